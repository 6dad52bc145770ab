"""A study as SLURM job arrays: the steps of every element.

Nothing here asks SLURM or writes a file: the same study and limits give the same arrays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from base.grouping import grouped
from slurm.site import JobKind, JobLimits
from study import steps as pipeline
from study.definition import Study
from study.paths import MeasuredModel, ingredients, model_record
from study.step import Step

FINAL = "final"  # table, report and mirror of what there is, once nothing else can be made
DEFAULT_MAX_ARRAY_SIZE = 1001  # SLURM's own default
WEIGHTS, AVERAGES, SOUPS = "", "-averages", "-soups"  # chains, by the suffix of their arrays

Elements = Sequence[tuple[str, ...]]  # of an array: the names of the steps of each


@dataclass(frozen=True)
class JobArray:
    """Elements that share a job script. Any of them may be submitted, in any order."""

    name: str  # unique in the study and fit for a file name, such as `train` or `quantize-1.2`
    kind: JobKind  # the site's table of resources that it takes
    # Names of the study's steps that each element runs, one after the other.
    elements: tuple[tuple[str, ...], ...]


def arrays_of(study: Study, limits: JobLimits) -> list[JobArray]:
    """Return the arrays of a study, each after those that make what it reads.

    Weights, averages kept in training and soups are chains of arrays of their own, whose elements
    correspond: the export of some checkpoints, an array for each group of specs, and curvature.
    """
    return list(_Planner(study, limits).plan())


class _Planner:
    """The arrays of one study."""

    def __init__(self, study: Study, limits: JobLimits) -> None:
        self.study, self.limits, self.steps = study, limits, pipeline.steps_of(study)
        # Kinds of measurement that are made as soon as a model is there, with the site's table of
        # their resources, kinds that are made at the end of a run, and those of several models.
        # Those of the move from the checkpoint before read other models: they come at the end, too.
        self.at_each_model: dict[str, JobKind] = {}
        self.at_the_end, self.kinds_of_several = set[str](), set[str]()
        for kind, settings in study.measurements:
            if kind.models == "several":
                self.kinds_of_several.add(kind.name)
            elif kind.models == "moved" or kind.at_the_end(settings):
                self.at_the_end.add(kind.name)
            else:
                self.at_each_model[kind.name] = "curvature" if kind.shares_model else "quantize"

    def plan(self) -> Iterator[JobArray]:
        """Yield all arrays, each after those that make what it reads."""
        yield from self.texts()
        yield from self.training()
        for suffix, making in self.making().items():
            if making:
                yield from self.chain(suffix, making)
        yield from self.ends()
        yield from self.of_several()
        yield from self.arrays(FINAL, "light", [pipeline.FINAL])

    def texts(self) -> Iterator[JobArray]:
        """Yield the arrays that make text: first what needs nothing, then the rest."""
        # Without a run: text, which belongs to all of them, and the last steps.
        steps = [step for step in self.steps if not step.run and step.kind not in pipeline.FINAL]
        yield from self.arrays("text", "light", [(step.name,) for step in steps if not step.after])
        yield from self.arrays("prepare", "light", [(step.name,) for step in steps if step.after])

    def training(self) -> Iterator[JobArray]:
        """Yield an element per run; branches read their parents' checkpoints."""
        steps = [step for step in self.steps if step.kind == "train"]
        # Apart from the rest, since they cannot start before checkpoints of their parents exist.
        branching = {run.name for run in self.study.trained if run.branch_from}
        roots = [(step.name,) for step in steps if step.run not in branching]
        branches = [(step.name,) for step in steps if step.run in branching]
        yield from self.arrays("train", "train", roots)
        yield from self.arrays("branches", "train", sorted(branches))

    def making(self) -> dict[str, list[Step]]:
        """Return the steps that make HF directories, by the suffix of their chain's names."""
        models = {
            model_record(run.name, model): model
            for run in self.study.runs
            for model in (*self.study.models_of(run), *ingredients(run))
        }
        making: dict[str, list[Step]] = {WEIGHTS: [], AVERAGES: [], SOUPS: []}
        for step in self.steps:
            if step.outputs[0] in models:
                making[_suffix(models[step.outputs[0]])].append(step)
        return making

    def chain(self, suffix: str, making: list[Step]) -> Iterator[JobArray]:
        """Yield arrays that make HF directories, and element for element what measures them."""
        # A group never spans runs: only models of one run share a process (`Step.process`).
        groups = [
            tuple(step.name for step in group)
            for run in self.study.runs
            for group in _chunks(
                [step for step in making if step.run == run.name], self.limits.checkpoints_per_job
            )
        ]
        measurements = self.measurements(making)
        # Soups have a kind of step of their own; averages are exported, as weights are.
        name = making[0].kind + (AVERAGES if suffix == AVERAGES else "")
        for part_name, part in self.parts(name, groups):
            yield from self.arrays(part_name, "export", part)
            # What measures a part has its number, and its elements those of what makes the models.
            number = part_name.removeprefix(name)
            for kind, table in self.at_each_model.items():
                steps = [
                    [step for maker in makers for step in measurements[maker] if step.kind == kind]
                    for makers in part
                ]
                for group_name, elements in self.by_specs(steps).items():
                    # What is fetched for soups alone is not measured.
                    measured = [element for element in elements if element]
                    yield from self.arrays(f"{kind}{suffix}{group_name}{number}", table, measured)

    def measurements(self, making: list[Step]) -> dict[str, list[Step]]:
        """Return the measurements of each HF directory, by the name of the step that makes it."""
        makers = {step.outputs[0]: step.name for step in making}
        measurements: dict[str, list[Step]] = {step.name: [] for step in making}
        for step in self.steps:
            maker = next((makers[path] for path in step.reads if path in makers), None)
            if maker and step.kind in self.at_each_model:
                measurements[maker].append(step)
        return measurements

    def by_specs(self, steps: list[list[Step]]) -> dict[str, Elements]:
        """Return elements by the suffix of their array: one for each group of specs, if any."""
        if not any(steps):
            return {}
        if not any(step.specs for element in steps for step in element):
            return {"": [tuple(step.name for step in element) for element in steps]}
        named = dict.fromkeys(step.specs[-1] for element in steps for step in element)
        groups = _chunks([*named], self.limits.specs_per_job)
        return {
            f"-{number}": [
                tuple(step.name for step in element if step.specs[-1] in specs) for element in steps
            ]
            for number, specs in enumerate(groups, start=1)
        }

    def ends(self) -> Iterator[JobArray]:
        """Yield an element per run for what is measured when all of its checkpoints are there."""
        at_the_end = [step for step in self.steps if step.kind in self.at_the_end]
        by_run = grouped(at_the_end, lambda step: step.run)
        elements = [tuple(step.name for step in steps) for steps in by_run.values()]
        yield from self.arrays("ends", "quantize", elements)

    def of_several(self) -> Iterator[JobArray]:
        """Yield an element per plane, after those that quantize models for them."""
        steps = [step for step in self.steps if step.kind in self.kinds_of_several]
        read = {name for step in steps for name in step.after}
        quantizing = [(step.name,) for step in steps if step.name in read]
        yield from self.arrays("dense", "quantize", quantizing)
        planes = [(step.name,) for step in steps if step.name not in read]
        yield from self.arrays("planes", "quantize", planes)

    def arrays(self, name: str, kind: JobKind, elements: Elements) -> Iterator[JobArray]:
        """Yield arrays of these elements, as many as they need."""
        for part_name, part in self.parts(name, elements):
            yield JobArray(part_name, kind, tuple(part))

    def parts(self, name: str, elements: Elements) -> list[tuple[str, Elements]]:
        """Cut elements into named parts: NAME if one suffices, else NAME.1, NAME.2, ..."""
        parts = _chunks(elements, self.limits.max_array_size or DEFAULT_MAX_ARRAY_SIZE)
        # The usual name stays without a number; limits of SLURM alone add one.
        if len(parts) == 1:
            return [(name, parts[0])]
        return [(f"{name}.{number}", part) for number, part in enumerate(parts, start=1)]


def _suffix(model: MeasuredModel) -> str:
    """Return the suffix of the arrays of a model's chain."""
    if model.members:
        return SOUPS
    return AVERAGES if model.average else WEIGHTS


def _chunks(items: Sequence, size: int) -> list:
    return [items[start : start + size] for start in range(0, len(items), size)]
