"""What a checkpoint, an HF directory or a run is, from what lies there; opens no pickle that was not hash-checked."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_tools.checkpoint import run_of
from ckpt_tools.formats.hf_weights import INDEX_JSON
from ckpt_tools.formats.megatron_shards import METADATA
from ckpt_tools.formats.parallel import default_processes, each
from ckpt_tools.hf_directory import LINEAGE_JSON, read_lineage
from ckpt_tools.inspecting.report import print_description
from ckpt_tools.inspecting.stored_keys import Keys, safetensors_keys, sharded_keys, summary
from ckpt_tools.released.download_record import DOWNLOAD_JSON, read_download
from train.command import Progress, UserError
from train.config import load_run
from train.run_directory import (
    CHECKPOINT_JSON,
    MODEL_WEIGHTS,
    CheckpointRecord,
    FileRecord,
    RunDirectory,
    first_damage,
    read_checkpoint_record,
)
from train.tracking import attempts

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
VERIFIED, NOT_CHECKED, NOT_RECORDED = "verified", "not checked", "no hash recorded"
TOLD = (
    *("run", "fingerprint", "step", "tokens", "learning_rate", "train_loss", "held_out_loss"),
    *("engine", "precision", "world_size", "layout", "data_sha256"),
)


@dataclass
class _Findings:
    """What is known of a directory's files."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # bytes and state, by relative path
    damage: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Takes a UserError down as damage: everything else is still to be shown."""
        try:
            yield
        except UserError as error:
            if str(error) not in self.damage:
                self.damage.append(str(error))


def inspect(path: Path, *, keys: bool = True, hashes: bool = True, as_json: bool = False) -> None:
    """Prints what `describe` returns, as tables or as JSON.

    Raises:
        UserError: `describe` refuses; or, after everything was printed, something is damaged.
    """
    description = describe(path, keys=keys, hashes=hashes)
    if as_json:
        print(json.dumps(description, indent=2))
    else:
        print_description(description)
    damage = description["damage"]
    if damage:
        more = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
        raise UserError(f"DAMAGED: {damage[0]}{more}; restore it or make it again")


def describe(path: Path, *, keys: bool = True, hashes: bool = True) -> dict[str, Any]:
    """What a checkpoint, an HF directory or a run is, ready for JSON.

    Args:
        path: RUN, RUN/checkpoints/*, another checkpoint of either engine, or an HF directory with or without lineage.
        keys: list every stored key.
        hashes: check every file that has a recorded hash, of a run those of all its checkpoints and exports.

    Returns:
        path and kind; what the record says (`TOLD`); parameters, None if no keys could be read; tensors: for weights
        and each part of the optimizer's state the number of keys, numbers and bytes, and per key its global shape and
        dtype; files: bytes and state of each; made_by; damage and warnings, one line each. A run lists its checkpoints
        and exports instead of tensors.

    Raises:
        UserError: it is nothing of that kind, or the JSON that says what it is cannot be read.
    """
    if (path / CHECKPOINT_JSON).exists() or (path / METADATA).exists():
        return _describe_checkpoint(path, keys, hashes)
    if (path / "run.json").exists():
        return _describe_run(path, hashes)
    if any((path / name).exists() for name in (LINEAGE_JSON, "config.json", INDEX_JSON, MODEL_WEIGHTS)):
        return _describe_hf(path, keys, hashes)
    state = "is no checkpoint, HF directory or run directory" if path.exists() else "does not exist"
    raise UserError(f"{path} {state}; give one of RUN, RUN/checkpoints/NAME, RUN/hf/NAME")


def _describe_checkpoint(path: Path, keys: bool, hashes: bool) -> dict[str, Any]:
    record = read_checkpoint_record(path)
    found = _check(path, record.files, hashes, seal=CHECKPOINT_JSON)
    stored: Keys = {}
    with found.noting():
        stored = sharded_keys(path, record.files) if METADATA in record.files else safetensors_keys(path)
    return {
        "path": str(path),
        "kind": _kind_of(record),
        **record.model_dump(mode="json", include=set(TOLD)),
        "model": record.model,
        **summary(stored, keys),
        "files": found.files,
        "bytes": sum(file["bytes"] for file in found.files.values()),
        "made_by": _origin(path, record, found),
        "damage": found.damage,
        "warnings": found.warnings,
    }


def _kind_of(record: CheckpointRecord) -> str:
    kinds = {"megatron": "megatron checkpoint", "deepspeed": "deepspeed checkpoint"}
    kind = kinds.get(record.engine, f"checkpoint for {record.engine} engine")
    if record.imported is not None:
        return f"imported {kind}"
    return f"{kind} of an average" if record.average else kind


def _origin(path: Path, record: CheckpointRecord, found: _Findings) -> dict[str, Any]:
    """Source of an import, ingredients of an average, and the attempt of the run that wrote the checkpoint."""
    if record.imported is not None:
        return {"imported": record.imported}
    origin: dict[str, Any] = {"average": record.average} if record.average else {}
    try:
        directory, _ = run_of(path, record)
        recorded = attempts(directory.environment_json)
    except (UserError, FileNotFoundError) as error:
        found.warnings.append(f"what wrote it is unknown: {error}")
        return origin
    written_by = recorded[record.attempt - 1] if 0 < record.attempt <= len(recorded) else {}
    return {**origin, "attempt": record.attempt, **written_by}


def _describe_hf(path: Path, keys: bool, hashes: bool) -> dict[str, Any]:
    download = read_download(path)
    lineage, records = read_lineage(path) or ({}, download.files if download else {})
    found = _check(path, records, hashes, seal=LINEAGE_JSON if lineage else DOWNLOAD_JSON)
    for name in found.files:
        if name.endswith(PICKLES):
            found.warnings.append(f"{path / name} may be a pickle, which can run code when it is opened; it was not")
    stored: Keys = {}
    config: dict[str, Any] = {}
    with found.noting():
        stored = safetensors_keys(path)
    try:
        config = dict(json.loads((path / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        found.damage.append(f"{path / 'config.json'} cannot be read ({error})")
    kind = lineage.get("kind", "downloaded" if download else "without lineage")
    kind += " of an average" * bool(lineage.get("average"))
    made_by = {key: value for key, value in lineage.items() if key not in TOLD}
    if download:
        made_by["download"] = download.model_dump(exclude={"files"})
    return {
        "path": str(path),
        "kind": f"HF directory, {kind}",
        **{key: lineage[key] for key in TOLD if key in lineage},
        "model": {key: config[key] for key in ("architectures", "model_type", "dtype", "torch_dtype") if key in config},
        **summary(stored, keys),
        "files": found.files,
        "bytes": sum(file["bytes"] for file in found.files.values()),
        "made_by": made_by,
        "damage": found.damage,
        "warnings": found.warnings,
    }


def _describe_run(path: Path, hashes: bool) -> dict[str, Any]:
    directory, run = RunDirectory(path), load_run(path / "run.json")
    parts: list[tuple[Path, dict[str, Any], dict[str, FileRecord], str]] = []
    found = _Findings()
    for parent in (directory.checkpoints, directory.restarts, directory.hf):
        for part in sorted(path for path in parent.glob("[!.]*") if path.is_dir()):
            with found.noting():
                if parent == directory.hf:
                    lineage, files = read_lineage(part) or ({}, {})
                    parts.append((part, lineage, files, LINEAGE_JSON))
                else:
                    record = read_checkpoint_record(part)
                    parts.append((part, record.model_dump(mode="json"), record.files, CHECKPOINT_JSON))
    listed = {}
    for part, told, files, seal in parts:
        checked = _check(part, files, hashes, seal=seal)
        found.damage += checked.damage
        states = {file["state"] for name, file in checked.files.items() if name in files}
        listed[str(part.relative_to(path))] = {
            **{key: told.get(key) for key in ("step", "tokens", "learning_rate", "train_loss", "held_out_loss")},
            "bytes": sum(file["bytes"] for file in checked.files.values()),
            "state": _state_of_all(states),
        }
    origin: dict[str, Any] = {}
    with found.noting():
        if directory.environment_json.exists():
            recorded = attempts(directory.environment_json)
            origin = {"attempts": len(recorded), **recorded[-1]}
    return {
        "path": str(path),
        "kind": "run",
        **{"run": run.name, "engine": run.engine, "precision": run.precision},
        "status": _status(directory),
        **{"total_steps": run.total_steps, "total_tokens": run.total_steps * run.tokens_per_step},
        "model": run.model.model_dump(mode="json"),
        "parts": listed,
        "quarantined": sorted(part.name for part in directory.quarantine.glob("*")),
        "bytes": sum(part["bytes"] for part in listed.values()),
        "made_by": origin,
        "damage": found.damage,
        "warnings": found.warnings,
    }


def _status(directory: RunDirectory) -> str:
    """How the last attempt ended."""
    try:
        return str(json.loads(directory.status_json.read_text())["status"])
    except FileNotFoundError:
        return "no attempt has ended"
    except (ValueError, KeyError, TypeError):
        return f"{directory.status_json.name} cannot be read"


def _state_of_all(states: set[str]) -> str:
    """Of a directory, by those of its recorded files."""
    damaged = sorted(state for state in states if state not in (VERIFIED, NOT_CHECKED))
    return (damaged or sorted(states) or [NOT_RECORDED])[0]


def _check(path: Path, records: dict[str, FileRecord], hashes: bool, *, seal: str) -> _Findings:
    """Every file of a directory but its seal, with its size; the recorded ones with what became of their hash."""
    found = _Findings()
    present = {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}
    for name in sorted((present.keys() | records.keys()) - {seal}):
        state = NOT_CHECKED if name in records else NOT_RECORDED
        found.files[name] = {"bytes": present.get(name, 0), "state": state}
    if not hashes:
        return found
    names = sorted(records, key=lambda name: -records[name].bytes)
    with Progress(f"hash {path.name}", total=len(names)) as progress:
        for index, problem in each(lambda name: first_damage(path, {name: records[name]}), names, default_processes()):
            found.files[names[index]]["state"] = f"DAMAGED: {problem}" if problem else VERIFIED
            found.damage += [problem] if problem else []
            progress.advance()
    found.damage.sort()
    return found
