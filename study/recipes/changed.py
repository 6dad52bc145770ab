"""A recipe's study with something changed: settings of it and of its runs, or the text."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.frozen import fingerprint
from base.names import dotted_keys
from base.reading import as_model
from base.settings import change, check_path, name_with, path_of
from study.definition import Study, load_study
from study.recipes.parts import places_of_runs
from study.recipes.presets import PRESET, is_preset, with_presets
from study.text.own import TextOptions, TextSource, source_of, text_of
from study.text_kinds import OwnText, PreparedText
from train.run.config import RunConfig, with_settings

# What the recipe alone decides, of the study and of its runs; the text is that of `--text`.
OF_RECIPE = {"name", "settings", "runs", "experiments", "text"}
OF_RUNS = {"name", "factors", "branch_from"}
PERTURBATION = "perturbation"


def with_study_settings(study: Study, settings: tuple[str, ...]) -> Study:
    """Return the study with PATH=VALUE settings; its name says them.

    `settings=NAME` is a preset (`study.recipes.presets`), which comes before all others. Any other
    path is of run.json, then every run that has the field is changed, or else of the study. What a
    run is trained with keeps the last word of its path in the name, as in run.json.
    """
    study = with_presets(study, settings)
    of_run = {run.name: _paths(run, OF_RUNS) for run in study.trained}
    paths = list(dict.fromkeys(chain(*of_run.values(), _paths(study, OF_RECIPE))))
    content, named = study.model_dump(mode="json"), []
    for setting in settings:
        path, _, value = setting.partition("=")
        key = path
        if not is_preset(setting):
            check_path(setting, (PRESET, *paths))
            # Settings of runs are applied to the runs below, all others to the study here.
            if path.partition(".")[0] in RunConfig.model_fields:
                key = path.rpartition(".")[2]
            else:
                change(content, setting)
        named.append((key, value))

    its = {
        name: [each for each in settings if path_of(each) in paths_of_run]
        for name, paths_of_run in of_run.items()
    }
    its = _perturbing_anneals(study, its)

    def change_run(run: RunConfig) -> RunConfig:
        return with_settings(run, its[run.name])

    # Validated as a whole after all settings: one alone may not fit the rest.
    name = name_with(study.name, named)
    content |= {"name": name, "settings": settings, "runs": _changed_runs(study, change_run)}
    changed = as_model(Study, content, "--set")
    along = {"step", "slice"} - changed.measured_by.keys()
    unused = [each for each in settings if path_of(each).partition(".")[0] in along]
    if unused:
        raise UserError(
            f"--set {unused[0]}: {changed.name} measures nothing by block; give"
            " quantization.by_block, too"
        )
    return changed


def _perturbing_anneals(study: Study, settings: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the settings by run, those of a perturbation for its anneals alone if it is of these.

    One that begins with the anneal leaves controls as they are: they have none. Without any anneal
    in the study nothing is left out, and the runs refuse it.
    """
    others = {}
    for run in study.trained:
        content = run.model_dump(mode="json")
        for setting in settings[run.name]:
            change(content, setting)
        perturbation = content["perturbation"]
        is_of_anneal = isinstance(perturbation, dict) and perturbation.get("from_step") is None
        if is_of_anneal and not content["schedule"]["anneal"]:
            others[run.name] = [
                each for each in settings[run.name] if path_of(each).split(".")[0] != PERTURBATION
            ]
    return settings | others if len(others) < len(study.trained) else settings


def _paths(value: Study | RunConfig, without: set[str]) -> list[str]:
    return list(dotted_keys(value.model_dump(mode="json", exclude=without)))


def _changed_runs(study: Study, change: Callable[[RunConfig], RunConfig]) -> list[dict[str, Any]]:
    """Return the runs of a study, every one changed; a branch names its changed parent."""
    changed: dict[str, RunConfig] = {}
    for run in study.trained:
        branch_from = run.branch_from
        if branch_from:
            # Parents come first: their fingerprint has changed, and with it that in the branch.
            parent = changed[study.parent_of(run).name]
            branch_from = branch_from.model_copy(update={"fingerprint": fingerprint(parent)})
        changed[run.name] = change(run).model_copy(
            update={"name": run.name, "branch_from": branch_from}
        )
    return [changed.get(run.name, run).model_dump(mode="json") for run in study.runs]


def on_text(study: Study, options: TextOptions, root: Path) -> Study:
    """Return the study on another text, which its name says."""
    source = source_of(options)
    name = study.name + source.suffix
    # The recorded text first: its shares stay what they were when the study began.
    text = _recorded(root / name, source) or text_of(study, source)
    places = places_of_runs(text)

    def change_run(run: RunConfig) -> RunConfig:
        return run.model_copy(update={"data": run.data.model_copy(update=places)})

    content: dict[str, Any] = {"name": name, "text": text.model_dump(mode="json")}
    content["runs"] = _changed_runs(study, change_run)
    return as_model(Study, study.model_dump(mode="json") | content, "--text")


def _recorded(directory: Path, source: TextSource) -> OwnText | PreparedText | None:
    """Return the text of the study that is there, if it was made of the same content."""
    if not (directory / "study.json").is_file():
        return None
    text = load_study(directory).text
    if isinstance(text, OwnText | PreparedText) and text.sha256 == source.sha256:
        return text
    return None
