"""The interface of a kind of measurement: its steps, its results and their columns of the table.

A new kind is a file beside this one and an entry in `study.definition.KINDS`; steps, table, GPUs
and SLURM jobs follow from there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ckpt_tools.hf.measured import Estimate, Trace
from study.paths import MeasuredModel, hf_directory
from study.pipeline.step import Step

INTERVAL_LEVEL = 0.95  # coverage of all intervals
Settings = TypeVar("Settings")
Values = dict[str, Any]  # by column
Type = Literal["number", "count", "flag"]
Reader = Callable[[Path], Values]  # of a result.json
ESTIMATE = ("", "_standard_error", "_low", "_high")  # columns of an estimate


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
    before: "Subject | None" = None  # the weights of the checkpoint before; None for averages

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


def _nothing(*_: object) -> dict[str, Any]:
    """Return no results and no columns: the kind has none in the table."""
    return {}


@dataclass(frozen=True)
class Kind(Generic[Settings]):
    """A kind of measurement.

    A step that needs another kind's finds it among those made for the model before, by kind.
    Results are read by path relative to the study.
    """

    name: str
    models: Literal["all", "weights", "last"]  # every one, all but averages, the last of each run
    steps: Callable[[Settings, Subject, Mapping[str, list[Step]]], list[Step]]
    results: Callable[[Settings, str, MeasuredModel], dict[str, Reader]] = _nothing
    columns: Callable[[Settings], dict[str, Type]] = _nothing  # of the table, with their types
    shares_work: bool = False  # several processes share the work on whole models
    shares_model: bool = False  # several GPUs share a model that is too large for one
    online: bool = False  # it may reach the network

    def measures(self, model: MeasuredModel, last: MeasuredModel) -> bool:
        """Return whether the kind measures a model of a run that ends with `last`."""
        if self.models == "last":
            return model == last
        return self.models == "all" or model.average is None


def estimate_values(column: str, estimate: Estimate | Trace | None) -> Values:
    """Return the four columns of an estimate; empty without one."""
    low, high = estimate.interval if estimate and estimate.interval else (None, None)
    mean, error = (estimate.mean, estimate.standard_error) if estimate else (None, None)
    values = (mean, error, low, high)
    return {f"{column}{suffix}": value for suffix, value in zip(ESTIMATE, values, strict=True)}
