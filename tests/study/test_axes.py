"""The axes of a study follow from its runs: what differs, how it is called, and the labels."""

import pytest

from study.axes import axes_of, text_of
from study.recipes import resolve
from tests.study.ablation import tiny
from train.run.config import RunConfig, with_settings


def _runs(*settings: tuple[str, ...]) -> tuple[RunConfig, ...]:
    base = tiny().trained[0]
    return tuple(with_settings(base, list(each)) for each in settings)


def _grid(first: str, second: str) -> tuple[RunConfig, ...]:
    return _runs(*((f"{first}={a}", f"{second}={b}") for a in (1e-3, 1e-2) for b in (0, 0.1)))


def test_two_factors_are_two_axes():
    runs = _grid("optimizer.peak_lr", "optimizer.weight_decay")
    study = tiny().model_copy(update={"runs": runs})
    assert study.heading == "peak learning rate and weight decay"
    assert [study.label_of(run) for run in runs] == [
        "0.001, 0",
        "0.001, 0.1",
        "0.01, 0",
        "0.01, 0.1",
    ]
    peaks, decays = study.axes
    assert (peaks.key, peaks.scale) == ("peak_lr", "log")
    assert (decays.key, decays.scale) == ("weight_decay", "linear"), "0 has no place on a log axis"
    assert study.varied is not None
    assert study.varied.key == peaks.key
    assert list(study.varied.groups.values()) == ["0", "0.1", "0", "0.1"]


@pytest.mark.parametrize(
    ("settings", "keys", "labels"),
    [
        (("seed=1",), ["peak_lr"], ["0.001, seed 6198", "0.001, seed 1"]),
        (("engine=deepspeed",), ["engine"], ["megatron", "deepspeed"]),
        (("batch_size=32",), ["batch_size"], ["16", "32"]),
        (("optimizer.eps=1e-6",), ["peak_lr"], ["lr1e-3", "lr1e-3-eps=1e-6"]),
    ],
)
def test_what_differs_is_an_axis_and_the_rest_a_name(settings, keys, labels):
    study = tiny().model_copy(update={"runs": _runs((), settings)})
    assert [axis.key for axis in study.axes] == keys, "tokens follow from the batch"
    assert [study.label_of(run) for run in study.runs] == labels


def test_budgets_and_schedules_have_words():
    study = resolve("pythia-160m-budgets", "full")
    assert study.heading == "budget", "what anneals differs in its length alone"
    assert [study.label_of(run) for run in study.runs][:2] == ["99.6B, no anneal", "10.5B"]
    big = resolve("olmo2-7b-lr", "full")
    axes = axes_of(big.runs, big.controls)
    assert text_of(axes, "lr6e-4-anneal100b") == "0.0006, 100B anneal"
