"""Verification of an HF directory: its files, its tensors, and what every module computes."""

import difflib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig

from base.errors import UserError
from base.files import FileRecord
from ckpt_tools.formats.hf_weights import HFWeights, weight_files
from ckpt_tools.formats.parallel import default_processes, first_damage_in_parallel
from ckpt_tools.hf.directory import LINEAGE_JSON, VERIFICATION_PROBE, read_lineage
from ckpt_tools.hf.forward import empty_model, names_in_files, read_config, spread_ids
from ckpt_tools.probe import check_probe, compute_probe, stage_of
from train.run.directory import PROBE_OUTPUTS, PROBE_SEQUENCES, PROBE_TOKENS

CHUNK_BYTES = 64 << 20  # of a tensor in memory at once
MOST_PROBLEMS = 5  # named in one line
AGAIN = {  # next action, by kind of lineage
    "export": "export the checkpoint again",
    "average": "make the average again",
}


def verify(hf_dir: Path) -> dict[str, Any]:
    """Check files against lineage.json, tensors against config.json, outputs against the engine's.

    A directory that is no export, such as a downloaded one or an average, has no engine's outputs
    to reproduce: only its forward pass is checked to be finite, and `verdict` says so.

    Returns:
        path, kind of lineage, number of files checked, `check_tensors`, `check_probe` as parity,
        and a verdict.

    Raises:
        UserError: names the first file, the tensors or the parameters that are wrong.
    """
    lineage, files = read_lineage(hf_dir) or ({}, {})
    kind = str(lineage.get("kind", "none"))
    again = AGAIN.get(kind, "fetch it again")
    if lineage:
        _check_files(hf_dir, files, kind, again)
    weights, config = HFWeights(hf_dir), read_config(hf_dir)
    report = {"path": str(hf_dir), "lineage": kind, "files": len(files)}
    try:
        report["tensors"] = check_tensors(weights, config)
        if kind == "export":
            probe = load_file(hf_dir / VERIFICATION_PROBE)
            report["parity"] = check_probe(hf_dir, probe, lineage["parity"]["precision"])
            engine = f"the {lineage['engine']} engine"
            source = "the model that was imported" if lineage["imported"] else engine
            report["verdict"] = f"computes what {source} did, at step {lineage['step']}"
        else:
            report["forward"] = _check_finite(hf_dir, config.vocab_size)
            report["verdict"] = "sound and finite; no engine's probe vouches for these weights"
    except (SafetensorError, KeyError) as error:
        raise UserError(
            f"{hf_dir}: {VERIFICATION_PROBE} or {LINEAGE_JSON} is damaged ({error!r}); {again}"
        ) from None
    except UserError as error:
        raise UserError(f"{hf_dir}: {error}; {again}") from None
    return report


def _check_files(hf_dir: Path, files: dict[str, FileRecord], kind: str, again: str) -> None:
    """Raise UserError unless every file that is read from here on is recorded and unchanged."""
    damage = first_damage_in_parallel(hf_dir, files, default_processes())
    if damage:
        raise UserError(f"{damage}; {again}")
    needed = ["config.json", *(path.name for path in weight_files(hf_dir))]
    for name in [*needed, VERIFICATION_PROBE] if kind == "export" else needed:
        if name not in files:
            state = "is not in lineage.json" if (hf_dir / name).exists() else "is missing"
            raise UserError(f"{hf_dir / name} {state}; {again}")


def check_tensors(weights: HFWeights, config: PretrainedConfig) -> dict[str, Any]:
    """Compare the tensors of the files with config.json, and look for values that are not finite.

    Returns:
        Numbers of tensors and parameters, and their dtype.

    Raises:
        UserError: names the tensors that are missing, renamed, unknown, misshapen, of another type
            or not finite.
    """
    dtype = config.dtype or next(iter(weights.tensors.values())).dtype
    model = empty_model(config)  # which changes the dtype in its configuration
    held = model.state_dict()
    shapes = {file: tuple(held[name].shape) or (1,) for name, file in names_in_files(model).items()}
    problems = list(_wrong_names(weights, shapes))
    for name in shapes.keys() & weights.tensors.keys():
        tensor = weights.tensors[name]
        if tensor.shape != shapes[name]:
            problems.append(f"'{name}' is {tensor.shape}, config.json makes it {shapes[name]}")
        if tensor.dtype != dtype:
            problems.append(f"'{name}' is {tensor.dtype}, config.json says {dtype}")
        if not all(rows.isfinite().all() for rows in _chunks(weights, name)):
            problems.append(f"'{name}' holds values that are not finite")
    if problems:
        left = len(problems) - MOST_PROBLEMS
        more = f", and {left} more problems" if left > 0 else ""
        raise UserError(", ".join(sorted(problems)[:MOST_PROBLEMS]) + more)
    return {
        "tensors": len(shapes),
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "dtype": str(dtype).removeprefix("torch."),
    }


def _wrong_names(weights: HFWeights, shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Name missing and unknown tensors; an unknown one of a missing one's shape may be renamed."""
    missing = sorted(shapes.keys() - weights.tensors.keys())
    for name in sorted(weights.tensors.keys() - shapes.keys()):
        fitting = [other for other in missing if shapes[other] == weights.tensors[name].shape]
        closest = difflib.get_close_matches(name, fitting, n=1)
        if closest:
            missing.remove(closest[0])
            yield f"'{closest[0]}' is missing, perhaps renamed to '{name}'"
        else:
            yield f"'{name}' is unknown"
    yield from (f"'{name}' is missing" for name in missing)


def _chunks(weights: HFWeights, name: str) -> Iterator[Tensor]:
    """Yield a tensor some rows at a time."""
    tensor = weights.tensors[name]
    rows = max(1, CHUNK_BYTES // tensor.row_bytes)
    for start in range(0, tensor.shape[0], rows):
        yield weights.read(name, start, min(start + rows, tensor.shape[0]))


def _check_finite(hf_dir: Path, vocab_size: int) -> dict[str, Any]:
    """Return the largest |logit| for fixed tokens; UserError naming a module that overflows."""
    outputs = compute_probe(hf_dir, spread_ids(vocab_size, PROBE_SEQUENCES, PROBE_TOKENS))
    for key in sorted(outputs, key=stage_of):
        if not outputs[key].isfinite().all():
            raise UserError(
                f"'{key.removeprefix(PROBE_OUTPUTS)}' overflows in a forward pass in fp32"
            )
    return {"max_logit": outputs["logits"].abs().max().item()}
