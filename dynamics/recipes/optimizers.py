"""Optimizers compared at equal tokens, each at several peak learning rates of its own."""

from functools import partial
from typing import Any

from dynamics.recipes.olmo2 import TEXT_30M
from dynamics.recipes.web import WEB_SPECS
from study.definition import Study
from study.design import with_controls
from study.measurements.quantization import QuantizationSettings
from study.recipes.parts import (
    DRAWS,
    SMALL_QUANTIZATION,
    SMALL_TEXT,
    data_of,
    lean,
    recipe,
    spread,
    study,
    sweep,
)
from train.model.presets import OLMO2_30M, olmo2
from train.optimizers import AnyOptimizer
from train.optimizers.adamw import AdamW
from train.optimizers.lion import Lion
from train.optimizers.muon import Muon
from train.optimizers.soap import Soap
from train.run.config import RunConfig
from train.run.optimization import Anneal, ConstantPhase, ScheduleConfig
from train.run.saving import SavingConfig

SOURCES = (
    "the question: arXiv 2509.23500, which has models of 50M to 1.5B parameters",
    (
        "peaks in the middle, and Lion's weight decay and beta2: the sweeps of arXiv 2509.02046 at"
        " 130M parameters and 20 tokens for each, marin-community/marin at 122c501,"
        " experiments/optimizer_sweep/Analysis/PhaseI/tex"
    ),
    (
        "Muon's peak: 0.016 there has updates of the size that 0.0035 has here, for there an"
        " orthogonal matrix of width 512 is not multiplied by 0.2 sqrt(512)"
    ),
    (
        "SOAP's peak there: 0.016 with 20 tokens for each parameter, 0.008 with 80; they differ by"
        " 0.008 nats"
    ),
    "ours: factors of two around these peaks, a warm-up over a tenth, an anneal over a quarter",
)
# At the peak in the middle.
OPTIMIZERS: dict[str, AnyOptimizer] = {
    optimizer.matrices: optimizer
    for optimizer in (
        AdamW(peak_lr=8e-3),
        Muon(peak_lr=4e-3),
        Soap(peak_lr=8e-3),
        # Nearly as much decay in a step, rate x weight decay, as AdamW has at its peak.
        Lion(peak_lr=1e-3, beta2=0.95, weight_decay=0.7),
    )
}
# 176M tokens, as a run of olmo2-30m-lr with its anneal has.
FULL: dict[str, Any] = {
    "precision": "bf16",
    "model": OLMO2_30M,
    "data": data_of(TEXT_30M, sequence_length=2048, held_out_sequences=64),
    "batch_size": 64,
    "total_steps": 1_344,
    "saving": SavingConfig(asynchronous=True, restart_every_steps=500),
}
SMOKE: dict[str, Any] = {
    "precision": "fp32",
    "model": olmo2(hidden_size=64, layers=2, heads=4, intermediate_size=192).model_copy(
        update={"vocab_size": SMALL_TEXT.vocab_size}
    ),
    "data": data_of(SMALL_TEXT, sequence_length=128, held_out_sequences=16),
    "batch_size": 16,
    "total_steps": 48,
}


def run(name: str, matrices: str, peak_lr: float, *, size: dict[str, Any]) -> RunConfig:
    """Return a run with an optimizer of hidden matrices: a warm-up, a constant rate, an anneal."""
    steps = size["total_steps"]
    start = 3 * steps // 4
    tokens_per_step = size["batch_size"] * size["data"].sequence_length
    return RunConfig(
        name=name,
        seed=6198,
        optimizer=OPTIMIZERS[matrices].model_copy(update={"peak_lr": peak_lr}),
        schedule=ScheduleConfig(
            warmup_tokens=steps // 10 * tokens_per_step,
            phase=ConstantPhase(),
            anneal=Anneal(start_step=start),
        ),
        micro_batch_size=8,
        # The control leaves where the anneal starts.
        save_steps=(start, *spread(start, steps, 2)),
        evaluate_every_steps=steps // 12,
        **size,
    )


@recipe
def olmo2_30m_optimizers(*, smoke: bool = False) -> Study:
    """AdamW, Muon, SOAP and Lion with OLMo2-30M at equal tokens, each at three peak learning rates.

    So each is compared at its best of three, by the full-precision loss at the end. A run trains on
    176M tokens and anneals over the last quarter; its control does not.
    """
    quantization = QuantizationSettings(
        specs=WEB_SPECS,
        methods=("rtn-b3-g128", "rtn-b4-g128", "awq-b3-g128"),
        calibration_sequences=128,
        calibration_seeds=DRAWS,
        eval_tokens=131_072,
        block_tokens=32_768,
    )
    factors = (1,) if smoke else (0.5, 1, 2)
    runs = [
        trained
        for matrices, optimizer in OPTIMIZERS.items()
        for trained in sweep(
            partial(run, size=SMOKE if smoke else FULL),
            matrices=(matrices,),
            peak_lr=[factor * optimizer.peak_lr for factor in factors],
        )
    ]
    return study(
        lean(with_controls(runs)),
        text=SMALL_TEXT if smoke else TEXT_30M,
        sources=SOURCES,
        ranks=1,
        sized_for="cpu" if smoke else "cuda",
        quantization=SMALL_QUANTIZATION if smoke else quantization,
    )
