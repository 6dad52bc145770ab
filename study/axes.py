"""The axes of a study: the quantities in which its runs differ, read off their configurations.

Labels, headings and the order of runs in figures and tables follow from them, so a recipe says
nothing but its runs.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Literal, NamedTuple

from pydantic import Field

from base.frozen import Frozen
from study.released import ReleasedRun
from train.run.config import RunConfig

AnyRun = RunConfig | ReleasedRun
Value = float | str
Scale = Literal["log", "linear", "category"]


class Axis(Frozen):
    """A quantity in which runs differ."""

    key: str = Field(description="the first four quantities are columns of the table, too")
    name: str = Field(description="for headings and titles, such as 'weight decay'")
    unit: str = ""
    scale: Scale
    values: dict[str, Value] = Field(description="by the name of the run")

    def text_of(self, run: str) -> str:
        """Return the value of a run for a label: '0.1', '10.5B' or 'cosine'."""
        value = self.values[run]
        if isinstance(value, str):
            return value
        return amount_name(value).upper() if self.unit == "tokens" else f"{value:g}"


class _Quantity(NamedTuple):
    name: str
    of: Callable[[RunConfig], Value]
    unit: str = ""
    implied_by: tuple[str, ...] = ()  # axes that together may decide it; then no label names it


NO_ANNEAL = "no anneal"  # of a control, see study.design


def _schedule(run: RunConfig) -> str:
    """Return the kind of schedule, with the length of an anneal that leaves a decaying phase."""
    phase, anneal = run.schedule.phase.kind, run.schedule.anneal
    if phase == "constant":
        return "WSD" if anneal else "constant rate"
    return f"{amount_name(_anneal_tokens(run)).upper()} anneal" if anneal else phase


def _anneal_tokens(run: RunConfig) -> int:
    anneal = run.schedule.anneal
    return run.total_tokens - run.tokens_at(anneal.start_step) if anneal else 0


def _batch_warmup(run: RunConfig) -> str:
    stages = [f"{stage.batch_size} to step {stage.until_step}" for stage in run.batch_warmup]
    return ", ".join(stages) or "none"


QUANTITIES: dict[str, _Quantity] = {  # in the order in which labels have them
    "peak_lr": _Quantity("peak learning rate", lambda run: run.optimizer.peak_lr),
    "weight_decay": _Quantity("weight decay", lambda run: run.optimizer.weight_decay),
    "batch_size": _Quantity("batch size", lambda run: run.batch_size, "sequences"),
    "engine": _Quantity("engine", lambda run: run.engine),
    "schedule": _Quantity("schedule", _schedule),
    "tokens": _Quantity(
        "budget",
        lambda run: run.total_tokens,
        "tokens",
        implied_by=("batch_size", "schedule"),
    ),
    "anneal_tokens": _Quantity(
        "anneal", _anneal_tokens, "tokens", implied_by=("batch_size", "schedule", "tokens")
    ),
    "batch_warmup": _Quantity("smaller batches first", _batch_warmup),
    "matrices": _Quantity("optimizer of matrices", lambda run: run.optimizer.matrices),
    "decay": _Quantity("rule of weight decay", lambda run: run.optimizer.decay),
}


def axes_of(runs: Sequence[AnyRun], controls: Set[str] = frozenset()) -> tuple[Axis, ...]:
    """Return the axes of a study with these runs; the peak learning rate where none differs.

    Runs of released models have one axis, their stage. Controls, by name, make no axis: what they
    have on those of the other runs says which of them they are compared with.
    """
    trained = [run for run in runs if isinstance(run, RunConfig)]
    if len(trained) < len(runs):
        stages: dict[str, Value] = {run.name: run.name for run in runs}
        return (Axis(key="stage", name="stage", scale="category", values=stages),)
    compared = [run for run in trained if run.name not in controls] or trained
    kinds = {(run.schedule.phase.kind, run.schedule.anneal is None) for run in compared}
    axes: list[Axis] = []
    for key, quantity in QUANTITIES.items():
        values = {run.name: quantity.of(run) for run in compared}
        if key == "schedule" and len(kinds) == 1:
            continue  # budgets or lengths of anneals then say what differs
        if len(set(values.values())) > 1 and not _is_implied(values, quantity, axes):
            everywhere = {run.name: quantity.of(run) for run in trained}
            if key == "schedule":
                everywhere |= dict.fromkeys(controls, NO_ANNEAL)
            axes.append(_axis(key, everywhere | values))
    if not axes:
        axes = [_axis("peak_lr", {run.name: run.optimizer.peak_lr for run in trained})]
    return tuple(axes)


def _is_implied(values: dict[str, Value], quantity: _Quantity, axes: Iterable[Axis]) -> bool:
    """Return whether other axes together decide the quantity, so that no label need say it."""
    deciding = [axis for axis in axes if axis.key in quantity.implied_by]
    places = {run: tuple(axis.values[run] for axis in deciding) for run in values}
    return len(set(places.values())) == len({(places[run], values[run]) for run in values})


def _axis(key: str, values: dict[str, Value]) -> Axis:
    scale: Scale = "category"
    numbers = [value for value in values.values() if not isinstance(value, str)]
    if numbers:
        scale = "log" if min(numbers) > 0 else "linear"
    quantity = QUANTITIES[key]
    return Axis(key=key, name=quantity.name, unit=quantity.unit, scale=scale, values=values)


def amount_name(tokens: float) -> str:
    """Return tokens in three digits: 50e9 -> '50b', 28311552000 -> '28.3b', 32768 -> '32.8k'."""
    for unit, letter in ((1e12, "t"), (1e9, "b"), (1e6, "m"), (1e3, "k")):
        if tokens >= unit:
            return f"{tokens / unit:.3g}{letter}"
    return f"{tokens:g}"


class Varied(NamedTuple):
    """The axis that figures of final errors are drawn against, and the lines that they have.

    `groups` are by the name of the run the texts of its other axes; one text for all without any.
    """

    key: str
    name: str
    unit: str
    scale: Scale
    values: dict[str, float]
    groups: dict[str, str]


def varied_of(axes: Sequence[Axis], controls: Set[str] = frozenset()) -> Varied | None:
    """Return the axis to draw against, with the others as groups; None where none has numbers.

    Controls are a group of their own beside every other.
    """
    for axis in axes:
        values = {run: value for run, value in axis.values.items() if not isinstance(value, str)}
        if values:
            others = [other for other in axes if other is not axis]
            groups = {run: text_of(others, run, controls) for run in values}
            return Varied(axis.key, axis.name, axis.unit, axis.scale, values, groups)
    return None


def text_of(axes: Iterable[Axis], run: str, controls: Set[str] = frozenset()) -> str:
    """Return the texts of a run on several axes: '0.001, cosine'; a control has 'no anneal'."""
    texts = [axis.text_of(run) for axis in axes]
    if run in controls and NO_ANNEAL not in texts:
        texts.append(NO_ANNEAL)
    return ", ".join(texts)
