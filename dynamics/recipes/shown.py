"""Recipes and studies in words, and the cost of training: `python -m study list` and `show`.

The cost is hours of one GPU, an estimate: none was measured on a GPU.
"""

from collections.abc import Iterator

from base.frozen import Frozen
from dynamics.recipes import PROFILES, RECIPES, TRAJECTORY, resolve
from study.axes import amount_name
from study.definition import Study
from study.released import ReleasedRun
from study.text.kinds import TokenFile
from train.planning.flops import GPUS, assumed_mfu, flops_per_token
from train.run.config import RunConfig
from train.run.schedules import describe, first_step

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
    for name in RECIPES:
        study = resolve(name, "full")
        cost = f"{amount_name(trained_tokens(study)).upper()} tokens"
        hours, mfu = gpu_hours(study), assumed_mfu(study.trained[0].model)
        if hours >= SHORTEST_HOURS:
            amount = f"{hours:,.{0 if hours >= 1 else 1}f}"
            cost += f", {amount} H100-hours of training at {mfu:.0%} of the peak"
        yield f"{name} ({', '.join(PROFILES)}): {study.description} [{cost}]"
    yield (
        f"{TRAJECTORY} (full, smoke): A released model at its revisions, with --set"
        " source=OWNER/NAME or a directory [nothing is trained]"
    )


def summary(study: Study) -> Iterator[str]:
    """Yield what a study trains and measures, and where its figures come from."""
    yield f"{study.name}: {study.description}"
    for run in study.runs:
        yield f"  {run.name}: {_released(run) if isinstance(run, ReleasedRun) else _trained(run)}"
    yield f"  text: {study.text.kind}; {_in_words(study.text)}"
    for part in ("quantization", "curvature", "tasks"):
        settings: Frozen | None = getattr(study, part)
        yield f"  {part}: {'not measured' if settings is None else _in_words(settings)}"
    averages = dict.fromkeys(average.name for run in study.trained for average in run.averages)
    if averages and study.averaged_steps:
        steps = ", ".join(map(str, study.averaged_steps))
        yield f"  averages quantized: {', '.join(averages)} at {steps}"
    for soup in study.soups:
        steps = ", ".join(map(str, soup.steps))
        yield f"  {soup.name}: the mean of the checkpoints at {steps}, quantized"
    for source in study.sources:
        yield f"  source: {source}"


def _in_words(settings: Frozen) -> str:
    """Return the settings that are not at their defaults: 'pairs 16; specs gptq-b3, gptq-b4'."""
    words = []
    for name, value in settings:
        if value != type(settings).model_fields[name].default:
            if isinstance(value, TokenFile):
                value = f"({_in_words(value)})"
            values = ", ".join(map(str, value)) if isinstance(value, tuple) else value
            words.append(f"{name} {values}")
    return "; ".join(words)


def _trained(run: RunConfig) -> str:
    branch = run.branch_from
    origin = f"from step {branch.step} of {branch.run.removeprefix('../')} " if branch else ""
    return (
        f"peak {run.optimizer.peak_lr:g}; {describe(run)}; {origin}to step {run.total_steps},"
        f" {run.tokens_per_step:,} tokens each; {run.engine}; checkpoints at"
        f" {', '.join(map(str, run.save_steps))}"
    )


def _released(run: ReleasedRun) -> str:
    first, last = run.revisions[0].name, run.revisions[-1].name
    return f"{len(run.revisions)} revisions of {run.source}, {first} to {last}; {run.course}"
