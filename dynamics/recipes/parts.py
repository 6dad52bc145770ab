"""The parts of recipes: sweeps, branches, names, texts, and what is measured at a small size.

A recipe is a function that returns a study, with the decorator `recipe`; `dynamics.recipes.demo` is
one to begin with.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from base.frozen import fingerprint
from study.axes import AnyRun
from study.definition import Study
from study.design import with_controls, with_seeds
from study.differences import Value, in_words
from study.measurements.curvature import CurvatureSettings
from study.measurements.quantization import QuantizationSettings
from study.text.kinds import PACKAGES, PackageSources, PreparedText, Text, TokenFile, places_of
from train.data.config import DataConfig
from train.model.config import ModelConfig
from train.run.config import BranchFrom, RunConfig
from train.run.optimization import Anneal, ConstantPhase, OptimizerConfig, ScheduleConfig

PROFILES = ("full", "smoke")
UNNAMED = "unnamed"  # a study before its recipe names it

# arXiv 2510.06213, appendices A and D: calibrated on C4's second file, c4-train.00001-of-01024, and
# measured on some 600,000 tokens of RefinedWeb, of which
# aldakata/TrainingDynamicsQuantizationRobustness does not say which.
C4 = TokenFile(name="c4", dataset="allenai/c4", config="en", files="2")
REFINEDWEB = TokenFile(
    name="refinedweb", dataset="tiiuae/falcon-refinedweb", files="1", key="content"
)
WEB_SPECS = ("gptq-b3-g128", "gptq-b4-g128")
# At the end of training, of each kind that arXiv 2510.06213 names; -paper is what it ran.
WEB_METHODS = (
    *("gptqmodel-b3-g128-paper", "gptqmodel-b4-g128-paper", "rtn-b3-g128", "rtn-b4-g128"),
    *("awq-b3-g128", "awq-b4-g128", "autoround-b3-g128", "nf4-g64", "int8-t6"),
    # weights alone: rotated, in codebooks, in three levels
    *("gptq-b3-g128-had", "gptq-b4-g128-had", "qtip-b2", "qtip-b3", "ternary-g128"),
    # weights and activations: formats of engines, and 4 bits by every transform
    *("w8a8", "w8a8-smooth0.5", "fp8", "mxfp4", "gptq-nvfp4"),
    *("w4a4-g128", "w4a4-g128-baseq-quarot", "w4a4-g128-duquant"),
    *("w4a4-g128-spinquant-blockwise", "w4a4-g128-ostquant-blockwise"),
    *("w4a4-g128-flatquant-blockwise", "gptq-b4-g128-a4-kv4-quarot"),
    *("atom-b4-g128-keep0.03-a4", "quik-b4-perchannel-keep0.06-a4"),
    *("kv4", "kv4-quarot"),
)
WEB_QUANTIZATION = QuantizationSettings(
    specs=WEB_SPECS,
    methods=WEB_METHODS,
    along=("w4a4-g128-quarot", "nvfp4"),
    calibration_sequences=256,
    eval_tokens=600_000,
    block_tokens=150_000,
    dtype="bf16",
)
WEB_CURVATURE = CurvatureSettings(
    pairs=64,
    norm_pairs=16,
    companion_pairs=32,
    microbatch_sequences=1,
    fixed_sequences=16,
    step_microbatches=32,
    slice_grid=15,
    slice_sequences=32,
)

# The profile smoke: the same structure, minutes on two cores.
SMALL_TEXT = PackageSources(packages=PACKAGES[:2], vocab_size=1024)  # 5 MB of 20: without sympy
SMALL_QUANTIZATION = QuantizationSettings(
    specs=("gptq-b3-g32", "gptq-b4-g32"),
    methods=("rtn-b3-g32",),
    calibration_sequences=32,
    eval_tokens=12_288,  # 22 documents of SMALL_TEXT; 20 give an interval
    block_tokens=12_288,
)
SMALL_CURVATURE = CurvatureSettings(
    pairs=4,
    norm_pairs=2,
    companion_pairs=2,
    microbatch_sequences=2,
    fixed_sequences=4,
    step_microbatches=2,
    slice_grid=5,
    slice_sequences=4,
)


@dataclass(frozen=True)
class Recipe:
    """A function that returns a study, with its name and description; see `recipe`."""

    make: Callable[..., Study]

    @property
    def name(self) -> str:
        """The function's name with hyphens."""
        return self.make.__name__.replace("_", "-")

    def __call__(self, *, smoke: bool = False) -> Study:
        """Return the study, named after the function and described by its docstring."""
        study = self.make(smoke=smoke)
        first_line = (self.make.__doc__ or self.name).strip().splitlines()[0].rstrip(".")
        texts = {
            "name": self.name + ("-smoke" if smoke else ""),
            "description": f"In small: {first_line}" if smoke else first_line,
        }
        return study.model_copy(update=texts)


def recipe(make: Callable[..., Study]) -> Recipe:
    """Make a recipe of a function `NAME(*, smoke: bool) -> Study` with a docstring.

    The first line of the docstring describes the study. `smoke` asks for the same study at a size
    that a test can afford.
    """
    return Recipe(make)


def study(
    runs: Iterable[AnyRun],
    *,
    text: Text,
    quantization: QuantizationSettings,
    seeds: Sequence[int] = (),
    **settings: Any,
) -> Study:
    """Return a study of these runs; `settings` are further fields of Study.

    Every run that anneals gets a control of equal tokens that does not (`study.design`), and with
    `seeds` every run is trained once with each. By default a training takes two processes on the
    CPU of one machine.
    """
    trained = [run for run in runs if isinstance(run, RunConfig)]
    if trained:
        runs = with_controls(trained)
        runs = with_seeds(runs, seeds) if seeds else runs
    defaults = {"name": UNNAMED, "description": UNNAMED, "ranks": 2, "sized_for": "cpu"}
    content = {"text": text, "runs": tuple(runs), "quantization": quantization}
    return Study.model_validate(defaults | content | settings)


def sweep(run: Callable[..., RunConfig], **values: Sequence[Any]) -> list[RunConfig]:
    """Return a run for every combination of the values, named after them.

    `run` takes a name and a value of each: `run("lr1e-3-wd0", peak_lr=1e-3, weight_decay=0)`. The
    keywords are the study's factors: axes, headings and columns have their names.
    """
    words = [in_words(each) for each in values.values()]
    places = [range(len(each)) for each in words]
    runs = []
    for combination in product(*places):
        factors = {key: of[at] for key, of, at in zip(values, words, combination, strict=True)}
        point = {key: of[at] for (key, of), at in zip(values.items(), combination, strict=True)}
        name = "-".join(value_name(key, point[key], word) for key, word in factors.items())
        runs.append(run(name, **point).model_copy(update={"factors": factors}))
    return runs


def wsd_run(
    name: str,
    *,
    model: ModelConfig,
    text: Text,
    steps: int,
    peak_lr: float,
    weight_decay: float = 0.1,
    **settings: Any,
) -> RunConfig:
    """Return a run to begin with: a warm-up, the peak, and a linear anneal over the last quarter.

    It has four checkpoints, a warm-up over a twentieth, and the vocabulary of the tokenizer
    that is trained on the text where it is the source of packages. `settings` are further ones of
    RunConfig.
    """
    if isinstance(text, PackageSources):
        model = model.model_copy(update={"vocab_size": text.vocab_size})
    checkpoints = spread(0, steps, 4)
    content: dict[str, Any] = {
        "name": name,
        "seed": 1,
        "precision": "fp32",
        "model": model,
        "data": data_of(text, sequence_length=128, held_out_sequences=16),
        "optimizer": OptimizerConfig(peak_lr=peak_lr, weight_decay=weight_decay),
        "total_steps": steps,
        "batch_size": 16,
        "micro_batch_size": 8,
        "save_steps": checkpoints,
        "evaluate_every_steps": max(1, steps // 10),
        **settings,
    }
    tokens_per_step = content["batch_size"] * content["data"].sequence_length
    schedule = ScheduleConfig(
        warmup_tokens=steps // 20 * tokens_per_step,
        phase=ConstantPhase(),
        anneal=Anneal(start_step=checkpoints[2]),
    )
    return RunConfig.model_validate({"schedule": schedule} | content)


def value_name(key: str, value: object, word: Value) -> str:
    """Return a value as a part of a run's name: 'lr3e-3', 'wd0.1', 'seed2' or 'deepspeed'."""
    if key == "peak_lr" and isinstance(value, float):
        return learning_rate_name(value)
    short = {"weight_decay": "wd", "batch_size": "batch"}.get(key, key.replace("_", ""))
    if isinstance(value, bool):
        return f"{short}={word}"
    if not isinstance(word, str):
        return f"{short}{word:g}"
    fit = re.sub(r"[^A-Za-z0-9.+=]+", "_", word).strip("_.+=")
    return fit if isinstance(value, str) else f"{short}{fit}"


def learning_rate_name(peak_lr: float) -> str:
    """Return the name of a run after its peak learning rate: 'lr3e-3' or 'lr2.5e-4'."""
    exponent = math.floor(math.log10(peak_lr))
    return f"lr{round(peak_lr / 10**exponent, 6):g}e{exponent}"


def spread(start: int, end: int, count: int) -> tuple[int, ...]:
    """Return `count` steps after `start`, evenly spaced up to `end`, which is the last of them."""
    return tuple(start + round(part * (end - start) / count) for part in range(1, count + 1))


def annealed(parent: RunConfig, name: str, *, start: int, save_steps: tuple[int, ...]) -> RunConfig:
    """Return the run that leaves `parent` at step `start` for a linear anneal to zero.

    It reads the data that comes next there.
    """
    changes: dict[str, Any] = {
        "name": name,
        "schedule": parent.schedule.model_copy(update={"anneal": Anneal(start_step=start)}),
        "branch_from": BranchFrom(
            run=f"../{parent.name}", step=start, fingerprint=fingerprint(parent)
        ),
        "total_steps": save_steps[-1],
        "save_steps": save_steps,
        # what is kept at which step is the parent's own
        "saving": parent.saving.model_copy(update={"full_steps": None, "average_steps": None}),
    }
    return RunConfig.model_validate(dict(parent) | changes)


def lean(runs: Sequence[RunConfig], averaged_steps: Iterable[int] = ()) -> list[RunConfig]:
    """Return the runs with state kept where one branches, and averages at `averaged_steps`.

    All other permanent checkpoints keep weights. Without restart checkpoints a run stays as it is:
    it resumes from its permanent ones.
    """
    branches = [run.branch_from for run in runs if run.branch_from]
    changed = []
    for run in runs:
        if not run.saving.restart_every_steps:
            changed.append(run)
            continue
        starts = {branch.step for branch in branches if branch.run == f"../{run.name}"}
        steps = {
            "full_steps": tuple(sorted(starts)),
            "average_steps": tuple(sorted(set(averaged_steps).intersection(run.save_steps))),
        }
        saving = run.saving.model_copy(update=steps)
        changed.append(RunConfig.model_validate(dict(run) | {"saving": saving}))
    return changed


def web_text(tokenizer: str, train: TokenFile | None = None) -> PreparedText:
    """Return the paper's texts to calibrate on and to measure on, with the tokens of a tokenizer.

    The name of each file says whose tokens it holds.
    """

    def tokenized(file: TokenFile) -> TokenFile:
        return file.model_copy(update={"name": f"{file.name}--{tokenizer.replace('/', '--')}"})

    return PreparedText(
        tokenizer=tokenizer,
        train=tokenized(train) if train else None,
        held_out=tokenized(REFINEDWEB),
        calibration=tokenized(C4),
    )


def data_of(text: Text, **settings: Any) -> DataConfig:
    """Return what a run of a study with this text reads; `settings` are fields of DataConfig."""
    return DataConfig.model_validate(places_of_runs(text) | settings)


def places_of_runs(text: Text) -> dict[str, str]:
    """Return what runs read of a text, by use, as a run's directory sees it: '../data/train'."""
    places = places_of(text)
    del places["calibration"]
    return {
        use: place.replace("{study}", "..", 1).replace("{root}", "../..", 1)
        for use, place in places.items()
    }
