"""The controlled experiments of arXiv 2510.06213 with Pythia on FineWeb-Edu."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from dynamics.recipes import captions
from dynamics.recipes.web import (
    WEB_CURVATURE,
    WEB_QUANTIZATION,
    WEB_SLICE,
    WEB_SPECS,
    WEB_STEP,
    web_text,
)
from study.axes import amount_name
from study.definition import Study
from study.design import with_controls
from study.recipes.parts import (
    SMALL_CURVATURE,
    SMALL_QUANTIZATION,
    SMALL_TEXT,
    annealed,
    data_of,
    lean,
    learning_rate_name,
    recipe,
    study,
    sweep,
)
from study.text_kinds import TokenFile
from train.model.config import ModelConfig
from train.model.presets import PYTHIA_70M, PYTHIA_160M, pythia
from train.optimizers.adamw import AdamW
from train.run.config import RunConfig
from train.run.optimization import (
    Anneal,
    ConstantPhase,
    CosinePhase,
    Lawa,
    ScheduleConfig,
)
from train.run.saving import SavingConfig

SOURCES = (
    (
        "training: arXiv 2510.06213, sections 4 and 5, appendix C; plainLM at a625d7d, with its"
        " defaults"
    ),
    (
        "schedules: aldakata/TrainingDynamicsQuantizationRobustness at b2f3b49, landscape.py and"
        " the README's figures of budgets, learning rates and LAWA"
    ),
    "quantization and curvature: arXiv 2510.06213, section 6.2, appendices A, D, G",
)
PEAK = 3e-3  # where no other is stated
COSINE_FLOOR = 0.1  # this project's choice; the paper states none
# 524,288 tokens a step, 99.6e9 tokens in all, warm-up 1%. On 8 H100 with 80 GB, 'python -m train
# plan' has a rank at 19 GB with 160M parameters and at 9 GB with 70M.
END, SMALL_END = 190_000, 80
# Checkpoints of a stable phase and of a cooldown. The paper's are 2,000 steps apart in both: its
# landscape is spanned by 188,000 and 190,000.
STABLE_EVERY, COOLDOWN_EVERY, SMALL_EVERY = 10_000, 2_000, 40
# The rates in the figure of the sweep fall from 80e9 to 100e9 tokens, over one part in five.
COOLDOWN_SHARE = 5
APPENDIX = (
    'appendix C of the paper has "1900 steps (10% of total)", which none of its figures shows'
)
TEXT = web_text(
    "EleutherAI/gpt-neox-20b",
    TokenFile(name="fineweb-edu-100bt", dataset="HuggingFaceFW/fineweb-edu", config="sample-100BT"),
)
QUANTIZATION = WEB_QUANTIZATION.model_copy(update={"by_block": WEB_SPECS, "dtype": "fp32"})
# The paper has 100 sequences of 2,048 tokens, and a plane of 1,000 points. Its sequences are of
# FineWeb-Edu; here, as the batch of the eigenvalue, they are of the text that losses are over.
CURVATURE = WEB_CURVATURE.model_copy(update={"pairs": 100, "fixed_sequences": 32})
MEASURED: dict[str, Any] = {
    "quantization": QUANTIZATION,
    "curvature": CURVATURE,
    "step": WEB_STEP,
    "slice": WEB_SLICE.model_copy(update={"grid": 31}),
}
SMALL_MEASURED: dict[str, Any] = {"quantization": SMALL_QUANTIZATION, "curvature": SMALL_CURVATURE}
SMALL_MODEL = pythia(hidden_size=64, layers=2, heads=4, intermediate_size=256).model_copy(
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
        optimizer=AdamW(
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


def cooldown_saves(start: int, end: int, smoke: bool) -> tuple[int, ...]:
    """Return the checkpoints of a cooldown between these steps, the last at its end."""
    # Two checkpoints at least: slices go through the last two.
    every = (end - start) // 2 if smoke else COOLDOWN_EVERY
    return tuple(range(start + every, end + 1, every))


def stable_saves(end: int, smoke: bool, every: int = STABLE_EVERY) -> tuple[int, ...]:
    """Return the checkpoints of a stable phase, the last at its `end`."""
    every = SMALL_EVERY if smoke else every
    return (*range(every, end, every), end)


def whole(
    name: str,
    *,
    smoke: bool,
    schedule: str = "wsd",
    end: int | None = None,
    cooldown: int | None = None,
    **settings: Any,
) -> RunConfig:
    """Return a run that cools down to zero over its last fifth, or a cosine to a tenth of its peak.

    With `cooldown` it is so many steps. Both have the checkpoints of a cooldown there.
    """
    end = end or (SMALL_END if smoke else END)
    # A cosine has no cooldown, but checkpoints at the same places, to be compared with.
    start = end - (cooldown or end // COOLDOWN_SHARE)
    if schedule == "wsd":
        settings["anneal"] = Anneal(start_step=start)
    else:
        settings["phase"] = CosinePhase(horizon_tokens=tokens_of(end, smoke), floor=COSINE_FLOOR)
    saves = (*stable_saves(start, smoke), *cooldown_saves(start, end, smoke))
    return run(name, saves=saves, smoke=smoke, **settings)


def measured(runs: Iterable[RunConfig], smoke: bool, *followed: str, **settings: Any) -> Study:
    """Return the study of runs with what all these recipes measure.

    `followed` says what is this project's choice, and which of several versions is followed.
    """
    return study(
        lean(with_controls(list(runs)), settings.get("averaged_steps", ())),
        sources=(*SOURCES, *followed),
        ranks=2 if smoke else 8,
        sized_for="cpu" if smoke else "cuda",
        text=SMALL_TEXT if smoke else TEXT,
        **(SMALL_MEASURED if smoke else MEASURED),
        **settings,
    )


@recipe
def pythia_160m_lr(*, smoke: bool = False) -> Study:
    """Pythia-160M under WSD at four peak learning rates, 100B tokens each.

    arXiv 2510.06213, section 5.1. The rates fall over the last fifth, as its figure has them.
    """
    peaks = (3e-3, 1e-2) if smoke else (3e-4, 1e-3, 3e-3, 1e-2)
    return measured(
        sweep(partial(whole, smoke=smoke), peak_lr=peaks),
        smoke,
        f"cooldown: from 80e9 to 100e9 tokens, as in the authors' figure of the sweep; {APPENDIX}",
        captions=captions.SWEEP,
    )


@recipe
def pythia_160m_schedules(*, smoke: bool = False) -> Study:
    """Pythia-160M under cosine and WSD at the same peak learning rates, 100B tokens each.

    arXiv 2510.06213, section 4.2; the cosine goes to 10%. The peaks, that floor, and the cooldown
    over the last fifth, as in the learning-rate sweep, are this project's choice.
    """
    peaks = (3e-3, 1e-2) if smoke else (1e-3, 3e-3)
    return measured(
        [
            whole(f"{kind}-{learning_rate_name(peak)}", smoke=smoke, schedule=kind, peak_lr=peak)
            for peak in peaks
            for kind in ("cosine", "wsd")
        ],
        smoke,
        "ours: the peaks, the cosine's floor, the cooldown as in the learning-rate sweep;"
        f" {APPENDIX}",
        captions=captions.SCHEDULES,
    )


@recipe
def pythia_160m_weight_decay(*, smoke: bool = False) -> Study:
    """Pythia-160M under WSD at five weight decays and one peak learning rate, 100B tokens each.

    arXiv 2510.06213, section 5.3, figure 19. Each update shrinks a weight by rate x weight decay.
    The paper sweeps that product, as `decoupled` in Schaipp 2024: at the peak of 3e-3 it goes from
    3e-5 to 3e-3 here, where the default of 0.1 gives 3e-4. The paper's values are not
    published, these are this project's. The cooldown is that of the learning-rate sweep.
    """
    decays = (0.1, 1.0) if smoke else (0.01, 0.03, 0.1, 0.3, 1.0)
    return measured(
        sweep(partial(whole, smoke=smoke), weight_decay=decays),
        smoke,
        "weight decay: the paper's is decoupled (Schaipp 2024), it sweeps the product of the"
        f" learning rate and the weight decay: {PEAK:g} x the values here",
        f"ours: the values but for the default 0.1, the cooldown as in the learning-rate sweep;"
        f" {APPENDIX}",
        captions=captions.WEIGHT_DECAYS,
    )


@recipe
def pythia_160m_decay(*, smoke: bool = False) -> Study:
    """Pythia-160M under WSD, decayed as in AdamW and as in AdamC, 100B tokens each.

    arXiv 2510.06213, figure 20. In the anneal AdamC (arXiv 2506.02285) decays the linear layers by
    the square of the learning rate. Peak, weight decay and cooldown are those of the learning-rate
    sweep.
    """
    return measured(
        sweep(partial(whole, smoke=smoke), decay=("adamw", "adamc")),
        smoke,
        "AdamC: arXiv 2506.02285",
        f"ours: the peak, the weight decay, the cooldown as in the learning-rate sweep; {APPENDIX}",
        captions=captions.DECAY_RULES,
    )


# landscape.py lists checkpoints from 4,000 to 20,000, from 38,000 to 54,000 and so on. The rates in
# the figure of budgets fall from 1.05, 18.9, 36.7, 54.5, 72.4 and 90.2e9 tokens on: every cooldown
# takes 18,000 steps.
BUDGETS, COOLDOWN = (20_000, 54_000, 88_000, 122_000, 156_000, END), 18_000
DOUBLINGS = (23_750, 47_500, 95_000, END)  # of the budget; the paper's are not published
# The cooldowns in the figure of LAWA end at 41, 62, 83 and 100e9 tokens. Their first checkpoints
# are at 22, 43, 64 and 81e9: they take as many steps as those of the learning-rate sweep.
LAWA_ENDS, LAWA_COOLDOWN = (78_000, 118_000, 158_000, END), END // COOLDOWN_SHARE
# The curve of averages begins at 8.4e9 tokens and has some thirty points.
AVERAGED_FROM, AVERAGED_EVERY = 16_000, 8_000
SMALL_ENDS, SMALL_COOLDOWN = (SMALL_END // 2, SMALL_END), 8
STABLE = "stable"  # the run that cooldowns leave
CONSTANT = {STABLE: "constant rate"}  # its label


def budget_name(schedule: str, end: int, smoke: bool) -> str:
    """Return the name of a run that ends at a budget: wsd-10.5b."""
    return f"{schedule}-{amount_name(tokens_of(end, smoke))}"


def cooldowns(
    ends: tuple[int, ...],
    length: int,
    *,
    smoke: bool,
    every: int = STABLE_EVERY,
    averages: tuple[Lawa, ...] = (),
    **settings: Any,
) -> list[RunConfig]:
    """Return a run at the peak, and from it a linear cooldown of `length` steps to each of `ends`.

    The run trains on to the last of them and has a checkpoint at every one, the control of the
    cooldown that ends there. The others are `every` so many steps. It keeps `averages`.
    """
    starts = [end - length for end in ends]
    # Starts, from which cooldowns branch, and ends, at which they are compared with controls.
    saves = {*stable_saves(ends[-1], smoke, every), *starts, *ends}
    stable = run(STABLE, saves=tuple(sorted(saves)), smoke=smoke, averages=averages, **settings)
    runs = [stable]
    for start, end in zip(starts, ends, strict=True):
        save_steps = cooldown_saves(start, end, smoke)
        name = budget_name("wsd", end, smoke)
        cooled = annealed(stable, name, start=start, save_steps=save_steps)
        # Averages are of the constant rate alone, so cooldowns keep none.
        runs.append(cooled.model_copy(update={"averages": ()}))
    return runs


@recipe
def pythia_160m_budgets(*, smoke: bool = False) -> Study:
    """Pythia-160M: one run at a constant rate, cooldowns at six budgets from 10B to 100B tokens.

    arXiv 2510.06213, section 4.1. Every cooldown takes 18,000 steps, so that budgets alone differ.
    Ends and starts are those of landscape.py; the talk of the paper has other budgets.
    """
    ends, length = (SMALL_ENDS, SMALL_COOLDOWN) if smoke else (BUDGETS, COOLDOWN)
    return measured(
        cooldowns(ends, length, smoke=smoke),
        smoke,
        "budgets: the ends in landscape.py; the paper rounds them to 12, 28, 46, 64, 82 and 100e9"
        " tokens, and its talk has 16, 33, 49, 65, 82 and 100e9",
        f"cooldowns: 18,000 steps, as in landscape.py and the authors' figure; {APPENDIX}",
        captions=captions.BUDGETS,
        labels=CONSTANT,
    )


@recipe
def pythia_160m_lawa(*, smoke: bool = False) -> Study:
    """Pythia-160M: averages of weights along a constant rate, and four cooldowns of 20B tokens.

    arXiv 2510.06213, section 5.2, appendix C: LAWA over five weights, 500 steps apart. Its figure
    has averages from 8.4e9 tokens on, and cooldowns to 41, 62, 83 and 100e9 tokens, which are not
    those of the budgets. Checkpoints 8,000 steps apart are this project's choice.
    """
    ends, length = (SMALL_ENDS, SMALL_COOLDOWN) if smoke else (LAWA_ENDS, LAWA_COOLDOWN)
    averages = (Lawa(interval_steps=4 if smoke else 500, window=5),)
    runs = cooldowns(ends, length, smoke=smoke, every=AVERAGED_EVERY, averages=averages)

    first = SMALL_EVERY if smoke else AVERAGED_FROM
    # Only checkpoints from which on the figure of the paper has averages.
    averaged = tuple(step for step in runs[0].save_steps if step >= first)
    return measured(
        runs,
        smoke,
        "LAWA: five weights 500 steps apart (appendix C)",
        "cooldowns: of 20e9 tokens to 41, 62, 83 and 100e9, as in the authors' figure of LAWA;"
        f" {APPENDIX}",
        "ours: checkpoints, and so averages, 8,000 steps apart",
        averaged_steps=averaged,
        captions=captions.LAWA,
        labels=CONSTANT,
    )


@recipe
def pythia_70m_kumar(*, smoke: bool = False) -> Study:
    """Pythia-70M at four budgets, each by a cosine of its own and by a cooldown of one run.

    The effect of data volume on quantization (arXiv 2411.04330) under both, as in figure 5 of
    arXiv 2510.06213. A cosine knows its end and takes a run of its own per budget; WSD takes one
    run and a cooldown per budget. Budgets that double from 12.5e9 to 99.6e9 tokens and the peak of
    3e-3 are this project's choice. So are the cooldowns, of 18,000 steps each as in
    `pythia_160m_budgets`: a share of the budget would vary the length of the anneal with it.
    """
    ends, length = (SMALL_ENDS, SMALL_COOLDOWN) if smoke else (DOUBLINGS, COOLDOWN)
    sizes: dict[str, Any] = {"smoke": smoke, "model": PYTHIA_70M}
    cosines = [
        whole(
            budget_name("cosine", end, smoke), schedule="cosine", end=end, cooldown=length, **sizes
        )
        for end in ends
    ]
    return measured(
        [*cosines, *cooldowns(ends, length, **sizes)],
        smoke,
        "ours: the budgets, the peak, the cosine's floor, cooldowns of 18,000 steps as in the"
        " paper's study of budgets",
        captions=captions.KUMAR,
        labels=CONSTANT,
    )
