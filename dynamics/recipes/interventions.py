"""Interventions in the anneal at equal tokens: arms that leave one run at a constant rate."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dynamics.recipes import demo
from dynamics.recipes.olmo2 import TEXT, TEXT_30M
from dynamics.recipes.web import WEB_CURVATURE, WEB_QUANTIZATION
from quant_eval.settings import OutlierSettings
from study.definition import Study
from study.measurements.curvature import CurvatureSettings
from study.measurements.quantization import QuantizationSettings
from study.recipes.parts import (
    DRAWS,
    SMALL_CURVATURE,
    SMALL_TEXT,
    annealed,
    data_of,
    lean,
    recipe,
    spread,
    study,
)
from study.soups import SoupSettings
from study.text_kinds import Text
from train.model.config import ModelConfig
from train.model.presets import OLMO2_1B, OLMO2_30M, OLMO2_190M
from train.optimizers.adamw import AdamW
from train.run.config import RunConfig
from train.run.optimization import ConstantPhase, Ema, Lawa, ScheduleConfig
from train.run.perturbation import Noise, Perturbation, Qat, Sam
from train.run.saving import SavingConfig

SHARE = 20  # of the tokens, in percent, that an anneal with an intervention takes
FLOOR = 0.1
RHO = 0.05
STABLE = "stable"
INTERVALS = 40  # of the whole run: between evaluations, and between the weights of LAWA
DENSE = 3  # checkpoints of an anneal of the usual share, where the stable run has its own
SOURCES = (
    "QAT in the anneal: arXiv 2509.22935; straight-through estimator: arXiv 1308.3432",
    (
        "SAM late in pretraining: arXiv 2605.02105; its rho was not read, ours is the default of"
        f" arXiv 2010.01412, {RHO:g}, over the whole batch"
    ),
    "averages in place of the decay: arXiv 2507.17634; LAWA: arXiv 2209.14981",
    "shares of the anneal: arXiv 2605.25966, which has 33%",
    "outliers and the error of quantization: arXiv 2509.23500",
    "the error at 4 bits after convergence: arXiv 2604.15167",
    (
        "ours: the sizes, batches and peaks, one constant rate, linear anneals, the other shares,"
        " the floor, noise of the size of rounding, lengths of averages, and what is measured"
    ),
)


@dataclass(frozen=True)
class ArmsSize:
    """A size at which all arms are trained.

    Attributes:
        model: what is trained.
        text: what is trained and measured on.
        steps: of every arm, those before it leaves the stable run included.
        warmup: steps of it.
        optimizer: with the constant rate.
        group_size: of the grids that QAT and noise round to, which are measured, too.
        training: further fields of each RunConfig.
        measured: further fields of the Study.
        shares: of the tokens, in percent, that anneals take.
        qat_bits: widths of QAT.
    """

    model: ModelConfig
    text: Text
    steps: int
    warmup: int
    optimizer: AdamW
    group_size: int
    training: dict[str, Any]
    measured: dict[str, Any]
    shares: tuple[int, ...] = (10, SHARE, 33, 50)
    qat_bits: tuple[int, ...] = (3, 4)

    def start_of(self, share: int) -> int:
        """Return the step at which an anneal over this percentage of the tokens starts."""
        return round(self.steps * (1 - share / 100))

    def saves_of(self, share: int) -> tuple[int, ...]:
        """Return the checkpoints of such an anneal."""
        return spread(self.start_of(share), self.steps, DENSE if share == SHARE else 2)

    @property
    def lawa(self) -> Lawa:
        """The mean of five weights over a tenth of the run, the later half of the usual anneal."""
        return Lawa(interval_steps=self.steps // INTERVALS, window=5)

    @property
    def ema(self) -> Ema:
        """An average that forgets over a twentieth of the run."""
        return Ema(decay=0.98, interval_steps=max(1, self.steps // 1000))

    def grid(self, bits: int) -> str:
        """Return the rounding to nearest with so many bits."""
        return f"rtn-b{bits}-g{self.group_size}"


def arms(size: ArmsSize) -> list[RunConfig]:
    """Return the run at the constant rate, which is the control, and all anneals that leave it."""
    stable = _stable(size)
    lengths = [_anneal(stable, size, f"anneal{share}", share) for share in size.shares]
    return [stable, *lengths, *_interventions(stable, size)]


def _interventions(stable: RunConfig, size: ArmsSize) -> Iterator[RunConfig]:
    """Yield the anneals that differ from the usual one in more than their length."""
    perturbations: dict[str, Perturbation] = {
        **{f"qat{bits}": Qat(spec=size.grid(bits)) for bits in size.qat_bits},
        "noise3": Noise(spec=size.grid(3)),
        "sam": Sam(rho=RHO),
    }
    for name, perturbation in perturbations.items():
        yield _anneal(stable, size, f"anneal{SHARE}-{name}", perturbation=perturbation)
    yield _anneal(stable, size, f"anneal{SHARE}-floor{100 * FLOOR:g}", floor=FLOOR)


def _stable(size: ArmsSize) -> RunConfig:
    """Return the run at the constant rate to the end, saved where an anneal leaves or is saved."""
    starts = {size.start_of(share) for share in size.shares}
    tokens_per_step = size.training["batch_size"] * size.training["data"].sequence_length
    return RunConfig(
        name=STABLE,
        seed=6198,
        model=size.model,
        optimizer=size.optimizer,
        schedule=ScheduleConfig(warmup_tokens=size.warmup * tokens_per_step, phase=ConstantPhase()),
        averages=(size.lawa, size.ema),
        total_steps=size.steps,
        save_steps=tuple(sorted({*starts, *size.saves_of(SHARE)})),
        evaluate_every_steps=size.steps // INTERVALS,
        **size.training,
    )


def _anneal(
    stable: RunConfig, size: ArmsSize, name: str, share: int = SHARE, **settings: Any
) -> RunConfig:
    """Return an anneal over the last `share` percent; the usual one and those by QAT keep LAWA."""
    # What averages do to weights on a grid is asked of QAT, in comparison with the usual anneal.
    is_averaged = share == SHARE and isinstance(settings.get("perturbation"), Qat | None)
    return annealed(
        stable,
        name,
        start=size.start_of(share),
        save_steps=size.saves_of(share),
        averages=(size.lawa,) if is_averaged and "floor" not in settings else (),
        **settings,
    )


def interventions(size: ArmsSize, **settings: Any) -> Study:
    """Return the study of all arms at a size; `settings` are further ones of Study."""
    averaged_steps = (size.steps,)
    # those of the constant rate from where the usual anneal starts
    steps = (size.start_of(SHARE), *size.saves_of(SHARE))
    return study(
        lean(arms(size), averaged_steps),
        sources=SOURCES,
        text=size.text,
        averaged_steps=averaged_steps,
        soups=(SoupSettings(name="decay-linear", steps=steps, decay="linear"),),
        **(size.measured | settings),
    )


def _quantization(
    group_size: int, *, bits: tuple[int, ...] = (3, 4), **amounts: Any
) -> QuantizationSettings:
    """Return what is measured: the grids of QAT and noise, and GPTQ on that of 3 bits.

    The error is the loss that rounding adds. A KL divergence has the full-precision model as its
    reference, which QAT changes: it can rise where the quantized model becomes better.
    """
    specs = (*(f"rtn-b{width}-g{group_size}" for width in bits), f"gptq-b3-g{group_size}")
    return QuantizationSettings(measure="absolute_error", specs=specs, **amounts)


TINY = ArmsSize(
    model=demo.MODEL,
    text=demo.TEXT,
    steps=1000,
    warmup=32,
    optimizer=AdamW(peak_lr=1.2e-2, weight_decay=demo.WEIGHT_DECAY),
    group_size=32,
    training={
        "precision": "fp32",
        "data": data_of(demo.TEXT, sequence_length=128, held_out_sequences=64),
        "batch_size": 8,
        "micro_batch_size": 8,
    },
    measured={
        "ranks": 1,
        "sized_for": "cpu",
        "detailed": "first seed",
        "quantization": _quantization(
            32,
            bits=(2, 3, 4),
            calibration_sequences=32,
            calibration_seeds=DRAWS,
            eval_tokens=32_768,
            block_tokens=16_384,
        ),
        "curvature": CurvatureSettings(
            pairs=8, norm_pairs=2, companion_pairs=4, microbatch_sequences=2, fixed_sequences=4
        ),
        "outliers": OutlierSettings(eval_tokens=16_384),
    },
    # So small a model loses little at 3 bits.
    qat_bits=(2, 3, 4),
)
SMOKE = ArmsSize(
    model=demo.MODEL,
    text=SMALL_TEXT,
    steps=40,
    warmup=4,
    optimizer=TINY.optimizer,
    group_size=32,
    training={
        "precision": "fp32",
        "data": data_of(SMALL_TEXT, sequence_length=128, held_out_sequences=16),
        "batch_size": 16,
        "micro_batch_size": 8,
    },
    measured={
        "ranks": 2,
        "sized_for": "cpu",
        "detailed": "first seed",
        "quantization": _quantization(
            32,
            calibration_sequences=16,
            calibration_seeds=2,
            eval_tokens=12_288,  # 22 documents of SMALL_TEXT; 20 give an interval
            block_tokens=12_288,
        ),
        "curvature": SMALL_CURVATURE,
        "outliers": OutlierSettings(eval_tokens=12_288),
    },
    shares=(SHARE, 50),
    qat_bits=(3,),
)
# Tokens are those of the learning-rate ablation of the size up to the usual anneal, which takes a
# quarter of them.
OF_30M = ArmsSize(
    model=OLMO2_30M,
    text=TEXT_30M,
    steps=1_440,
    warmup=32,
    optimizer=AdamW(peak_lr=4e-3),
    group_size=128,
    training={
        "precision": "bf16",
        "data": data_of(TEXT_30M, sequence_length=2048, held_out_sequences=64),
        "batch_size": 64,
        "micro_batch_size": 8,
        "saving": SavingConfig(asynchronous=True, restart_every_steps=500),
    },
    measured={
        "ranks": 1,
        "sized_for": "cuda",
        "detailed": "first seed",
        "quantization": _quantization(
            128,
            calibration_sequences=128,
            calibration_seeds=DRAWS,
            eval_tokens=131_072,
            block_tokens=32_768,
        ),
        "curvature": WEB_CURVATURE.model_copy(
            update={"pairs": 8, "norm_pairs": 4, "companion_pairs": 4, "fixed_sequences": 4}
        ),
        "outliers": OutlierSettings(),
    },
)


def _of_web(
    model: ModelConfig, steps: int, warmup: int, peak_lr: float, **training: Any
) -> ArmsSize:
    """Return a size with the texts and amounts of the larger learning-rate ablations."""
    return ArmsSize(
        model=model,
        text=TEXT,
        steps=steps,
        warmup=warmup,
        optimizer=AdamW(peak_lr=peak_lr),
        group_size=128,
        training={
            "precision": "bf16",
            "data": data_of(TEXT, sequence_length=4096, held_out_sequences=256),
            "saving": SavingConfig(asynchronous=True, restart_every_steps=500),
            **training,
        },
        measured={
            "ranks": 8,
            "sized_for": "cuda",
            "quantization": _quantization(
                128,
                **WEB_QUANTIZATION.model_dump(exclude={"measure", "specs", "along", "methods"}),
            ),
            "curvature": WEB_CURVATURE.model_copy(update={"checkpointing": True, "pairs": 32}),
            "outliers": OutlierSettings(),
        },
    )


OF_190M = _of_web(OLMO2_190M, 14_400, 320, 2e-3, batch_size=256, micro_batch_size=16)
OF_1B = _of_web(OLMO2_1B, 36_000, 800, 4e-4, batch_size=512, micro_batch_size=4)


@recipe
def tiny_interventions(*, smoke: bool = False) -> Study:
    """Interventions in the anneal in small: QAT, noise, SAM, lengths, a floor, averages.

    Ten arms of 1M tokens leave one run at a constant rate, with three seeds: anneals over 10, 20,
    33 and 50% of the tokens, and over 20% with QAT at 2, 3 and 4 bits, with noise, with SAM, and to
    a tenth of the rate. Averages of the constant rate end there, too.
    """
    return interventions(SMOKE) if smoke else interventions(TINY, seeds=(1, 2, 3))


@recipe
def olmo2_30m_interventions(*, smoke: bool = False) -> Study:
    """Interventions in the anneal of OLMo2-30M: 189M tokens an arm, three seeds, below two hours.

    The peak is within those of `olmo2_30m_lr`; so are batch, context and text.
    """
    return interventions(SMOKE) if smoke else interventions(OF_30M, seeds=(1, 2, 3))


@recipe
def olmo2_190m_interventions(*, smoke: bool = False) -> Study:
    """Interventions in the anneal of OLMo2-190M: 15B tokens an arm, one seed."""
    return interventions(SMOKE if smoke else OF_190M)


@recipe
def olmo2_1b_interventions(*, smoke: bool = False) -> Study:
    """Interventions in the anneal of OLMo2-1B: 75B tokens an arm, one seed.

    Batch and rate are those of the released model, as the lowest of `olmo2_1b_lr` are.
    """
    if smoke:
        return interventions(SMOKE)
    # Hessian products in fp32 do not fit one H100.
    in_bf16 = OF_1B.measured["curvature"].model_copy(update={"dtype": "bf16"})
    return interventions(OF_1B, curvature=in_bf16)
