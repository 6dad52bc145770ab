"""The controlled experiments of arXiv 2510.06213 with Pythia on FineWeb-Edu."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from dynamics.recipes import captions
from dynamics.recipes.web import (
    WEB_CRITICAL,
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
from study.planes import NamedPlane
from study.recipes.parts import (
    SMALL_CRITICAL,
    SMALL_CURVATURE,
    SMALL_PLANE,
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
from study.text_kinds import Text, TokenFile
from train.data.config import DataConfig
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
COSINE_FLOOR = 0.1  # this project's choice; the paper states none
# The rates in the figure of the sweep fall from 80e9 to 100e9 tokens, over one part in five.
COOLDOWN_SHARE = 5
APPENDIX = (
    'appendix C of the paper has "1900 steps (10% of total)", which none of its figures shows'
)
STABLE = "stable"  # the run that cooldowns leave
CONSTANT = {STABLE: "constant rate"}  # its label


@dataclass(frozen=True)
class Size:
    """A size at which the experiments of the paper are run: models, text, steps and settings.

    Attributes:
        model: the paper's Pythia-160M, or what stands for it.
        smaller_model: likewise of Pythia-70M.
        text: what is trained and measured on.
        training: further fields of each RunConfig.
        measured: further fields of each Study.
        end: steps of the longest run.
        warmup: steps of each.
        stable_every: steps between checkpoints at a constant rate.
        cooldown_every: the same in a cooldown; None: two of each.
        peak: learning rate where no other is stated, among `peaks`.
        weight_decay: where no other is stated, among `decays`.
        peaks: of the sweep.
        cosine_peaks: at which cosine and WSD are compared.
        decays: of the sweep of weight decays.
        budgets: steps at which the cooldowns of the budgets end.
        doublings: likewise of the study of data volume.
        cooldown: steps of each of these.
        lawa_ends: steps at which cooldowns beside LAWA end.
        lawa_cooldown: steps of each of these.
        lawa_every: steps between the weights that LAWA averages.
        averaged_from: step of the first average that is measured.
        averaged_every: steps between checkpoints of the run whose averages are measured.
    """

    model: ModelConfig
    smaller_model: ModelConfig
    text: Text
    training: dict[str, Any]
    measured: dict[str, Any]
    end: int
    warmup: int
    stable_every: int
    cooldown_every: int | None
    peaks: tuple[float, ...]
    cosine_peaks: tuple[float, ...]
    decays: tuple[float, ...]
    budgets: tuple[int, ...]
    doublings: tuple[int, ...]
    cooldown: int
    lawa_ends: tuple[int, ...]
    lawa_cooldown: int
    lawa_every: int
    averaged_from: int
    averaged_every: int
    peak: float = 3e-3
    weight_decay: float = 0.1

    def tokens_of(self, steps: int) -> int:
        """Return the tokens of so many steps."""
        data: DataConfig = self.training["data"]
        batch_size: int = self.training["batch_size"]
        return steps * batch_size * data.sequence_length

    def stable_saves(self, end: int, every: int | None = None) -> tuple[int, ...]:
        """Return the checkpoints of a stable phase, the last at its `end`."""
        every = every or self.stable_every
        return (*range(every, end, every), end)

    def cooldown_saves(self, start: int, end: int) -> tuple[int, ...]:
        """Return the checkpoints of a cooldown between these steps, the last at its end."""
        # Two checkpoints at least: slices go through the last two.
        every = self.cooldown_every or (end - start) // 2
        return tuple(range(start + every, end + 1, every))


TEXT = web_text(
    "EleutherAI/gpt-neox-20b",
    TokenFile(name="fineweb-edu-100bt", dataset="HuggingFaceFW/fineweb-edu", config="sample-100BT"),
)
# 524,288 tokens a step, 99.6e9 tokens in all, warm-up 1%. On 8 H100 with 80 GB, 'python -m train
# plan' has a rank at 19 GB with 160M parameters and at 9 GB with 70M.
END = 190_000
FULL = Size(
    model=PYTHIA_160M,
    smaller_model=PYTHIA_70M,
    text=TEXT,
    training={
        "precision": "bf16",
        # plainLM takes its data in order.
        "data": data_of(TEXT, sequence_length=2048, held_out_sequences=256, order="sequential"),
        "batch_size": 256,
        "micro_batch_size": 16,
        "evaluate_every_steps": 500,
        "saving": SavingConfig(asynchronous=True, restart_every_steps=2_000),
    },
    measured={
        "ranks": 8,
        "sized_for": "cuda",
        "quantization": WEB_QUANTIZATION.model_copy(
            update={"by_block": WEB_SPECS, "dtype": "fp32"}
        ),
        # The paper has 100 sequences of 2,048 tokens, and a plane of 1,000 points. Its sequences
        # are of FineWeb-Edu; here, as the batch of the eigenvalue, they are of the text that losses
        # are over.
        "curvature": WEB_CURVATURE.model_copy(update={"pairs": 100, "fixed_sequences": 32}),
        "step": WEB_STEP,
        "slice": WEB_SLICE.model_copy(update={"grid": 31}),
        "critical": WEB_CRITICAL.model_copy(update={"sequences": 32}),
    },
    end=END,
    warmup=1_900,
    # The paper's are 2,000 steps apart in both phases: its landscape is spanned by 188,000 and
    # 190,000.
    stable_every=10_000,
    cooldown_every=2_000,
    peaks=(3e-4, 1e-3, 3e-3, 1e-2),
    cosine_peaks=(1e-3, 3e-3),
    decays=(0.01, 0.03, 0.1, 0.3, 1.0),
    # landscape.py lists checkpoints from 4,000 to 20,000, from 38,000 to 54,000 and so on. The
    # rates in the figure of budgets fall from 1.05, 18.9, 36.7, 54.5, 72.4 and 90.2e9 tokens on:
    # every cooldown takes 18,000 steps.
    budgets=(20_000, 54_000, 88_000, 122_000, 156_000, END),
    doublings=(23_750, 47_500, 95_000, END),  # the paper's are not published
    cooldown=18_000,
    # The cooldowns in the figure of LAWA end at 41, 62, 83 and 100e9 tokens. Their first
    # checkpoints are at 22, 43, 64 and 81e9: they take as many steps as those of the sweep.
    lawa_ends=(78_000, 118_000, 158_000, END),
    lawa_cooldown=END // COOLDOWN_SHARE,
    lawa_every=500,
    # The curve of averages begins at 8.4e9 tokens and has some thirty points.
    averaged_from=16_000,
    averaged_every=8_000,
)
SMOKE_MODEL = pythia(hidden_size=64, layers=2, heads=4, intermediate_size=256).model_copy(
    update={"vocab_size": SMALL_TEXT.vocab_size}
)
SMOKE = Size(
    model=SMOKE_MODEL,
    smaller_model=SMOKE_MODEL,
    text=SMALL_TEXT,
    training={
        "precision": "fp32",
        "data": data_of(SMALL_TEXT, sequence_length=128, held_out_sequences=16, order="sequential"),
        "batch_size": 16,
        "micro_batch_size": 8,
        "evaluate_every_steps": 4,
    },
    measured={
        "ranks": 2,
        "sized_for": "cpu",
        "quantization": SMALL_QUANTIZATION,
        "curvature": SMALL_CURVATURE,
        "slice": SMALL_PLANE,
        "critical": SMALL_CRITICAL,
    },
    end=80,
    warmup=4,
    stable_every=40,
    cooldown_every=None,
    peaks=(3e-3, 1e-2),
    cosine_peaks=(3e-3, 1e-2),
    decays=(0.1, 1.0),
    budgets=(40, 80),
    doublings=(40, 80),
    cooldown=8,
    lawa_ends=(40, 80),
    lawa_cooldown=8,
    lawa_every=4,
    averaged_from=40,
    averaged_every=40,
)


def size_of(smoke: bool) -> Size:
    """Return the size of a profile."""
    return SMOKE if smoke else FULL


def run(
    name: str,
    size: Size,
    *,
    saves: tuple[int, ...],
    phase: ConstantPhase | CosinePhase | None = None,
    model: ModelConfig | None = None,
    peak_lr: float | None = None,
    weight_decay: float | None = None,
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
        model=model or size.model,
        optimizer=AdamW(
            peak_lr=peak_lr or size.peak,
            weight_decay=weight_decay or size.weight_decay,
            decay=decay,
            undecayed=("bias", "norm"),
            z_loss=0.0,
        ),
        schedule=ScheduleConfig(
            warmup_tokens=size.tokens_of(size.warmup),
            phase=phase or ConstantPhase(),
            anneal=anneal,
        ),
        averages=averages,
        total_steps=saves[-1],
        save_steps=saves,
        **size.training,
    )


def whole(
    name: str,
    size: Size,
    *,
    schedule: str = "wsd",
    end: int | None = None,
    cooldown: int | None = None,
    **settings: Any,
) -> RunConfig:
    """Return a run that cools down to zero over its last fifth, or a cosine to a tenth of its peak.

    With `cooldown` it is so many steps. Both have the checkpoints of a cooldown there.
    """
    end = end or size.end
    # A cosine has no cooldown, but checkpoints at the same places, to be compared with.
    start = end - (cooldown or end // COOLDOWN_SHARE)
    if schedule == "wsd":
        settings["anneal"] = Anneal(start_step=start)
    else:
        settings["phase"] = CosinePhase(horizon_tokens=size.tokens_of(end), floor=COSINE_FLOOR)
    saves = (*size.stable_saves(start), *size.cooldown_saves(start, end))
    return run(name, size, saves=saves, **settings)


def cooldowns(
    size: Size,
    ends: tuple[int, ...],
    length: int,
    *,
    every: int | None = None,
    averages: tuple[Lawa, ...] = (),
    **settings: Any,
) -> list[RunConfig]:
    """Return a run at the peak, and from it a linear cooldown of `length` steps to each of `ends`.

    The run trains on to the last of them and has a checkpoint at every one, the control of the
    cooldown that ends there. The others are `every` so many steps. It keeps `averages`.
    """
    starts = [end - length for end in ends]
    # Starts, from which cooldowns branch, and ends, at which they are compared with controls.
    saves = {*size.stable_saves(ends[-1], every), *starts, *ends}
    stable = run(STABLE, size, saves=tuple(sorted(saves)), averages=averages, **settings)
    runs = [stable]
    for start, end in zip(starts, ends, strict=True):
        save_steps = size.cooldown_saves(start, end)
        name = budget_name("wsd", end, size)
        cooled = annealed(stable, name, start=start, save_steps=save_steps)
        # Averages are of the constant rate alone, so cooldowns keep none.
        runs.append(cooled.model_copy(update={"averages": ()}))
    return runs


def budget_name(schedule: str, end: int, size: Size) -> str:
    """Return the name of a run that ends at a budget: wsd-10.5b."""
    return f"{schedule}-{amount_name(size.tokens_of(end))}"


def learning_rates(size: Size) -> list[RunConfig]:
    """Return a run at each peak of the sweep."""
    return sweep(partial(whole, size=size), peak_lr=size.peaks)


def schedules(size: Size) -> list[RunConfig]:
    """Return a cosine and a run under WSD at each of some peaks."""
    return [
        whole(f"{kind}-{learning_rate_name(peak)}", size, schedule=kind, peak_lr=peak)
        for peak in size.cosine_peaks
        for kind in ("cosine", "wsd")
    ]


def weight_decays(size: Size) -> list[RunConfig]:
    """Return a run at each weight decay."""
    return sweep(partial(whole, size=size), weight_decay=size.decays)


def rules_of_decay(size: Size) -> list[RunConfig]:
    """Return a run decayed as in AdamW, and one as in AdamC."""
    return sweep(partial(whole, size=size), decay=("adamw", "adamc"))


def budgets(size: Size) -> list[RunConfig]:
    """Return a run at a constant rate, and a cooldown of it at each budget."""
    return cooldowns(size, size.budgets, size.cooldown)


def averages(size: Size) -> list[RunConfig]:
    """Return a run at a constant rate that keeps averages, and the cooldowns beside them."""
    kept = (Lawa(interval_steps=size.lawa_every, window=5),)
    return cooldowns(
        size, size.lawa_ends, size.lawa_cooldown, every=size.averaged_every, averages=kept
    )


def averaged_steps(size: Size, runs: Iterable[RunConfig]) -> tuple[int, ...]:
    """Return the steps of `averages` from which on the figure of the paper has averages."""
    stable, *_ = runs
    return tuple(step for step in stable.save_steps if step >= size.averaged_from)


def data_volumes(size: Size) -> list[RunConfig]:
    """Return a cosine per budget, and a run at a constant rate with a cooldown per budget."""
    of_model: dict[str, Any] = {"model": size.smaller_model}
    cosines = [
        whole(
            budget_name("cosine", end, size),
            size,
            schedule="cosine",
            end=end,
            cooldown=size.cooldown,
            **of_model,
        )
        for end in size.doublings
    ]
    return [*cosines, *cooldowns(size, size.doublings, size.cooldown, **of_model)]


def end_plane(size: Size, stable: str, annealed: str, *, average: str = "") -> NamedPlane:
    """Return the plane of the ends of two runs at the same step, with and without an anneal.

    The third point is an average of the one without, or else the annealed weights at 3 bits.
    """
    spec = size.measured["quantization"].specs[0]
    points = {"constant rate": f"{stable}@{size.end}", "annealed": f"{annealed}@{size.end}"}
    if average:
        third = {"average": f"{stable}@{size.end}/{average}"}
    else:
        third = {"annealed, quantized": f"{annealed}@{size.end}/{spec}"}
    return NamedPlane(name="ends", points=points | third)


def of_slices(size: Size) -> dict[str, str]:
    """Return the captions of slices, which a size that measures nothing by block has none of."""
    return captions.SLICES if size.measured["quantization"].by_block else {}


def measured(runs: Iterable[RunConfig], size: Size, *followed: str, **settings: Any) -> Study:
    """Return the study of runs with what all these recipes measure.

    `followed` says what is this project's choice, and which of several versions is followed.
    """
    return study(
        lean(with_controls(list(runs)), settings.get("averaged_steps", ())),
        sources=(*SOURCES, *followed),
        text=size.text,
        **size.measured,
        **settings,
    )


@recipe
def pythia_160m_lr(*, smoke: bool = False) -> Study:
    """Pythia-160M under WSD at four peak learning rates, 100B tokens each.

    arXiv 2510.06213, section 5.1. The rates fall over the last fifth, as its figure has them.
    """
    size = size_of(smoke)
    name = learning_rate_name(size.peak)
    return measured(
        learning_rates(size),
        size,
        f"cooldown: from 80e9 to 100e9 tokens, as in the authors' figure of the sweep; {APPENDIX}",
        captions=captions.SWEEP | of_slices(size),
        planes=(end_plane(size, f"{name}-control", name),),
    )


@recipe
def pythia_160m_schedules(*, smoke: bool = False) -> Study:
    """Pythia-160M under cosine and WSD at the same peak learning rates, 100B tokens each.

    arXiv 2510.06213, section 4.2; the cosine goes to 10%. The peaks, that floor, and the cooldown
    over the last fifth, as in the learning-rate sweep, are this project's choice.
    """
    size = size_of(smoke)
    return measured(
        schedules(size),
        size,
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
    size = size_of(smoke)
    return measured(
        weight_decays(size),
        size,
        "weight decay: the paper's is decoupled (Schaipp 2024), it sweeps the product of the"
        f" learning rate and the weight decay: {size.peak:g} x the values here",
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
    size = size_of(smoke)
    return measured(
        rules_of_decay(size),
        size,
        "AdamC: arXiv 2506.02285",
        f"ours: the peak, the weight decay, the cooldown as in the learning-rate sweep; {APPENDIX}",
        captions=captions.DECAY_RULES,
    )


@recipe
def pythia_160m_budgets(*, smoke: bool = False) -> Study:
    """Pythia-160M: one run at a constant rate, cooldowns at six budgets from 10B to 100B tokens.

    arXiv 2510.06213, section 4.1. Every cooldown takes 18,000 steps, so that budgets alone differ.
    Ends and starts are those of landscape.py; the talk of the paper has other budgets.
    """
    size = size_of(smoke)
    return measured(
        budgets(size),
        size,
        "budgets: the ends in landscape.py; the paper rounds them to 12, 28, 46, 64, 82 and 100e9"
        " tokens, and its talk has 16, 33, 49, 65, 82 and 100e9",
        f"cooldowns: 18,000 steps, as in landscape.py and the authors' figure; {APPENDIX}",
        captions=captions.BUDGETS,
        labels=CONSTANT,
        planes=(end_plane(size, STABLE, budget_name("wsd", size.budgets[-1], size)),),
        pca=size.measured["slice"],
    )


@recipe
def pythia_160m_lawa(*, smoke: bool = False) -> Study:
    """Pythia-160M: averages of weights along a constant rate, and four cooldowns of 20B tokens.

    arXiv 2510.06213, section 5.2, appendix C: LAWA over five weights, 500 steps apart. Its figure
    has averages from 8.4e9 tokens on, and cooldowns to 41, 62, 83 and 100e9 tokens, which are not
    those of the budgets. Checkpoints 8,000 steps apart are this project's choice.
    """
    size = size_of(smoke)
    runs, longest = averages(size), budget_name("wsd", size.lawa_ends[-1], size)
    return measured(
        runs,
        size,
        "LAWA: five weights 500 steps apart (appendix C)",
        "cooldowns: of 20e9 tokens to 41, 62, 83 and 100e9, as in the authors' figure of LAWA;"
        f" {APPENDIX}",
        "ours: checkpoints, and so averages, 8,000 steps apart",
        averaged_steps=averaged_steps(size, runs),
        captions=captions.LAWA,
        labels=CONSTANT,
        planes=(end_plane(size, STABLE, longest, average=runs[0].averages[0].name),),
        pca=size.measured["slice"],
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
    size = size_of(smoke)
    return measured(
        data_volumes(size),
        size,
        "ours: the budgets, the peak, the cosine's floor, cooldowns of 18,000 steps as in the"
        " paper's study of budgets",
        captions=captions.KUMAR,
        labels=CONSTANT,
    )
