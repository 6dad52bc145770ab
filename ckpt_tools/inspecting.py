"""Description of checkpoints and HF directories from their records; opens no pickle."""

import math
from pathlib import Path
from typing import Any

from base.errors import UserError, printable
from ckpt_tools.checkpoint import model_of, verified_record
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.parallel import verify_in_parallel
from ckpt_tools.hf.directory import read_download, read_lineage
from ckpt_tools.verify import verify
from train.model.config import parameter_shapes
from train.run.directory import CHECKPOINT_JSON, RunDirectory, read_checkpoint_record

FACTS = (  # of a checkpoint's record, a lineage or a download
    *("run", "step", "tokens", "learning_rate", "train_loss", "held_out_loss"),
    *("engine", "precision", "layout", "dtype", "average", "weights_only", "imported"),
    *("repo", "revision", "commit", "quantdyn"),
)


def inspect(paths: list[Path], *, check: bool = False) -> None:
    """Print what each directory is, and with `check` whether it is unchanged since it was written.

    A run stands for all of its directories. `check` hashes files, and compares every module of
    an export with the engine's outputs.

    Raises:
        UserError: a path is nothing of that kind, or damaged; the first such path, after all others
            were printed.
    """
    paths = [part for path in paths for part in _parts(path)]
    failures = []
    for path in paths:
        try:
            description = describe(path)
            if check:
                description["verdict"] = _verdict(path)
        except UserError as error:
            failures.append(str(error))
            continue

        files = description.pop("files")
        lines = [str(path)]
        for key, value in description.items():
            # Not `isinstance`: a bool is an int, too.
            text = f"{value:,}" if type(value) is int else value
            lines.append(f"  {key.replace('_', ' '):<15} {text}")
        lines += [f"    {size:>18,}  {name}" for name, size in files.items()]
        for line in lines:
            # Records may come from others: nothing in them steers the terminal or begins a line.
            print(printable(line).replace("\n", "?"))

    if failures:
        several = f"{len(failures)} of {len(paths)} failed: " if len(paths) > 1 else ""
        raise UserError(several + failures[0])


def _parts(path: Path) -> list[Path]:
    """Return the checkpoints and exports of a run; any other path alone, and a run without them."""
    directory = RunDirectory(path)
    if not directory.run_json.exists():
        return [path]
    parents = (directory.checkpoints, directory.hf)
    parts = [part for parent in parents for part in sorted(parent.glob("[!.]*")) if part.is_dir()]
    return parts or [path]


def describe(path: Path) -> dict[str, Any]:
    """Return kind, facts, number of parameters, bytes, and files with their sizes."""
    if (path / CHECKPOINT_JSON).exists():
        record = read_checkpoint_record(path)
        kind, facts = "checkpoint", record.model_dump(mode="json")
        shapes = list(parameter_shapes(model_of(path, record)).values())
    elif (path / "config.json").exists():
        lineage, _ = read_lineage(path) or ({}, {})
        download = read_download(path)
        facts = lineage | (download.model_dump() if download else {})
        origin = lineage.get("kind", "download" if download else "without lineage")
        kind = f"HF directory, {origin}"
        shapes = [tensor.shape for tensor in HFWeights(path).tensors.values()]
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
        "parameters": sum(map(math.prod, shapes)),
        "bytes": sum(sizes.values()),
        "files": sizes,
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
