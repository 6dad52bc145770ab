"""The picture of docs/design/gptq-numerics.md: GPTQ's output error against its damping.

Shapes: O output features, I input features, N tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from base.hessian import InputHessian, row_output_errors
from docs.drawn import logarithmic
from quant_eval.probing import round_by_names
from quant_eval.quantizers.gptq import GPTQ
from study.figures.charts import CONFIG, DASHED, INK

OUTPUTS, INPUTS = 128, 256
BITS, GROUP = 3, 32
TOKENS = {"128": "#e8912d", "512": "#cc4778", "4,096": "#7e03a8"}  # of calibration
TOKENS_AFTER = 8192  # new tokens, on which the error counts
DAMPINGS = (*(digit * 10.0**power for power in range(-6, 0) for digit in (1, 2, 5)), 1.0)
DECAY, LOUD_SHARE, LOUDNESS = 0.75, 0.03, 6.0  # of the inputs
TEXTS = ("new text", "the calibration text")
SHOWN = (2e-3, 5e-2)  # relative output errors


def gptq_numerics() -> dict[str, Any]:
    """Return the output error of one linear against damping, for three sizes of text."""
    generator = torch.Generator().manual_seed(0)
    draw = correlated(generator)
    weight_OI = torch.randn(OUTPUTS, INPUTS, generator=generator)
    after_II = hessian(draw(TOKENS_AFTER))
    rows = []
    for tokens in TOKENS:
        before_II = hessian(draw(int(tokens.replace(",", ""))))
        for damping in DAMPINGS:
            spec = f"gptq-b{BITS}-g{GROUP}-damp{damping:.6f}"
            (dense_OI,) = round_by_names([spec], weight_OI, before_II, "linear")
            for text, hessian_II in zip(TEXTS, (after_II, before_II), strict=True):
                error = relative_error(weight_OI, dense_OI, hessian_II)
                row = {"tokens": tokens, "damping": damping, "measured on": text}
                rows.append(row | {"error": error})
    (nearest_OI,) = round_by_names([f"rtn-b{BITS}-g{GROUP}"], weight_OI, None, "linear")
    return _chart(rows, relative_error(weight_OI, nearest_OI, after_II))


def correlated(generator: torch.Generator) -> Callable[[int], Tensor]:
    """Return a draw of inputs [N, I] with a decaying spectrum and some loud features."""
    mixing_II = torch.linalg.qr(torch.randn(INPUTS, INPUTS, generator=generator)).Q
    spectrum_I = torch.arange(1, INPUTS + 1) ** -DECAY
    is_loud_I = torch.rand(INPUTS, generator=generator) < LOUD_SHARE
    scale_I = torch.where(is_loud_I, LOUDNESS, 1.0)

    def draw(tokens: int) -> Tensor:
        normal_NI = torch.randn(tokens, INPUTS, generator=generator)
        inputs_NI: Tensor = ((normal_NI * spectrum_I) @ mixing_II) * scale_I
        return inputs_NI

    return draw


def hessian(inputs_NI: Tensor) -> Tensor:
    """Return the mean of x x^T, float64 [I, I]."""
    sums = InputHessian(INPUTS, torch.device("cpu"), inputs_NI.dtype)
    sums.add(inputs_NI)
    return sums.mean("linear")


def relative_error(weight_OI: Tensor, dense_OI: Tensor, hessian_II: Tensor) -> float:
    """Return the squared error of the outputs over their square."""
    error_O, whole_O = row_output_errors(weight_OI, dense_OI, hessian_II)
    return float(error_O.sum() / whole_O.sum())


def _chart(rows: list[dict[str, Any]], nearest: float) -> dict[str, Any]:
    """Return lines of the errors, the error of rounding to nearest, and the default damping."""
    default = GPTQ.model_fields["damping"].default
    ticks = [10.0**power for power in range(-6, 1)]
    title = "damping λ, share of the mean diagonal of H"
    damping = logarithmic("damping", title, (1e-6, 1.0), ticks, "~g")
    ticks = [0.002, 0.005, 0.01, 0.02, 0.05]
    error = logarithmic("error", "squared error of the outputs, relative", SHOWN, ticks, "~g")

    tokens: dict[str, Any] = {
        "field": "tokens",
        "type": "nominal",
        "sort": None,
        "title": "calibration tokens",
    }
    tokens |= {"scale": {"domain": list(TOKENS), "range": list(TOKENS.values())}}
    texts: dict[str, Any] = {
        "field": "measured on",
        "type": "nominal",
        "sort": None,
        "title": "error on",
    }
    texts |= {"scale": {"domain": list(TEXTS), "range": [[1, 0], [2, 3]]}}
    legend = {"orient": "right", "titleOrient": "top", "columns": 1}
    legend |= {"symbolType": "stroke", "symbolSize": 300, "symbolStrokeWidth": 1.8}
    lines = {
        "data": {"values": rows},
        "mark": {"type": "line", "strokeWidth": 1.8},
        "encoding": {
            "x": damping,
            "y": error,
            "color": tokens | {"legend": legend},
            "strokeDash": texts | {"legend": legend},
        },
    }
    names = [
        {"damping": 1e-6, "error": nearest, "text": "rounding to nearest", "colour": INK},
        {"damping": default, "error": SHOWN[0], "text": f"default, {default:g}", "colour": INK},
    ]
    words = {
        "data": {"values": names},
        "mark": {"type": "text", "align": "left", "dx": 5, "dy": -7, "color": INK, "fontSize": 11},
        "encoding": {"x": damping, "y": error, "text": {"field": "text", "type": "nominal"}},
    }
    rule = {"type": "rule"} | DASHED
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": [
            "Damping matters where calibration tokens are few",
            f"(GPTQ, {BITS} bits in groups of {GROUP}, {INPUTS} correlated synthetic inputs)",
        ],
        "width": 440,
        "height": 320,
        "layer": [
            {"data": {"values": names[:1]}, "mark": rule, "encoding": {"y": error}},
            {"data": {"values": names[1:]}, "mark": rule, "encoding": {"x": damping}},
            lines,
            words,
        ],
        "config": CONFIG,
    }
