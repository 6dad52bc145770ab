"""Recipes and studies in words: `python -m study list` and `show`."""

from collections.abc import Iterator

from study.axes import amount_name
from study.definition import Study
from study.recipes import PROFILES, RECIPES, TRAJECTORY, resolve
from study.recipes.cost import gpu_hours, trained_tokens
from study.released import ReleasedRun
from study.text.kinds import PreparedText, StandardLibrary, TokenFiles, places_of
from train.planning.flops import assumed_mfu
from train.run.config import RunConfig

SHORTEST_HOURS = 0.1  # of training; less is trained on a CPU


def listed() -> Iterator[str]:
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
    yield f"  text: {_text(study)}"
    curvature = f"{study.curvature.pairs} probe pairs" if study.curvature else "not measured"
    curvature += ", traces alone" if study.curvature and not study.curvature.lambda_max else ""
    yield f"  quantized: {', '.join(study.quantization.specs)}; curvature: {curvature}"
    if study.quantization.methods:
        yield f"  quantized at the end of training: {', '.join(study.quantization.methods)}"
    if study.quantization.by_block:
        yield f"  block by block at the end of training: {', '.join(study.quantization.by_block)}"
    if study.tasks:
        tasks, specs = ", ".join(study.tasks.tasks), ", ".join(study.tasks.specs)
        shots = study.tasks.shots
        yield f"  accuracy at the end of training: {tasks} with {shots} examples, of {specs}"
    averages = dict.fromkeys(average.name for run in study.trained for average in run.averages)
    if averages and study.averaged_steps:
        steps = ", ".join(map(str, study.averaged_steps))
        yield f"  averages quantized: {', '.join(averages)} at {steps}"
    for soup in study.soups:
        steps = ", ".join(map(str, soup.steps))
        yield f"  {soup.name}: the mean of the checkpoints at {steps}, quantized"
    for source in study.sources:
        yield f"  source: {source}"


def _text(study: Study) -> str:
    text = study.text
    if isinstance(text, StandardLibrary):
        return (
            f"the standard library of Python, a tokenizer of {text.vocab_size} tokens trained on it"
        )
    if isinstance(text, PreparedText):
        files = ", ".join(f"{use} {file.name}" for use, file in text.files.items())
        return f"{files}, with the tokenizer of {text.tokenizer}"
    if isinstance(text, TokenFiles):
        return ", ".join(f"{use} {place}" for use, place in places_of(text).items())
    shares = f"places {text.held_out} of a million held out, {text.calibration} to calibrate with"
    shares += f", {text.train} trained on" if text.train else ""
    tokenizer = text.tokenizer or f"one of {text.vocab_size} tokens trained on it"
    return f"{', '.join(text.sources)}: {shares}; tokenizer: {tokenizer}"


def _trained(run: RunConfig) -> str:
    anneal, start = run.schedule.anneal, run.branch_from
    begun = f" from step {start.step} of {start.run.removeprefix('../')}" if start else ""
    annealed = f", {anneal.shape} anneal from step {anneal.start_step}" if anneal else ""
    return (
        f"peak {run.optimizer.peak_lr:g}, {run.schedule.phase.kind}{begun} to step"
        f" {run.total_steps} of {run.tokens_per_step} tokens{annealed}, {run.engine}, checkpoints"
        f" at {', '.join(map(str, run.save_steps))}"
    )


def _released(run: ReleasedRun) -> str:
    first, last = run.revisions[0].name, run.revisions[-1].name
    return (
        f"{len(run.revisions)} revisions of {run.source}, {first} to {last};"
        f" {run.schedule or 'schedule unknown'}"
    )
