"""The tables of the report, as HTML: figures with their intervals."""

import math
from collections.abc import Sequence
from html import escape

from study.averages import compare, compared_columns
from study.methods import shown_methods
from study.settings import Study, spec_title
from study.summary import Estimate, Rows, RunSummary, estimate


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


def _digits_of_errors(estimates: list[Estimate | None], scale: float) -> int:
    """Decimals at which the shortest of these intervals has two figures or more."""
    shortest = min((found.high - found.low for found in estimates if found and found.high > found.low), default=1.0)
    return max(0, 1 - math.floor(math.log10(scale * shortest)))


def table_row(cells: Sequence[str], tag: str = "td") -> str:
    """A row of texts."""
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def summary_table(study: Study, summaries: list[RunSummary]) -> str:
    """One row per end of training."""
    specs = study.quantization.specs
    above = "".join(f'<th colspan="2">{escape(spec_title(spec))}</th>' for spec in specs)
    head = [study.heading, "final loss, nats per token", *["error before the anneal", "after it"] * len(specs)]
    columns = [f"quant/{spec}/relative_error" for spec in specs]
    found = {
        column: [estimate(row, column) for summary in summaries for row in (summary.first, summary.last)]
        for column in columns
    }
    body = []
    for index, summary in enumerate(summaries):
        loss = estimate(summary.last, f"quant/{specs[0]}/cross_entropy")
        cells = f"<td>{escape(summary.label)}</td>{_estimate(loss, digits=3)}"
        for estimates in found.values():
            for measured in estimates[2 * index : 2 * index + 2]:
                cells += _estimate(measured, _percent_digits(estimates), scale=100, unit=" %")
        body.append(f"<tr>{cells}</tr>")
    thead = f"<tr><th></th><th></th>{above}</tr>{table_row(head, 'th')}"
    return f"<table><thead>{thead}</thead><tbody>{''.join(body)}</tbody></table>"


def average_table(study: Study, rows: Rows) -> str:
    """Per run and compared step: a row of the weights, and one of each average of weights up to there."""
    compared = compare(study, rows)
    if not compared:
        return ""
    specs = study.quantization.specs
    columns = compared_columns(study)
    above = "".join(f'<th colspan="3">{escape(spec_title(spec))}</th>' for spec in specs)
    head = [study.heading, "weights", "loss", *["quantized loss", "error", "KL divergence"] * len(specs)]
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
    thead = f"<tr><th></th><th></th><th></th>{above}</tr>{table_row(head, 'th')}"
    return (
        "<h2>Averages of weights</h2><p>At the end of each phase and of each soup: averages beside the weights of the "
        "same step. Losses and divergences in nats per token.</p>"
        f'<table class="wide"><thead>{thead}</thead><tbody>{"".join(body)}</tbody></table>'
    )


def method_table(study: Study, summaries: list[RunSummary], sentences: Sequence[str]) -> str:
    """The sentences on the methods, then a row per method: KL divergence of every run's last checkpoint."""
    if not study.quantization.methods:
        return ""
    head = "".join(f"<th>{escape(summary.label)}</th>" for summary in summaries)
    body = []
    for spec in shown_methods(study):
        found = [estimate(summary.last, f"quant/{spec}/kl_divergence") for summary in summaries]
        smallest = min((one.value for one in found if one and one.value > 0), default=1.0)
        digits = max(4, 2 - math.floor(math.log10(smallest)))  # three figures of the smallest
        cells = "".join(_estimate(one, digits) for one in found)
        body.append(f"<tr><td>{escape(spec_title(spec))}</td>{cells}</tr>")
    return (
        "<h2>Methods at the end of training</h2>"
        f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"
        f"<p>KL divergence in nats per token, by {escape(study.heading)}.</p>"
        f'<table class="wide"><thead><tr><th>method</th>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    )


def step_table(study: Study, summaries: list[RunSummary], sentences: Sequence[str]) -> str:
    """The sentences on quantization steps, then a row per spec and run: the terms of the loss increase, and ratios."""
    specs = study.quantization.by_block
    if not specs:
        return ""
    terms = {
        "first_order": "g.delta",
        "second_order": "delta'H delta / 2",
        "predicted": "their sum",
        "measured": "measured increase",
        "remainder": "left over",
    }
    ratios = {"step_to_mean": "step / mean", "step_to_signed": "step / random signs"}
    body = []
    for spec in specs:
        column = f"curvature/step-{spec}"
        ends = {summary.label: summary.last for summary in summaries}
        found = {figure: [estimate(row, f"{column}/{figure}") for row in ends.values()] for figure in terms}
        digits = {figure: _digits_of_errors(estimates, 1000) for figure, estimates in found.items()}
        for label, row in ends.items():
            cells = f'<td>{escape(label)}</td><td class="text">{escape(spec_title(spec))}</td>'
            for figure in terms:
                cells += _estimate(estimate(row, f"{column}/{figure}"), digits[figure], scale=1000)
            cells += "".join(_estimate(estimate(row, f"{column}/{figure}"), digits=2) for figure in ratios)
            body.append(f"<tr>{cells}</tr>")
    head = [study.heading, "quantization", *terms.values(), *ratios.values()]
    above = f'<th colspan="{len(terms)}">thousandths of a nat per token</th><th colspan="{len(ratios)}">curvature</th>'
    thead = f"<tr><th></th><th></th>{above}</tr>{table_row(head, 'th')}"
    return (
        "<h2>Along the quantization step</h2>"
        f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"
        "<p>The step delta leads from the weights at the end of training to the quantized ones. Its curvature, "
        "delta'H delta / |delta|<sup>2</sup>, is set against tr H / N of the same weights, the mean over random steps, "
        "and against the mean over steps with the same entries but random signs: a ratio to that below 1 says that "
        "errors of entries cancel. In the sentences &plusmn; is a standard error over microbatches, and ratios are "
        "told from 1 by Student's t with Holm's correction over the runs. Intervals are 95%, over microbatches.</p>"
        f'<table class="wide"><thead>{thead}</thead><tbody>{"".join(body)}</tbody></table>'
    )
