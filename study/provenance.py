"""What made the numbers of a report, as HTML: settings, software, and the command of every step."""

import json
import shlex
from collections.abc import Callable
from html import escape
from pathlib import Path

from study.averages import average_title
from study.commands import Step, batches, shared, shown
from study.hardware import Hardware
from study.needs import Needs
from study.recipes import RECIPES, resolve
from study.released import ReleasedRun
from study.runner import MODELS_PER_PROCESS
from study.settings import Study
from study.steps import steps_of
from study.tables import table_row
from train.config import RunConfig
from train.run_directory import RunDirectory

FAMILIES = {"olmo2": "OLMo2", "llama": "Llama", "gpt_neox": "GPT-NeoX"}
ENGINE_PACKAGES = {"megatron": "megatron-core", "deepspeed": "deepspeed"}


def _training_rows(directory: Path, study: Study) -> list[tuple[str, str]]:
    """What trained the runs: figures that differ between them are listed once each."""

    def each(told: Callable[[RunConfig], str]) -> str:
        return "; ".join(dict.fromkeys(told(run) for run in study.trained))

    def schedule(run: RunConfig) -> str:
        anneal = run.schedule.anneal
        annealed = f", {anneal.shape} anneal to zero from step {anneal.start_step}" if anneal else ""
        return f"{run.warmup_steps} steps of warm-up, {run.schedule.phase.kind}{annealed}"

    run = study.trained[0]
    model = run.model
    rows = [
        (
            "model",
            f"{FAMILIES[model.family]}, {model.num_hidden_layers} layers, width {model.hidden_size}, vocabulary "
            f"{model.vocab_size}",
        ),
        (
            "training",
            each(
                lambda run: (
                    f"{run.total_steps} steps of {run.batch_size} x {run.data.sequence_length} tokens, {run.precision}"
                )
            ),
        ),
        ("schedule", each(schedule)),
        (
            "optimizer",
            each(
                lambda run: (
                    f"AdamW, betas {run.optimizer.beta1:g} and {run.optimizer.beta2:g}, weight decay "
                    f"{run.optimizer.weight_decay:g}, seed {run.seed}"
                )
            ),
        ),
    ]
    averages = dict.fromkeys(average for run in study.trained for average in run.averages)
    if averages:
        steps = ", ".join(map(str, study.averaged_steps))
        rows.append(("averages", f"{'; '.join(map(average_title, averages))}; quantized at {steps or 'no step'}"))
    if study.soups:
        rows.append(("soups", "; ".join(f"{soup.name}, {average_title(soup)}" for soup in study.soups)))
    if study.settings:
        rows.append(("set", ", ".join(study.settings)))
    zero = f", ZeRO stage {run.zero.stage}" if run.engine == "deepspeed" else ""
    needs = Needs(study, Hardware.recorded(directory), directory)
    ranks = needs.trainings[run.name].ranks
    rows.append(("engine", f"{ENGINE_PACKAGES[run.engine]}{zero}, {ranks} ranks"))
    path = RunDirectory(directory / run.name).environment_json
    if path.exists():
        last = json.loads(path.read_text())["attempts"][-1]
        commit = last.get("commit") or "not recorded"
        rows.append(("commit", commit + (" with uncommitted changes" if last.get("uncommitted_changes") else "")))
        others = set(ENGINE_PACKAGES.values()) - {ENGINE_PACKAGES[run.engine]}
        versions = {"python": last.get("python", "unknown")} | last.get("packages", {})
        used = [f"{name} {version}" for name, version in versions.items() if name not in others]
        rows.append(("software", ", ".join(used)))
    return rows


def _measuring_rows(study: Study) -> list[tuple[str, str]]:
    quantization, curvature = study.quantization, study.curvature
    quantized = (
        f"{', '.join(quantization.specs)}; {quantization.calibration_sequences} calibration sequences, losses over "
        f"{quantization.eval_tokens} tokens in {quantization.dtype}"
    )
    if quantization.methods:
        quantized += f"; at the end of training also {', '.join(quantization.methods)}"
    if quantization.by_block:
        quantized += f"; {', '.join(quantization.by_block)} block by block, over {quantization.block_tokens} tokens"
    if curvature is None:
        return [("quantization", quantized)]
    curved = (
        f"{curvature.pairs} pairs of a probe and {curvature.microbatch_sequences} sequences; largest eigenvalue "
        + (f"on {curvature.fixed_sequences} sequences" if curvature.lambda_max else "not measured")
    )
    if quantization.by_block:
        curved += (
            f"; steps on {curvature.step_microbatches} x {curvature.microbatch_sequences} sequences; slices of "
            f"{curvature.slice_grid} x {curvature.slice_grid} points on {curvature.slice_sequences} sequences"
        )
    return [("quantization", quantized), ("curvature", curved)]


def settings_table(directory: Path, study: Study) -> str:
    """Model, schedule, measurements and software of the study, and where the recipe's figures come from."""
    released = [run for run in study.runs if isinstance(run, ReleasedRun)]
    rows = [(run.name, f"{run.source}, {run.schedule or 'schedule unknown'}") for run in released]
    if study.trained:
        rows += _training_rows(directory, study)
    rows += _measuring_rows(study)
    if study.sources:
        rows.append(("sources", "; ".join(study.sources)))
    return f'<table class="settings">{"".join(table_row(row) for row in rows)}</table>'


def _run_again(study: Study) -> str:
    for recipe, profiles in RECIPES.items():
        for profile in profiles:
            if not study.name.startswith(resolve(recipe, profile).name):
                continue  # its settings may not fit
            if resolve(recipe, profile, study.settings).name == study.name:
                settings = "".join(f" --set {shlex.quote(setting)}" for setting in study.settings)
                return f'python -m study run {recipe} --profile {profile}{settings} --root "$STUDY/.."'
    return f'python -m study run {study.name} --root "$STUDY/.."'


def commands(directory: Path, study: Study) -> str:
    """Return the commands of every step, by run, as the hardware that the study last ran on takes them."""
    hardware = Hardware.recorded(directory)
    needs = Needs(study, hardware, directory)
    groups: dict[str, list[Step]] = {"text and tokenizer": []}
    for step in steps_of(study):
        text = step.kind in ("corpus", "prepare")
        title = f"run {step.run}" if step.run else "text and tokenizer" if text else "table, report and MLflow"
        groups.setdefault(title, []).append(step)
    blocks = []
    for title, members in groups.items():
        together = batches(members, MODELS_PER_PROCESS, len(members))
        lines = escape("\n".join(shown(shared(batch), needs.machine(batch[0])) for batch in together))
        blocks.append(
            f"<details><summary>{escape(title)} ({len(together)} commands)</summary><pre>{lines}</pre></details>"
        )
    settings = f"export STUDY={shlex.quote(str(directory.absolute()))} OMP_NUM_THREADS=1"
    settings += "" if hardware.gpus else " CUDA_VISIBLE_DEVICES="
    start = escape(f"{settings}\n{_run_again(study)}")
    return f"<pre>{start}</pre>{''.join(blocks)}"
