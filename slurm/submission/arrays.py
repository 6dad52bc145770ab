"""A study as SLURM job arrays: the steps of every element.

Nothing here asks SLURM or writes a file: the same study and limits give the same arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slurm.site import Kind, Limits
from study.definition import KINDS, Study
from study.pipeline.step import Step
from study.pipeline.steps import steps_of

FINAL = "final"  # table, report and mirror of what there is, once nothing else can be made
MAX_ARRAY_SIZE = 1001  # SLURM's own default
# Kinds that are measured as soon as a model is there, with the site's table of their resources.
CHAINED: dict[str, Kind] = {
    kind.name: "curvature" if kind.shares_model else "quantize"
    for kind, _ in KINDS
    if kind.models != "last"
}


@dataclass(frozen=True)
class JobArray:
    """Elements that share a job script. Any of them may be submitted, in any order."""

    name: str  # unique in the study and fit for a file name, such as `train` or `quantize-1.2`
    kind: Kind  # the site's table of resources that it takes
    # Names of the study's steps that each element runs, one after the other.
    elements: tuple[tuple[str, ...], ...]


class _Planner:
    """The arrays of one study."""

    def __init__(self, study: Study, limits: Limits) -> None:
        self.study, self.limits, self.steps = study, limits, steps_of(study)
        self.arrays: list[JobArray] = []

    def parts(
        self, name: str, elements: Sequence[tuple[str, ...]]
    ) -> list[tuple[str, Sequence[tuple[str, ...]]]]:
        """Cut elements into named parts: NAME if one suffices, else NAME.1, NAME.2, ..."""
        parts = _chunks(elements, self.limits.max_array_size or MAX_ARRAY_SIZE)
        if len(parts) == 1:
            return [(name, parts[0])]
        return [(f"{name}.{number}", part) for number, part in enumerate(parts, start=1)]

    def add(self, name: str, kind: Kind, elements: Sequence[tuple[str, ...]]) -> None:
        """Add arrays for these elements, as many as they need."""
        for own, part in self.parts(name, elements):
            self.arrays.append(JobArray(own, kind, tuple(part)))

    def plan(self) -> list[JobArray]:
        """Return all arrays, each after those that make what it reads."""
        self.texts()
        self.training()
        averages = tuple(
            f"{run.name}/hf/{average.name}-"
            for run in self.study.trained
            for average in run.averages
        )
        making = [step for step in self.steps if step.kind in ("export", "download") and step.run]
        averaged = [step for step in making if step.outputs[0].startswith(averages)]
        weights = [step for step in making if not step.outputs[0].startswith(averages)]
        if weights:
            self.chain(weights[0].kind, "", weights)
        if averaged:
            self.chain("export-averages", "-averages", averaged)
        soups = [step for step in self.steps if step.kind == "average"]
        if soups:
            self.chain("average", "-soups", soups)
        self.ends()
        self.add(FINAL, "light", [("collect", "report", "mirror")])
        return self.arrays

    def texts(self) -> None:
        """Add arrays that make text: first what needs nothing, then the rest."""
        kinds = ("corpus", "download", "prepare")
        steps = [step for step in self.steps if not step.run and step.kind in kinds]
        self.add("text", "light", [(step.name,) for step in steps if not step.after])
        self.add("prepare", "light", [(step.name,) for step in steps if step.after])

    def training(self) -> None:
        """Add an element per run; branches read their parents' checkpoints."""
        steps = [step.name for step in self.steps if step.kind == "train"]
        branches = {f"train-{run.name}" for run in self.study.trained if run.branch_from}
        self.add("train", "train", [(name,) for name in steps if name not in branches])
        self.add("branches", "train", [(name,) for name in sorted(branches)])

    def chain(self, name: str, suffix: str, making: list[Step]) -> None:
        """Add arrays that make HF directories, and element for element those that measure them."""
        groups = [
            tuple(step.name for step in group)
            for run in self.study.runs
            for group in _chunks(
                [step for step in making if step.run == run.name], self.limits.checkpoints_per_job
            )
        ]

        # the measurements of each HF directory, by the step that makes it
        by_output = {step.outputs[0]: step.name for step in making}
        measuring: dict[str, list[Step]] = {step.name: [] for step in making}
        for step in self.steps:
            maker = next((by_output[read] for read in step.reads if read in by_output), None)
            if step.kind in CHAINED and maker:
                measuring[maker].append(step)

        # elements of measurements have the numbers of those that make their models
        spec_groups = _chunks(self.study.quantization.everywhere, self.limits.specs_per_job)
        for part_name, part in self.parts(name, groups):
            self.add(part_name, "export", part)
            number = part_name.removeprefix(name)
            for kind, table in CHAINED.items():
                own = [
                    [
                        step
                        for kind_of_step in element
                        for step in measuring[kind_of_step]
                        if step.kind == kind
                    ]
                    for element in part
                ]
                chosen: dict[str, Sequence[str] | None] = {"": None} if any(own) else {}
                if any(step.specs for steps in own for step in steps):
                    chosen = {
                        f"-{index}": group for index, group in enumerate(spec_groups, start=1)
                    }
                for group_name, specs in chosen.items():
                    elements = [_names(steps, specs) for steps in own]
                    self.add(f"{kind}{suffix}{group_name}{number}", table, elements)

    def ends(self) -> None:
        """Add an element per run for what is measured of its last checkpoint alone."""
        kinds = [kind.name for kind, _ in KINDS if kind.models == "last"]
        by_run: dict[str, list[str]] = {}
        for step in self.steps:
            if step.kind in kinds:
                by_run.setdefault(step.run, []).append(step.name)
        self.add("ends", "quantize", [tuple(names) for names in by_run.values()])


def _names(steps: list[Step], specs: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of steps, of those with one of the specs where these are given."""
    return tuple(step.name for step in steps if specs is None or step.specs[-1] in specs)


def _chunks(items: Sequence, size: int) -> list:
    return [items[start : start + size] for start in range(0, len(items), size)]


def arrays_of(study: Study, limits: Limits) -> list[JobArray]:
    """Return the arrays of a study, each after those that make what it reads.

    Weights, averages kept in training and soups are chains of arrays of their own, whose elements
    correspond: the export of some checkpoints, an array for each group of specs, and curvature.
    """
    return _Planner(study, limits).plan()
