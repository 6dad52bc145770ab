"""The same run at every layout: same data, same losses, same weights."""

import json

import pytest

from tests.conftest import LAYOUTS, layouts
from train.run.directory import RunDirectory, read_checkpoint_record
from train.run.metrics import read_metrics


def losses(run_dir, key="loss"):
    return {
        row["step"]: row[key] for row in read_metrics(RunDirectory(run_dir).metrics) if key in row
    }


@pytest.mark.parametrize(
    "layout", layouts("dp2", "tp2", "pp2", "tp2pp2", "tp2dp2", "sp2", "ds-zero1")
)
def test_losses_do_not_depend_on_layout_and_engine(trained, layout):
    """20 fp32 steps with a large learning rate; rounding in sums is amplified by training."""
    reference, other = trained("dp1"), trained(layout)
    for key, steps in (("loss", 20), ("held_out_loss", 3), ("grad_norm", 20)):
        expected, values = losses(reference, key), losses(other, key)
        assert len(expected) == steps
        assert values == pytest.approx(expected, abs=1e-4 if key != "grad_norm" else 1e-3)


@pytest.mark.parametrize(
    ("layout", "reference"), [("pp2", "dp1"), ("tp2pp2", "tp2"), ("sp2", "tp2")]
)
def test_the_first_loss_is_the_same_bit_for_bit(trained, layout, reference):
    """A pipeline changes no sum; of two terms, reduced or scattered, the order does not matter."""
    assert losses(trained(layout))[1] == losses(trained(reference))[1]


@pytest.mark.parametrize("layout", ["recompute", "selective"])
def test_recomputing_activations_changes_nothing(trained, layout):
    for key in ("loss", "z_loss", "grad_norm", "held_out_loss"):
        assert losses(trained(layout), key) == losses(trained("dp1"), key)


def test_grouped_queries_do_not_depend_on_the_layout(trained):
    assert losses(trained("gqa-tp2")) == pytest.approx(losses(trained("gqa-dp1")), abs=1e-4)


@pytest.mark.parametrize("layout", layouts("bf16-dp2", "bf16-tp2pp2", "bf16-sp2"))
def test_bf16_does_not_depend_on_the_layout(trained, layout):
    """Partial sums are rounded to 8 bits before they are added up, and training amplifies that.

    Up to 0.021 was seen, at the last step, with kernels of AVX2: the bound is that of bf16 against
    fp32, below.
    """
    assert losses(trained(layout)) == pytest.approx(losses(trained("bf16-dp1")), abs=3e-2)


def test_bf16_follows_fp32(trained):
    """bf16 has 8 bits of mantissa: losses agree to about 1e-2, and the run learns as much."""
    expected, values = losses(trained("dp1")), losses(trained("bf16-dp2"))
    assert values == pytest.approx(expected, abs=3e-2)
    assert values != expected


@pytest.mark.parametrize("layout", ["dp1", "tp2pp2"])
def test_checkpoints_say_what_they_are(trained, layout):
    directory = RunDirectory(trained(layout))
    processes, settings = LAYOUTS[layout]
    assert directory.complete_steps() == [0, 10, 20]
    record = read_checkpoint_record(directory.checkpoint(10))
    held_out = losses(directory.path, "held_out_loss")
    assert (record.step, record.tokens) == (10, 10 * 8 * 32)
    assert record.world_size == processes
    assert record.layout["tensor"] == settings.get("tensor", 1)
    assert record.layout["pipeline"] == settings.get("pipeline", 1)
    assert record.held_out_loss == held_out[10]
    assert held_out[20] < held_out[10] < held_out[0]
    attempts = json.loads(directory.environment_json.read_text())["attempts"]
    assert len(attempts) == 1
    assert attempts[0]["packages"]["megatron-core"]
