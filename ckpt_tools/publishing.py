"""A run's exports laid out for the hub: a directory per revision, its results, and a model card."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.files import FileRecord, committed_directory, fsync_path, write_json, write_sealed
from base.frozen import NAME_PATTERN, fingerprint
from base.progress import Progress
from base.reading import read_object
from ckpt_tools.formats.parallel import hash_in_parallel, verify_in_parallel
from ckpt_tools.hf.directory import (
    CONFIGURATION_FILES,
    RESULT_JSON,
    read_lineage,
    write_lineage,
)
from ckpt_tools.hf.results import Result, read_content, read_result
from ckpt_tools.model_card import README, model_card
from train.run.config import RunConfig, load_run
from train.run.directory import RunDirectory

UNITS = {"B": 10**9, "M": 10**6, "K": 10**3}
LEAST_UNITS = 100  # that a run of M or K ends with, so that rounding up adds at most 1% there
STEP_SUFFIX = re.compile(r"-step\d{8,}$")
REWRITTEN = {  # configurations in which transformers notes places
    *(*CONFIGURATION_FILES, "tokenizer_config.json", "special_tokens_map.json"),
}
PUBLISHED_OF_ENVIRONMENT = {
    *("quantdyn", "commit", "uncommitted_changes", "python", "packages", "origins"),
    "differs_from_tested",
    *("world_size", "threads", "started_at"),
}
PLACE_KEYS = ("_file", "_path")  # end keys under which transformers notes a place


def tokens_unit(total_tokens: int) -> str:
    """Return the unit in which all names of a run count its tokens.

    B (10^9) for a run that ends with at least 1B tokens, as OLMo's do. Counted so, every checkpoint
    of a smaller run would be `tokens1B`: it has the larger of M and K in which it ends with at
    least 100, or else K.
    """
    if total_tokens >= UNITS["B"]:
        return "B"
    return "M" if total_tokens >= LEAST_UNITS * UNITS["M"] else "K"


def published_name(step: int, tokens: int, *, unit: str, average: str | None = None) -> str:
    """Return the name of a published checkpoint, such as stage1-step1000-tokens5B-lawa5x16.

    As Ai2 names the revisions of allenai/OLMo-2-1124-7B: tokens are rounded up to whole units of
    `tokens_unit`.
    """
    name = f"stage1-step{step}-tokens{-(-tokens // UNITS[unit])}{unit}"
    return f"{name}-{average}" if average else name


@dataclass(frozen=True)
class _Export:
    """An HF directory of a run, its published name, and what was measured of it."""

    directory: Path
    revision: str
    lineage: dict[str, Any]
    files: dict[str, FileRecord]
    results: list[Result[Any]]


def publish(run_dir: Path, out: Path, *, license: str = "other") -> list[Path]:
    """Write OUT/stage1-step1000-tokens5B and so on from RUN/hf/*.

    Files are hashed before anything is written, and linked. Lineage, configurations and results are
    rewritten: no path or host of this machine is published.

    `out` is new, or what this run was published in before: a revision whose export is no longer in
    RUN/hf stays there. `license` is an identifier of the hub.

    Raises:
        UserError: there are no exports, one of them is damaged, not of this run or without its
            parity figures, or `out` holds something else.
    """
    run = load_run(RunDirectory(run_dir).run_json)
    exports = _read_exports(run_dir, run)
    _check_out(out, RunDirectory(run_dir).hf, fingerprint(run))
    revisions = {export.directory.resolve(): export.revision for export in exports}
    with Progress("publish", total=len(exports)) as progress:
        for export in exports:
            with committed_directory(out / export.revision) as aside:
                _lay_out(export, aside, run, run_dir.resolve(), revisions, license)
            progress.advance()
    print(f"{len(exports)} revisions in {out}")
    return [out / export.revision for export in exports]


def _read_exports(run_dir: Path, run: RunConfig) -> list[_Export]:
    """Return the exports of a run by step, averages after the weights they are made from."""
    hf = RunDirectory(run_dir).hf
    exports: dict[str, _Export] = {}
    # Names with a dot are of directories that are not complete.
    for path in sorted(path for path in hf.glob("[!.]*") if path.is_dir()):
        export = _read_export(path, run)
        first = exports.setdefault(export.revision, export)
        if first is not export:
            raise UserError(
                f"{first.directory} and {path} are both {export.revision}; move one out of hf/"
            )
    if not exports:
        raise UserError(f"{hf} holds no exports; make them with 'python -m ckpt_tools export'")
    return sorted(exports.values(), key=lambda export: (export.lineage["step"], export.revision))


def _read_export(hf_dir: Path, run: RunConfig) -> _Export:
    lineage, files = read_lineage(hf_dir) or ({}, {})
    kind = lineage.get("kind")
    proven = kind == "average" or (kind == "export" and lineage.get("parity"))
    if not proven or lineage.get("fingerprint") != fingerprint(run) or "step" not in lineage:
        raise UserError(
            f"{hf_dir} is not a proven export or average of run {run.name} alone;"
            " move it out of hf/"
        )
    verify_in_parallel(hf_dir, files, "export it again, nothing was published")
    averaged = kind == "average" or lineage.get("average")
    average = STEP_SUFFIX.sub("", hf_dir.name) if averaged else None
    step, unit = lineage["step"], tokens_unit(run.total_tokens)
    revision = published_name(step, run.tokens_at(step), unit=unit, average=average)
    if not re.match(NAME_PATTERN, revision):
        raise UserError(f"{hf_dir}: '{revision}' is not a name for the hub; rename the directory")
    return _Export(hf_dir, revision, lineage, files, _results(hf_dir, files))


def _results(hf_dir: Path, files: dict[str, FileRecord]) -> list[Result[Any]]:
    """Return every result of an HF directory, of any kind; UserError for one of other weights."""
    results = [read_result(path) for path in sorted(hf_dir.glob(f"*/*/{RESULT_JSON}"))]
    for result in results:
        for name, digest in result.model.weights_digests.items():
            if name not in files or files[name].digest != digest:
                raise UserError(
                    f"{result.path} was measured of other weights than those of {hf_dir}; measure"
                    " again, or move it away"
                )
    return results


def _check_out(out: Path, hf: Path, run_fingerprint: str) -> None:
    """Raise UserError unless `out` is new, or holds only what this run was published as."""
    if out.resolve().is_relative_to(hf.resolve()):
        raise UserError(f"{out} is within the exports in {hf}; publish elsewhere")
    for path in sorted(out.glob("[!.]*")):
        lineage, _ = read_lineage(path) or ({}, {})
        if lineage.get("published", {}).get("fingerprint") != run_fingerprint:
            raise UserError(f"{path} was not published from this run; give a new directory")


def _lay_out(
    export: _Export,
    aside: Path,
    run: RunConfig,
    run_dir: Path,
    revisions: dict[Path, str],
    license: str,
) -> None:
    """Link unchanged files, and write the rest without places of this machine, and the card."""
    unchanged = export.files.keys() - REWRITTEN
    for name in unchanged:
        _link(export.directory / name, aside / name)
    # The hub shows SHA-256 of a file, and every system has a program for it.
    records = hash_in_parallel(aside, sorted(unchanged), {}, "sha256")

    for name in REWRITTEN & export.files.keys():
        content = read_object(export.directory / name)
        places = {key for key in content if key.endswith(PLACE_KEYS) and _is_place(content[key])}
        write_json(aside / name, {key: content[key] for key in content if key not in places})

    # Ingredients of an average are named by their published revisions.
    # An empty environment keeps `write_lineage` from adding that of this process.
    lineage = {"environment": {}} | export.lineage
    if "ingredients" in lineage:
        parent = export.directory.resolve().parent
        for ingredient in lineage["ingredients"]:
            directory = (parent / ingredient["path"]).resolve()
            ingredient["path"] = revisions.get(directory, str(directory))
    lineage["published"] = {"fingerprint": fingerprint(run), "revision": export.revision}
    lineage = _without_places(lineage, run_dir)
    # Before the results: as that of an export, it vouches for the model alone, which a download
    # takes without them.
    write_lineage(aside, lineage, records, "sha256")

    # Results have a seal of their own each, and name the weights by the published hashes.
    for result in export.results:
        target = aside / result.path.relative_to(export.directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = _without_places(read_content(result.path), run_dir)
        digests = {name: records[name].digest for name in result.model.weights_digests}
        content["model"] |= {"weights_digests": digests}
        write_sealed(target, content)

    settings = _without_places(run.model_dump(mode="json"), run_dir)
    card = model_card(export.revision, settings, lineage, export.results, license)
    (aside / README).write_text(card)


def _link(source: Path, target: Path) -> None:
    """Link a file, or copy it where no link is possible."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve()  # a link to a symlink would be one itself
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        fsync_path(target)


def _is_place(value: Any) -> bool:
    """Return whether a value is a path on this machine, not one within a run or on the hub."""
    return isinstance(value, str) and (value.startswith(("/", "~", "../")) or value == "..")


def _without_places(value: Any, run_dir: Path) -> Any:
    """Return nested values with paths cut down to their part within the run, or their last part."""
    if isinstance(value, dict):
        if "environment" in value:
            environment = value["environment"] or {}
            published = {k: environment[k] for k in environment if k in PUBLISHED_OF_ENVIRONMENT}
            value = value | {"environment": published}
        return {key: _without_places(inner, run_dir) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_places(inner, run_dir) for inner in value]
    if _is_place(value):
        path = Path(value)
        return str(path.relative_to(run_dir)) if path.is_relative_to(run_dir) else path.name
    return value
