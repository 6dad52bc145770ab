"""A run's exports laid out for publishing: an HF directory per revision, an index of them all, and model cards."""

import errno
import json
import os
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

from ckpt_tools.formats.parallel import default_processes, first_damage_in_parallel
from ckpt_tools.hf_directory import LINEAGE_JSON, read_lineage
from ckpt_tools.publishing.exports import Exported, read_exports
from ckpt_tools.publishing.index import INDEX_CSV, write_index
from ckpt_tools.publishing.model_card import README, revision_card, trajectory_card
from train.command import Progress, UserError
from train.frozen import fingerprint
from train.run_directory import (
    FileRecord,
    RunDirectory,
    committed_directory,
    first_damage,
    fsync_path,
    replaced_file,
)

TOLD_OF_ENVIRONMENT = ("commit", "uncommitted_changes", "python", "packages", "world_size", "threads", "started_at")
NAMING_PLACES = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
PLACE_KEYS = ("_file", "_path")  # end the keys under which transformers notes where something was loaded from


def publish(run_dir: Path, out: Path, *, stage: int = 1, copy: bool = False, license: str = "other") -> list[Path]:
    """Writes OUT/stage1-step1000-tokens5B and so on, OUT/index.csv and OUT/README.md from RUN/hf/*.

    Names are those of `exports.published_name`. Every file is hashed before anything is written. What a revision held
    and still holds is kept; model cards are written anew. No path or host of this machine is published: lineage.json
    and configurations are rewritten without them.

    Args:
        run_dir: a run with exports.
        out: a new directory, or one that this run was published in before.
        stage: number that begins every name.
        copy: files instead of hard links, which are the exports' own files: whoever edits one edits both.
        license: identifier on the hub, for the cards.

    Returns:
        The directories, in the order of the trajectory.

    Raises:
        UserError: `read_exports` refuses, an export is damaged, or `out` holds something else.
    """
    run, exports = read_exports(run_dir, stage)
    _check_out(out, RunDirectory(run_dir).hf, exports, fingerprint(run))
    with Progress("verify", total=len(exports)) as progress:
        for one in exports:
            damage = first_damage_in_parallel(one.directory, one.files, default_processes())
            if damage:
                raise UserError(f"{damage}; export it again, nothing was published")
            progress.advance()
    revisions = {one.directory.resolve(): one.revision for one in exports}
    all_names = {f"{result.measurement}/{result.name}" for one in exports for result in one.results}
    lineages: dict[str, dict[str, Any]] = {}
    for one in exports:
        configurations = _configurations(one)
        files = one.files | {name: _record(content) for name, content in configurations.items()}
        lineage = _lineage(one, run_dir.resolve(), revisions) | {
            "published": {"run": run.name, "fingerprint": fingerprint(run), "revision": one.revision, "stage": stage},
            "files": {name: file.model_dump() for name, file in sorted(files.items())},
        }
        lineages[one.revision] = lineage
        written = configurations | {
            LINEAGE_JSON: _json(lineage),
            README: revision_card(run, one, lineage, all_names, license).encode(),
        }
        if not _is_current(out / one.revision, one, written, copy):
            _lay_out(out / one.revision, one, written, copy)
    write_index(out, exports, stage)
    with replaced_file(out / README) as aside:
        aside.write_text(trajectory_card(run, exports, lineages, license))
    print(f"{len(exports)} revisions, {INDEX_CSV} and {README} in {out}")
    return [out / one.revision for one in exports]


def _check_out(out: Path, hf: Path, exports: list[Exported], run_fingerprint: str) -> None:
    """UserError unless `out` is new, or holds nothing but what publishing this run left there."""
    if out.resolve().is_relative_to(hf.resolve()):
        raise UserError(f"{out} lies within the exports in {hf}; publish elsewhere")
    if not out.exists():
        return
    ours = {one.revision for one in exports}
    ours |= {INDEX_CSV, README} if (out / INDEX_CSV).exists() else set()
    for path in sorted(out.glob("[!.]*")):
        if path.name not in ours:
            raise UserError(f"{path} is none of the revisions to publish; give a new directory or remove it")
        if path.name in (INDEX_CSV, README):
            continue
        lineage, _ = read_lineage(path) or ({}, {})
        if lineage.get("published", {}).get("fingerprint") != run_fingerprint:
            raise UserError(f"{path} was not published from this run; give a new directory or remove it")


def _configurations(one: Exported) -> dict[str, bytes]:
    """What configurations say without the places that their files were loaded from; those that tell none are absent."""
    changed = {}
    for name in NAMING_PLACES:
        if name not in one.files:
            continue
        content = json.loads((one.directory / name).read_text())
        kept = {key: value for key, value in content.items() if not _tells_place(key, value)}
        if kept != content:
            changed[name] = _json(kept)
    return changed


def _tells_place(key: str, value: Any) -> bool:
    return key.endswith(PLACE_KEYS) and isinstance(value, str) and _is_place(value)


def _is_place(text: str) -> bool:
    """Whether a text is a path on this machine, not one within a run or a model of the hub."""
    return text.startswith(("/", "~", "../")) or text == ".."


def _lineage(one: Exported, run_dir: Path, revisions: dict[Path, str]) -> dict[str, Any]:
    """The lineage with paths within the run, ingredients by their published names, and nothing of this machine."""
    lineage = dict(one.lineage)
    environment = lineage.pop("environment", None) or {}
    if "ingredients" in lineage:
        start = one.directory.resolve().parent  # of their paths, and so the published tree is of the new ones
        places = [(start / held["path"]).resolve() for held in lineage["ingredients"]]
        lineage["ingredients"] = [
            held | {"path": revisions.get(place, str(place))}
            for held, place in zip(lineage["ingredients"], places, strict=True)
        ]
    told = {key: environment[key] for key in TOLD_OF_ENVIRONMENT if key in environment}
    return {**{key: _without_places(value, run_dir) for key, value in lineage.items()}, "environment": told}


def _without_places(value: Any, run_dir: Path) -> Any:
    """Nested values with paths of this machine cut down to their part within the run, or to their last part."""
    if isinstance(value, dict):
        return {key: _without_places(inner, run_dir) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_places(inner, run_dir) for inner in value]
    if isinstance(value, str) and _is_place(value):
        path = Path(value)
        return str(path.relative_to(run_dir)) if path.is_relative_to(run_dir) else path.name
    return value


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _record(content: bytes) -> FileRecord:
    return FileRecord(bytes=len(content), sha256=sha256(content).hexdigest())


def _is_current(target: Path, one: Exported, written: dict[str, bytes], copy: bool) -> bool:
    """Whether a published directory holds what it should, links or copies as asked for, and nothing else."""
    linked = one.files.keys() - written.keys()
    present = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    if present != linked | written.keys():
        return False
    if any((target / name).read_bytes() != content for name, content in written.items()):
        return False
    if any((target / name).samefile(one.directory / name) == copy for name in linked):
        return False
    return not copy or first_damage(target, {name: one.files[name] for name in linked}) is None


def _lay_out(target: Path, one: Exported, written: dict[str, bytes], copy: bool) -> None:
    """Writes one published directory, whole or not at all."""
    linked = {name: record for name, record in one.files.items() if name not in written}
    with committed_directory(target) as aside:
        for name in linked:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            _place((one.directory / name).resolve(), aside / name, copy)  # a link to a symlink would be one itself
        for name, content in written.items():
            (aside / name).write_bytes(content)
            fsync_path(aside / name)
        damage = first_damage(aside, linked) if copy else None
        if damage:
            raise UserError(f"{damage} while it was copied; check the disk and publish again")


def _place(source: Path, target: Path, copy: bool) -> None:
    if copy:
        shutil.copyfile(source, target)
        fsync_path(target)
        return
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        raise UserError(f"{source} cannot be linked from there ({error.strerror}); publish with --copy") from None
