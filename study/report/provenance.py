"""Settings, software and commands of the numbers in a report."""

import shlex
from itertools import product
from pathlib import Path

from base.environment import PROJECT, version_line
from base.environment_in_words import differences_in_words
from base.frozen import in_words
from base.grouping import grouped
from study.definition import Study
from study.machine.hardware import Hardware
from study.machine.needs import Needs
from study.pipeline.runner import MODELS_PER_PROCESS
from study.recipes.parts import PROFILES
from study.recipes.resolve import resolve, whole_recipes
from study.released import ReleasedRun
from study.restarts import lost_to_restarts
from study.results.averages import kept_averages
from study.step import Step, batches, shared, shown
from study.steps import FINAL, steps_of
from train.run.config import RunConfig
from train.run.directory import RunDirectory
from train.run.environment import attempts

ENGINE_PACKAGES = {"megatron": "megatron-core", "deepspeed": "deepspeed"}


def _of_run(run: RunConfig) -> dict[str, str]:
    """Return the settings of a training in words, by name."""
    model = run.model
    sizes = " to ".join(map(str, run.batch_sizes))
    return {
        "model": f"{model.row.title}, {model.num_hidden_layers} layers, width"
        f" {model.hidden_size}, vocabulary {model.vocab_size}",
        "training": f"{run.total_steps} steps of {sizes} x {run.data.sequence_length}"
        f" tokens, {run.precision}",
        "schedule": run.schedule.describe(run.warmup_steps),
        "optimizer": f"{run.optimizer.describe()}{run.found_at}, seed {run.seed}",
    }


def _training_rows(directory: Path, study: Study) -> dict[str, str]:
    """Return settings of the training; values that differ between runs are listed once each."""
    each = [_of_run(run) for run in study.trained]
    rows = {name: "; ".join(dict.fromkeys(row[name] for row in each)) for name in each[0]}
    averages = [average.describe() for average in kept_averages(study)]
    if averages:
        steps = ", ".join(map(str, study.averaged_steps))
        rows["averages"] = f"{'; '.join(averages)}; quantized at {steps or 'no step'}"
    if study.soups:
        rows["soups"] = "; ".join(f"{soup.name}, {soup.describe()}" for soup in study.soups)
    run = study.trained[0]
    zero = f", ZeRO stage {run.zero.stage}" if run.engine == "deepspeed" else ""
    ranks = Needs(study, Hardware.recorded(directory)).trainings[run.name].ranks
    counted = "1 rank" if ranks == 1 else f"{ranks} ranks"
    rows["engine"] = f"{ENGINE_PACKAGES[run.engine]}{zero}, {counted}"
    path = RunDirectory(directory / run.name).environment_json
    if path.exists():
        last = attempts(path)[-1]
        changed = " with uncommitted changes" if last.get("uncommitted_changes") else ""
        rows["commit"] = (last.get("commit") or "not recorded") + changed
        # The engine that was not used says nothing of the numbers.
        others = set(ENGINE_PACKAGES.values()) - {ENGINE_PACKAGES[run.engine]}
        versions = {name: last[name] for name in (PROJECT, "python") if name in last}
        versions |= last.get("packages", {})
        used = [f"{name} {version}" for name, version in versions.items() if name not in others]
        rows["software"] = ", ".join(used)
        if "differs_from_tested" in last:
            rows["versions"] = differences_in_words(last)
    lost = lost_to_restarts(directory, study.trained)
    if lost:
        rows["lost to restarts"] = lost.removeprefix("lost to restarts: ")
    return rows


def settings_of(directory: Path, study: Study) -> dict[str, str]:
    """Return model, schedule, measurements, software and sources of the study, by name.

    The software of the training is that of its last attempt. What draws the report may be newer.
    """
    released = [run for run in study.runs if isinstance(run, ReleasedRun)]
    rows = {
        run.name: "; ".join((f"{run.source}, {run.course}", *run.averages_in_words))
        for run in released
    }
    if study.trained:
        rows |= _training_rows(directory, study)
    if study.settings:
        rows["set"] = ", ".join(study.settings)
    rows |= {part: in_words(settings) for part, settings in study.measured_by.items()}
    if study.sources:
        rows["sources"] = "; ".join(study.sources)
    return rows | {"this report": version_line()}


def _run_again(study: Study) -> str:
    command = f"python -m study run {study.name}"
    candidates = [recipe for recipe in whole_recipes() if study.name.startswith(recipe)]
    # The longest first: tiny-paper begins with tiny, whose runs its settings may not fit.
    for recipe, profile in product(sorted(candidates, key=len, reverse=True), PROFILES):
        # A name begins with that of its recipe and profile; the settings follow.
        if not study.name.startswith(resolve(recipe, profile).name):
            continue  # its settings may not fit
        if resolve(recipe, profile, study.settings).name == study.name:
            settings = "".join(f" --set {shlex.quote(setting)}" for setting in study.settings)
            command = f"python -m study run {recipe} --profile {profile}{settings}"
            break
    return f'{command} --root "$STUDY/.."'


def _part(step: Step) -> str:
    """Return the part of a study that a step belongs to."""
    if step.run:
        return f"run {step.run}"
    # A step of no run makes the text, whatever its kind, or is one of the last.
    return "table, report and MLflow" if step.kind in FINAL else "text and tokenizer"


def commands(directory: Path, study: Study) -> dict[str, list[str]]:
    """Return the commands of every step by run, as the study's last hardware takes them.

    Those that come first set the environment and run the study again.
    """
    hardware = Hardware.recorded(directory)
    needs = Needs(study, hardware)
    groups = grouped(steps_of(study), _part)
    settings = f"export STUDY={shlex.quote(str(directory.absolute()))} OMP_NUM_THREADS=1"
    settings += "" if hardware.gpus else " CUDA_VISIBLE_DEVICES="
    lines = {"the whole study again": [settings, _run_again(study)]}
    for title, members in groups.items():
        together = batches(members, MODELS_PER_PROCESS, len(members))
        lines[title] = [shown(shared(batch), needs.machine(batch[0])) for batch in together]
    return lines
