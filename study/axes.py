"""The axes of a study: the quantities in which its runs differ.

First those that `study.recipes.parts.sweep` varied, under the names that they have there. Then
what else differs, read off the configurations: the quantities listed here, and any other setting
of run.json. Labels, headings and the order of runs in figures and tables follow from them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

from pydantic import Field

from base.frozen import Frozen
from study.released import ReleasedRun
from train.run.config import RunConfig

Value = int | float | str
YES, NO, NONE = "yes", "no", "none"

# What may differ without another training, and what says which training it is.
IGNORED = frozenset(
    {"seed", "branch_from", "save_steps", "evaluate_every_steps", "averages"}
    | RunConfig.NOT_IDENTITY
)
Settings = Mapping[str, Any]  # by dotted path


def differing_settings(runs: Sequence[RunConfig]) -> dict[str, dict[str, Value]]:
    """Return the settings that are not the same in all runs: path -> run -> value in words.

    Paths are dotted, in the order of run.json. A setting that a run does not have is 'none'.
    """
    by_run = {run.name: dict(_leaves(_content(run))) for run in runs}
    paths = dict.fromkeys(path for settings in by_run.values() for path in settings)
    differing = {}
    for path in paths:
        values = in_words([settings.get(path) for settings in by_run.values()])
        if len(set(values)) > 1:
            differing[path] = dict(zip(by_run, values, strict=True))
    return differing


def in_words(values: Sequence[Any]) -> list[Value]:
    """Return some values as numbers and words; of compound ones, that in which they differ.

    Example:
        >>> in_words([2, 0.5, True, None, (0.9, 0.95)])
        [2, 0.5, 'yes', 'none', '(0.9, 0.95)']
        >>> in_words(["../texts/web", "../texts/code"])
        ['web', 'code']
    """
    words = [_in_words(value) for value in _distinguishing(values)]
    # Short forms only if they tell as many values apart as the whole paths do.
    lasts = [_last(word) for word in words]
    return lasts if len(set(lasts)) == len(set(words)) else words


def _content(run: RunConfig) -> dict[str, Any]:
    return run.model_dump(mode="json", exclude=set(IGNORED))


def _leaves(content: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all settings below some keys; a list is one."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _distinguishing(values: Sequence[Any]) -> Iterable[Any]:
    """Return compound values as what differs between them, others as they are."""
    if not all(isinstance(value, Frozen | Mapping) for value in values):
        return values
    contents = [
        dict(_leaves(value.model_dump(mode="json") if isinstance(value, Frozen) else value))
        for value in values
    ]
    paths = [
        path
        for path in dict.fromkeys(path for content in contents for path in content)
        if len({repr(content.get(path)) for content in contents}) > 1
    ]
    # A name tells compound values apart by itself.
    named = [path for path in paths if path == "name"] or paths
    parts = [[content.get(path) for path in named] for content in contents]
    return [part[0] if len(part) == 1 else part for part in parts]


def _in_words(value: Any) -> Value:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return YES if value else NO
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(str(_in_words(part)) for part in value)})"
    return str(value)


def _last(word: Value) -> Value:
    """Return the last part of a path."""
    return word.rstrip("/").rpartition("/")[2] if isinstance(word, str) else word


AnyRun = RunConfig | ReleasedRun
Scale = Literal["log", "linear", "category"]
MODEL, STAGE = "model", "stage"  # the axes of released models


class Axis(Frozen):
    """A quantity in which runs differ."""

    key: str = Field(description="of its column in the table, and of MLflow's parameter")
    name: str = Field(description="for headings and titles, such as 'weight decay'")
    unit: str = ""
    scale: Scale
    values: dict[str, Value] = Field(description="by the name of the run")
    labels: dict[str, str] = Field(
        default={}, description="of the values, by the name of the run; empty: as `text_of`"
    )

    @property
    def title(self) -> str:
        """The name with the unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def text_of(self, run: str) -> str:
        """Return the value of a run in words: '0.1', '10.5B', '20%' or 'cosine'."""
        value = self.values[run]
        if isinstance(value, str):
            return value
        if self.unit == "tokens":
            return amount_name(value).upper()
        return f"{value:g}%" if self.unit.startswith("%") else f"{value:g}"

    def label_of(self, run: str) -> str:
        """Return the part of a label that is of this axis; empty where it would say 'none'."""
        return self.labels.get(run, self.text_of(run))


class _Quantity(NamedTuple):
    """A quantity that may be an axis."""

    name: str
    of: Callable[[RunConfig], Value]
    unit: str = ""
    implied_by: tuple[str, ...] = ()  # axes that together may decide it; then no label names it
    label: Callable[[Value], str] | None = None  # of a value, where that alone would not do


NO_ANNEAL = "no anneal"  # of a control, see study.design


def _schedule(run: RunConfig) -> str:
    """Return the kind of schedule, with the length of an anneal that leaves a decaying phase."""
    if run.schedule.anneal and run.schedule.phase.DECAYS:
        return f"{amount_name(_anneal_tokens(run)).upper()} anneal"
    return run.schedule.name


def _anneal_tokens(run: RunConfig) -> int:
    anneal = run.schedule.anneal
    return run.total_tokens - run.tokens_at(anneal.start_step) if anneal else 0


def _anneal_share(run: RunConfig) -> float:
    """Return the anneal's percentage of the tokens, as labels have it."""
    return round(100 * _anneal_tokens(run) / run.total_tokens, 1)


def _anneal_label(share: Value) -> str:
    return f"anneal {share:g}%" if share else NO_ANNEAL


def _floor(run: RunConfig) -> float:
    return 100 * run.schedule.anneal.floor if run.schedule.anneal else 0.0


def _floor_label(floor: Value) -> str:
    return f"floor {floor:g}%" if floor else ""


def _perturbation(run: RunConfig) -> str:
    return run.perturbation.describe() if run.perturbation else NONE


def _perturbation_label(words: Value) -> str:
    return "" if words == NONE else str(words)


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
    "anneal_share": _Quantity(
        "anneal",
        _anneal_share,
        "% of the tokens",
        implied_by=("batch_size", "schedule", "tokens"),
        label=_anneal_label,
    ),
    "anneal_tokens": _Quantity(
        "length of the anneal",
        _anneal_tokens,
        "tokens",
        implied_by=("batch_size", "schedule", "tokens", "anneal_share"),
    ),
    "floor": _Quantity(
        "floor of the anneal", _floor, "% of the rate at its start", label=_floor_label
    ),
    "perturbation": _Quantity("perturbation", _perturbation, label=_perturbation_label),
    "batch_warmup": _Quantity("smaller batches first", _batch_warmup),
    "matrices": _Quantity("optimizer of matrices", lambda run: run.optimizer.matrices),
    "decay": _Quantity("rule of weight decay", lambda run: run.optimizer.decay),
}


# The settings of run.json that are in the quantities above.
COVERED = frozenset(
    {"batch_size", "batch_warmup", "engine", "total_steps", "schedule.phase.kind"}
    | {f"optimizer.{key}" for key in ("peak_lr", "weight_decay", "matrices", "decay")}
    | {"schedule.phase.horizon_tokens"}
    | {f"schedule.anneal{key}" for key in ("", ".start_step", ".floor")}
)
# What other settings may follow from: a warm-up from the budget, say, but none from the peak.
DECIDING = (
    *("batch_size", "schedule", "tokens", "anneal_share", "anneal_tokens", "perturbation"),
    *("batch_warmup", "matrices"),
)
NAMES = {  # of settings and factors, with their unit; the key itself in words for any other
    "num_hidden_layers": ("layers", ""),
    "hidden_size": ("width", ""),
    "intermediate_size": ("width of the MLP", ""),
    "num_attention_heads": ("attention heads", ""),
    "vocab_size": ("size of the vocabulary", ""),
    "sequence_length": ("sequence length", "tokens a sequence"),
    "warmup_tokens": ("warm-up", "tokens"),
    "clip_grad_norm": ("clipping of the gradient norm", ""),
    "z_loss": ("z-loss", ""),
    "train": ("training data", ""),
}


def axes_of(runs: Sequence[AnyRun], controls: Set[str] = frozenset()) -> tuple[Axis, ...]:
    """Return the axes of a study with these runs; the peak learning rate where nothing differs.

    Runs of released models have their stage, after their model where there are several. Controls,
    by name, make no axis: what they have on those of the other runs says which of them they are
    compared with.
    """
    trained = [run for run in runs if isinstance(run, RunConfig)]
    if len(trained) < len(runs):
        return tuple(_released_axes(runs))
    # Where all runs are controls they are what is compared.
    compared = [run for run in trained if run.name not in controls] or trained

    axes: dict[str, Axis] = {}
    for key, quantity in _candidates(compared, trained):
        values = {run.name: quantity.of(run) for run in compared}
        varies = len(set(values.values())) > 1
        # Candidates come in order of preference, so an axis that is there already wins.
        if key in axes or not varies or _is_implied(values, quantity, axes.values()):
            continue
        everywhere = {run.name: quantity.of(run) for run in trained}
        if quantity.of is _schedule:
            # A control is named as one, not by the schedule that is left without its anneal.
            everywhere |= dict.fromkeys(controls, NO_ANNEAL)
        axes[key] = _axis(key, quantity, everywhere | values, values)
    if not axes:
        quantity = QUANTITIES["peak_lr"]
        values = {run.name: quantity.of(run) for run in trained}
        return (_axis("peak_lr", quantity, values, values),)
    return tuple(axes.values())


def _released_axes(runs: Sequence[AnyRun]) -> Iterator[Axis]:
    """Yield the model, where there are several, and the stage."""
    models: dict[str, Value] = {
        run.name: run.model if isinstance(run, ReleasedRun) else run.name for run in runs
    }
    if len(set(models.values())) > 1:
        yield Axis(key=MODEL, name="model", scale="category", values=models)
    stages: dict[str, Value] = {
        run.name: run.stage if isinstance(run, ReleasedRun) else run.name for run in runs
    }
    yield Axis(key=STAGE, name="stage", scale="category", values=stages)


def _candidates(
    compared: Sequence[RunConfig], trained: Sequence[RunConfig]
) -> Iterator[tuple[str, _Quantity]]:
    """Yield what may be an axis, with its key: swept factors, listed quantities, other settings.

    A swept factor decides all that follows it: the run is a function of its factors.
    """
    swept = dict(_swept(compared))
    yield from swept.items()

    kinds = {(run.schedule.phase.kind, run.schedule.anneal is None) for run in compared}
    for key, quantity in QUANTITIES.items():
        # under one kind of schedule budgets or lengths of anneals say what differs
        if key != "schedule" or len(kinds) > 1:
            yield key, quantity._replace(implied_by=(*quantity.implied_by, *swept))

    varying = [path for path in differing_settings(compared) if path not in COVERED]
    # The last word of a path, longer where two settings end alike.
    keys = {path: _short(path, varying) for path in varying}
    everywhere = differing_settings(trained)
    for path, key in keys.items():
        name, unit = _named(key)
        implied_by = (*swept, *DECIDING, *keys.values())
        yield key, _Quantity(name, _by_run(everywhere[path]), unit, implied_by)


def _swept(compared: Sequence[RunConfig]) -> Iterator[tuple[str, _Quantity]]:
    """Yield the factors that all runs have; under the listed name if they are that quantity."""
    for key in compared[0].factors:
        if not all(key in run.factors for run in compared):
            continue
        values = {run.name: run.factors[key] for run in compared}
        if all(run.seed == values[run.name] for run in compared):
            continue  # replicates are no axis
        listed = QUANTITIES.get(key)
        if listed and all(listed.of(run) == values[run.name] for run in compared):
            yield key, listed
            continue
        name, unit = _named(key)
        yield (f"swept_{key}" if listed else key), _Quantity(name, _factor(key), unit)


def _factor(key: str) -> Callable[[RunConfig], Value]:
    """Return what gives a factor; a control that runs of several values share has none."""
    return lambda run: run.factors.get(key, NO_ANNEAL)


def _by_run(values: dict[str, Value]) -> Callable[[RunConfig], Value]:
    return lambda run: values[run.name]


def _short(path: str, others: Sequence[str]) -> str:
    """Return the last part of a dotted path, or its last two where another ends alike."""
    last = path.rpartition(".")[2]
    is_alone = sum(other.rpartition(".")[2] == last for other in others) == 1
    return last if is_alone and last not in QUANTITIES else ".".join(path.split(".")[-2:])


def _named(key: str) -> tuple[str, str]:
    """Return name and unit of a setting or factor."""
    return NAMES.get(key, (key.replace("_", " ").replace(".", " "), ""))


def _is_implied(values: dict[str, Value], quantity: _Quantity, axes: Iterable[Axis]) -> bool:
    """Return whether other axes together decide the quantity, so that no label need say it."""
    deciding = [axis for axis in axes if axis.key in quantity.implied_by]
    places = {run: tuple(axis.values[run] for axis in deciding) for run in values}
    # Implied if adding the quantity tells no more places apart than the others do.
    return len(set(places.values())) == len({(places[run], values[run]) for run in values})


def _axis(key: str, quantity: _Quantity, values: dict[str, Value], compared: Iterable[str]) -> Axis:
    scale: Scale = "category"
    # A control may have a word among numbers; a run that is compared would have no place there.
    if not any(isinstance(values[run], str) for run in compared):
        numbers = [value for value in values.values() if not isinstance(value, str)]
        scale = "log" if min(numbers) > 0 else "linear"
    label = quantity.label
    labels = {run: label(value) for run, value in values.items()} if label else {}
    return Axis(
        key=key,
        name=quantity.name,
        unit=quantity.unit,
        scale=scale,
        values=values,
        labels=labels,
    )


def amount_name(tokens: float) -> str:
    """Return tokens in three digits: 50e9 -> '50b', 28311552000 -> '28.3b', 32768 -> '32.8k'."""
    for unit, letter in ((1e12, "t"), (1e9, "b"), (1e6, "m"), (1e3, "k")):
        amount = f"{tokens / unit:.3g}"
        # As rounded: 999.8 million are 1b, in millions their three digits would be 1e+03.
        if float(amount) >= 1:
            return amount + letter
    return f"{tokens:g}"


class Varied(NamedTuple):
    """The axis that figures of final errors are drawn against, and the lines that they have.

    `groups` are by the name of the run the texts of its other axes; one text for all without any.
    """

    key: str
    name: str
    unit: str
    scale: Scale
    values: dict[str, Value]
    groups: dict[str, str]

    @property
    def has_numbers(self) -> bool:
        """True for numbers, which have places on an axis; False for words, in the study's order."""
        return self.scale != "category"


def varied_of(axes: Sequence[Axis], controls: Set[str] = frozenset()) -> Varied | None:
    """Return the axis to draw against, the first with numbers if any, with the others as groups.

    Controls are a group of their own beside every other. None for a released model.
    """
    if axes[-1].key == STAGE:
        return None
    # Curves are drawn against numbers; words make groups.
    axis = next((axis for axis in axes if axis.scale != "category"), axes[0])
    # Words and the numbers among them are shown as labels have them; numbers keep their places.
    values: dict[str, Value] = {run: axis.text_of(run) for run in axis.values}
    if axis.scale != "category":
        values = {run: each for run, each in axis.values.items() if not isinstance(each, str)}
    others = [other for other in axes if other is not axis]
    groups = {run: text_of(others, run, controls) for run in values}
    return Varied(axis.key, axis.name, axis.unit, axis.scale, values, groups)


def text_of(axes: Iterable[Axis], run: str, controls: Set[str] = frozenset()) -> str:
    """Return the labels of a run on several axes: '0.001, cosine'; a control has 'no anneal'."""
    all_axes = list(axes)
    texts = [label for axis in all_axes if (label := axis.label_of(run))]
    if run in controls and NO_ANNEAL not in texts:
        texts.append(NO_ANNEAL)
    if all_axes and not texts:
        return NONE
    return ", ".join(texts)
