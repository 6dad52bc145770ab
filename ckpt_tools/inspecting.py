"""Description of checkpoints and HF directories from their records; opens no pickle."""

import math
import os
from pathlib import Path
from typing import Any

from base.aligned import aligned, shortened
from base.errors import UserError, printable
from base.quantities import significant, size_in_words
from ckpt_tools.checkpoint import model_of, verified_record
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.parallel import verify_in_parallel
from ckpt_tools.hf.directory import read_download, read_lineage
from ckpt_tools.verify import verify
from train.model.config import parameter_shapes
from train.run.directory import CHECKPOINT_JSON, RunDirectory, read_checkpoint_record

SHOWN = 18  # rows of a table
FACTS = (  # of a checkpoint's record, a lineage or a download
    *("run", "step", "tokens", "learning_rate", "train_loss", "held_out_loss"),
    *("engine", "precision", "layout", "dtype", "average", "weights_only", "imported"),
    *("repo", "revision", "commit", "quantdyn"),
)


def inspect(paths: list[Path], *, check: bool = False, whole: bool = False) -> None:
    """Print what each directory is, and with `check` whether it is unchanged since it was written.

    A run stands for all of its directories; of several there is a row each, with `whole` all facts,
    files and tensors. `check` hashes files, and compares every module of an export with the
    engine's outputs.

    Raises:
        UserError: a path is nothing of that kind, or damaged; the first such path, after all others
            were printed.
    """
    paths = [part for path in paths for part in _parts(path)]
    descriptions: dict[Path, dict[str, Any]] = {}
    failures = []
    for path in paths:
        try:
            description = describe(path)
            if check:
                description["verdict"] = _verdict(path)
        except UserError as error:
            failures.append(str(error))
            continue
        descriptions[path] = description

    if whole or len(descriptions) == 1:
        lines = [line for each in descriptions.items() for line in _facts(*each, whole=whole)]
    else:
        lines = _table(descriptions) if descriptions else []
        if check and lines:
            lines.insert(0, f"{len(descriptions)} of {len(paths)} are sound, by all of their files")
    for line in lines:
        # Records may come from others: nothing in them steers the terminal or begins a line.
        print(printable(line).replace("\n", "?"))

    if failures:
        several = f"{len(failures)} of {len(paths)} failed: " if len(paths) > 1 else ""
        raise UserError(several + failures[0])


def _facts(path: Path, description: dict[str, Any], *, whole: bool) -> list[str]:
    """Return what a directory is, its facts, and the sum of its files, or all of them."""
    facts = dict(description)
    kind, files, tensors = (facts.pop(key) for key in ("kind", "files", "tensors"))
    verdict = facts.pop("verdict", None)
    lines = [f"{path}: {kind}" + (f", {verdict}" if verdict else "")]
    size = f"{size_in_words(facts.pop('bytes'))} in {len(files)} files, {len(tensors)} tensors"
    facts["size"] = size + ("" if whole else "; --all lists them")
    lines += [f"  {key.replace('_', ' '):<15} {_text(key, facts[key])}" for key in facts]
    if whole:
        lines += [f"    {count:>18,}  {name}" for name, count in files.items()]
        lines += [f"    {'x'.join(map(str, shape)):>18}  {name}" for name, shape in tensors.items()]
    return lines


def _text(key: str, value: Any) -> str:
    """Return a fact for the screen; records have all of its digits."""
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4f} nats/token" if key.endswith("loss") else significant(value)
        case dict():
            return ", ".join(f"{name} {inner}" for name, inner in value.items())
        case _:
            return str(value)


def _table(descriptions: dict[Path, dict[str, Any]]) -> list[str]:
    """Return the sum of several directories, and a row for each."""
    parent = os.path.commonpath([path.parent for path in descriptions])
    size = sum(each["bytes"] for each in descriptions.values())
    rows = [("directory", "kind", "step", "tokens", "held-out loss", "parameters", "size")]
    for path, each in descriptions.items():
        step, tokens, loss = (each.get(key) for key in ("step", "tokens", "held_out_loss"))
        rows.append(
            (
                os.path.relpath(path, parent),
                each["kind"].removeprefix("HF directory, "),
                *("-" if count is None else f"{count:,}" for count in (step, tokens)),
                "-" if loss is None else f"{loss:.4f}",
                f"{each['parameters']:,}",
                size_in_words(each["bytes"]),
            )
        )
    return [
        f"{parent}: {len(descriptions)} directories, {size_in_words(size)}",
        *shortened(aligned(rows, right={2, 3, 4, 5}), SHOWN),
        "losses in nats/token; --all lists all facts, files and tensors",
    ]


def _parts(path: Path) -> list[Path]:
    """Return the checkpoints and exports of a run; any other path alone, and a run without them."""
    directory = RunDirectory(path)
    if not directory.run_json.exists():
        return [path]
    parents = (directory.checkpoints, directory.hf)
    parts = [part for parent in parents for part in sorted(parent.glob("[!.]*")) if part.is_dir()]
    return parts or [path]


def describe(path: Path) -> dict[str, Any]:
    """Return kind, facts, parameters, bytes, files by size and tensors by shape."""
    if (path / CHECKPOINT_JSON).exists():
        record = read_checkpoint_record(path)
        kind, facts = "checkpoint", record.model_dump(mode="json")
        shapes = parameter_shapes(model_of(path, record))
    elif (path / "config.json").exists():
        lineage, _ = read_lineage(path) or ({}, {})
        download = read_download(path)
        facts = lineage | (download.model_dump() if download else {})
        origin = lineage.get("kind", "download" if download else "without lineage")
        kind = f"HF directory, {origin}"
        shapes = {name: tensor.shape for name, tensor in HFWeights(path).tensors.items()}
    else:
        raise UserError(
            f"{path} is no checkpoint or HF directory, nor a run that holds one; give a RUN after"
            " its first checkpoint, RUN/checkpoints/NAME or RUN/hf/NAME"
        )
    files = sorted(file for file in path.rglob("*") if file.is_file())
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in files}
    return {
        "kind": kind,
        **{key: facts[key] for key in FACTS if facts.get(key) is not None},
        "parameters": sum(map(math.prod, shapes.values())),
        "bytes": sum(sizes.values()),
        "files": sizes,
        "tensors": shapes,
    }


def _verdict(path: Path) -> str:
    """Return the result of a full check; UserError naming the first wrong file or parameter."""
    if (path / CHECKPOINT_JSON).exists():
        record = verified_record(path)
        return f"all {len(record.files)} files are as they were written"
    download = read_download(path)
    if download:
        verify_in_parallel(path, download.files, "download it again")
    return str(verify(path)["verdict"])
