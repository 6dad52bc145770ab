"""Results as the commands of `curvature` leave them, with made-up numbers."""

import math
import statistics
from pathlib import Path

BLOCKS = 4
# Every checkpoint is measured on the same microbatches with the same probes: some are sharper than
# others.
PAIRS = [math.sin(3 * pair) for pair in range(16)]


def estimate(mean: float, standard_error: float) -> dict:
    """A mean over eight microbatches with its 95% interval: 2.365 is Student's 97.5% quantile at
    7 degrees.
    """
    half = 2.365 * standard_error
    return {"mean": mean, "standard_error": standard_error, "interval": [mean - half, mean + half]}


def curvature_content(
    path: Path, trace: float, loss: float, pairs: int, is_converged: bool
) -> dict:
    """result.json of 'curvature hutchinson'."""
    # v'Hv of every microbatch, scattered by a quarter of their mean
    shifts = PAIRS[:pairs]
    values = [trace * (1 + 0.35 * (shift - statistics.mean(shifts))) for shift in shifts]
    error = statistics.stdev(values) / math.sqrt(pairs)
    spec = {"name": "hutchinson", "data": {"bin_sha256": "0" * 64}, "dtype": "fp32", "seed": 0}
    spec |= {"sequence_length": 128, "microbatch_sequences": 2, "probes_per_microbatch": 1}
    measured = {
        "loss": loss,
        "trace": estimate(trace, error) | {"probes": pairs, "per_microbatch": values},
        "block_traces": {},
        "gauss_newton_trace": estimate(0.9 * trace, 0.1 * error),
        "fisher_trace": estimate(1.1 * trace, 0.1 * error),
        "lambda_max": {
            "value": trace / 40,
            "residual": 0.008,
            "converged": is_converged,
            "iterations": 23,
        },
    }
    return {"model": {"path": str(path)}, "spec": spec, "measured": measured}


def critical_content(path: Path, trace: float, multiple: float | None, specs: tuple) -> dict:
    """result.json of 'curvature critical': along the move, whose curvature follows the trace, and
    along quantization steps. Without a multiple none was found up to 64.
    """
    found = {"outcome": "none", "side": 1, "not_above": 64.0, "above": None, "is_narrow": False}
    found |= {"multiple": None, "sharpness": None}
    if multiple is not None:
        size = abs(multiple)
        found |= {"outcome": "crossing", "side": 1 if multiple > 0 else -1, "is_narrow": True}
        found |= {"not_above": 0.95 * size, "above": 1.05 * size}
        found |= {"multiple": estimate(multiple, 0.1 * size)}
        found |= {"sharpness": estimate(2 / size, 0.2 / size)}
    line = {
        "norm": 2.0,
        "slope": estimate(-0.1, 0.02),
        "curvature": estimate(trace / 1e5, trace / 2e6),
        "critical": found,
    }
    directions = {"move": line} | {f"step-{spec}": line for spec in specs}
    spec = {"name": "critical", "directions": {name: {} for name in directions}, "data": {}}
    measured = {"noise": 1e-8, "directions": directions, "forward_passes": 11}
    return {"model": {"path": str(path)}, "spec": spec, "measured": measured}


def _part(measured: float) -> dict:
    """A step whose second-order prediction is 96% of the measured increase."""
    error, share = 0.2 * abs(measured), 0.96
    return {
        "first_order": estimate(0.1 * share * measured, error),
        "second_order": estimate(0.9 * share * measured, 0.1 * error),
        "predicted": estimate(share * measured, error),
        "measured": estimate(measured, error),
        "remainder": estimate((1 - share) * measured, 0.05 * error),
        "relative_difference": estimate(share - 1, 0.01),
        "ratios": {"step_to_mean": estimate(0.25, 0.02), "step_to_signed": estimate(0.3, 0.02)},
    }


def step_content(measured: float) -> dict:
    """result.json of 'curvature step': the whole, and blocks that share it out evenly."""
    blocks = {f"layer{block}": _part(measured / BLOCKS) for block in range(BLOCKS)}
    return {"measured": {"whole": _part(measured), "blocks": blocks}}


def slice_content(loss: float) -> dict:
    """result.json of 'curvature slice': a valley that is narrow across and wide along the
    quantization step.
    """
    x = [-2.0, -1.0, 0.0, 1.0, 2.0]
    y = [-2.0, 0.0, 2.0, 4.0, 6.0]
    points = {"base": (0.0, 0.0), "previous": (1.0, 0.0), "quantized": (0.1, 4.0)}

    def at(across: float, along: float) -> float:
        return loss + 0.08 * across**2 + 0.002 * along**2 - 0.0005 * along

    return {
        "measured": {
            "grid": {"x": x, "y": y, "loss": [[at(across, along) for across in x] for along in y]},
            "points": [
                {
                    "name": name, "x": across, "y": along, "loss": at(across, along),
                    "increase": at(across, along) - loss,
                    "increase_standard_error": 0.004 if across else 0.0,
                }
                for name, (across, along) in points.items()
            ],
        }
    }  # fmt: skip
