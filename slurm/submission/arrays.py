"""A study as SLURM job arrays: the steps of every element, its dependencies and holds.

Nothing here asks SLURM or writes a file: the same study and site give the same arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from study.definition import KINDS, Study
from study.pipeline.step import Step
from study.pipeline.steps import steps_of
from study.released import ReleasedRun

FINAL, SETTLE, MEND = (
    "final",
    "settle",
    "mend",
)  # MEND: no array of a study, but a job that helps elements
# Kinds that are measured as soon as a model is there, with the site's table of their resources.
CHAINED = {
    kind.name: "curvature" if kind.shares_model else "quantize"
    for kind, _ in KINDS
    if kind.models != "last"
}


@dataclass(frozen=True)
class Dependency:
    """A dependency of an array.

    `aftercorr`: the element of the same index of the other array ended well; `afterok`, `afterany`:
    all of it ended.
    """

    kind: Literal["aftercorr", "afterok", "afterany"]
    array: str


@dataclass(frozen=True)
class JobArray:
    """One `sbatch --array=0-N%throttle`.

    Attributes:
        name: unique in the study and fit for a file name, such as `train` or `quantize-1.2`.
        kind: the site's table of resources that it takes: train, export, quantize, curvature,
            light.
        elements: names of the study's steps that each element runs, one after the other.
        after: what it waits for.
        held_for: arrays that make the files which its elements read. They are submitted held, and
            released one by one as those files appear; empty: not held.
    """

    name: str
    kind: str
    elements: tuple[tuple[str, ...], ...]
    after: tuple[Dependency, ...] = ()
    held_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cut:
    """Sizes of jobs and arrays; see `site.Limits`."""

    checkpoints_per_job: int
    specs_per_job: int
    max_array_size: int


def _named(
    name: str, elements: Sequence[tuple[str, ...]], size: int
) -> list[tuple[str, Sequence[tuple[str, ...]]]]:
    """Cut elements into named parts: NAME if one suffices, else NAME.1, NAME.2, ..."""
    parts = [elements[start : start + size] for start in range(0, len(elements), size)]
    return [
        (name if len(parts) == 1 else f"{name}.{number}", part)
        for number, part in enumerate(parts, start=1)
    ]


class _Planner:
    """The arrays of one study."""

    def __init__(self, study: Study, cut: Cut) -> None:
        self.study, self.cut = study, cut
        self.steps = steps_of(study)
        self.arrays: list[JobArray] = []

    def add(
        self,
        name: str,
        kind: str,
        elements: Sequence[tuple[str, ...]],
        after: tuple[Dependency, ...] = (),
        held_for: tuple[str, ...] = (),
    ) -> tuple[str, ...]:
        """Add arrays for these elements, as many as they need; return their names."""
        parts = _named(name, elements, self.cut.max_array_size)
        for own, part in parts:
            self.arrays.append(JobArray(own, kind, tuple(part), after, held_for))
        return tuple(own for own, _ in parts)

    def plan(self) -> list[JobArray]:
        """Return all arrays, each after those it depends on."""
        texts = self.texts()
        trained = self.training(texts)
        exported: tuple[str, ...] = ()
        for name, kinds, averages in (
            ("", ("export", "download"), False),
            ("-averages", ("export",), True),
        ):
            making = [step for step in self.steps if step.kind in kinds and step.run]
            chosen = [step for step in making if _is_average(self.study, step) == averages]
            if chosen:
                verb = chosen[0].kind
                made = self.chain(
                    f"{verb}{name}", name, chosen, "export", held_for=trained, after=texts
                )
                exported += () if averages else made
        soups = [step for step in self.steps if step.kind == "average"]
        if soups:
            self.chain("average", "-soups", soups, "export", held_for=exported)
        self.ends(exported)
        self.settling()
        everything = tuple(Dependency("afterany", array.name) for array in self.arrays)
        self.add(FINAL, "light", [("collect", "report", "mirror")], everything)
        return self.arrays

    def texts(self) -> tuple[str, ...]:
        """Add arrays that make text: first what needs nothing, then the rest."""
        steps = [
            step
            for step in self.steps
            if not step.run and step.kind in ("corpus", "download", "prepare")
        ]
        first = [(step.name,) for step in steps if not step.after]
        rest = [(step.name,) for step in steps if step.after]
        names = self.add("text", "light", first)
        return (
            self.add("prepare", "light", rest, tuple(Dependency("afterok", name) for name in names))
            or names
        )

    def training(self, texts: tuple[str, ...]) -> tuple[str, ...]:
        """Add an element per run; branches wait for their parents' checkpoints."""
        steps = [step for step in self.steps if step.kind == "train"]
        branches = {f"train-{run.name}" for run in self.study.trained if run.branch_from}
        roots = [(step.name,) for step in steps if step.name not in branches]
        names = self.add(
            "train", "train", roots, tuple(Dependency("afterok", name) for name in texts)
        )
        return names + self.add(
            "branches", "train", [(name,) for name in sorted(branches)], held_for=names
        )

    def chain(
        self,
        name: str,
        suffix: str,
        making: list[Step],
        kind: str,
        held_for: tuple[str, ...],
        after: tuple[str, ...] = (),
    ) -> tuple[str, ...]:
        """Add arrays that make HF directories, and element for element those that measure them.

        What is made out of nothing of this study, a download, waits for texts only so that
        measuring can follow it.
        """
        size, per_job = self.cut.max_array_size, self.cut.checkpoints_per_job
        groups = [
            group
            for run in self.study.runs
            for group in _chunks([s for s in making if s.run == run.name], per_job)
        ]
        by_output = {step.outputs[0]: step for step in making}
        measuring: dict[str, list[Step]] = {}
        for step in self.steps:
            if step.kind in CHAINED:
                maker = next((by_output[read] for read in step.reads if read in by_output), None)
                if maker:
                    measuring.setdefault(maker.name, []).append(step)
        specs = self.study.quantization.specs
        spec_groups = _chunks(list(specs), self.cut.specs_per_job)
        names: tuple[str, ...] = ()
        for part_name, part in _named(
            name, [tuple(step.name for step in group) for group in groups], size
        ):
            waits = () if held_for else tuple(Dependency("afterok", text) for text in after)
            names += self.add(part_name, kind, part, waits, held_for)
            number = part_name.removeprefix(name)
            corresponding = (Dependency("aftercorr", part_name),)
            measured = [[step for made in element for step in measuring[made]] for element in part]
            for kind_name, table in CHAINED.items():
                own = [[s for s in steps if s.kind == kind_name] for steps in measured]
                if any(step.specs for steps in own for step in steps):
                    for index, group in enumerate(spec_groups, start=1):
                        chosen = [_names(steps, group) for steps in own]
                        self.add(
                            f"{kind_name}{suffix}-{index}{number}", table, chosen, corresponding
                        )
                elif any(own):
                    chosen = [_names(steps) for steps in own]
                    self.add(f"{kind_name}{suffix}{number}", table, chosen, corresponding)
        return names

    def ends(self, exported: tuple[str, ...]) -> None:
        """Add an element per run for what is measured of its last checkpoint alone."""
        kinds = [kind.name for kind, _ in KINDS if kind.models == "last"]
        by_run: dict[str, list[str]] = {}
        for step in self.steps:
            if step.kind in kinds:
                by_run.setdefault(step.run, []).append(step.name)
        self.add("ends", "quantize", [tuple(names) for names in by_run.values()], held_for=exported)

    def settling(self) -> None:
        """Add a job after every array that others are held for, to cancel what can never start."""
        makers = dict.fromkeys(name for array in self.arrays for name in array.held_for)
        for name in makers:
            self.add(f"{SETTLE}-{name}", "light", [(SETTLE,)], (Dependency("afterany", name),))


def _is_average(study: Study, step: Step) -> bool:
    """Return whether a step exports an average kept in training."""
    run = next(run for run in study.runs if run.name == step.run)
    if isinstance(run, ReleasedRun):
        return False
    names = tuple(f"{average.name}-" for average in run.averages)
    return step.outputs[0].removeprefix(f"{run.name}/hf/").startswith(names) if names else False


def _names(steps: list[Step], specs: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the names of steps, of those with one of the specs where these are given."""
    return tuple(step.name for step in steps if specs is None or step.specs[-1] in specs)


def _chunks(items: list, size: int) -> list[list]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def arrays_of(study: Study, cut: Cut) -> list[JobArray]:
    """Return the arrays of a study, each after those it depends on.

    Weights, averages kept in training and soups are chains of arrays of their own, whose elements
    correspond: the export of some checkpoints, an array for each group of specs, and curvature.
    """
    return _Planner(study, cut).plan()
