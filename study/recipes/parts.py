"""The parts of recipes: sweeps, branches, names, texts, and what is measured at a small size.

A recipe is a function that returns a study, with the decorator `recipe`.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from base.frozen import fingerprint
from curvature.settings import LineSettings, PlaneSettings
from study.axes import AnyRun, Value, in_words
from study.content import described, with_hyphens
from study.definition import Study
from study.design import with_controls, with_seeds
from study.experiments import Experiment
from study.measurements.curvature import CurvatureSettings
from study.measurements.quantization import QuantizationSettings
from study.text_kinds import PACKAGES, PackageSources, Text, places_of
from train.data.config import DataConfig
from train.model.config import ModelConfig
from train.optimizers.adamw import AdamW
from train.run.config import BranchFrom, RunConfig
from train.run.optimization import Anneal, ConstantPhase, ScheduleConfig

PROFILES = ("full", "smoke")
UNNAMED = "unnamed"  # a study before its recipe names it

DRAWS = 3  # of the calibration text: they give a standard error
# The profile smoke: the same structure, minutes on two cores.
SMALL_TEXT = PackageSources(packages=PACKAGES[:2], vocab_size=1024)  # 5 MB of 20: without sympy
SMALL_QUANTIZATION = QuantizationSettings(
    specs=("gptq-b3-g32", "gptq-b4-g32"),
    methods=("rtn-b3-g32",),
    calibration_sequences=32,
    calibration_seeds=DRAWS,
    eval_tokens=12_288,  # 22 documents of SMALL_TEXT; 20 give an interval
    block_tokens=12_288,
)
SMALL_CURVATURE = CurvatureSettings(
    pairs=4,
    norm_pairs=2,
    companion_pairs=2,
    microbatch_sequences=2,
    fixed_sequences=4,
)
SMALL_PLANE = PlaneSettings(grid=5, sequences=4)
SMALL_CRITICAL = LineSettings(sequences=4, batch_size=4)


@dataclass(frozen=True)
class Recipe:
    """A function that returns a study, with its name and description; see `recipe`.

    Attributes:
        make: called with `smoke`.
        takes_settings: what --set says is not of run.json but of the recipe: `make` is called with
            `smoke`, with the `settings`, and with `on_text`, True where the user's text will take
            the place of the recipe's.
    """

    make: Callable[..., Study]
    takes_settings: bool = False

    @property
    def name(self) -> str:
        """The function's name with hyphens."""
        return with_hyphens(self.make.__name__)

    @property
    def description(self) -> str:
        """The first line of the function's docstring."""
        return described(self.make)

    def __call__(self, *, smoke: bool = False) -> Study:
        """Return the study, named after the function and described by its docstring."""
        study = self.make(smoke=smoke)
        texts = {
            "name": self.name + ("-smoke" if smoke else ""),
            "description": f"In small: {self.description}" if smoke else self.description,
        }
        return study.model_copy(update=texts)


def recipe(make: Callable[..., Study]) -> Recipe:
    """Make a recipe of a function `NAME(*, smoke: bool) -> Study` with a docstring.

    The first line of the docstring describes the study. `smoke` asks for the same study at a size
    that a test can afford.
    """
    return Recipe(make)


def recipe_of_settings(make: Callable[..., Study]) -> Recipe:
    """Make a recipe of a function that says itself what --set means; see `Recipe`."""
    return Recipe(make, takes_settings=True)


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
        # Controls first: each is then replicated with every seed, as the others are.
        runs = with_controls(trained)
        if seeds:
            runs = with_seeds(runs, seeds)
            experiments: Sequence[Experiment] = settings.get("experiments", ())
            settings["experiments"] = tuple(each.with_seeds(seeds) for each in experiments)
    defaults = {"name": UNNAMED, "description": UNNAMED, "ranks": 2, "sized_for": "cpu"}
    content = {"text": text, "runs": tuple(runs), "quantization": quantization}
    return Study.model_validate(defaults | content | settings)


def sweep(run: Callable[..., RunConfig], **values: Sequence[Any]) -> list[RunConfig]:
    """Return a run for every combination of the values, named after them.

    `run` takes a name and a value of each: `run("lr1e-3-wd0", peak_lr=1e-3, weight_decay=0)`. The
    keywords are the study's factors: axes, headings and columns have their names.
    """
    # Words of all values of a factor at once: compound ones are named by what differs.
    in_pairs = [list(zip(each, in_words(each), strict=True)) for each in values.values()]
    runs = []
    for combination in product(*in_pairs):
        chosen, words = zip(*combination, strict=True)
        point = dict(zip(values, chosen, strict=True))
        factors = dict(zip(values, words, strict=True))
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
    # `settings` come last and win; the schedule below counts with what they say.
    content: dict[str, Any] = {
        "name": name,
        "seed": 1,
        "precision": "fp32",
        "model": model,
        "data": data_of(text, sequence_length=128, held_out_sequences=16),
        "optimizer": AdamW(peak_lr=peak_lr, weight_decay=weight_decay),
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
    # Rounded, for 3e-4 / 10**-4 is 2.9999999999999996.
    return f"lr{round(peak_lr / 10**exponent, 6):g}e{exponent}"


def spread(start: int, end: int, count: int) -> tuple[int, ...]:
    """Return `count` steps after `start`, evenly spaced up to `end`, which is the last of them."""
    return tuple(start + round(part * (end - start) / count) for part in range(1, count + 1))


def annealed(
    parent: RunConfig,
    name: str,
    *,
    start: int,
    save_steps: tuple[int, ...],
    floor: float = 0.0,
    **settings: Any,
) -> RunConfig:
    """Return the run that leaves `parent` at step `start` for a linear anneal, to zero by default.

    It reads the data that comes next there. `settings` are further ones of RunConfig, such as its
    perturbation.
    """
    anneal = Anneal(start_step=start, floor=floor)
    changes: dict[str, Any] = {
        "name": name,
        "schedule": parent.schedule.model_copy(update={"anneal": anneal}),
        # The fingerprint pins the parent: a branch of another training is refused.
        "branch_from": BranchFrom(
            run=f"../{parent.name}", step=start, fingerprint=fingerprint(parent)
        ),
        "total_steps": save_steps[-1],
        "save_steps": save_steps,
        # what is kept at which step is the parent's own
        "saving": parent.saving.model_copy(update={"full_steps": None, "average_steps": None}),
    }
    return RunConfig.model_validate(dict(parent) | changes | settings)


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
        # A branch needs the optimizer state of the checkpoint that it starts from.
        starts = {branch.step for branch in branches if branch.run == f"../{run.name}"}
        steps = {
            "full_steps": tuple(sorted(starts)),
            "average_steps": tuple(sorted(set(averaged_steps).intersection(run.save_steps))),
        }
        saving = run.saving.model_copy(update=steps)
        changed.append(RunConfig.model_validate(dict(run) | {"saving": saving}))
    return changed


def data_of(text: Text, **settings: Any) -> DataConfig:
    """Return what a run of a study with this text reads; `settings` are fields of DataConfig."""
    return DataConfig.model_validate(places_of_runs(text) | settings)


def places_of_runs(text: Text) -> dict[str, str]:
    """Return what runs read of a text, by use, as a run's directory sees it: '../data/train'."""
    # A directory of a run is one level below its study and two below the root.
    places = places_of(text)
    del places["calibration"]
    return {
        use: prefix.replace("{study}", "..", 1).replace("{root}", "../..", 1)
        for use, prefix in places.items()
    }
