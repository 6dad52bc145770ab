"""The steps that make a study's text, and its token files as commands name them."""

import os
from pathlib import Path
from typing import Any, assert_never

from base.errors import UserError
from study.definition import Study
from study.step import Step, python
from study.text.own import check_unchanged
from study.text.package_sources import check_versions
from study.text_kinds import (
    CORPUS,
    TEXTS,
    USES,
    OwnText,
    PackageSources,
    PreparedText,
    places_of,
)


def prefix(study: Study, use: str) -> str:
    """Return PREFIX of the token file for train, held_out or calibration, as commands name it."""
    return places_of(study.text)[use]


def record(study: Study, use: str) -> str:
    """Return its manifest, relative to the study where it is below the root."""
    named = prefix(study, use)
    return f"{named.removeprefix('{study}/').replace('{root}', '..', 1)}.json"


def used(study: Study) -> tuple[str, ...]:
    """Return the uses that a study has for text; one that trains nothing has none to train on."""
    return USES if study.trained else USES[1:]


def check_text(study: Study, directory: Path) -> None:
    """Raise UserError where a token file that no step of the study makes is not there.

    Where the study's own steps still have to make one, the files they make it of have to be there
    unchanged.
    """
    text, outputs = study.text, {output for step in text_steps(study) for output in step.outputs}
    for use in used(study):
        path_in_study = record(study, use)
        path = _place(directory, path_in_study)
        if path.is_file():
            continue
        if isinstance(text, OwnText):
            check_unchanged(text)
        if isinstance(text, PackageSources):
            check_versions(text.packages)
        # A step of the study makes it, and what it is made of is as it was.
        if path_in_study in outputs:
            continue
        if not isinstance(text, PreparedText) or text.files[use].name.startswith("/"):
            raise UserError(f"{path} does not exist; prepare that text, or give another")
        tokenizer = directory.absolute().parent / text.tokenizer_directory
        origin = text.files[use].origin or "python -m train prepare FILES"
        raise UserError(
            f"{path} does not exist; make it first: {origin} (--out {path.with_suffix('')},"
            f" --tokenizer {tokenizer}, which 'python -m ckpt_tools download {text.tokenizer} DIR"
            " --tokenizer-only' fetches), or take text of your own with --text"
        )


def check_documents_of(study: Study, directory: Path) -> None:
    """Raise UserError where a token file that is there has too few documents to measure with.

    One that is yet to be made is checked by the measurements.
    """
    from quant_eval.draws import check_documents_for
    from quant_eval.measuring.documents import check_documents, draw_documents
    from train.data.corpus import open_corpus

    quantization = study.quantization
    calibration = _place(directory, record(study, "calibration"))
    if calibration.is_file() and quantization.calibration_documents == "separate":
        check_documents_for(
            open_corpus(calibration.with_suffix("")),
            quantization.calibration_sequences,
            draws=quantization.seed + quantization.calibration_seeds,
        )
    manifest = _place(directory, record(study, "held_out"))
    # Not made yet: the measurements check it themselves.
    if not manifest.is_file():
        return
    corpus = open_corpus(manifest.with_suffix(""))
    by_block = [quantization.block_tokens] if quantization.by_block else []
    for tokens in (quantization.eval_tokens, *by_block):
        check_documents(corpus, len(draw_documents(corpus, tokens, seed=0)))


def _place(directory: Path, relative: str) -> Path:
    """Return a place that is relative to the study, which may not be there yet."""
    # Not `resolve`, which would follow links: places stay as the study names them.
    return Path(os.path.normpath(directory.absolute() / relative))


def text_steps(study: Study) -> list[Step]:
    """Return the steps that make text; none of what has to be there before."""
    match study.text:
        case PackageSources():
            return _package_steps(study.text)
        case OwnText():
            return _own_steps(study.text)
        case PreparedText():
            return _prepared_steps(study.text)
        case text:
            assert_never(text)


def _own_steps(text: OwnText) -> list[Step]:
    """Return the steps of a tokenizer, trained or copied, and of a token file of every share."""
    places = places_of(text)
    tokenizer = places["tokenizer"]
    key = ("--key", text.key) if text.key else ()
    if text.tokenizer is None:
        make = python("study", "tokenizer", *text.sources, *key)
        make += ("--vocab-size", str(text.vocab_size))
        # On the training share alone: what is held out must not shape the tokenizer.
        make += ("--share", str(text.train), "--out", tokenizer)
    else:
        make = python("ckpt_tools", "download", text.tokenizer, tokenizer, "--tokenizer-only")
    outputs = ("data/tokenizer/tokenizer.json",)
    steps = [Step("tokenizer", "corpus", make, outputs, settings=text.sha256, expected_seconds=12)]
    for use in USES:
        share = getattr(text, use)
        if share is None:
            continue
        command = python("train", "prepare", *text.sources, *key, "--share", str(share))
        command += ("--at-least", str(getattr(text, f"{use}_tokens")))
        if use == "held_out":
            command += ("--document-tokens", str(text.document_tokens))
        command += ("--tokenizer", tokenizer, "--out", places[use], "--workers", "{cores}")
        steps.append(_prepare_step(use, command, f"data/{use}.json", settings=text.sha256))
    return steps


def _prepare_step(name: str, command: tuple[str, ...], output: str, **more: Any) -> Step:
    """Return a step that tokenizes text and resumes where it was interrupted."""
    return Step(
        f"prepare-{name}", "prepare", command, (output,), ("tokenizer",), resumes=True, **more
    )


def _package_steps(text: PackageSources) -> list[Step]:
    make = python("study", "corpus", f"{{study}}/{CORPUS}", str(text.vocab_size), *text.packages)
    steps = [Step("corpus", "corpus", make, (f"{CORPUS}/corpus.json",), expected_seconds=8)]
    places = places_of(text)
    for use in USES:
        source = f"{{study}}/{CORPUS}/{use}.jsonl"
        command = python("train", "prepare", source, "--tokenizer", places["tokenizer"])
        command += ("--out", places[use])
        steps.append(Step(f"prepare-{use}", "prepare", command, (f"data/{use}.json",), ("corpus",)))
    return steps


def _prepared_steps(text: PreparedText) -> list[Step]:
    steps, tokenizer = [], places_of(text)["tokenizer"]
    if not text.tokenizer.startswith("/"):
        fetch = python("ckpt_tools", "download", text.tokenizer, tokenizer, "--tokenizer-only")
        output = f"../{text.tokenizer_directory}/tokenizer.json"
        steps.append(Step("tokenizer", "download", fetch, (output,), resumes=True))
    # Each file once, though it may serve two uses.
    for file in dict.fromkeys(text.files.values()):
        # Files without a data set have to be there before, see `check_text`.
        if file.dataset:
            parts = (file.dataset, file.config or "", file.split, file.files or "")
            command = python("train", "prepare", ":".join(("dataset", *parts)), "--key", file.key)
            command += ("--tokenizer", tokenizer, "--out", f"{{root}}/{TEXTS}/{file.name}")
            command += ("--workers", "{cores}")
            output = f"../{TEXTS}/{file.name}.json"
            steps.append(_prepare_step(file.name, command, output, expected_seconds=600))
    return steps
