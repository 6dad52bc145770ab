"""Whole screens of curvature's commands, from planted results."""

from pathlib import Path
from typing import Any

from base.aligned import WIDTH
from ckpt_tools.hf.measured import (
    Critical,
    Curvature,
    MeasuredStep,
    Slice,
    TrajectoryPlane,
)
from ckpt_tools.hf.results import Result, ResultModel, Spec
from curvature.shown import lines


def result(kind: Any, measured: dict[str, Any], name: str, model: str = "a/hf/step2") -> Any:
    return Result[kind](
        path=Path(model) / "curvature" / name / "result.json",
        model=ResultModel(path=model),
        spec=Spec(name=name),
        measured=kind.model_validate(measured),
    )


def mean(value: float, half: float) -> dict[str, Any]:
    return {"mean": value, "interval": [value - half, value + half]}


def test_traces_are_a_row_per_model():
    """A trace whose interval is wider than itself has two digits of that, and no exponent."""
    first = {"trace": mean(145.381, 225.0), "loss": 3.14159}
    first["lambda_max"] = {"value": 12.3456, "converged": False}
    second = {"trace": mean(1.5e-5, 2e-6), "loss": 3.0}
    second["lambda_max"] = {"value": 9.876, "converged": True}
    results = [
        result(Curvature, first, "hutchinson", "a/hf/step1"),
        result(Curvature, second, "hutchinson"),
    ]
    assert lines(results) == [
        "traces and eigenvalues in nats/token per squared parameter, 95% intervals; loss in nats/token",
        "",
        "model       trace                             largest eigenvalue    loss",
        "a/hf/step1  150 [-80, 370]                    12.3 (not converged)  3.1416",
        "a/hf/step2  0.0000150 [0.0000130, 0.0000170]  9.88                  3.0000",
        "",
        "written: a/hf/step1/curvature/hutchinson/result.json",
        "written: a/hf/step2/curvature/hutchinson/result.json",
    ]


def test_both_ends_of_a_spectrum():
    pair = {"value": 12.3456, "converged": True}
    measured = {"trace": mean(100.0, 10.0), "lambda_max": pair, "loss": 3.0}
    measured["eigenvalues"] = {"largest": [pair], "smallest": [{"value": -1.5, "converged": False}]}
    assert lines([result(Curvature, measured, "lanczos")])[2:6] == [
        "model       trace          largest eigenvalue  loss",
        "a/hf/step2  100 [90, 110]  12.3                3.0000",
        "largest eigenvalues: 12.3",
        "smallest eigenvalues: -1.5 (not converged)",
    ]


def test_a_step_predicted_and_measured():
    whole = {
        "measured": mean(0.00066, 0.0003),
        "predicted": mean(0.00064, 0.0003),
        "first_order": mean(-0.0001, 0.0001),
        "second_order": mean(0.00074, 0.0001),
    }
    assert lines([result(MeasuredStep, {"whole": whole}, "step-gptq-b3-g32")]) == [
        "increase of the loss by quantization, 10^-3 nats/token, with 95% intervals",
        "",
        "step         measured           predicted          by the gradient      by the curvature",
        "gptq-b3-g32  0.66 [0.36, 0.96]  0.64 [0.34, 0.94]  -0.10 [-0.20, 0.00]  0.74 [0.64, 0.84]",
        "",
        "written: a/hf/step2/curvature/step-gptq-b3-g32/result.json",
    ]


def test_a_plane_has_a_row_per_point():
    """Losses of four sequences; the other point adds 1, 2, 3 and 2 thousandths to them."""
    base = [3.0, 3.1, 2.9, 3.0]
    moved = [3.001, 3.102, 2.903, 3.002]
    points = [
        {"name": "base", "x": 0, "y": 0, "loss": 3.0, "losses": base},
        {"name": "quantized", "x": -0.0191, "y": 4.449, "loss": 3.002, "losses": moved},
    ]
    # t of 3 degrees is 3.182 and the standard error 0.408
    assert lines([result(Slice, {"points": points}, "slice-q")]) == [
        "loss over that of base (3.0000 nats/token), 10^-3 nats/token, with 95% intervals",
        "",
        "point      x        y     increase",
        "quantized  -0.0191  4.45  2.0 [0.7, 3.3]",
        "",
        "written: a/hf/step2/curvature/slice-q/result.json",
    ]


def test_a_trajectory_of_many_checkpoints_is_a_screen():
    points = [
        {
            "name": f"step{step:08d}",
            "x": step / 10,
            "y": 0.0,
            "loss": 3.0,
            "checkpoint_loss": 2.9,
            "off_plane_share": 0.25,
        }
        for step in range(40)
    ]
    measured = {"points": points, "variance_shares": [0.9, 0.05, 0.05]}
    shown = lines([result(TrajectoryPlane, measured, "pca")])
    assert shown[:4] == [
        "95.0% of the variance of the weights is in the plane: 90.0% along its first direction, 5.0%"
        " along the second",
        "",
        "checkpoint    x    y  off the plane  its loss, nats/token  loss on the plane",
        "step00000000  0    0  25.0%          2.9000                3.0000",
    ]
    assert "... 24 more, in result.json" in shown
    assert len(shown) <= 24


def test_a_direction_without_a_crossing_says_so():
    move = {"curvature": mean(0.00116, 0.001)}
    move["critical"] = {
        "outcome": "crossing",
        "sharpness": mean(4.7, 1.7),
        "multiple": mean(0.43, 0.15),
    }
    step = {"critical": {"outcome": "none", "side": 1, "not_above": 64.0}}
    measured = {"directions": {"move": move, "step-gptq-b3-g32": step}}
    shown = lines([result(Critical, measured, "critical")])
    assert shown == [
        "a/hf/step2: sharpness along directions, with 95% intervals",
        "direction         curvature                critical sharpness  the same loss at",
        "move              0.0012 [0.0002, 0.0022]  4.7 [3.0, 6.4]      0.43 [0.28, 0.58] times it",
        "step-gptq-b3-g32  below the noise          not resolved        no higher loss up to 64 times it",
        "",
        "written: a/hf/step2/curvature/critical/result.json",
    ]
    assert max(map(len, shown)) <= WIDTH
