"""Whole screens of `quant_eval run`, `tasks` and `outliers`, from planted results."""

from pathlib import Path
from typing import Any

from base.aligned import WIDTH
from ckpt_tools.hf.measured import Outliers, Quantization, Tasks
from ckpt_tools.hf.results import Result, ResultModel, Spec
from quant_eval.shown import lines


def result(measured: Any, spec: str, model: str = "runs/a/hf/step2", kind: str = "quant") -> Any:
    typed: Any = Result[type(measured)]  # type: ignore[misc]
    return typed(
        path=Path(model) / kind / spec / "result.json",
        model=ResultModel(path=model),
        spec=Spec(name=spec),
        measured=measured,
    )


def losses(increase: float, divergence: float, **changes: Any) -> Quantization:
    """Losses of 5 nats/token in full precision, with intervals of 0.1 and 0.2 thousandths."""
    return Quantization(
        cross_entropy=5.0,
        cross_entropy_quantized=5.0 + increase,
        relative_error=increase / 5.0,
        absolute_error=increase,
        kl_divergence=divergence,
        intervals={
            "absolute_error": (increase - 2e-4, increase + 2e-4),
            "kl_divergence": (divergence - 1e-4, divergence + 1e-4),
        },
        **changes,
    )


def test_specs_of_a_model_are_a_row_each():
    results = [
        result(losses(0.00123, 0.00066), "gptq-b3-g32"),
        result(losses(-0.0001, 0.000054), "rtn-b8-g32"),
    ]
    assert lines(results, kept=1) == [
        "loss in nats/token; increase and KL divergence in 10^-3 nats/token, with 95% intervals",
        "runs/a/hf/step2: loss 5.0000 in full precision",
        "",
        "spec         quantized  increase             KL divergence       relative increase, %",
        "gptq-b3-g32  5.0012     1.23 [1.03, 1.43]    0.66 [0.56, 0.76]   0.0246",
        "rtn-b8-g32   4.9999     -0.10 [-0.30, 0.10]  0.05 [-0.05, 0.15]  -0.002",
        "",
        "2 results (1 of them kept, measured before) below runs/a/hf/step2/quant",
    ]


def test_models_are_named_below_what_they_share_and_one_result_by_its_path():
    results = [
        result(losses(0.001, 0.0005), "gptq-b3-g32", f"runs/{run}/hf/step2") for run in ("a", "b")
    ]
    assert lines(results, kept=0) == [
        "loss in nats/token; increase and KL divergence in 10^-3 nats/token, with 95% intervals",
        "",
        "model       spec         loss    increase           KL divergence",
        "a/hf/step2  gptq-b3-g32  5.0000  1.00 [0.80, 1.20]  0.50 [0.40, 0.60]",
        "b/hf/step2  gptq-b3-g32  5.0000  1.00 [0.80, 1.20]  0.50 [0.40, 0.60]",
        "",
        "2 results below runs",
    ]
    assert lines(results[:1], 1)[-1] == (
        "kept, measured before: runs/a/hf/step2/quant/gptq-b3-g32/result.json"
    )


def test_hundreds_of_results_are_a_screen():
    results = [
        result(losses(0.001, 0.0005), f"gptq-b{bits}-g32", f"runs/lr3e-3/hf/step{step:08d}")
        for step in range(50)
        for bits in (3, 4)
    ]
    shown = lines(results, kept=0)
    assert len(shown) <= 24
    assert max(map(len, shown)) <= WIDTH
    assert "... 84 more, in their files" in shown


def test_the_accuracy_that_is_lost_comes_before_the_tasks():
    tasks = Tasks.model_validate(
        {
            "tasks": {
                "arc_easy": {
                    "accuracy": 0.6,
                    "accuracy_quantized": 0.55,
                    "difference": 0.05,
                    "p_value": 0.012,
                    "items": 500,
                    "intervals": {"difference": [0.02, 0.08]},
                },
                "piqa": {
                    "accuracy": 0.7,
                    "accuracy_quantized": 0.69,
                    "difference": 0.01,
                    "p_value": 0.6,
                    "items": 500,
                    "intervals": {"difference": [-0.02, 0.04]},
                },
            },
            "mean": {
                "accuracy": 0.65,
                "accuracy_quantized": 0.62,
                "difference": 0.03,
                "items": 1000,
                "intervals": {"difference": [0.01, 0.05]},
            },
        }
    )
    shown = lines([result(tasks, "gptq-b3-g32", kind="tasks")], kept=0)
    assert shown == [
        "gptq-b3-g32 loses 3.0 [1.0, 5.0] percentage points of accuracy (mean of 2 tasks)",
        "",
        "accuracy in %; lost in percentage points, with 95% intervals over items; p by McNemar's test",
        "spec         task      full  quantized  lost             p",
        "gptq-b3-g32  arc_easy  60.0  55.0       5.0 [2.0, 8.0]   0.012",
        "gptq-b3-g32  piqa      70.0  69.0       1.0 [-2.0, 4.0]  0.6",
        "gptq-b3-g32  mean      65.0  62.0       3.0 [1.0, 5.0]   -",
        "",
        "written: runs/a/hf/step2/tasks/gptq-b3-g32/result.json",
    ]
    alone = Tasks(tasks={"piqa": tasks.tasks["piqa"]})
    assert lines([result(alone, "gptq-b3-g32")], 0)[0] == (
        "gptq-b3-g32 loses no significant accuracy: 1.0 [-2.0, 4.0] percentage points (500 items)"
    )


def test_an_accuracy_that_is_gained_has_its_interval_turned_around_and_what_is_missing_a_dash():
    gained = {"difference": -0.02, "items": 500, "intervals": {"difference": [-0.03, -0.01]}}
    tasks = Tasks.model_validate({"tasks": {"piqa": gained}})
    first, *_, row, _, _ = lines([result(tasks, "gptq-b3-g32")], 0)
    assert first == "gptq-b3-g32 gains 2.0 [1.0, 3.0] percentage points of accuracy (500 items)"
    assert row.split()[:4] == ["gptq-b3-g32", "piqa", "-", "-"]


def test_outliers_are_a_row_each():
    figures = {
        "input_kurtosis": {"mean": 12.3, "interval": [11.0, 13.6], "max": 150.0, "linear": "q"},
        "weight_kurtosis": {"mean": 3.1, "max": 4.0, "linear": "down"},
        "input_max_to_median": {"mean": None, "max": None, "linear": "o"},
    }
    measured = Outliers.model_validate({"figures": figures})
    assert lines([result(measured, "linears", kind="outliers")], 0) == [
        "runs/a/hf/step2: mean over linears with 95% intervals, the largest, and where",
        "statistic                        mean               largest    in",
        "inputs: kurtosis                 12.3 [11.0, 13.6]  150        q",
        "weights: kurtosis                3.1                4          down",
        "inputs: largest over the median  -                  undefined  o: zeros alone, or in half of a row",
        "",
        "written: runs/a/hf/step2/outliers/linears/result.json",
    ]
