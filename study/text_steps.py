"""The steps that make a study's text, and where its token files lie as commands name them."""

import os
from pathlib import Path

from study.commands import Step
from study.layout import CORPUS
from study.own_text import check_unchanged
from study.settings import Study
from study.text import TEXTS, OwnText, PreparedText, StandardLibrary, TokenFile
from study.text_places import places_of
from train.command import UserError


def _python(*arguments: str) -> tuple[str, ...]:
    return ("{python}", "-m", *arguments)


def prefix(study: Study, use: str) -> str:
    """PREFIX of the token file for `use` (train, held_out or calibration), as commands name it."""
    return places_of(study.text)[use]


def record(study: Study, use: str) -> str:
    """Its manifest, relative to the study where it lies below the root."""
    place = prefix(study, use)
    return f"{place.removeprefix('{study}/').replace('{root}', '..', 1)}.json"


def check_text(study: Study, directory: Path) -> None:
    """UserError, before anything is started, where a token file that no step of the study makes is not there.

    Where the study's own steps still have to make one, the files they make it of have to be there unchanged.
    """
    made = {output for step in text_steps(study) for output in step.outputs}
    for use in ("train", "held_out", "calibration") if study.trained else ("held_out", "calibration"):
        place = record(study, use)
        path = Path(os.path.normpath(directory.absolute() / place))  # the study itself may not be there yet
        if path.is_file():
            continue
        if isinstance(study.text, OwnText):
            check_unchanged(study.text)
        if place in made:
            continue
        if not isinstance(study.text, PreparedText):
            raise UserError(f"{path} does not exist; prepare that text, or give another")
        tokenizer = directory.absolute().parent / study.text.tokenizer_directory
        origin = study.text.files[use].origin or "python -m train prepare FILES"
        raise UserError(
            f"{path} does not exist; make it first: {origin} (--out {path.with_suffix('')}, "
            f"--tokenizer {tokenizer}, which 'python -m ckpt_tools tokenizer {study.text.tokenizer} DIR' fetches), or "
            "take text of your own with --text"
        )


def text_steps(study: Study) -> list[Step]:
    """Everything that makes text; none for token files that have to be there before."""
    if isinstance(study.text, StandardLibrary):
        return _library_steps(study.text)
    if isinstance(study.text, OwnText):
        return _own_steps(study.text)
    return _prepared_steps(study.text) if isinstance(study.text, PreparedText) else []


def _own_steps(text: OwnText) -> list[Step]:
    """A tokenizer, trained on the training share or copied, and a token file of every share."""
    place = places_of(text)["tokenizer"]
    if text.tokenizer is None:
        make = _python("study", "tokenizer", *text.sources, "--vocab-size", str(text.vocab_size))
        make += ("--share", str(text.train), "--out", place)
    else:
        make = _python("ckpt_tools", "tokenizer", text.tokenizer, place)
    outputs = (f"{place.removeprefix('{study}/')}/tokenizer.json",)
    steps = [Step("tokenizer", "corpus", make, outputs, settings=text.sha256, expected_seconds=12)]
    for use, share, options in (
        ("train", text.train, ("--at-least", str(text.train_tokens))),
        (
            "held_out",
            text.held_out,
            ("--at-least", str(text.held_out_tokens), "--document-tokens", str(text.document_tokens)),
        ),
        ("calibration", text.calibration, ("--at-least", str(text.calibration_tokens))),
    ):
        if share is None:
            continue
        command = _python("train", "prepare", *text.sources, "--share", str(share), *options)
        command += ("--tokenizer", place, "--out", places_of(text)[use], "--workers", "{cores}")
        outputs = (f"data/{use}.json",)
        steps.append(
            Step(f"prepare-{use}", "prepare", command, outputs, ("tokenizer",), settings=text.sha256, resumes=True)
        )
    return steps


def _library_steps(text: StandardLibrary) -> list[Step]:
    make = _python("study", "corpus", f"{{study}}/{CORPUS}", "--vocab-size", str(text.vocab_size))
    make += ("--held-out-percent", str(text.held_out_percent))
    make += ("--held-out-characters", str(text.held_out_characters))
    steps = [Step("corpus", "corpus", make, (f"{CORPUS}/corpus.json",), expected_seconds=12)]
    for split in ("train", "held_out"):
        source, tokenizer = f"{{study}}/{CORPUS}/{split}.jsonl", f"{{study}}/{CORPUS}/tokenizer"
        command = _python("train", "prepare", source, "--tokenizer", tokenizer, "--out", f"{{study}}/data/{split}")
        steps.append(Step(f"prepare-{split}", "prepare", command, (f"data/{split}.json",), ("corpus",)))
    return steps


def _prepared_steps(text: PreparedText) -> list[Step]:
    place = text.tokenizer_directory
    fetch = _python("ckpt_tools", "tokenizer", text.tokenizer, f"{{root}}/{place}")
    steps = [Step("tokenizer", "download", fetch, (f"../{place}/tokenizer.json",), resumes=True)]
    for file in dict.fromkeys(text.files.values()):
        if file.dataset:
            steps.append(_prepare_step(file, file.dataset, place))
    return steps


def _prepare_step(file: TokenFile, dataset: str, tokenizer: str) -> Step:
    command = _python("train", "prepare", "--dataset", dataset, "--split", file.split, "--key", file.key)
    if file.config:
        command += ("--dataset-config", file.config)
    if file.files:
        command += ("--files", file.files)
    command += (
        "--tokenizer",
        f"{{root}}/{tokenizer}",
        "--out",
        f"{{root}}/{TEXTS}/{file.name}",
        "--workers",
        "{cores}",
    )
    outputs = (f"../{TEXTS}/{file.name}.json",)
    return Step(f"prepare-{file.name}", "prepare", command, outputs, ("tokenizer",), resumes=True, expected_seconds=600)
