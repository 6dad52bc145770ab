"""A recipe's study with something changed in every run: settings, or the text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from base.errors import explain_validation
from base.frozen import fingerprint
from dynamics.recipes.parts import places_of_runs
from study.definition import Study, load_study
from study.text.kinds import OwnText, TokenFiles
from study.text.own import TextOptions, TextSource, source_of, text_of
from train.run.config import RunConfig, with_settings


def _changed(
    study: Study, change: Callable[[RunConfig], RunConfig], option: str, **content: Any
) -> Study:
    """Return the study with every run changed; a branch names its changed parent."""
    changed: dict[str, RunConfig] = {}
    for run in study.trained:
        branch_from = run.branch_from
        if branch_from:
            parent = changed[study.parent_of(run).name]
            branch_from = branch_from.model_copy(update={"fingerprint": fingerprint(parent)})
        changed[run.name] = change(run).model_copy(
            update={"name": run.name, "branch_from": branch_from}
        )
    runs = [changed.get(run.name, run).model_dump() for run in study.runs]
    try:
        return Study.model_validate(study.model_dump() | {"runs": runs} | content)
    except ValidationError as error:
        raise explain_validation(option, error) from None


def with_study_settings(study: Study, settings: tuple[str, ...]) -> Study:
    """Return the study with key.path=value settings applied to every run."""
    first = study.trained[0]
    suffix = with_settings(first, list(settings)).name.removeprefix(first.name)
    return _changed(
        study,
        lambda run: with_settings(run, list(settings)),
        "--set",
        name=study.name + suffix,
        settings=settings,
    )


def on_text(study: Study, options: TextOptions, root: Path) -> Study:
    """Return the study on another text, which its name says."""
    source = source_of(options)
    name = study.name + source.suffix
    text = _recorded(root / name, source) or text_of(study, source)
    places = places_of_runs(text)

    def change(run: RunConfig) -> RunConfig:
        return run.model_copy(update={"data": run.data.model_copy(update=places)})

    return _changed(study, change, "--text", name=name, text=text.model_dump())


def _recorded(directory: Path, source: TextSource) -> OwnText | TokenFiles | None:
    """Return the text of the study that is there, if it was made of the same content."""
    if not (directory / "study.json").is_file():
        return None
    text = load_study(directory).text
    return text if isinstance(text, OwnText | TokenFiles) and text.sha256 == source.sha256 else None
