"""The interface of a kind of measurement: its steps, its results and their columns of the table.

A new kind is a file beside this one and an entry in `study.definition.KINDS`; steps, table, GPUs
and SLURM jobs follow from there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from base.errors import UserError
from ckpt_tools.hf.measured import Read
from ckpt_tools.hf.results import REMEASURE, read_result
from study.paths import MeasuredModel, hf_directory, result
from study.pipeline.step import Step

Type = Literal["number", "count", "flag"]


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


class Column(NamedTuple):
    """A column of the table, and the keys that lead to its value in what was measured."""

    name: str
    keys: tuple[str | int, ...]
    type: Type = "number"

    def value(self, measured: Any) -> Any:
        """Return the value; None where a key on the way is missing or empty."""
        for key in self.keys:
            if isinstance(measured, dict):
                measured = measured.get(key)
            elif measured is not None:
                measured = measured[key] if isinstance(key, int) else getattr(measured, key)
        return measured


def bounded(name: str, figure: str, *place: str) -> list[Column]:
    """Return the columns of a figure and of its interval, which is beside it by its name."""
    return [
        Column(name, (*place, figure)),
        Column(f"{name}_low", (*place, "intervals", figure, 0)),
        Column(f"{name}_high", (*place, "intervals", figure, 1)),
    ]


def estimated(name: str, *place: str) -> list[Column]:
    """Return the columns of an estimate."""
    return [
        Column(name, (*place, "mean")),
        Column(f"{name}_standard_error", (*place, "standard_error")),
        Column(f"{name}_low", (*place, "interval", 0)),
        Column(f"{name}_high", (*place, "interval", 1)),
    ]


class Result(NamedTuple):
    """A result that every measured model has, with its columns of the table."""

    folder: str
    spec: str
    measured: type[Read]
    columns: list[Column]

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
        return {column.name: column.value(result.measured) for column in self.columns}


@dataclass(frozen=True)
class Kind[Settings]:
    """A kind of measurement.

    A step that needs another kind's finds it among those made for the model before, by kind.
    """

    name: str
    models: Literal["all", "weights", "last"]  # every one, all but averages, the last of each run
    steps: Callable[[Settings, Subject, Mapping[str, list[Step]]], list[Step]]
    tabled: Callable[[Settings], list[Result]] = lambda _: []  # its results in the table
    averages: Callable[[Settings], bool] = lambda _: False  # of weights too, where it is of weights
    shares_work: bool = False  # several processes share the work on whole models
    shares_model: bool = False  # several GPUs share a model that is too large for one
    online: bool = False  # it may reach the network

    def measures(self, settings: Settings, model: MeasuredModel, last: MeasuredModel) -> bool:
        """Return whether the kind measures a model of a run that ends with `last`."""
        if self.models == "last":
            return model == last
        return self.models == "all" or model.average is None or self.averages(settings)

    def results(
        self, settings: Settings, run: str, model: MeasuredModel
    ) -> dict[str, Callable[[Path], dict[str, Any]]]:
        """Return what reads each result of a model, by its path relative to the study."""
        return {
            result(run, model, table.folder, table.spec): table.read
            for table in self.tabled(settings)
        }

    def columns(self, settings: Settings) -> dict[str, Type]:
        """Return the columns of the table, with their types."""
        return {
            column.name: column.type for table in self.tabled(settings) for column in table.columns
        }
