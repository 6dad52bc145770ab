"""report.html: findings, one table, the figures and the commands behind every number, in one file without scripts."""

import base64
import json
import math
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path

from study.averages import average_findings, average_title, compare, compared_columns
from study.collect import read_table
from study.figures import draw_all
from study.mlflow_mirror import server_command
from study.recipes import RECIPES, resolve
from study.settings import Study, spec_title
from study.steps import INTERVAL_LEVEL, Step, shown, steps_of
from study.summary import Estimate, Rows, RunSummary, findings, summarize
from train.run_directory import RunDirectory, replaced_file

REPORT = "report.html"
ENGINE_PACKAGES = {"megatron": "megatron-core", "deepspeed": "deepspeed"}
STYLE = """
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1c1c1c; background: #fff;
  max-width: 62rem; margin: 2.5rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
.lead { color: #555; margin-top: 0; } figure { margin: 1.6rem 0; } img { width: 100%; height: auto; }
img.narrow { max-width: 42rem; } figcaption, .note { color: #555; font-size: .87rem; max-width: 56rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .8rem 0; }
th, td { text-align: right; padding: .35rem .9rem .35rem 0; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
th:first-child, td:first-child, .wide tr + tr th:nth-child(2) { text-align: left; }
thead tr:last-child th { border-bottom: 2px solid #1c1c1c; }
.settings td, td.text { text-align: left; } .wide { font-size: .84rem; } thead tr + tr th { font-weight: 400; }
.interval { color: #666; font-size: .83em; white-space: nowrap; display: block; }
pre { background: #f6f6f4; padding: .7rem .9rem; overflow-x: auto; font-size: .8rem; line-height: 1.6; }
summary { cursor: pointer; margin: .3rem 0; } li { margin: .25rem 0; }
"""
CAPTIONS = {
    "quantization_error": "Quantization error against training tokens: quantized loss / full-precision loss - 1 on "
    "held-out text, bars are their intervals. Dotted, on the second axis: the learning rate as a share of its peak.",
    "kl_divergence": "The same as Kullback-Leibler divergence of the quantized from the full-precision distribution "
    "of the next token: it cannot change sign and varies less between documents than a difference of losses.",
    "validation_loss": "Validation loss against training tokens, in full precision; markers are checkpoints.",
    "averages": "Averages of weights beside the weights themselves: full-precision loss, and Kullback-Leibler "
    "divergence of the model with the fewest bits. Open markers, dashed: an average kept in training. Stars: soups, at "
    "the last checkpoint that they take in. Bars are intervals; those of the loss are left out: over documents, which "
    "all models share, they are as wide as the panel.",
    "full_against_quantized": "Loss after against loss before quantization, a point per checkpoint of the second half "
    "of training; large points lie in the anneal. On the dashed line quantization costs nothing.",
    "curvature": "Trace of the Hessian of the held-out loss (bars: two standard errors over probes and microbatches), "
    "and its largest eigenvalue on a fixed batch (bars: residual of the solver, no sampling error).",
}


def _estimate(estimate: Estimate | None, digits: int, scale: float = 1.0, unit: str = "") -> str:
    if estimate is None:
        return "<td>not measured</td>"
    low, high = estimate.low * scale, estimate.high * scale
    interval = f'<span class="interval">[{low:.{digits}f}, {high:.{digits}f}]</span>'
    return f"<td>{estimate.value * scale:.{digits}f}{unit}{interval}</td>"


def _percent_digits(estimates: list[Estimate | None]) -> int:
    """Decimals at which the largest of these shares shows three figures as a percentage; two at least."""
    largest = max((abs(found.value) for found in estimates if found), default=1.0)
    return max(2, 1 - math.ceil(math.log10(largest))) if largest > 0 else 2


def _row(cells: Sequence[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _summary_table(study: Study, summaries: list[RunSummary]) -> str:
    """One row per learning rate."""
    specs = study.quantization.specs
    above = "".join(f'<th colspan="2">{escape(spec_title(spec))}</th>' for spec in specs)
    head = ["peak learning rate", "final loss, nats per token", *["error before the anneal", "after it"] * len(specs)]
    columns = [f"quant/{spec}/relative_error" for spec in specs]
    digits = {
        column: _percent_digits([part[column] for summary in summaries for part in (summary.before, summary.after)])
        for column in columns
    }
    body = []
    for summary in summaries:
        cells = f"<td>{escape(summary.label)}</td>{_estimate(summary.loss, digits=3)}"
        for column in columns:
            for measured in (summary.before[column], summary.after[column]):
                cells += _estimate(measured, digits[column], scale=100, unit=" %")
        body.append(f"<tr>{cells}</tr>")
    thead = f"<tr><th></th><th></th>{above}</tr>{_row(head, 'th')}"
    return f"<table><thead>{thead}</thead><tbody>{''.join(body)}</tbody></table>"


def _average_table(study: Study, rows: Rows) -> str:
    """Per learning rate and compared step: a row of the weights, and one of each average of weights up to there."""
    compared = compare(study, rows)
    if not compared:
        return ""
    specs = study.quantization.specs
    columns = compared_columns(study)
    above = "".join(f'<th colspan="3">{escape(spec_title(spec))}</th>' for spec in specs)
    head = ["peak learning rate", "weights", "loss", *["quantized loss", "error", "KL divergence"] * len(specs)]
    digits = {
        column: _percent_digits([one.estimates[column] for one in compared])
        for column in columns
        if column.endswith("relative_error")
    }
    body = []
    for one in compared:
        cells = f'<td>{escape(one.label)}</td><td class="text">{escape(one.model)}</td>'
        for column in columns:
            if column in digits:
                cells += _estimate(one.estimates[column], digits[column], scale=100, unit=" %")
            else:
                cells += _estimate(one.estimates[column], digits=5 if column.endswith("kl_divergence") else 3)
        body.append(f"<tr>{cells}</tr>")
    thead = f"<tr><th></th><th></th><th></th>{above}</tr>{_row(head, 'th')}"
    return (
        "<h2>Averages of weights</h2><p>At the end of each phase and of each soup: averages beside the weights of the "
        "same step. Losses and divergences in nats per token.</p>"
        f'<table class="wide"><thead>{thead}</thead><tbody>{"".join(body)}</tbody></table>'
    )


def _figures(paths: dict[str, Path]) -> str:
    parts = []
    for name, path in paths.items():
        data = base64.b64encode(path.read_bytes()).decode()
        kind = ' class="narrow"' if name == "validation_loss" else ""
        caption = escape(CAPTIONS[name])
        parts.append(
            f'<figure><img{kind} alt="{caption}" src="data:image/png;base64,{data}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    return "".join(parts)


def _settings(directory: Path, study: Study) -> str:
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
            f"losses over {quantization.eval_tokens} tokens",
        ),
        (
            "curvature",
            f"{curvature.pairs} probe pairs of {curvature.microbatch_sequences} sequences; largest eigenvalue on "
            f"{curvature.eigen_sequences} sequences",
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
    return f'<table class="settings">{"".join(_row(row) for row in rows)}</table>'


def _run_again(study: Study) -> str:
    for recipe, profiles in RECIPES.items():
        for profile in profiles:
            if resolve(recipe, profile, study.settings).name == study.name:
                settings = "".join(f" --set {shlex.quote(setting)}" for setting in study.settings)
                return f'python -m study run {recipe} --profile {profile}{settings} --root "$STUDY/.."'
    return f'python -m study status {study.name} --root "$STUDY/.."'


def _commands(directory: Path, study: Study) -> str:
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


def write_report(directory: Path, study: Study) -> Path:
    """Draws the figures and writes report.html aside, then renames it."""
    rows: Rows = read_table(directory, study)
    summaries = summarize(study, rows)
    said = findings(study, summaries) + average_findings(study, rows)
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in said)
    counts = sorted({row[f"quant/{study.quantization.specs[0]}/documents"] for row in rows} - {None})
    documents = " or ".join(map(str, counts)) or "0"
    note = (
        f"Intervals of losses, errors and divergences: {INTERVAL_LEVEL:.0%}, bootstrap over the {documents} documents "
        "of the evaluation text; of traces: two standard errors. "
        "All models are measured on the same documents, so overlapping intervals understate what a "
        "paired comparison could resolve; where they overlap nothing is claimed."
    )
    page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(study.name)}: quantization along training</title><style>{STYLE}</style></head><body>
<h1>{escape(study.name)}</h1><p class="lead">{escape(study.description)}</p>
<h2>What is seen</h2><ul>{sentences}</ul>
{_summary_table(study, summaries)}<p class="note">{escape(note)}</p>
{_average_table(study, rows)}
<h2>Figures</h2>{_figures(draw_all(directory, study, rows))}
<h2>Settings</h2>{_settings(directory, study)}
<h2>Commands behind every number</h2>
<p>To be run from the project's directory. The first line names this study and what its steps run with, the second
repeats whatever is missing. Each result lies beside its
model as result.json with its settings; table.parquet holds them all.</p>{_commands(directory, study)}
<h2>MLflow</h2><pre>{escape(server_command(directory.parent))}</pre>
</body></html>
"""
    with replaced_file(directory / REPORT) as aside:
        aside.write_text(page, encoding="utf-8")
    return directory / REPORT
