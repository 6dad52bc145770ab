"""All controlled experiments of arXiv 2510.06213 at the demo's size, in one study."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from base.digests import digest_of_json
from base.frozen import fingerprint
from curvature.settings import LineSettings, PlaneSettings, PredictionSettings
from dynamics.recipes import captions
from dynamics.recipes import pythia as experiments_of
from dynamics.recipes.demo import TEXT
from dynamics.recipes.pythia import SMOKE, SOURCES, Size
from study.definition import Study
from study.experiments import Experiment
from study.measurements.curvature import CurvatureSettings
from study.measurements.quantization import QuantizationSettings
from study.recipes.parts import DRAWS, data_of, recipe, study
from train.model.presets import pythia
from train.run.config import RunConfig

END = 760  # a 250th of the paper's steps, as all the lengths below
MODEL, SMALLER_MODEL = (
    pythia(hidden_size=width, layers=2, heads=width // 16, intermediate_size=4 * width).model_copy(
        update={"vocab_size": TEXT.vocab_size}
    )
    for width in (64, 32)
)
TINY = Size(
    model=MODEL,
    smaller_model=SMALLER_MODEL,
    text=TEXT,
    training={
        "precision": "fp32",
        # Files of one package follow each other, so that text in order would change as it goes.
        "data": data_of(TEXT, sequence_length=128, held_out_sequences=64),
        "batch_size": 8,
        "micro_batch_size": 8,
        "evaluate_every_steps": 38,
    },
    measured={
        "ranks": 1,
        "sized_for": "cpu",
        "detailed": "first seed",
        "quantization": QuantizationSettings(
            measure="relative_error",
            specs=("gptq-b3-g32", "gptq-b4-g32"),
            methods=("rtn-b3-g32", "int8-t6"),
            by_block=("gptq-b3-g32",),
            calibration_sequences=32,
            calibration_seeds=DRAWS,
            eval_tokens=32_768,
            block_tokens=16_384,
        ),
        "curvature": CurvatureSettings(
            pairs=8,
            norm_pairs=2,
            companion_pairs=4,
            microbatch_sequences=2,
            fixed_sequences=4,
        ),
        "step": PredictionSettings(microbatches=4),
        "slice": PlaneSettings(grid=9, sequences=4),
        "critical": LineSettings(sequences=8, batch_size=8),
    },
    end=END,
    warmup=8,
    stable_every=190,
    cooldown_every=None,
    # Rates grow as models become narrower, here to 10 / 3 of the paper's. An update is forgotten
    # over 1 / (rate x weight decay) steps: with the paper's share of the training, a 57th, these
    # models would forget nearly all of their text. Here it is an eighth, in the demo a tenth.
    peaks=(1e-3, 3e-3, 1e-2, 3e-2),
    cosine_peaks=(3e-3, 1e-2),
    decays=(0.1, 0.3, 1.0, 3.0),
    peak=1e-2,
    weight_decay=1.0,
    budgets=(80, 216, 352, 488, 624, END),
    doublings=(95, 190, 380, END),
    cooldown=72,
    lawa_ends=(312, 472, 632, END),
    lawa_cooldown=END // experiments_of.COOLDOWN_SHARE,
    lawa_every=2,
    averaged_from=64,
    averaged_every=96,
)
# Two show how far trainings that differ in their seed alone are apart.
SEEDS = (1, 2)

# As the paper has them; those of further settings, such as `settings=paper`, where these are given.
ALONG = ("quantization_error", "absolute_error", "full_against_quantized")
ASKED = ("tasks", "accuracy_degradation")
FURTHER = ("anneal_against_control", "kl_divergence", "losses")


def parts_of(size: Size) -> list[tuple[Experiment, list[RunConfig]]]:
    """Return the experiments in the order of the paper, each with the runs of its own recipe."""
    averaged = experiments_of.averages(size)
    sweep = experiments_of.learning_rates(size)
    return [
        _part(
            "budgets",
            "Section 4.1: token budgets",
            experiments_of.budgets(size),
            figures=(*ALONG, "ends", *FURTHER, "trajectory_plane"),
            captions=captions.BUDGETS,
            claims=("budgets", "tokens", "surge"),
        ),
        _part(
            "schedules",
            "Section 4.2: cosine and WSD",
            experiments_of.schedules(size),
            figures=(*ALONG, "ends", "kl_divergence", "losses"),
            captions=captions.SCHEDULES,
            claims=("flat", "surge", "divergence", "bits"),
        ),
        _part(
            "learning-rates",
            "Figure 3: learning rates",
            sweep,
            figures=(*ALONG, "ends", *FURTHER, "methods", "methods_along_training", *ASKED),
            captions=captions.SWEEP,
            claims=("flat", "surge", "divergence", "peaks", "matched", "methods"),
        ),
        _part(
            "averages",
            "Figure 4: averages of weights",
            averaged,
            figures=("averages", *ALONG, "planes", "trajectory_plane"),
            captions=captions.LAWA,
            claims=("averages", "flat-averages"),
        ),
        _part(
            "data",
            "Figure 5: more data under cosine and WSD",
            experiments_of.data_volumes(size),
            figures=("ends", *ALONG, "kl_divergence", "losses"),
            captions=captions.KUMAR,
            claims=("budgets", "schedules"),
        ),
        _part(
            "curvature",
            "Figures 6 and 8: curvature and slices",
            sweep,
            figures=(
                *("curvature", "error_against_curvature", "sharpness", "slices"),
                *("prediction", "blocks", "formula"),
            ),
            captions=captions.CURVATURE | experiments_of.of_slices(size),
            claims=("sharpness", "sharpening", "formula"),
        ),
        _part(
            "weight-decay",
            "Figure 19: weight decay",
            experiments_of.weight_decays(size),
            figures=(*ALONG, "ends", *FURTHER),
            captions=captions.WEIGHT_DECAYS,
            claims=("flat", "surge", "divergence"),
        ),
        _part(
            "adamc",
            "Figure 20: AdamW and AdamC",
            experiments_of.rules_of_decay(size),
            figures=(*ALONG, "ends", *FURTHER),
            captions=captions.DECAY_RULES,
            claims=("flat", "surge", "divergence"),
        ),
    ]


def _part(
    name: str, title: str, runs: Sequence[RunConfig], **shown: Any
) -> tuple[Experiment, list[RunConfig]]:
    names = tuple(run.name for run in runs)
    return Experiment(name=name, title=title, runs=names, **shown), list(runs)


def together(
    parts: Iterable[tuple[Experiment, Sequence[RunConfig]]],
) -> tuple[list[Experiment], list[RunConfig]]:
    """Return experiments and their runs, where those that are one training are one run.

    It has the checkpoints, averages and factors of all, and the name that it has first. A name that
    another training has already follows that of the experiment.
    """
    runs: dict[str, RunConfig] = {}  # by what is trained
    parents: dict[str, str] = {}
    experiments = []
    for experiment, of_part in parts:
        keys: dict[str, str] = {}  # of the runs of the part, by the names that they have there
        for run in of_part:
            parent = keys[run.branch_from.run.removeprefix("../")] if run.branch_from else ""
            key = keys[run.name] = _training(run, parent)
            parents[key] = parent
            if key in runs:
                runs[key] = _united(runs[key], run)
                continue
            is_taken = run.name in {other.name for other in runs.values()}
            name = f"{experiment.name}-{run.name}" if is_taken else run.name
            runs[key] = run.model_copy(update={"name": name})
        names = tuple(dict.fromkeys(runs[key].name for key in keys.values()))
        experiments.append(experiment.model_copy(update={"runs": names}))
    return experiments, _rejoined(runs, parents)


def _training(run: RunConfig, parent: str) -> str:
    """Return what is trained, whatever is saved of it; `parent` is that of the run it leaves."""
    saved = {"save_steps", "averages", "evaluate_every_steps", "branch_from"}
    content = run.model_dump(mode="json", exclude=saved | run.NOT_IDENTITY)
    content["branch_from"] = run.branch_from and [parent, run.branch_from.step]
    return digest_of_json(content)


def _united(run: RunConfig, other: RunConfig) -> RunConfig:
    """Return a run with the checkpoints, averages and factors of another one of its training."""
    changes = {
        "factors": run.factors | other.factors,
        "save_steps": tuple(sorted({*run.save_steps, *other.save_steps})),
        "averages": tuple(dict.fromkeys((*run.averages, *other.averages))),
    }
    return run.model_copy(update=changes)


def _rejoined(runs: Mapping[str, RunConfig], parents: Mapping[str, str]) -> list[RunConfig]:
    """Return the runs, of which branches name the parents that these have become."""
    joined: dict[str, RunConfig] = {}
    for key, run in runs.items():
        if run.branch_from:
            # Parents come before their branches.
            parent = joined[parents[key]]
            origin = {"run": f"../{parent.name}", "fingerprint": fingerprint(parent)}
            run = run.model_copy(update={"branch_from": run.branch_from.model_copy(update=origin)})
        joined[key] = RunConfig.model_validate(dict(run))
    return list(joined.values())


@recipe
def tiny_paper(*, smoke: bool = False) -> Study:
    """The paper's controlled experiments on Pythia in small, figure by figure in one report.

    Those of arXiv 2510.06213 that `pythia_160m_lr` and the other recipes have at full size, with a
    250th of the steps and a 512th of the tokens of each. A run that several experiments share is
    trained and measured once. That of OLMo2-7B in small is `tiny`.
    """
    size = SMOKE if smoke else TINY
    experiments, runs = together(parts_of(size))
    of_averages = experiments_of.averages(size)
    averaged = experiments_of.averaged_steps(size, of_averages)
    # The ends of the runs of the first seed, by the names that they have in the study.
    part = next(each for each in experiments if each.name == "averages")
    seed = "" if smoke else f"-seed{SEEDS[0]}"
    stable, *_, longest = (f"{name}{seed}" for name in part.runs)
    return study(
        runs,
        sources=SOURCES,
        text=size.text,
        seeds=() if smoke else SEEDS,
        experiments=experiments,
        averaged_steps=averaged,
        planes=(
            experiments_of.end_plane(
                size, stable, longest, average=of_averages[0].averages[0].name
            ),
        ),
        pca=size.measured["slice"],
        **size.measured,
    )
