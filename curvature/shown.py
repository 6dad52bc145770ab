"""Results of curvature as people read them: what was found with its units, then the files.

Traces and eigenvalues are in nats/token per squared unit of a parameter, increases of the loss in
10^-3 nats/token.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from base.aligned import aligned, shortened, wrapped
from base.quantities import MILLI, MILLINATS, NONE, significant, with_interval
from base.statistics import INTERVAL_LEVEL
from ckpt_tools.hf.comparing import ShownFigure
from ckpt_tools.hf.measured import (
    Critical,
    Curvature,
    Eigenvalue,
    MeasuredLine,
    MeasuredMean,
    MeasuredStep,
    ProjectedPoint,
    Slice,
    TrajectoryPlane,
)
from ckpt_tools.hf.results import Result, labels
from curvature.trace.estimates import estimate_mean

SQUARED = "nats/token per squared parameter"
TRACE = ShownFigure("trace", SQUARED)
INTERVALS = f"{INTERVAL_LEVEL:.0%} intervals"
SHOWN_ROWS, SHOWN_FILES = 18, 4


def lines(results: Sequence[Result[Any]]) -> list[str]:
    """Return the results of one command and where they are."""
    measured = results[0].measured
    match measured:
        case Curvature():
            shown = _curvatures(results)
        case MeasuredStep():
            shown = _steps(results)
        case Slice():
            shown = _slice(measured)
        case TrajectoryPlane():
            shown = _trajectory(measured)
        case _:
            shown = (line for result in results for line in _critical(result))
    files = [f"written: {result.path}" for result in results]
    return [*shown, "", *shortened(files, SHOWN_FILES, "beside their models")]


def _curvatures(results: Sequence[Result[Curvature]]) -> Iterator[str]:
    """Yield a row per model, and for a single one its eigenvalues."""
    yield f"traces and eigenvalues in {SQUARED}, {INTERVALS}; loss in nats/token"
    yield ""
    titles = {
        "trace": "trace",
        "gauss_newton_trace": "Gauss-Newton",
        "fisher_trace": "Fisher",
    }
    measured = [name for name in titles if any(getattr(each.measured, name) for each in results)]
    rows = [("model", *(titles[name] for name in measured), "largest eigenvalue", "loss")]
    for label, result in zip(labels(results), results, strict=True):
        traces = (_mean(getattr(result.measured, name)) for name in measured)
        loss = result.measured.loss
        largest = _eigenvalue(result.measured.lambda_max)
        rows.append((label, *traces, largest, NONE if loss is None else f"{loss:.4f}"))
    yield from shortened(aligned(rows), SHOWN_ROWS, "in their files")
    if len(results) == 1:
        for end, values in results[0].measured.eigenvalues.items():
            yield from wrapped(f"{end} eigenvalues: {', '.join(map(_eigenvalue, values))}")


def _mean(mean: MeasuredMean | None, scale: float = 1.0) -> str:
    """Return a mean with its interval."""
    if mean is None:
        return NONE
    if mean.interval is None:
        return significant(scale * mean.mean)
    return with_interval(mean.mean, *mean.interval, scale)


def _eigenvalue(value: Eigenvalue | None) -> str:
    if value is None:
        return NONE
    return significant(value.value) + ("" if value.converged else " (not converged)")


def _steps(results: Sequence[Result[MeasuredStep]]) -> Iterator[str]:
    """Yield what the quadratic model says of each quantization step, and its parts."""
    parts = {
        "measured": "measured",
        "predicted": "predicted",
        "first_order": "by the gradient",
        "second_order": "by the curvature",
    }
    yield f"increase of the loss by quantization, {MILLINATS}, with {INTERVALS}"
    yield ""
    rows = [("step", *parts.values())]
    for result in results:
        whole = result.measured.whole
        cells = (_mean(getattr(whole, part), MILLI) for part in parts)
        rows.append((result.spec.name.removeprefix("step-"), *cells))
    yield from aligned(rows)


def _slice(measured: Slice) -> Iterator[str]:
    """Yield the points of a plane and their losses over that of the first."""
    base, *others = measured.points
    yield (
        f"loss over that of {base.name} ({base.loss:.4f} nats/token), {MILLINATS}, with {INTERVALS}"
    )
    yield ""
    rows = [("point", "x", "y", "increase")]
    for point in others:
        pairs = zip(point.losses, base.losses, strict=True)
        increase = estimate_mean([after - before for after, before in pairs], level=INTERVAL_LEVEL)
        shown = with_interval(increase.mean, *increase.interval, MILLI)
        rows.append((point.name, significant(point.x), significant(point.y), shown))
    yield from aligned(rows)


def _trajectory(measured: TrajectoryPlane) -> Iterator[str]:
    """Yield the share of the two components, and a row per checkpoint."""
    first, second, *_ = measured.variance_shares
    yield (
        f"{first + second:.1%} of the variance of the weights is in the plane: {first:.1%} along"
        f" its first direction, {second:.1%} along the second"
    )
    yield ""
    heads = ("checkpoint", "x", "y", "off the plane", "its loss, nats/token", "loss on the plane")
    rows = aligned([heads, *map(_projected, measured.points)])
    yield from shortened(rows, SHOWN_ROWS, "in result.json")


def _projected(point: ProjectedPoint) -> tuple[str, ...]:
    """Return the cells of a checkpoint, with the share of its distance that is off the plane."""
    return (
        point.name,
        *(significant(each) for each in (point.x, point.y)),
        NONE if point.off_plane_share is None else f"{point.off_plane_share:.1%}",
        NONE if point.checkpoint_loss is None else f"{point.checkpoint_loss:.4f}",
        f"{point.loss:.4f}",
    )


def _critical(result: Result[Critical]) -> Iterator[str]:
    """Yield a row per direction: curvature, critical sharpness, and where the loss is crossed."""
    yield f"{result.model.path}: sharpness along directions, with {INTERVALS}"
    rows = [("direction", "curvature", "critical sharpness", "the same loss at")]
    rows += [(name, *_line(along)) for name, along in result.measured.directions.items()]
    yield from aligned(rows)


def _line(along: MeasuredLine) -> tuple[str, str, str]:
    """Return curvature, critical sharpness and multiple along a direction in words."""
    curvature = _mean(along.curvature) if along.curvature else "below the noise"
    critical = along.critical
    if critical is None:
        return curvature, NONE, NONE
    if critical.sharpness and critical.multiple:
        return curvature, _mean(critical.sharpness), f"{_mean(critical.multiple)} times it"
    side = critical.side or 1
    low, high = (
        NONE if each is None else significant(side * each)
        for each in (critical.not_above, critical.above)
    )
    crossing = {
        "none": f"no higher loss up to {low} times it",
        "rises": f"no lower loss down to {high} times it",
        "crossing": f"between {low} and {high} times it",
    }
    return curvature, "not resolved", crossing[critical.outcome] if critical.outcome else NONE
