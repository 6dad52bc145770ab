"""Every layout, both engines and all optimizers against a loop in fp64 of its own.

Grouped queries, document mask, repetition filter, accumulation, active clipping, a z-loss of 1e-2,
OLMo's order and an anneal, over 20 steps.
"""

from typing import Any

import pytest
import torch

from tests.ckpt_tools.checkpoints import read_weights
from tests.runs import make_run, ranks, succeed
from tests.train import independent
from train.data.config import RepetitionFilter
from train.optimizers.adamw import AdamW
from train.optimizers.muon import Muon
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics
from train.run.optimization import Anneal, ConstantPhase, ScheduleConfig
from train.run.parallel import ParallelConfig, ZeroConfig

# Processes, and settings of `make_run`.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP1": (1, {}),
    "DP2": (2, {}),
    "TP2+SP": (2, {"parallel": ParallelConfig(tensor=2, sequence=True)}),
    "PP2": (2, {"parallel": ParallelConfig(pipeline=2)}),
    "TP2 PP2": (4, {"parallel": ParallelConfig(tensor=2, pipeline=2)}),
    "ZeRO 1": (2, {"engine": "deepspeed", "zero": ZeroConfig(stage=1)}),
    "ZeRO 2": (2, {"engine": "deepspeed", "zero": ZeroConfig(stage=2)}),
}
OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "AdamW": ({}, AdamW(peak_lr=independent.PEAK)),
    "AdamC": ({"decay": "adamc"}, AdamW(peak_lr=independent.PEAK, decay="adamc")),
    "independent": (
        {"decay": "independent"},
        AdamW(peak_lr=independent.PEAK, decay="independent", weight_decay=independent.SHARE),
    ),
    "Muon": ({"muon": True}, Muon(peak_lr=independent.PEAK)),
}
# Of losses in nats, of norms, and of weights as a share of how far they moved; seen: a third.
MOST = {"fp32": (6e-7, 2e-6, 1e-5), "bf16": (4e-3, 2e-2, 9e-2)}


def cases() -> list[Any]:
    """All layouts and optimizers in `make stress`; in the suite one that has the most of them."""
    params = [
        (layout, optimizer, precision)
        for precision in MOST
        for layout in LAYOUTS
        for optimizer in OPTIMIZERS
    ]
    quick = {("TP2+SP", "AdamC", "fp32"), ("ZeRO 2", "Muon", "fp32")}
    marks = pytest.mark.stress
    return [pytest.param(*p, marks=() if p in quick else marks) for p in params]


@pytest.mark.parametrize(("layout", "optimizer", "precision"), cases())
def test_training_equals_an_independent_loop(
    tmp_path, inputs, record_property, layout, optimizer, precision
):
    processes, settings = LAYOUTS[layout]
    words, config = OPTIMIZERS[optimizer]
    changes = {"clip_grad_norm": independent.CLIP, "z_loss": independent.Z_LOSS}
    tokens = independent.BATCH * independent.LENGTH
    rule = RepetitionFilter(
        max_period=independent.LONGEST_PERIOD, max_count=independent.MOST_REPEATS
    )
    run = make_run(
        tmp_path / "run",
        **inputs,
        data={"order": "olmo", "document_mask": True, "repetition_filter": rule},
        kv_heads=independent.KV_HEADS,
        precision=precision,
        optimizer=config.model_copy(update=changes),
        schedule=ScheduleConfig(
            warmup_tokens=independent.WARMUP_STEPS * tokens,
            phase=ConstantPhase(),
            anneal=Anneal(start_step=independent.ANNEAL_STEP),
        ),
        micro_batch_size=2,
        save_steps=(0, independent.STEPS),
        **settings,
    )
    directory = RunDirectory(tmp_path / "run")
    succeed(ranks(processes, "train", "run", str(directory.path)))

    start = {k: w.double() for k, w in read_weights(directory.checkpoint(0)).items()}
    expected = {name: weight.clone() for name, weight in start.items()}
    text = independent.read_text(inputs["train_prefix"], run.seed)
    steps = independent.train(expected, text, **words)
    assert any(step.counted < 1 for step in steps)
    assert any(step.grad_norm > independent.CLIP for step in steps)

    rows = [row for row in read_metrics(directory.metrics) if row["step"] > 0]
    fractions = [row.get("counted_fraction", 1.0) for row in rows]
    assert fractions == pytest.approx([step.counted for step in steps])
    loss = max(abs(row["loss"] - step.loss) for row, step in zip(rows, steps, strict=True))
    norm = max(
        abs(row["grad_norm"] / step.grad_norm - 1) for row, step in zip(rows, steps, strict=True)
    )
    weights = read_weights(directory.checkpoint(independent.STEPS))
    apart = moved = torch.zeros(())
    for name, weight in expected.items():
        apart = apart + (weights[name].double() - weight.detach()).square().sum()
        moved = moved + (weight.detach() - start[name]).square().sum()
    share = float((apart / moved).sqrt())
    print(f"{layout} | {optimizer} | {precision} | {loss:.1e} | {norm:.1e} | {share:.1e}")
    most_loss, most_norm, most_share = MOST[precision]
    assert loss < most_loss
    assert norm < most_norm
    assert share < most_share
