"""report.html: findings, tables, the figures and the commands behind every number, in one self-contained file."""

from html import escape
from pathlib import Path

from quant_eval.statistics import METHOD
from study.averages import average_findings
from study.claims.page import claims_section
from study.collect import read_table
from study.figures import draw_all
from study.methods import method_findings
from study.page import STYLE as FIGURE_STYLE
from study.page import figures_section, policy, scripts
from study.paired import Paired
from study.prediction import step_findings
from study.provenance import commands, settings_table
from study.settings import Study
from study.steps import INTERVAL_LEVEL
from study.summary import Rows, findings, summarize
from study.tables import average_table, method_table, step_table, summary_table
from study.tracking.store import server_command
from train.run_directory import replaced_file

REPORT = "report.html"
STYLE = """
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1c1c1c; background: #fff;
  max-width: 62rem; margin: 2.5rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
.lead { color: #555; margin-top: 0; } figure { margin: 1.6rem 0; } img { width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: .87rem; max-width: 56rem; }
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
    "ends": "Quantization at the end of every run against what the study varies, the relative error of the loss above "
    "and Kullback-Leibler divergence below; bars are intervals.",
    "validation_loss": "Validation loss against training tokens, in full precision; markers are checkpoints.",
    "averages": "Averages of weights beside the weights themselves: full-precision loss, and Kullback-Leibler "
    "divergence of the model with the fewest bits. Open markers, dashed: an average kept in training. Stars: soups, at "
    "the last checkpoint that they take in. Bars are intervals; those of the loss are left out: over documents, which "
    "all models share, they are as wide as the panel.",
    "methods": "Every method at the end of training: Kullback-Leibler divergence on a logarithmic axis, and "
    "quantization error. Bars are intervals.",
    "blocks": "What each decoder block adds to the cost of quantization at the end of training. Left: the loss "
    "increase with this block alone quantized, as a share of that of the whole model. Middle: the share that goes away "
    "where it alone is left in full precision. The two differ, and do not sum to one, as far as errors of one block "
    "change what those of another cost. Bars are the intervals of the increases, with the whole model's taken as "
    "known; of a model whose increase is not told from 0 no share is shown. Right: relative error of the outputs of "
    "the block's linears on the calibration text, their mean, with bars from the smallest to the largest.",
    "full_against_quantized": "Loss after against loss before quantization, a point per checkpoint of the second half "
    "of training; large points lie in the anneal. On the dashed line quantization costs nothing.",
    "curvature": "Trace of the Hessian of the held-out loss and, where it is measured, its largest eigenvalue on a "
    "fixed batch. Bars of the "
    "trace are its 95% intervals over pairs of a microbatch and a probe; all checkpoints share the pairs, so the "
    "differences between them, by which they are told apart, are known far better. Bars of the eigenvalue are the "
    "residual of the solver: it holds for that batch, and has no sampling error. Both are per squared unit of the "
    "parameters, whose scale differs between the runs: neither alone says what a step of the quantizer costs.",
    "prediction": "The second-order prediction of the loss increase, g.delta + delta'H delta / 2, of the quantization "
    "step of the last checkpoints. Above: against the measured increase of the same microbatches; bars are 95% "
    "intervals over microbatches. Another draw of text moves both together, along the line. Below: what the second "
    "order leaves out, with the 95% interval of the difference taken microbatch by microbatch; open marks are the "
    "decoder blocks, the first one leftmost. Differences of some 1e-7 are rounding: fp32 tells losses between 2 and 4 "
    "apart by 2.4e-7. Percentages: the relative difference of the whole step, with its standard "
    "error over microbatches; a dash where the measured increase is not told from 0.",
    "slices": "The loss on the plane through the last two checkpoints and the quantized last one, over that of the "
    "last checkpoint on the same sequences. One scale of colours for all panels; distances are Euclidean, and each "
    "panel has its own scale of them. Above each: the increases at the points, with their standard errors over "
    "sequences.",
}


def write_report(directory: Path, study: Study) -> Path:
    """Draws the figures and writes report.html aside, then renames it."""
    rows: Rows = read_table(directory, study)
    summaries = summarize(study, rows)
    paired = Paired(directory)
    said = findings(study, summaries, paired) + average_findings(study, rows, paired)
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in said)
    counts = sorted({row[f"quant/{study.quantization.specs[0]}/documents"] for row in rows} - {None})
    documents = " or ".join(map(str, counts)) or "0"
    note = (
        f"Intervals of losses, errors and divergences: {INTERVAL_LEVEL:.0%}, each model for itself ({METHOD}; the "
        f"evaluation text has {documents} documents). Two models are compared on the same documents, by a bootstrap-t "
        "of the difference paired over them, so they can be told apart although their intervals overlap. Traces are "
        "compared on the same microbatches with the same probes, by Student's t of the differences. Holm's correction "
        "is over the runs, or pairs of runs, that a sentence speaks of, for each figure and method by itself: the "
        f"chance that any of them is told apart wrongly is held to {1 - INTERVAL_LEVEL:.0%}."
    )
    figures = draw_all(directory, study, rows)
    page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy()}">
<title>{escape(study.name)}: quantization along training</title><style>{STYLE}{FIGURE_STYLE}</style></head><body>
<h1>{escape(study.name)}</h1><p class="lead">{escape(study.description)}</p>
<h2>What is seen</h2><ul>{sentences}</ul>
{summary_table(study, summaries)}<p class="note">{escape(note)}</p>
{method_table(study, summaries, method_findings(study, summaries, paired))}
{average_table(study, rows)}
{step_table(study, summaries, step_findings(study, summaries))}
{figures_section(figures, CAPTIONS, directory)}
{claims_section(study, rows, paired)}
<h2>Settings</h2>{settings_table(directory, study)}
<h2>Commands behind every number</h2>
<p>To be run from the project's directory. The first line names this study and what its steps run with, the second
repeats whatever is missing. Each result lies beside its
model as result.json with its settings; table.parquet holds them all.</p>{commands(directory, study)}
<h2>MLflow</h2><pre>{escape(server_command(directory.parent))}</pre>
{scripts(figures)}</body></html>
"""
    with replaced_file(directory / REPORT) as aside:
        aside.write_text(page, encoding="utf-8")
    return directory / REPORT
