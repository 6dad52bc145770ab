"""The interface of a kind of measurement: its steps, its results and their columns of the table.

A new kind is a file beside this one and an entry in `study.definition.KINDS`; steps, table, GPUs
and SLURM jobs follow from there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from base.cli import arguments_of
from base.errors import UserError
from base.quantities import MILLI, MILLINATS, with_interval
from ckpt_tools.hf.measured import Read
from ckpt_tools.hf.results import REMEASURE, read_result
from study.paths import MeasuredModel, hf_directory, result
from study.step import Step

Type = Literal["number", "count", "flag"]
NATS, SHARE = "nats per token", "1"  # units
CURVED = f"{NATS} / (unit of the parameters)^2"  # of the Hessian of the loss


class Text(NamedTuple):
    """A token file that a step reads."""

    prefix: str  # as commands name it
    record: str  # the file that vouches for it, relative to the study
    made_by: str | None  # the step of the study; None where it has to be there before


@dataclass(frozen=True)
class Subject:
    """A model of a run, as the steps that measure it see it."""

    run: str
    model: MeasuredModel
    making: Step  # makes its HF directory
    texts: Mapping[str, Text]  # by use
    before: "Subject | None" = None  # the weights of the checkpoint before

    @property
    def hf(self) -> str:
        """The HF directory as commands name it."""
        return f"{{study}}/{hf_directory(self.run, self.model)}"

    @property
    def name(self) -> str:
        """The name of the HF directory, which is unique in the run."""
        return hf_directory(self.run, self.model).name

    def step(
        self,
        kind: str,
        name: str,
        head: tuple[str, ...],
        outputs: tuple[str, ...],
        *,
        uses: tuple[str, ...],
        after: tuple[Step, ...] = (),
        **more: Any,
    ) -> Step:
        """Return a step that reads this model, the texts of these uses and what `after` makes."""
        texts = [self.texts[use] for use in uses]
        made_by = [text.made_by for text in texts if text.made_by]
        steps = (self.making, *after)
        names = (*(step.name for step in steps), *dict.fromkeys(made_by))
        reads = (
            *(output for step in steps for output in step.outputs),
            *dict.fromkeys(text.record for text in texts),
        )
        return Step(name, kind, head, outputs, names, reads, run=self.run, **more)


# All measured models of a study, by the names of their runs.
Subjects = Mapping[tuple[str, MeasuredModel], Subject]


def options(command: type[BaseModel], settings: BaseModel, **decided: Any) -> tuple[str, ...]:
    """Return the options of a command: the settings that a study holds, and what it decides.

    The latter may be placeholders, so none of them is checked here.
    """
    # `model_construct` does not validate, so a placeholder may stand for a number.
    return tuple(arguments_of(command.model_construct(**dict(settings) | decided)))


@dataclass(frozen=True)
class Column:
    """A column of the table, or several of one meaning: one for each spec, and each task.

    It is declared where it is measured. Whatever reads the table refers to it.

    Attributes:
        name: with places for the spec and the task, such as quant/{spec}/kl_divergence; its last
            part is the figure's name in result.json.
        title: in words.
        unit: of its values and of the ends of its interval; empty for none.
        better: direction that is better; empty where none is.
    """

    name: str
    title: str = ""
    unit: str = ""
    better: Literal["lower", "higher", ""] = ""
    type: Type = "number"

    @property
    def figure(self) -> str:
        """The name of the figure in result.json."""
        return self.name.rpartition("/")[2]

    @property
    def is_share(self) -> bool:
        """Shown in percent."""
        return self.unit == SHARE

    @property
    def shown_unit(self) -> str:
        """The unit as tables show it."""
        return "%" if self.is_share else self.unit

    def of(self, spec: str, task: str = "") -> str:
        """Return the name of the column of a spec; with a task, of that task alone.

        >>> Column("tasks/{spec}/{task}/accuracy").of("rtn-b4-g32")
        'tasks/rtn-b4-g32/accuracy'
        """
        # Without a task its place leaves an empty part, which goes.
        return self.name.format(spec=spec, task=task).replace("//", "/")

    @property
    def difference_scale(self) -> float:
        """The factor that differences are shown with: shares in percent, nats in thousandths."""
        return 100.0 if self.is_share else MILLI if self.unit == NATS else 1.0

    @property
    def difference_unit(self) -> str:
        """The unit of differences times that factor, for a heading."""
        return MILLINATS if self.unit == NATS else self.shown_unit

    def difference(self, value: float, low: float, high: float) -> str:
        """Return a difference with its interval, in `difference_unit`.

        >>> Column("kl_divergence", unit=NATS).difference(0.000659, 0.000363, 0.000957)
        '0.66 [0.36, 0.96]'
        """
        return with_interval(value, low, high, self.difference_scale)


class Reading(NamedTuple):
    """A value of the table, and the keys that lead to it in what was measured."""

    column: str
    keys: tuple[str | int, ...]
    unit: str = ""
    type: Type = "number"
    function: Callable[[float], float] | None = None  # of what is there

    def value(self, measured: Any) -> Any:
        """Return the value; None where a key on the way is missing or empty."""
        for key in self.keys:
            if isinstance(measured, dict):
                measured = measured.get(key)
            # Indices are of tuples, such as the ends of an interval; other keys are attributes.
            elif measured is not None:
                measured = measured[key] if isinstance(key, int) else getattr(measured, key)
        if self.function is None or measured is None:
            return measured
        return self.function(measured)


def alone(column: Column, name: str, *keys: str) -> Reading:
    """Return the reading of a column without an interval."""
    return Reading(name, keys, column.unit, column.type)


def bounded(column: Column, name: str, *keys: str) -> list[Reading]:
    """Return a figure and its interval, which is beside it by the figure's name."""
    return [
        Reading(name, (*keys, column.figure), column.unit),
        Reading(f"{name}_low", (*keys, "intervals", column.figure, 0), column.unit),
        Reading(f"{name}_high", (*keys, "intervals", column.figure, 1), column.unit),
    ]


def estimated(column: Column, name: str, *keys: str) -> list[Reading]:
    """Return the values of an estimate."""
    return [
        Reading(name, (*keys, "mean"), column.unit),
        Reading(f"{name}_standard_error", (*keys, "standard_error")),
        Reading(f"{name}_low", (*keys, "interval", 0), column.unit),
        Reading(f"{name}_high", (*keys, "interval", 1), column.unit),
    ]


class TabledResult(NamedTuple):
    """A result that every measured model has, with its values in the table."""

    folder: str
    spec: str
    measured: type[Read]
    readings: list[Reading]

    def read(self, path: Path) -> dict[str, Any]:
        """Return the values of the columns from a result.json.

        UserError if it is of another spec or another model than its place says: a copy.
        """
        result = read_result(path, self.measured)
        # .../RUN/hf/MODEL/FOLDER/SPEC/result.json, wherever the study is and was measured from
        model = Path(result.model.path).parts[-3:]
        if (model, result.spec.name) != (path.parts[-3 - len(model) : -3], self.spec):
            raise UserError(
                f"{path} is a result of {result.spec.name} of {result.model.path}, and was copied"
                f" there; {REMEASURE}"
            )
        return {each.column: each.value(result.measured) for each in self.readings}


@dataclass(frozen=True)
class Kind[Settings]:
    """A kind of measurement: of one model at a time by `steps`, or of several by `together`.

    A step that needs another kind's finds it among those made for the model before, by kind.
    """

    name: str
    # Every one, all but averages, those with a checkpoint before, the last of each run; or several
    # models at once, of any runs.
    models: Literal["all", "weights", "moved", "last", "several"]
    steps: Callable[[Settings, Subject, Mapping[str, list[Step]]], list[Step]] = lambda *_: []
    tabled: Callable[[Settings], list[TabledResult]] = lambda _: []  # its results in the table
    averages: Callable[[Settings], bool] = lambda _: False  # of weights too, where it is of weights
    along: Callable[[Settings], bool] = lambda _: False  # of all weights, where it is of the last
    shares_work: bool = False  # several processes share the work on whole models
    shares_model: bool = False  # several GPUs share a model that is too large for one
    online: bool = False  # it may reach the network
    every_seed: bool = False  # also where more is measured of the first seed alone
    together: Callable[[Settings, Subjects], list[Step]] = lambda *_: []

    def at_the_end(self, settings: Settings) -> bool:
        """Return whether the kind measures the last model of a run alone."""
        return self.models == "last" and not self.along(settings)

    def measures(
        self, settings: Settings, model: MeasuredModel, last: MeasuredModel, *, moved: bool
    ) -> bool:
        """Return whether the kind measures a model of a run that ends with `last`.

        `moved` says that there are weights of a checkpoint before it.
        """
        if self.models == "several":
            return False
        if self.at_the_end(settings):
            return model == last
        if self.models == "moved":
            return moved
        return self.models == "all" or model.average is None or self.averages(settings)

    def results(
        self, settings: Settings, run: str, model: MeasuredModel
    ) -> dict[str, Callable[[Path], dict[str, Any]]]:
        """Return what reads each result of a model, by its path relative to the study."""
        return {
            result(run, model, table.folder, table.spec): table.read
            for table in self.tabled(settings)
        }

    def columns(self, settings: Settings) -> dict[str, Reading]:
        """Return what the table holds, by its columns."""
        return {each.column: each for table in self.tabled(settings) for each in table.readings}
