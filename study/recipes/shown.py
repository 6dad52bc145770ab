"""Recipes and studies in words, and the cost of training: `python -m study list` and `show`.

The cost is hours of one GPU by the roofline, expected and their range.
"""

from collections.abc import Iterator

from base.frozen import in_words
from study.axes import amount_name
from study.definition import Study
from study.recipes.parts import PROFILES
from study.recipes.resolve import named_recipe, recipe_names, resolve
from study.released import ReleasedRun
from train.planning import speed
from train.planning.flops import GPUS, GPUS_PER_NODE
from train.planning.speed import GpuHours
from train.run.config import RunConfig
from train.run.schedules import first_step

SHORTEST_HOURS = 0.1  # of training; less is trained on a CPU


def _tokens(run: RunConfig) -> int:
    """Return the tokens that a run is trained on; a branch counts from its start."""
    return run.total_tokens - run.tokens_at(first_step(run))


def trained_tokens(study: Study) -> int:
    """Return the tokens that all runs of a study are trained on."""
    return sum(map(_tokens, study.trained))


def gpu_hours(study: Study) -> GpuHours:
    """Return the hours of an H100 that training takes, on one replica of every run."""
    layouts = [(run, run.parallel.tensor * run.parallel.pipeline) for run in study.trained]
    return speed.gpu_hours(layouts, gpus_per_node=GPUS_PER_NODE, gpu=GPUS["h100"])


def recipe_lines() -> Iterator[str]:
    """Yield a line per recipe: its profiles, what it is, and what training it takes."""
    for name in recipe_names():
        recipe = named_recipe(name)
        head = f"{name} ({', '.join(PROFILES)})"
        if recipe.takes_settings:
            yield f"{head}: {recipe.description} [nothing is trained]"
            continue
        study = resolve(name)
        cost = f"{amount_name(trained_tokens(study)).upper()} tokens"
        hours = gpu_hours(study)
        if hours.expected >= SHORTEST_HOURS:
            cost += f", {hours} H100-hours of training"
        yield f"{head}: {study.description} [{cost}]"


def summary(study: Study) -> Iterator[str]:
    """Yield what a study trains and measures, and where its figures come from."""
    yield f"{study.name}: {study.description}"
    for run in study.runs:
        yield f"  {run.name}: {_released(run) if isinstance(run, ReleasedRun) else _trained(run)}"
    yield f"  text: {study.text.kind}; {in_words(study.text, defaults=False)}"
    for part, settings in study.measured_by.items():
        yield f"  {part}: {in_words(settings, defaults=False)}"
    averages = dict.fromkeys(average.name for run in study.trained for average in run.averages)
    if averages and study.averaged_steps:
        steps = ", ".join(map(str, study.averaged_steps))
        yield f"  averages quantized: {', '.join(averages)} at {steps}"
    for soup in study.soups:
        steps = ", ".join(map(str, soup.steps))
        yield f"  {soup.name}: the mean of the checkpoints at {steps}, quantized"
    for source in study.sources:
        yield f"  source: {source}"


def _trained(run: RunConfig) -> str:
    branch = run.branch_from
    origin = f"from step {branch.step} of {branch.run.removeprefix('../')} " if branch else ""
    schedule = run.schedule.describe(run.warmup_steps)
    return (
        f"peak {run.optimizer.peak_lr:g}{run.found_at}; {schedule}; {origin}to step"
        f" {run.total_steps},"
        f" {run.tokens_per_step:,} tokens each; {run.engine}; checkpoints at"
        f" {', '.join(map(str, run.save_steps))}"
    )


def _released(run: ReleasedRun) -> str:
    first, last = run.revisions[0].name, run.revisions[-1].name
    return f"{len(run.revisions)} revisions of {run.source}, {first} to {last}; {run.course}"
