"""Export of a training checkpoint to HF, refused unless HF computes what the engine did."""

import shutil
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.files import sha256_of
from base.progress import Progress
from base.quantities import significant
from ckpt_tools.checkpoint import model_of, open_weights, run_of, verify_recorded
from ckpt_tools.formats.hf_weights import read_tensors
from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.formats.parallel import is_whole
from ckpt_tools.formats.weights import dtype_of
from ckpt_tools.hf.configuration import complete_configuration, write_configuration
from ckpt_tools.hf.directory import (
    TOKENIZER_FILES,
    VERIFICATION_PROBE,
    copy_files,
    may_be_restored,
    read_lineage,
    remade,
    write_lineage,
)
from ckpt_tools.probe import check_probe
from train.data.tokenizer import load_tokenizer
from train.model.config import hf_settings
from train.model.precision import dtype_of as products_dtype
from train.run.directory import (
    CHECKPOINT_JSON,
    IMPORTED_FROM,
    PROBE,
    CheckpointRecord,
    read_checkpoint_record,
)

FACTS = {  # of a checkpoint, in the lineage of its export
    *("run", "fingerprint", "step", "tokens", "learning_rate", "train_loss", "held_out_loss"),
    *("average", "imported", "engine", "precision", "world_size", "layout", "data_sha256"),
}


def export_all(pairs: list[tuple[Path, Path]]) -> None:
    """Export (checkpoint, directory) after (checkpoint, directory), and print what proves them."""
    if len({target for _, target in pairs}) != len(pairs):
        raise UserError("two checkpoints have the same name; export them one by one")
    parities = []
    with Progress("export", total=len(pairs)) as progress:
        for checkpoint, target in pairs:
            parities.append(export(checkpoint, target)["max_absolute_error"])
            progress.advance(parity=parities[-1])
    (_, target), *others = pairs
    exported = f"{len(pairs)} checkpoints to {target.parent}" if others else str(target)
    print(
        f"exported {exported}: HF computes what the engine did, logits differ by at most"
        f" {significant(max(parities), 2)}"
    )


def export(checkpoint: Path, out: Path) -> dict[str, Any]:
    """Write an HF directory: weights, configuration, tokenizer, probe, and lineage.json last.

    Weights go from the sharded files to the HF files some rows at a time. Two checks prove them:
    their files have the hashes of checkpoint.json, which are compared before the first row is
    copied, and transformers computes from the written files what the engine did. Files of optimizer
    state are not read; `ckpt_tools inspect --verify` hashes those too.

    Args:
        checkpoint: of either engine.
        out: the directory to write, whole or not at all; an export of another checkpoint there is
            replaced, of a damaged export of this one the damaged files.

    Returns:
        The figures of `check_probe`.

    Raises:
        UserError: the checkpoint is damaged or not of its run, or HF and its engine compute
            different outputs.
    """
    record = read_checkpoint_record(checkpoint)
    lineage = {
        "kind": "export",
        "checkpoint": str(checkpoint.resolve()),
        "checkpoint_sha256": sha256_of(checkpoint / CHECKPOINT_JSON),
        "weights": "trained",
        "dtype": record.dtype,
        **record.model_dump(mode="json", include=FACTS),
    }
    present, damaged = _present(out, lineage)
    if present:
        return present
    with remade(out, damaged=damaged) as aside:
        copied = [name for name in record.files if name.startswith(f"{IMPORTED_FROM}/")]
        verify_recorded(checkpoint, record, [PROBE, *copied])
        weights = open_weights(checkpoint, record)
        dtype_of(weights, (record.dtype,), checkpoint)
        files = write_weights(aside, weights)
        _copy_configuration(aside, checkpoint, record)
        (aside / VERIFICATION_PROBE).parent.mkdir()
        shutil.copyfile(checkpoint / PROBE, aside / VERIFICATION_PROBE)
        parity = _check(aside, checkpoint, record)
        # Last, after the outputs agreed: without lineage.json a directory is no export.
        write_lineage(aside, {**lineage, "parity": parity}, files)
    return parity


def _present(out: Path, lineage: dict[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """Return the parity figures of `out` if it is this export, whole; and whether it is damaged.

    UserError if it is not an export.
    """
    if not out.exists():
        return None, False
    if may_be_restored(out):
        return None, True
    present, files = read_lineage(out) or ({}, {})
    if present.get("kind") != "export":
        raise UserError(f"{out} exists and is not an export; give a new directory")
    # Of another checkpoint: replaced as a whole, so nothing of it has to be checked.
    if any(present.get(key) != lineage[key] for key in ("checkpoint_sha256", "weights", "dtype")):
        return None, False
    return (dict(present["parity"]), False) if is_whole(out, files) else (None, True)


def _copy_configuration(out: Path, checkpoint: Path, record: CheckpointRecord) -> None:
    """Write config.json, generation_config.json and the tokenizer, of the run or of the import."""
    if record.imported is not None:
        imported = [Path(name) for name in record.files if name.startswith(f"{IMPORTED_FROM}/")]
        copy_files(checkpoint / IMPORTED_FROM, out, [path.name for path in imported])
        complete_configuration(out, record.dtype)
        return
    directory, run = run_of(checkpoint, record)
    tokenizer = directory.resolve(run.data.tokenizer)
    _, eos_token_id = load_tokenizer(tokenizer)
    model = model_of(checkpoint, record)
    write_configuration(
        out,
        model.family,
        hf_settings(model, run.data.sequence_length, eos_token_id),
        record.dtype,
    )
    copy_files(tokenizer, out, TOKENIZER_FILES)


def _check(hf_dir: Path, checkpoint: Path, record: CheckpointRecord) -> dict[str, Any]:
    """Return the figures of `check_probe` for a directory that is not committed yet."""
    # The probe of an import is computed in fp32 from the stored weights, whatever their type.
    precision = "fp32" if record.imported is not None else products_dtype(record.precision)
    try:
        return check_probe(hf_dir, read_tensors(checkpoint / PROBE), precision)
    except UserError as error:
        raise UserError(f"{checkpoint}: {error}; nothing was exported") from None
