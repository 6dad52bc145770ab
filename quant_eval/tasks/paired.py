"""The cost of quantization on downstream tasks, paired over the items.

Shapes: N items of a task, S bootstrap samples.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from base.errors import UserError
from base.statistics import INTERVAL_LEVEL
from quant_eval.measuring.statistics import SAMPLES, Floats
from quant_eval.tasks.loading import LoadedTask
from quant_eval.tasks.scoring import Answers

Bools = NDArray[np.bool_]
UNITS = {
    "accuracy": "1 (share of items)",
    "accuracy_quantized": "1 (share of items)",
    "standard_error": "1 (of accuracy, over items)",
    "standard_error_quantized": "1 (of accuracy_quantized, over items)",
    "difference": "1 (accuracy - accuracy_quantized)",
    "degradation": "1 ((accuracy - accuracy_quantized) / (1 - accuracy))",
    "p_value": "1 (exact two-sided McNemar test of no difference)",
    "only_full_correct": "items",
    "only_quantized_correct": "items",
    "items": "items",
    "truncated_items": (
        "items whose prompt lost its beginning, being longer than the model's context"
    ),
    "unanswerable_items": "items whose answer is none of their choices, which count as wrong",
    "per_item": "1 yes, 0 no, one digit for each item in file order, of mmlu subject by subject",
}
METHOD = "percentile bootstrap paired over items, within each task"
UNDEFINED = (
    "the full-precision model answers every item, nothing can be lost relative to its errors"
)
UNDEFINED_INTERVAL = "in a bootstrap sample the full-precision model answers every item"


def figures(accuracy: Any, accuracy_quantized: Any) -> dict[str, Any]:
    """Return every figure that has an interval, of numbers or of arrays.

    degradation = (Acc(W) - Acc(W_q)) / (1 - Acc(W)), of arXiv:2510.06213; NaN where Acc(W) is 1.

    Args:
        accuracy: Acc(W), share of items from 0 to 1.
        accuracy_quantized: Acc(W_q), likewise.

    Example: half as many errors again.
        >>> float(figures(0.75, 0.625)["degradation"])
        0.5
    """
    difference = accuracy - accuracy_quantized
    with np.errstate(divide="ignore", invalid="ignore"):
        degradation = np.where(accuracy < 1, np.divide(difference, 1 - accuracy), np.nan)
    return {
        "accuracy": accuracy,
        "accuracy_quantized": accuracy_quantized,
        "difference": difference,
        "degradation": degradation,
    }


def mcnemar_p_value(first: int, second: int) -> float:
    """Return the p-value of the exact two-sided McNemar test on discordant items.

    p = min(1, 2 sum_{k <= min(b, c)} C(b + c, k) / 2^(b + c)); McNemar 1947, with the binomial in
    place of its limit.

    Args:
        first: b, items that the first model alone answers.
        second: c, items that the second alone answers.

    Example: 2 x 1/32 where all five go one way.
        >>> mcnemar_p_value(5, 0), mcnemar_p_value(3, 3)
        (0.0625, 1.0)
    """
    discordant, fewer = first + second, min(first, second)
    # Exact integers: binomial coefficients of many items overflow a float.
    tail = coefficient = 1
    for k in range(1, fewer + 1):
        coefficient = coefficient * (discordant - k + 1) // k
        tail += coefficient
    probability: float = 2 * tail / 2**discordant
    return min(1.0, probability)


def resampled_accuracies(
    correct_N: Bools, quantized_N: Bools, samples: int, generator: np.random.Generator
) -> tuple[Floats, Floats]:
    """Return the accuracies of both models in bootstrap samples, [S] each.

    N items drawn with replacement, the same for both models, fall into (both, full only, quantized
    only, neither) correct as one multinomial draw does: the items are not drawn one by one.

    Example: models that answer the same items have the same accuracy in every sample.
        >>> right_N, generator = np.arange(10) < 8, np.random.default_rng(0)
        >>> full_S, same_S = resampled_accuracies(right_N, right_N, 99, generator)
        >>> bool((full_S == same_S).all()), bool(full_S.min() < 0.8 < full_S.max())
        (True, True)
    """
    num_items = len(correct_N)
    both, only_full = (correct_N & quantized_N).sum(), (correct_N & ~quantized_N).sum()
    only_quantized = (~correct_N & quantized_N).sum()
    counts = np.array(
        [both, only_full, only_quantized, num_items - both - only_full - only_quantized]
    )
    drawn_S4 = generator.multinomial(num_items, counts / num_items, size=samples)
    both_S, only_full_S, only_quantized_S, _ = drawn_S4.T
    return (both_S + only_full_S) / num_items, (both_S + only_quantized_S) / num_items


def _described(point: dict[str, Any], resampled: tuple[Floats, Floats]) -> dict[str, Any]:
    """Return figures with their intervals.

    An undefined degradation is null, with the reason.
    """
    tails = [(1 - INTERVAL_LEVEL) / 2, (1 + INTERVAL_LEVEL) / 2]
    intervals = {
        name: None if np.isnan(values_S).any() else np.quantile(values_S, tails).tolist()
        for name, values_S in figures(*resampled).items()
    }
    result: dict[str, Any] = {name: float(value) for name, value in point.items()}
    result["undefined"] = {}
    if intervals["degradation"] is None:
        result["undefined"]["intervals.degradation"] = UNDEFINED_INTERVAL
    if math.isnan(result["degradation"]):
        result["degradation"] = None
        result["undefined"]["degradation"] = UNDEFINED
    return result | {"intervals": intervals}


def _standard_error(correct_N: Bools) -> float | None:
    """Return the sample standard deviation / sqrt(N), None for a single item."""
    return float(correct_N.std(ddof=1) / math.sqrt(len(correct_N))) if len(correct_N) > 1 else None


def _digest(hashes: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def compare(
    full: Mapping[str, Answers],
    quantized: Mapping[str, Answers],
    tasks: Sequence[LoadedTask],
    seed: int,
) -> dict[str, Any]:
    """Return the `measured` part of a result: each task, and the unweighted mean over tasks.

    The degradation of the mean is that of the mean accuracies. Its intervals resample items within
    each task.
    """
    by_task, per_item, resampled = {}, {}, []
    for task in tasks:
        ours, theirs = full[task.name], quantized[task.name]
        # answers are paired item by item, so both models must have read the same
        if (ours.documents, ours.prompts) != (theirs.documents, theirs.prompts):
            raise UserError(
                f"task {task.name} was put differently to the two models; evaluate both again"
            )

        # A stream for each task: its figures do not depend on which others are measured.
        generator = np.random.default_rng([seed, *task.name.encode()])
        drawn = resampled_accuracies(ours.correct_N, theirs.correct_N, SAMPLES, generator)
        resampled.append(drawn)

        # discordant items decide the test
        lost = int((ours.correct_N & ~theirs.correct_N).sum())
        gained = int((~ours.correct_N & theirs.correct_N).sum())
        by_task[task.name] = {
            **_described(figures(ours.correct_N.mean(), theirs.correct_N.mean()), drawn),
            "standard_error": _standard_error(ours.correct_N),
            "standard_error_quantized": _standard_error(theirs.correct_N),
            "only_full_correct": lost,
            "only_quantized_correct": gained,
            "p_value": mcnemar_p_value(lost, gained),
            "items": len(ours.correct_N),
            "truncated_items": int(ours.truncated_N.sum()),
            "unanswerable_items": task.unanswerable,
            "leaves": ours.leaves,
            "documents_sha256": _digest(ours.documents),
            "prompts_sha256": _digest(ours.prompts),
        }

        # one digit per item, so that a later comparison can pair items again
        columns = {
            "correct": ours.correct_N,
            "correct_quantized": theirs.correct_N,
            "truncated": ours.truncated_N,
        }
        per_item[task.name] = {
            name: "".join("01"[int(yes)] for yes in yes_N) for name, yes_N in columns.items()
        }
    return {
        "tasks": by_task,
        "mean": _mean(by_task, resampled),
        "interval": {"level": INTERVAL_LEVEL, "method": METHOD, "samples": SAMPLES, "seed": seed},
        "units": UNITS,
        "per_item": per_item,
    }


def _mean(
    by_task: dict[str, dict[str, Any]], resampled: list[tuple[Floats, Floats]]
) -> dict[str, Any]:
    """Return the unweighted mean over tasks, which are independent: their variances add."""
    rows = list(by_task.values())
    accuracy, accuracy_quantized = (
        float(np.mean([row[name] for row in rows])) for name in ("accuracy", "accuracy_quantized")
    )
    of_full, of_quantized = (np.mean(side, axis=0) for side in zip(*resampled, strict=True))
    result = _described(figures(accuracy, accuracy_quantized), (of_full, of_quantized))
    for name in ("standard_error", "standard_error_quantized"):
        errors = [row[name] for row in rows]
        result[name] = None if None in errors else math.hypot(*errors) / len(rows)
    for name in ("items", "truncated_items", "unanswerable_items"):
        result[name] = sum(row[name] for row in rows)
    return result | {"tasks": len(rows)}
