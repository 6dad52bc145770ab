"""The picture of docs/design/dual-numbers.md: finite differences beside exact products.

Shapes: B sequences, S positions of a sequence, p parameters.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from base.ranks import ALONE
from curvature.products.exact import DualHessian, collected
from curvature.products.guard import ACCEPTED_FACTOR, LIMITS, RELATIVE_CHANGE
from curvature.products.model import CurvedModel
from curvature.products.parameters import Probe
from docs.drawn import logarithmic
from study.figures.charts import CONFIG, INK

# Its modules compute in the precision of the weights throughout, as those of OLMo2, whose norms
# are in fp32, do not: so differences in float64 are differences in float64.
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
STANDARD_DEVIATION = 0.05  # of the random weights
SEQUENCES, LENGTH = 2, 48
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
STEPS_PER_DECADE = 4
SMALLEST, LARGEST = -10, 0  # powers of ten of |step v| / |theta|
SHOWN = (-16, 1)  # powers of ten of the relative error
COLOURS = {"fp32": "#cc4778", "fp64": "#7e03a8"}


class DualProblem(NamedTuple):
    """A model in one precision, with the exact product by the dual layers."""

    curved: CurvedModel
    tokens_BS1: Tensor
    v_p: Tensor
    product_p: Tensor


class CentralDifference(NamedTuple):
    """A central difference of gradients, and what the step does to the gradient."""

    product_p: Tensor
    relative_change: float


def dual_numbers() -> dict[str, Any]:
    """Return the relative error of products against the step of the difference, as a chart."""
    exact_p = double_backward(loaded(torch.float64))
    differences: list[dict[str, Any]] = []
    products: list[dict[str, Any]] = []
    for name, dtype in DTYPES.items():
        model = loaded(dtype)
        products.append({"precision": name, "error": relative(model.product_p, exact_p)})
        for number in range(STEPS_PER_DECADE * SMALLEST, STEPS_PER_DECADE * LARGEST + 1):
            step = 10 ** (number / STEPS_PER_DECADE)
            product_p, change = difference(model, step)
            row = {"precision": name, "step": step, "error": relative(product_p, exact_p)}
            differences.append(row | {"guards": name == "fp32" and in_reach(change)})
    return _chart(differences, products)


def loaded(dtype: torch.dtype) -> DualProblem:
    """Return the model of random weights, the same numbers in every precision."""
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE, eos_token_id=0, bos_token_id=0)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(float("norm.weight" in name), STANDARD_DEVIATION)
    curved = CurvedModel(model.to(dtype), ranks=ALONE)
    tokens_BS1 = torch.randint(0, SHAPE["vocab_size"], (SEQUENCES, LENGTH + 1))
    v_p = curved.parameters.probe(Probe(seed=0, index=0))
    return DualProblem(curved, tokens_BS1, v_p, DualHessian(curved).product(tokens_BS1, v_p).hv_p)


def double_backward(model: DualProblem) -> Tensor:
    """Return Hv by two backward passes through transformers' code: the reference."""
    weights = list(model.curved.parameters.weights.values())
    with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        loss = model.curved.loss(model.tokens_BS1).share
        gradient = torch.autograd.grad(loss, weights, create_graph=True)
        slopes = [(v * g).sum() for v, g in zip(_parts(model), gradient, strict=True)]
        products = torch.autograd.grad(torch.stack(slopes).sum(), weights)
    return torch.cat([part.flatten() for part in products])


def difference(model: DualProblem, step: float) -> CentralDifference:
    """Return (g(theta + e v) - g(theta - e v)) / (2 e), of |e v| = step |theta|."""
    parameters = model.curved.parameters
    theta_p, direction = parameters.point(), parameters.split(model.v_p)
    size = step * parameters.norm(theta_p) / parameters.norm(model.v_p)
    gradients = []
    for moved in (0.0, size, -size):
        parameters.move(theta_p, direction.__getitem__, moved)
        loss = model.curved.loss(model.tokens_BS1).share
        parts = collected(parameters, loss, lambda _, gradient: gradient.clone())
        gradients.append(torch.cat([parts[name].flatten() for name in parameters.weights]))
    parameters.move(theta_p)
    at_theta_p, above_p, below_p = gradients
    apart_p = above_p - below_p
    return CentralDifference(apart_p / (2 * size), float(apart_p.norm() / at_theta_p.norm()))


def in_reach(change: float) -> bool:
    """Return whether the guard takes a step that changes the gradient so much."""
    return 1 / ACCEPTED_FACTOR <= change / RELATIVE_CHANGE <= ACCEPTED_FACTOR


def relative(product_p: Tensor, exact_p: Tensor) -> float:
    """Return |product - exact| / |exact|."""
    return float((product_p.double() - exact_p).norm() / exact_p.norm())


def _parts(model: DualProblem) -> list[Tensor]:
    return list(model.curved.parameters.split(model.v_p).values())


def _chart(differences: list[dict[str, Any]], products: list[dict[str, Any]]) -> dict[str, Any]:
    """Return lines of the differences, flat lines of the products, and the guard's limit."""
    step = _powers("step", "size of the step, |ε v| / |θ|", (SMALLEST, LARGEST))
    error = _powers("error", "relative error of Hv", SHOWN)
    colours = {"domain": list(COLOURS), "range": list(COLOURS.values())}
    colour = {"field": "precision", "type": "nominal", "scale": colours, "legend": None}

    line = {"mark": {"type": "line", "clip": True, "strokeWidth": 1.8}}
    guards = {
        "transform": [{"filter": "datum.guards"}],
        "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1, "shape": "diamond"},
    }
    limit = {
        "data": {"values": [{"error": LIMITS["fp32"].product}]},
        "mark": {"type": "rule", "strokeWidth": 1, "color": INK},
        "encoding": {"y": error},
    }
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": [
            "No step of a finite difference reaches the dual product of the same precision",
            "(two blocks of Pythia's kind, random weights; reference: double backward in fp64)",
        ],
        "width": 540,
        "height": 340,
        "layer": [
            limit,
            {
                "data": {"values": differences},
                "encoding": {"x": step, "y": error, "color": colour},
                "layer": [line, guards],
            },
            {
                "data": {"values": products},
                "mark": {"type": "rule", "strokeWidth": 2, "strokeDash": [7, 3]},
                "encoding": {"y": error, "color": colour},
            },
            _words(differences, products, step, error),
        ],
        "config": CONFIG,
    }


def _words(
    differences: list[dict[str, Any]],
    products: list[dict[str, Any]],
    step: dict[str, Any],
    error: dict[str, Any],
) -> dict[str, Any]:
    """Return the names of lines and points, beside them."""
    words = [
        {
            "text": f"dual product in {product['precision']}: {product['error']:.0e}",
            "step": 10.0**LARGEST,
        }
        | {"error": product["error"], "colour": COLOURS[product["precision"]], "right": True}
        for product in products
    ]
    for precision, smallest in (("fp32", 1e-7), ("fp64", 1e-8)):
        of_one = [row for row in differences if row["precision"] == precision]
        labelled = next(row for row in of_one if row["step"] >= smallest)
        label = f"finite difference in {precision}"
        words.append(labelled | {"text": label, "colour": COLOURS[precision], "above": True})
    limit = LIMITS["fp32"].product
    refused = {"text": f"the guard refuses above {limit:.0%}", "step": 10.0**SMALLEST}
    words.append(refused | {"error": limit, "colour": INK})
    accepted = [row for row in differences if row["guards"]]
    words.append(accepted[-1] | {"text": "steps the guard takes", "colour": INK})
    mark: dict[str, Any] = {"type": "text", "fontSize": 11, "baseline": "middle"}
    mark |= {"dy": {"expr": "datum.above ? -8 : 11"}}
    mark |= {"align": {"expr": "datum.right ? 'right' : 'left'"}}
    mark |= {"dx": {"expr": "datum.right ? -4 : 8"}}
    colour = {"field": "colour", "type": "nominal", "scale": None}
    text = {"field": "text", "type": "nominal"}
    return {
        "data": {"values": words},
        "mark": mark,
        "encoding": {"x": step, "y": error, "text": text, "color": colour},
    }


def _powers(field: str, title: str, powers: tuple[int, int]) -> dict[str, Any]:
    """Return a logarithmic axis between two powers of ten."""
    low, high = powers
    ticks = [10.0**power for power in range(low, high + 1) if power % 2 == 0]
    return logarithmic(field, title, (10.0**low, 10.0**high), ticks, ".0e")
