"""The design of a study: replicates, runs that differ in their seed alone, and controls.

A control is what an annealed run is compared with: the same run at equal tokens without its anneal.
It has no perturbation that begins with the anneal either. A perturbed run is compared with the same
one without its perturbation, too. Replicates show the noise between trainings, which no interval
over text holds.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from base.frozen import fingerprint
from base.grouping import grouped
from study.axes import AnyRun
from train.run.branching import MUST_AGREE
from train.run.config import BranchFrom, RunConfig

# what may differ between replicates besides their seed
PLACES = ("name", "branch_from", *RunConfig.NOT_IDENTITY)


class Group(NamedTuple):
    """Runs that are the same but for their seed, in the order of the study."""

    label: str
    runs: tuple[AnyRun, ...]


@cache
def _content(run: RunConfig) -> dict[str, Any]:
    return run.model_dump(mode="json")


@cache
def _trajectory(run: RunConfig) -> str:
    """Return what decides the updates of a run, its anneal aside."""
    content = {key: _content(run)[key] for key in (*MUST_AGREE, "schedule")}
    # Without the anneal: a run and its control then have the same trajectory.
    content["schedule"] = content["schedule"] | {"anneal": None}
    perturbation = _without_anneal(run).perturbation
    content["perturbation"] = perturbation and perturbation.model_dump(mode="json")
    return json.dumps(content, sort_keys=True)


def _without_anneal(run: RunConfig) -> RunConfig:
    """Return a run without its anneal and without a perturbation that begins with it, unchecked."""
    schedule = run.schedule.model_copy(update={"anneal": None})
    begins_with_it = run.perturbation is not None and run.perturbation.from_step is None
    changes = {"schedule": schedule} | ({"perturbation": None} if begins_with_it else {})
    return run.model_copy(update=changes)


def control_among(runs: Iterable[RunConfig], run: AnyRun) -> RunConfig | None:
    """Return the run that trains as `run` does, without its anneal, and is saved where it ends."""
    if not isinstance(run, RunConfig) or not run.schedule.anneal:
        return None
    for other in runs:
        is_alike = _trajectory(other) == _trajectory(run) and not other.schedule.anneal
        if is_alike and run.total_steps in other.save_steps:
            return other
    return None


def unperturbed_among(runs: Iterable[RunConfig], run: AnyRun) -> RunConfig | None:
    """Return the run that trains as `run` does, to its end, without its perturbation."""
    if not isinstance(run, RunConfig) or not run.perturbation:
        return None
    unperturbed = _but_perturbation(run)
    return next(
        (
            other
            for other in runs
            if not other.perturbation
            and _but_perturbation(other) == unperturbed
            and run.total_steps in other.save_steps
        ),
        None,
    )


@cache
def _but_perturbation(run: RunConfig) -> str:
    content = {key: _content(run)[key] for key in (*MUST_AGREE, "schedule")}
    if run.schedule.anneal:  # which falls over the steps up to the end
        content["total_steps"] = run.total_steps
    return json.dumps(content, sort_keys=True)


def replicates_of(runs: Sequence[AnyRun]) -> list[list[AnyRun]]:
    """Return the groups of runs that are the same but for their seed."""
    return list(grouped(runs, _but_seed).values())


def equal_runs(runs: Sequence[AnyRun], settings: Sequence[str]) -> Iterator[str]:
    """Yield in words which two runs are the same training, and what to do; after these --set's."""
    for replicates in replicates_of(runs):
        by_seed: dict[int, str] = {}
        for run in replicates:
            if not isinstance(run, RunConfig):
                continue
            if run.seed in by_seed:
                both = f"{by_seed[run.seed]} and {run.name} are the same training"
                if settings:
                    yield (
                        f"with {' '.join(settings)} runs {both}; leave out the setting that the"
                        " recipe varies, or change the recipe"
                    )
                yield (
                    f"runs {both}: they differ in their names alone; let a setting of run.json"
                    " differ, or make anneals that leave one run with parts.annealed"
                )
            by_seed[run.seed] = run.name


@cache
def _but_seed(run: AnyRun) -> str:
    if not isinstance(run, RunConfig):
        return run.name
    content = {key: value for key, value in _content(run).items() if key not in PLACES}
    del content["seed"]
    return json.dumps(content, sort_keys=True)


def seeded_name(name: str, seed: int) -> str:
    """Return the name of a run that is trained with several seeds: 'lr3e-3-seed1'."""
    return f"{name}-seed{seed}"


def with_seeds(runs: Sequence[RunConfig], seeds: Sequence[int]) -> list[RunConfig]:
    """Return every run once per seed, named after it; a branch leaves the parent of its seed."""
    return [changed for seed in seeds for changed in _with_seed(runs, seed)]


def _with_seed(runs: Sequence[RunConfig], seed: int) -> Iterator[RunConfig]:
    parents: dict[str, RunConfig] = {}
    for run in runs:
        branch = run.branch_from
        if branch:
            # Parents come before their branches, and their fingerprint changes with the seed.
            parent = parents[branch.run.removeprefix("../")]
            branch = BranchFrom(
                run=f"../{parent.name}", step=branch.step, fingerprint=fingerprint(parent)
            )
        changes = {"name": seeded_name(run.name, seed), "seed": seed, "branch_from": branch}
        parents[run.name] = RunConfig.model_validate(dict(run) | changes)
        yield parents[run.name]


def with_controls(runs: Sequence[RunConfig]) -> list[RunConfig]:
    """Return the runs, and a control for every one that anneals and has none among them.

    It branches off where the first of them does that shares its start, and ends with the last.

    Raises:
        ValueError: a run has no checkpoint where its anneal starts.
    """
    annealed = [run for run in runs if run.schedule.anneal and not control_among(runs, run)]
    # One control serves all anneals of one trajectory that start at one step.
    lacking = grouped(annealed, lambda run: (_trajectory(run), _start(run)))

    # the control of an earlier start may be that of a later one too
    controls: dict[str, RunConfig] = {}
    for _, group in sorted(lacking.items(), key=lambda item: item[0][1]):
        # A control that ends later and saves at this end serves this anneal, too.
        if not all(control_among(controls.values(), run) for run in group):
            controls[group[-1].name] = _control(group)
    shared = {name: _with_shared_factors(control, runs) for name, control in controls.items()}
    return [each for run in runs for each in (run, shared.get(run.name)) if each]


def _start(run: RunConfig) -> int:
    """Return the step from which a run anneals."""
    assert run.schedule.anneal
    return run.schedule.anneal.start_step


def _with_shared_factors(control: RunConfig, runs: Iterable[RunConfig]) -> RunConfig:
    """Return a control with the factors in which all runs agree that it is the control of."""
    annealed = [run for run in runs if control_among([control], run)]
    # A factor that its annealed runs do not share says nothing about the control.
    shared = set.intersection(*(set(run.factors.items()) for run in annealed))
    factors = {key: value for key, value in control.factors.items() if (key, value) in shared}
    return control.model_copy(update={"factors": factors})


def _control(annealed: Sequence[RunConfig]) -> RunConfig:
    """Return the run that leaves with these anneals, and trains on as if there were none.

    It is saved where they end, and at the checkpoint half-way there.
    """
    first, start = annealed[0], _start(annealed[0])
    branch = first.branch_from
    if branch is None:
        if start not in first.save_steps:
            raise ValueError(
                f"{first.name} anneals from step {start} and saves none there, where a run of equal"
                f" tokens without the anneal branches off; add {start} to save_steps"
            )
        branch = BranchFrom(run=f"../{first.name}", step=start, fingerprint=fingerprint(first))
    saves: set[int] = set()
    for run in annealed:
        steps = [step for step in run.save_steps if step > start]
        # The checkpoint half-way and the last one of each anneal.
        saves |= {steps[(len(steps) - 1) // 2], steps[-1]}
    parent = branch.run.removeprefix("../")
    changes = {
        "name": f"{parent}-control",
        "branch_from": branch,
        "start_from": None,  # the parent did
        "total_steps": max(saves),
        "save_steps": tuple(sorted(saves)),
        "saving": first.saving.model_copy(update={"full_steps": None, "average_steps": None}),
    }
    return RunConfig.model_validate(dict(_without_anneal(first)) | changes)
