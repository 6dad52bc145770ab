"""The picture of docs/design/statistics.md: what more documents do to an interval."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant_eval.estimate import DOCUMENTS, DRAWS, SEEDS, Crossed, Effect, estimate_of
from study.figures.charts import CONFIG, INK
from study.results.power import Components, PowerPlan

# Standard deviations of one value, as shares of the figure: chosen, not measured.
DEVIATIONS: dict[Effect, float] = {
    frozenset({SEEDS}): 0.06,
    frozenset({DOCUMENTS}): 0.30,
    frozenset({DRAWS}): 0.04,
    frozenset({SEEDS, DOCUMENTS, DRAWS}): 0.20,
}
COUNTS = (20, 50, 100, 200, 500, 1000)  # documents
SEEDS_AT_HAND, DRAWS_AT_HAND = 4, 3
REPETITIONS, LEVEL = 1000, 0.95
SPLIT = (SEEDS, DRAWS, DOCUMENTS)
COLOURS = {SEEDS: "#7e03a8", DRAWS: "#cc4778", DOCUMENTS: "#e8912d", "all three": INK}
PLANS = {
    "seeds, draws, documents": (SEEDS_AT_HAND, DRAWS_AT_HAND, INK),
    "documents alone": (1, 1, COLOURS[DOCUMENTS]),
}
WIDTH, HEIGHT = 270, 230


def statistics() -> dict[str, Any]:
    """Return the coverage of two intervals, and the standard error by source, as a chart."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "hconcat": [_coverage_panel(), _error_panel()],
        "spacing": 30,
        "resolve": {"scale": {"color": "independent"}},
        "config": CONFIG,
    }


def coverage(seeds: int, documents: int, draws: int) -> float:
    """Return the share of simulated studies whose interval holds the true value, 1."""
    generator = np.random.default_rng(documents)
    hits = 0
    for _ in range(REPETITIONS):
        values_SDK = 1 + _noise(generator, (seeds, documents, draws))
        low, high = estimate_of(Crossed(values_SDK)).interval(LEVEL)
        hits += low <= 1 <= high
    return hits / REPETITIONS


def _noise(generator: np.random.Generator, sizes: tuple[int, int, int]) -> NDArray[np.float64]:
    """Return the sum of all random effects, [S, D, K]."""
    total: NDArray[np.float64] = np.zeros(sizes)
    for effect, deviation in DEVIATIONS.items():
        shape = tuple(
            size if name in effect else 1
            for name, size in zip((SEEDS, DOCUMENTS, DRAWS), sizes, strict=True)
        )
        total = total + deviation * generator.normal(size=shape)
    return total


def standard_errors(documents: int) -> dict[str, float]:
    """Return the expected standard error by source, and by all of them."""
    plan = PowerPlan(SEEDS_AT_HAND, documents, DRAWS_AT_HAND)
    variances = {effect: deviation**2 for effect, deviation in DEVIATIONS.items()}
    estimate = Components(plan, variances, evenness=1.0).estimate(1.0, plan)
    parts = {name: estimate.sources[name].standard_error for name in SPLIT}
    return parts | {"all three": math.hypot(*parts.values())}


def _coverage_panel() -> dict[str, Any]:
    rows = [
        {"documents": count, "interval over": name, "coverage": coverage(seeds, count, draws)}
        for name, (seeds, draws, _) in PLANS.items()
        for count in COUNTS
    ]
    title = ["With more documents an interval over documents", "alone misses the truth more often"]
    y = {"title": "95% intervals that hold the truth", "format": "%", "domain": [0, 1]}
    colours = {name: colour for name, (*_, colour) in PLANS.items()}
    nominal = {
        "data": {"values": [{}]},
        "mark": {"type": "rule", "strokeDash": [5, 3], "color": "#555555"},
        "encoding": {"y": {"datum": LEVEL}},
    }
    return _panel(title, _lines(rows, "coverage", "interval over", y, colours), nominal)


def _error_panel() -> dict[str, Any]:
    rows = [
        {"documents": count, "standard error by": name, "error": error}
        for count in COUNTS
        for name, error in standard_errors(count).items()
    ]
    title = [
        "More documents shrink one part of the error",
        f"({SEEDS_AT_HAND} seeds, {DRAWS_AT_HAND} calibration draws)",
    ]
    y = {"title": "standard error, share of the figure", "format": "%", "domain": [0, 0.09]}
    return _panel(title, _lines(rows, "error", "standard error by", y, COLOURS))


def _panel(title: list[str], *layers: dict[str, Any]) -> dict[str, Any]:
    return {"title": title, "width": WIDTH, "height": HEIGHT, "layer": list(layers)}


def _lines(
    rows: list[dict[str, Any]],
    quantity: str,
    series: str,
    y: dict[str, Any],
    colours: dict[str, str],
) -> dict[str, Any]:
    """Return a line with points for every series, named in a legend below."""
    ticks = {"title": "evaluated documents", "values": list(COUNTS), "format": "d"}
    x = {"field": "documents", "type": "quantitative", "axis": ticks}
    x["scale"] = {"type": "log", "domain": [COUNTS[0] * 0.85, COUNTS[-1] * 1.2], "nice": False}
    scale = {"domain": list(colours), "range": list(colours.values())}
    legend = {"title": series, "titleOrient": "top", "orient": "bottom", "columns": 2}
    return {
        "data": {"values": rows},
        "mark": {"type": "line", "point": {"size": 32, "filled": True}, "strokeWidth": 1.8},
        "encoding": {
            "x": x,
            "y": {
                "field": quantity,
                "type": "quantitative",
                "scale": {"domain": y["domain"]},
                "axis": {"title": y["title"], "format": y["format"]},
            },
            "color": {"field": series, "type": "nominal", "scale": scale, "legend": legend},
        },
    }
