"""The controlled experiments of arXiv 2510.06213 with Pythia on FineWeb-Edu."""

from collections.abc import Iterable

from study.recipes.parts import SMOKE, amount_name, learning_rate_name
from study.recipes.pythia_runs import FULL, SMALL, Size, cooldowns, cosine, wsd
from study.settings import Study, Varied
from train.config import RunConfig
from train.settings import Lawa

SOURCES = (
    "training: arXiv 2510.06213, sections 4 and 5, appendix C; plainLM at a625d7d, with its defaults",
    "budgets: aldakata/TrainingDynamicsQuantizationRobustness at b2f3b49, landscape.py",
    "quantization and curvature: arXiv 2510.06213, section 6.2, appendices A, D, G",
)
CONSTANT = "constant rate"


def _study(
    recipe: str,
    smoke: bool,
    description: str,
    runs: Iterable[RunConfig],
    *,
    labels: dict[str, str],
    varied: Varied,
    heading: str = "peak learning rate",
    averaged_steps: tuple[int, ...] = (),
) -> Study:
    size = SMALL if smoke else FULL
    return Study(
        name=f"{recipe}{SMOKE * smoke}",
        description=f"In small: {description}" if smoke else description,
        sources=SOURCES,
        ranks=size.ranks,
        sized_for="cpu" if smoke else "cuda",
        text=size.text,
        runs=tuple(runs),
        heading=heading,
        labels=labels,
        varied=varied,
        quantization=size.quantization,
        curvature=size.curvature,
        averaged_steps=averaged_steps,
    )


def _size(smoke: bool) -> Size:
    return SMALL if smoke else FULL


def _tokens(run: RunConfig) -> int:
    return run.total_steps * run.tokens_per_step


def _budget_labels(runs: Iterable[RunConfig]) -> dict[str, str]:
    return {run.name: f"{amount_name(_tokens(run)).upper()}" for run in runs}


def pythia_160m_lr(smoke: bool = False) -> Study:
    """Four peak learning rates under WSD, 99.6e9 tokens each (section 5.1)."""
    size = _size(smoke)
    runs = [wsd(size, learning_rate_name(peak_lr), peak_lr) for peak_lr in size.peaks]
    peaks = {run.name: run.optimizer.peak_lr for run in runs}
    return _study(
        "pythia-160m-lr",
        smoke,
        "Pythia-160M under WSD at four peak learning rates, 100B tokens each",
        runs,
        labels={name: f"{peak:g}" for name, peak in peaks.items()},
        varied=Varied(name="peak learning rate", values=peaks),
    )


def pythia_160m_schedules(smoke: bool = False) -> Study:
    """A cosine to 10% and WSD at the same peaks over the same 99.6e9 tokens (section 4.2).

    The peaks, and the cosine's floor, are this project's choice.
    """
    size, runs, labels, groups = _size(smoke), [], {}, {}
    for peak_lr in size.two_peaks:
        for schedule, run in (
            ("cosine", cosine(size, f"cosine-{learning_rate_name(peak_lr)}", size.total_steps, peak_lr=peak_lr)),
            ("WSD", wsd(size, f"wsd-{learning_rate_name(peak_lr)}", peak_lr)),
        ):
            runs.append(run)
            labels[run.name], groups[run.name] = f"{schedule}, {peak_lr:g}", schedule
    return _study(
        "pythia-160m-schedules",
        smoke,
        "Pythia-160M under cosine and WSD at the same peak learning rates, 100B tokens each",
        runs,
        heading="schedule and peak learning rate",
        labels=labels,
        varied=Varied(
            name="peak learning rate", values={run.name: run.optimizer.peak_lr for run in runs}, groups=groups
        ),
    )


def pythia_160m_weight_decay(smoke: bool = False) -> Study:
    """Weight decays at one peak under WSD (section 5.3, figure 19).

    Each update shrinks a weight by rate x weight decay. The paper sweeps that product, as `decoupled` in Schaipp 2024:
    at the peak of 3e-3 it goes from 3e-5 to 3e-3 here, where the default of 0.1 stands for 3e-4. The paper's values are
    not published, these are this project's.
    """
    size = _size(smoke)
    runs = [wsd(size, f"wd{decay:g}", weight_decay=decay) for decay in size.decays]
    decays = {run.name: run.optimizer.weight_decay for run in runs}
    return _study(
        "pythia-160m-weight-decay",
        smoke,
        "Pythia-160M under WSD at five weight decays and one peak learning rate, 100B tokens each",
        runs,
        heading="weight decay",
        labels={name: f"{decay:g}" for name, decay in decays.items()},
        varied=Varied(name="weight decay", values=decays),
    )


def pythia_160m_budgets(smoke: bool = False) -> Study:
    """One stable run, and from it a cooldown to each of six budgets from 10.5e9 to 99.6e9 tokens (section 4.1).

    The ends are the paper's; that every cooldown is the last tenth of its budget follows from the longest one.
    """
    size = _size(smoke)
    stable, *cooled = cooldowns(size, size.budgets)
    return _study(
        "pythia-160m-budgets",
        smoke,
        "Pythia-160M: one run at a constant rate, cooldowns from it at six budgets from 10B to 100B tokens",
        (stable, *cooled),
        heading="budget in tokens",
        labels={stable.name: CONSTANT} | _budget_labels(cooled),
        varied=Varied(name="budget", unit="tokens", values={run.name: float(_tokens(run)) for run in cooled}),
    )


def pythia_160m_lawa(smoke: bool = False) -> Study:
    """Averages of a run at a constant rate against cooldowns that end at the same tokens (section 5.2, appendix C).

    LAWA over five weights, 500 steps apart.
    """
    size = _size(smoke)
    averages = (Lawa(interval_steps=size.interval, window=5),)
    stable, *cooled = cooldowns(size, size.budgets, averages=averages)
    return _study(
        "pythia-160m-lawa",
        smoke,
        "Pythia-160M: averages of weights along a constant rate, and the cooldowns that end there",
        (stable, *cooled),
        heading="budget in tokens",
        labels={stable.name: CONSTANT} | _budget_labels(cooled),
        varied=Varied(name="budget", unit="tokens", values={run.name: float(_tokens(run)) for run in cooled}),
        averaged_steps=size.budgets,
    )


def pythia_70m_kumar(smoke: bool = False) -> Study:
    """What data volume does to quantization (arXiv 2411.04330), under cosine and under WSD (figure 5).

    A cosine knows its end and takes a run of its own per budget; WSD takes one run and a cooldown per budget. Budgets
    that double from 12.5e9 to 99.6e9 tokens and the peak of 3e-3 are this project's choice.
    """
    size = _size(smoke)
    stable, *cooled = cooldowns(size, size.doublings, model="70m")
    cosines = [
        cosine(size, f"cosine-{amount_name(end * size.tokens_per_step)}", end, model="70m") for end in size.doublings
    ]
    cosine_labels = {name: f"cosine, {label}" for name, label in _budget_labels(cosines).items()}
    wsd_labels = {name: f"WSD, {label}" for name, label in _budget_labels(cooled).items()}
    return _study(
        "pythia-70m-kumar",
        smoke,
        "Pythia-70M at four budgets from 12B to 100B tokens, each by a cosine of its own and by a cooldown of one run",
        (*cosines, stable, *cooled),
        heading="schedule and budget in tokens",
        labels=cosine_labels | {stable.name: CONSTANT} | wsd_labels,
        varied=Varied(
            name="budget",
            unit="tokens",
            values={run.name: float(_tokens(run)) for run in (*cosines, *cooled)},
            groups=dict.fromkeys(cosine_labels, "cosine") | dict.fromkeys(wsd_labels, "WSD"),
        ),
    )
