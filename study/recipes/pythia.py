"""The controlled experiments of arXiv 2510.06213 with Pythia on FineWeb-Edu."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from study.axes import amount_name
from study.definition import Study
from study.design import with_controls
from study.recipes.parts import (
    SMALL_CURVATURE,
    SMALL_QUANTIZATION,
    SMALL_TEXT,
    WEB_CURVATURE,
    WEB_QUANTIZATION,
    WEB_SPECS,
    annealed,
    data_of,
    lean,
    learning_rate_name,
    recipe,
    study,
    sweep,
    web_text,
)
from study.text.kinds import TokenFile
from train.model.config import ModelConfig
from train.model.presets import PYTHIA_70M, PYTHIA_160M, pythia
from train.run.config import RunConfig
from train.run.optimization import (
    Anneal,
    ConstantPhase,
    CosinePhase,
    Lawa,
    OptimizerConfig,
    ScheduleConfig,
)
from train.run.saving import SavingConfig

SOURCES = (
    (
        "training: arXiv 2510.06213, sections 4 and 5, appendix C; plainLM at a625d7d, with its"
        " defaults"
    ),
    "budgets: aldakata/TrainingDynamicsQuantizationRobustness at b2f3b49, landscape.py",
    "quantization and curvature: arXiv 2510.06213, section 6.2, appendices A, D, G",
)
PEAK = 3e-3  # where no other is stated
COOLDOWN = 10  # of a budget, one part is the cooldown
COSINE_FLOOR = 0.1  # as the released Pythia's; the paper states none
# 524,288 tokens a step, 99.6e9 tokens in all, warm-up 1%, cooldown 10% (the paper's "1900 steps" is
# a slip for 19,000). On 8 H100 with 80 GB, 'python -m train plan' has a rank at 40 GB with 160M
# parameters and at 31 GB with 70M.
END, SMALL_END = 190_000, 80
BUDGETS, SMALL_BUDGETS = (20_000, 54_000, 88_000, 122_000, 156_000, END), (40, SMALL_END)
DOUBLINGS = (23_750, 47_500, 95_000, END)  # of the budget; the paper's are not published
TEXT = web_text(
    "EleutherAI/gpt-neox-20b",
    TokenFile(name="fineweb-edu-100bt", dataset="HuggingFaceFW/fineweb-edu", config="sample-100BT"),
)
QUANTIZATION = WEB_QUANTIZATION.model_copy(update={"by_block": WEB_SPECS, "dtype": "fp32"})
# The paper: 100 sequences of 2,048 tokens, of FineWeb-Edu.
CURVATURE = WEB_CURVATURE.model_copy(update={"pairs": 100, "fixed_sequences": 32, "slice_grid": 31})
SMALL_MODEL = pythia(hidden_size=64, layers=2, heads=4).model_copy(
    update={"vocab_size": SMALL_TEXT.vocab_size}
)
# plainLM takes its data in order.
SIZES: dict[str, Any] = {
    "precision": "bf16",
    "data": data_of(TEXT, sequence_length=2048, held_out_sequences=256, order="sequential"),
    "batch_size": 256,
    "micro_batch_size": 16,
    "evaluate_every_steps": 500,
    "saving": SavingConfig(asynchronous=True, restart_every_steps=2_000),
}
SMALL_SIZES: dict[str, Any] = {
    "precision": "fp32",
    "data": data_of(SMALL_TEXT, sequence_length=128, held_out_sequences=16, order="sequential"),
    "batch_size": 16,
    "micro_batch_size": 8,
    "evaluate_every_steps": 4,
}


def run(
    name: str,
    *,
    saves: tuple[int, ...],
    smoke: bool,
    phase: ConstantPhase | CosinePhase | None = None,
    model: ModelConfig = PYTHIA_160M,
    peak_lr: float = PEAK,
    weight_decay: float = 0.1,
    decay: Literal["adamw", "adamc"] = "adamw",
    anneal: Anneal | None = None,
    averages: tuple[Lawa, ...] = (),
) -> RunConfig:
    """Return a run as plainLM trains, at a constant rate unless a phase is given.

    No decay of biases and norms, no z-loss, and the seed 100 of its sample.
    """
    return RunConfig(
        name=name,
        seed=100,
        engine="deepspeed",
        model=SMALL_MODEL if smoke else model,
        optimizer=OptimizerConfig(
            peak_lr=peak_lr,
            weight_decay=weight_decay,
            decay=decay,
            undecayed=("bias", "norm"),
            z_loss=0.0,
        ),
        schedule=ScheduleConfig(
            warmup_tokens=tokens_of(4 if smoke else 1_900, smoke),
            phase=phase or ConstantPhase(),
            anneal=anneal,
        ),
        averages=averages,
        total_steps=saves[-1],
        save_steps=saves,
        **(SMALL_SIZES if smoke else SIZES),
    )


def tokens_of(steps: int, smoke: bool) -> int:
    """Return the tokens of so many steps."""
    return steps * (16 * 128 if smoke else 256 * 2048)


def cooldown_saves(end: int, smoke: bool) -> tuple[int, ...]:
    """Return the checkpoints of a cooldown to `end`, the first half an interval after its start.

    At 190,000 they are 2,000 apart: the paper's landscape is spanned by 188,000 and 190,000
    (landscape.py).
    """
    count = 2 if smoke else 10
    every = 2 * (end // COOLDOWN) // (2 * count - 1)
    return tuple(range(end - (count - 1) * every, end + 1, every))


def stable_saves(end: int, smoke: bool) -> tuple[int, ...]:
    """Return the checkpoints of a stable phase, the last at its `end`."""
    every = 40 if smoke else 10_000
    return (*range(every, end, every), end)


def whole(
    name: str, *, smoke: bool, schedule: str = "wsd", end: int | None = None, **settings: Any
) -> RunConfig:
    """Return a run that cools down to zero over its last tenth, or a cosine to a tenth of its peak.

    Both have the checkpoints of a cooldown in that tenth.
    """
    end = end or (SMALL_END if smoke else END)
    start = end - end // COOLDOWN
    if schedule == "wsd":
        settings["anneal"] = Anneal(start_step=start)
    else:
        settings["phase"] = CosinePhase(horizon_tokens=tokens_of(end, smoke), floor=COSINE_FLOOR)
    saves = (*stable_saves(start, smoke), *cooldown_saves(end, smoke))
    return run(name, saves=saves, smoke=smoke, **settings)


def cooldowns(
    budgets: tuple[int, ...], *, smoke: bool, averages: tuple[Lawa, ...] = (), **settings: Any
) -> list[RunConfig]:
    """Return a run at the peak, and from it a linear cooldown over the last tenth of every budget.

    The run trains on to the last budget and has a checkpoint at every one: the control of the
    cooldown that ends there, and the place of its averages.
    """
    starts = [end - end // COOLDOWN for end in budgets]
    saves = {*stable_saves(budgets[-1], smoke), *starts, *budgets}
    stable = run("stable", saves=tuple(sorted(saves)), smoke=smoke, averages=averages, **settings)
    runs = [stable]
    for start, end in zip(starts, budgets, strict=True):
        name = f"wsd-{amount_name(tokens_of(end, smoke))}"
        cooled = annealed(stable, name, start=start, save_steps=cooldown_saves(end, smoke))
        runs.append(cooled.model_copy(update={"averages": ()}))
    return runs


def measured(runs: Iterable[RunConfig], smoke: bool, **settings: Any) -> Study:
    """Return the study of runs with what all these recipes measure."""
    return study(
        lean(with_controls(list(runs)), settings.get("averaged_steps", ())),
        sources=SOURCES,
        ranks=2 if smoke else 8,
        sized_for="cpu" if smoke else "cuda",
        text=SMALL_TEXT if smoke else TEXT,
        quantization=SMALL_QUANTIZATION if smoke else QUANTIZATION,
        curvature=SMALL_CURVATURE if smoke else CURVATURE,
        **settings,
    )


@recipe
def pythia_160m_lr(*, smoke: bool = False) -> Study:
    """Pythia-160M under WSD at four peak learning rates, 100B tokens each.

    arXiv 2510.06213, section 5.1.
    """
    peaks = (3e-3, 1e-2) if smoke else (3e-4, 1e-3, 3e-3, 1e-2)
    return measured(sweep(partial(whole, smoke=smoke), peak_lr=peaks), smoke)


@recipe
def pythia_160m_schedules(*, smoke: bool = False) -> Study:
    """Pythia-160M under cosine and WSD at the same peak learning rates, 100B tokens each.

    arXiv 2510.06213, section 4.2; the cosine goes to 10%. The peaks and that floor are this
    project's choice.
    """
    peaks = (3e-3, 1e-2) if smoke else (1e-3, 3e-3)
    return measured(
        [
            whole(f"{kind}-{learning_rate_name(peak)}", smoke=smoke, schedule=kind, peak_lr=peak)
            for peak in peaks
            for kind in ("cosine", "wsd")
        ],
        smoke,
    )


@recipe
def pythia_160m_weight_decay(*, smoke: bool = False) -> Study:
    """Pythia-160M under WSD at five weight decays and one peak learning rate, 100B tokens each.

    arXiv 2510.06213, section 5.3, figure 19. Each update shrinks a weight by rate x weight decay.
    The paper sweeps that product, as `decoupled` in Schaipp 2024: at the peak of 3e-3 it goes from
    3e-5 to 3e-3 here, where the default of 0.1 gives 3e-4. The paper's values are not
    published, these are this project's.
    """
    decays = (0.1, 1.0) if smoke else (0.01, 0.03, 0.1, 0.3, 1.0)
    return measured(sweep(partial(whole, smoke=smoke), weight_decay=decays), smoke)


@recipe
def pythia_160m_decay(*, smoke: bool = False) -> Study:
    """Pythia-160M under WSD, decayed as in AdamW and as in AdamC, 100B tokens each.

    arXiv 2510.06213, figure 20. In the anneal AdamC (arXiv 2506.02285) decays the linear layers by
    the square of the learning rate. Peak and weight decay are those of the other recipes.
    """
    return measured(sweep(partial(whole, smoke=smoke), decay=("adamw", "adamc")), smoke)


@recipe
def pythia_160m_budgets(*, smoke: bool = False) -> Study:
    """Pythia-160M: one run at a constant rate, cooldowns at six budgets from 10B to 100B tokens.

    arXiv 2510.06213, section 4.1. The ends are the paper's; that every cooldown is the last tenth
    of its budget follows from the longest one.
    """
    return measured(cooldowns(SMALL_BUDGETS if smoke else BUDGETS, smoke=smoke), smoke)


@recipe
def pythia_160m_lawa(*, smoke: bool = False) -> Study:
    """Pythia-160M: averages of weights along a constant rate, and the cooldowns that end there.

    arXiv 2510.06213, section 5.2, appendix C: LAWA over five weights, 500 steps apart.
    """
    budgets = SMALL_BUDGETS if smoke else BUDGETS
    averages = (Lawa(interval_steps=4 if smoke else 500, window=5),)
    runs = cooldowns(budgets, smoke=smoke, averages=averages)
    return measured(runs, smoke, averaged_steps=budgets)


@recipe
def pythia_70m_kumar(*, smoke: bool = False) -> Study:
    """Pythia-70M at four budgets, each by a cosine of its own and by a cooldown of one run.

    The effect of data volume on quantization (arXiv 2411.04330) under both, as in figure 5 of
    arXiv 2510.06213. A cosine knows its end and takes a run of its own per budget; WSD takes one
    run and a cooldown per budget. Budgets that double from 12.5e9 to 99.6e9 tokens and the peak of
    3e-3 are this project's choice.
    """
    budgets = SMALL_BUDGETS if smoke else DOUBLINGS
    sizes: dict[str, Any] = {"smoke": smoke, "model": PYTHIA_70M}
    cosines = [
        whole(f"cosine-{amount_name(tokens_of(end, smoke))}", schedule="cosine", end=end, **sizes)
        for end in budgets
    ]
    return measured([*cosines, *cooldowns(budgets, **sizes)], smoke)
