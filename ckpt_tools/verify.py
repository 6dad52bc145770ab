"""Verification of an HF directory: its files, its tensors, and what every module computes."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from transformers import PretrainedConfig

from base.errors import UserError
from base.reading import as_model
from ckpt_tools.formats.hf_weights import HFWeights, read_tensors
from ckpt_tools.formats.parallel import verify_in_parallel
from ckpt_tools.formats.weight_files import weight_files
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.directory import LINEAGE_JSON, VERIFICATION_PROBE, read_lineage
from ckpt_tools.hf.forward import check_shapes, empty_model, spread_ids
from ckpt_tools.probe import check_probe, compute_probe, stage_of
from train.run.directory import PROBE_OUTPUTS, PROBE_SEQUENCES, PROBE_TOKENS

CHUNK_BYTES = 64 << 20  # of a tensor in memory at once


class _Parity(BaseModel):
    precision: Literal["fp32", "bf16"]


class _Export(BaseModel):
    """The part of an export's lineage that is about its engine."""

    parity: _Parity
    engine: str
    imported: dict[str, Any] | None
    step: int


def verify(hf_dir: Path) -> dict[str, Any]:
    """Check files against lineage.json, tensors against config.json, outputs against the engine's.

    A directory that is not an export, such as a download or an average, has no engine's outputs to
    reproduce: its forward pass is only checked to be finite, and `verdict` says so.

    Returns:
        A verdict, and of an export the figures of `check_probe` as parity.

    Raises:
        UserError: names the first file, the tensors or the parameters that are wrong.
    """
    lineage, files = read_lineage(hf_dir) or ({}, {})
    exported = lineage.get("kind") == "export"
    again = f"make {hf_dir} again"
    verify_in_parallel(hf_dir, files, again)

    # A file that the lineage does not list has not been checked.
    needed = ["config.json", *(path.name for path in weight_files(hf_dir))]
    needed += [VERIFICATION_PROBE] * exported
    unknown = [name for name in needed if name not in files]
    if lineage and unknown:
        raise UserError(f"{hf_dir / unknown[0]} is not in lineage.json; {again}")

    config = read_config(hf_dir)
    _check_tensors(hf_dir, config, mixed=not lineage)
    try:
        if exported:
            probe = read_tensors(hf_dir / VERIFICATION_PROBE)
            facts = as_model(_Export, lineage, hf_dir / LINEAGE_JSON)
            parity = check_probe(hf_dir, probe, facts.parity.precision)
            engine = f"the {facts.engine} engine"
            source = "the model that was imported" if facts.imported else engine
            verdict = f"computes what {source} did, at step {facts.step}"
            return {"verdict": verdict, "parity": parity}
        _check_finite(hf_dir, config.vocab_size)
    except UserError as error:
        raise UserError(f"{hf_dir}: {error}; {again}") from None
    return {"verdict": "sound and finite; no engine's probe vouches for these weights"}


def _check_tensors(hf_dir: Path, config: PretrainedConfig, *, mixed: bool) -> None:
    """Raise UserError unless all tensors are those of config.json, of its type, and finite.

    With `mixed` some may be of another type: others publish norms in fp32 beside weights in bf16.
    """
    weights = HFWeights(hf_dir)
    dtypes = {tensor.dtype for tensor in weights.tensors.values()}
    dtype = config.dtype or next(iter(dtypes))
    mixed = mixed and dtype in dtypes
    check_shapes(empty_model(config), weights, hf_dir)
    for name, tensor in weights.tensors.items():
        if tensor.dtype != dtype and not mixed:
            raise UserError(
                f"{hf_dir}: '{name}' is {tensor.dtype}, config.json says {dtype}; restore both"
            )
        rows = max(1, CHUNK_BYTES // tensor.row_bytes)
        for start in range(0, tensor.shape[0], rows):
            if not tensor.read(start, min(start + rows, tensor.shape[0])).isfinite().all():
                raise UserError(
                    f"{hf_dir}: '{name}' holds values that are not finite; make it again"
                )


def _check_finite(hf_dir: Path, vocab_size: int) -> None:
    """Raise UserError naming the first module that overflows for fixed tokens."""
    outputs = compute_probe(hf_dir, spread_ids(vocab_size, PROBE_SEQUENCES, PROBE_TOKENS))
    # In the order of the data flow: all modules after the first that overflows do so too.
    for key in sorted(outputs, key=stage_of):
        if not outputs[key].isfinite().all():
            raise UserError(
                f"'{key.removeprefix(PROBE_OUTPUTS)}' overflows in a forward pass in fp32"
            )
