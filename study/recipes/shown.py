"""Recipes and studies in words, and the cost of training: `python -m study list` and `show`.

The cost is hours of one GPU, an estimate: none was measured on a GPU.
"""

from collections.abc import Iterator

from base.frozen import in_words
from study.axes import amount_name
from study.definition import Study
from study.recipes.parts import PROFILES
from study.recipes.resolve import named_recipe, recipe_names, resolve
from study.released import ReleasedRun
from train.planning.flops import GPUS, assumed_mfu, flops_per_token
from train.run.config import RunConfig
from train.run.schedules import first_step

SHORTEST_HOURS = 0.1  # of training; less is trained on a CPU


def _tokens(run: RunConfig) -> int:
    """Return the tokens that a run is trained on; a branch counts from its start."""
    return run.total_tokens - run.tokens_at(first_step(run))


def trained_tokens(study: Study) -> int:
    """Return the tokens that all runs of a study are trained on."""
    return sum(map(_tokens, study.trained))


def gpu_hours(study: Study, gpu: str = "h100") -> float:
    """Return the hours of one GPU that training takes at `assumed_mfu`."""
    return sum(
        _tokens(run)
        * flops_per_token(run.model, run.data.sequence_length)
        / (assumed_mfu(run.model) * GPUS[gpu].peak_flops)
        / 3600
        for run in study.trained
    )


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
        hours, mfu = gpu_hours(study), assumed_mfu(study.trained[0].model)
        if hours >= SHORTEST_HOURS:
            amount = f"{hours:,.{0 if hours >= 1 else 1}f}"
            cost += f", {amount} H100-hours of training at {mfu:.0%} of the peak"
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
