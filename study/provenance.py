"""What made the numbers of a report, as HTML: settings, software, and the command of every step."""

import json
import shlex
from html import escape
from pathlib import Path

from study.averages import average_title
from study.recipes import RECIPES, resolve
from study.settings import Study
from study.steps import Step, shown, steps_of
from study.tables import table_row
from train.run_directory import RunDirectory

ENGINE_PACKAGES = {"megatron": "megatron-core", "deepspeed": "deepspeed"}


def settings_table(directory: Path, study: Study) -> str:
    """Model, schedule and software of the study; what the runs share is told once."""
    run = study.runs[0]
    model, anneal = run.model, run.schedule.anneal
    quantization, curvature = study.quantization, study.curvature
    rows = [
        ("model", f"OLMo2, {model.num_hidden_layers} layers, width {model.hidden_size}, vocabulary {model.vocab_size}"),
        (
            "training",
            f"{run.total_steps} steps of {run.batch_size} x {run.data.sequence_length} tokens, {run.precision}",
        ),
        (
            "schedule",
            f"{run.warmup_steps} steps of warm-up, {run.schedule.phase.kind}"
            + (f", {anneal.shape} anneal to zero from step {anneal.start_step}" if anneal else ""),
        ),
        (
            "optimizer",
            f"AdamW, betas {run.optimizer.beta1:g} and {run.optimizer.beta2:g}, weight decay "
            f"{run.optimizer.weight_decay:g}, seed {run.seed}",
        ),
        (
            "quantization",
            f"{', '.join(quantization.specs)}; {quantization.calibration_sequences} calibration sequences, "
            f"losses over {quantization.eval_tokens} tokens"
            + (f"; at the end of training also {', '.join(quantization.methods)}" if quantization.methods else "")
            + (
                f"; {', '.join(quantization.by_block)} block by block, over {quantization.block_tokens} tokens"
                if quantization.by_block
                else ""
            ),
        ),
        (
            "curvature",
            f"{curvature.pairs} pairs of a probe and {curvature.microbatch_sequences} sequences; largest eigenvalue on "
            f"{curvature.fixed_sequences} sequences"
            + (
                f"; steps on {curvature.step_microbatches} x {curvature.microbatch_sequences} sequences; slices of "
                f"{curvature.slice_grid} x {curvature.slice_grid} points on {curvature.slice_sequences} sequences"
                if quantization.by_block
                else ""
            ),
        ),
    ]
    if run.averages:
        steps = ", ".join(map(str, study.averaged_steps))
        rows.append(("averages", f"{'; '.join(map(average_title, run.averages))}; quantized at {steps or 'no step'}"))
    if study.soups:
        rows.append(("soups", "; ".join(f"{soup.name}, {average_title(soup)}" for soup in study.soups)))
    if study.settings:
        rows.append(("set", ", ".join(study.settings)))
    zero = f", ZeRO stage {run.zero.stage}" if run.engine == "deepspeed" else ""
    engine = f"{ENGINE_PACKAGES[run.engine]}{zero}, {study.ranks} ranks"
    rows.append(("engine", engine))
    path = RunDirectory(directory / run.name).environment_json
    if path.exists():
        last = json.loads(path.read_text())["attempts"][-1]
        commit = last.get("commit") or "not recorded"
        rows.append(("commit", commit + (" with uncommitted changes" if last.get("uncommitted_changes") else "")))
        others = set(ENGINE_PACKAGES.values()) - {ENGINE_PACKAGES[run.engine]}
        versions = {"python": last.get("python", "unknown")} | last.get("packages", {})
        used = [f"{name} {version}" for name, version in versions.items() if name not in others]
        rows.append(("software", ", ".join(used)))
    return f'<table class="settings">{"".join(table_row(row) for row in rows)}</table>'


def _run_again(study: Study) -> str:
    for recipe, profiles in RECIPES.items():
        for profile in profiles:
            if resolve(recipe, profile, study.settings).name == study.name:
                settings = "".join(f" --set {shlex.quote(setting)}" for setting in study.settings)
                return f'python -m study run {recipe} --profile {profile}{settings} --root "$STUDY/.."'
    return f'python -m study status {study.name} --root "$STUDY/.."'


def commands(directory: Path, study: Study) -> str:
    """The commands of every step, by run."""
    groups: dict[str, list[Step]] = {"text and tokenizer": []}
    for step in steps_of(study):
        text = step.kind in ("corpus", "prepare")
        title = f"run {step.run}" if step.run else "text and tokenizer" if text else "table, report and MLflow"
        groups.setdefault(title, []).append(step)
    blocks = []
    for title, members in groups.items():
        lines = escape("\n".join(shown(step.command) for step in members))
        blocks.append(
            f"<details><summary>{escape(title)} ({len(members)} commands)</summary><pre>{lines}</pre></details>"
        )
    settings = f"export STUDY={shlex.quote(str(directory.absolute()))} OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="
    start = escape(f"{settings}\n{_run_again(study)}")
    return f"<pre>{start}</pre>{''.join(blocks)}"
