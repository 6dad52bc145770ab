"""Export of a training checkpoint to HF, refused unless HF computes what the engine did."""

import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from base.environment import environment
from base.errors import UserError
from base.files import committed_directory, record_file, sha256_of, write_json
from base.progress import Progress
from ckpt_tools.checkpoint import model_of, open_weights, run_of, verified_record
from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.formats.parallel import default_processes, first_damage_in_parallel
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.directory import LINEAGE_JSON, TOKENIZER_FILES, VERIFICATION_PROBE, read_lineage
from train.data.tokenizer import load_tokenizer
from train.model.families import hf_settings
from train.run.directory import CHECKPOINT_JSON, IMPORTED_FROM, PROBE, CheckpointRecord

FACTS = {  # of a checkpoint, in the lineage of its export
    *("run", "fingerprint", "step", "tokens", "learning_rate", "train_loss", "held_out_loss"),
    *("average", "imported", "engine", "precision", "world_size", "layout", "data_sha256"),
}
EXACT = "fp32"  # in which the engine's outputs and HF's differ by the order of sums alone


def export_all(
    pairs: list[tuple[Path, Path]],
    *,
    main: bool = False,
    dtype: str | None = None,
    processes: int | None = None,
) -> None:
    """Export (checkpoint, directory) after (checkpoint, directory), with progress."""
    if len({target for _, target in pairs}) != len(pairs):
        raise UserError("two checkpoints have the same name; export them one by one")
    if len(pairs) == 1:
        export(*pairs[0], main=main, dtype=dtype, processes=processes, label="export")
        return
    with Progress("export", total=len(pairs)) as progress:
        for checkpoint, target in pairs:
            parity = export(checkpoint, target, main=main, dtype=dtype, processes=processes)
            progress.advance(parity=parity["max_absolute_error"])


def export(
    checkpoint: Path,
    out: Path,
    *,
    main: bool = False,
    dtype: str | None = None,
    processes: int | None = None,
    label: str | None = None,
) -> dict[str, Any]:
    """Write an HF directory: weights, configuration, tokenizer, probe, and lineage.json last.

    Weights go from the sharded files to the HF files some rows at a time. The lineage of an average
    (`RUN/checkpoints/lawa5x500-stepXXXXXXXX`) lists, under "average", its members.

    Args:
        checkpoint: RUN/checkpoints/stepXXXXXXXX, or an imported one; its files are hash-checked
            before any is opened.
        out: the directory to write, whole or not at all; an export of another checkpoint there is
            replaced.
        main: the optimizer's fp32 weights instead of those that the model computed with.
        dtype: type to write, of `DTYPES`; None: the stored one.
        processes: at once; None: one per core. The files do not depend on it.
        label: of a progress bar over the files; None: there is none.

    Returns:
        The figures of `check_probe`.

    Raises:
        UserError: the checkpoint is damaged or not of its run, or HF computes something else than
            its engine did.
    """
    processes = processes or default_processes()
    record = verified_record(checkpoint, processes)
    if record.precision not in DTYPES:
        raise UserError(
            f"{checkpoint} was trained in {record.precision}, for which no tolerance between the"
            " engine's outputs and HF's is known; export checkpoints trained in fp32 or bf16"
        )
    stored = EXACT if main else record.precision
    lineage = {
        "kind": "export",
        "checkpoint": str(checkpoint.resolve()),
        "checkpoint_sha256": sha256_of(checkpoint / CHECKPOINT_JSON),
        "weights": "main" if main else "trained",
        "dtype": dtype or stored,
        **record.model_dump(mode="json", include=FACTS),
    }
    current = _current_parity(out, lineage, processes)
    if current:
        return current
    with committed_directory(out) as aside:
        weights = open_weights(checkpoint, record, main=main)
        files = write_weights(
            aside,
            weights,
            dtype=DTYPES[lineage["dtype"]],
            processes=processes,
            label=label,
            meanwhile=lambda: _copy_configuration(aside, checkpoint, record, lineage["dtype"]),
        )
        (aside / VERIFICATION_PROBE).parent.mkdir()
        shutil.copyfile(checkpoint / PROBE, aside / VERIFICATION_PROBE)
        parity = _check(aside, checkpoint, record, lineage["dtype"])
        others = {
            str(path.relative_to(aside)) for path in aside.rglob("*") if path.is_file()
        } - files.keys()
        files |= {name: record_file(aside / name) for name in sorted(others)}
        recorded = {name: file.model_dump() for name, file in sorted(files.items())}
        write_json(
            aside / LINEAGE_JSON,
            {**lineage, "parity": parity, "files": recorded, "environment": environment()},
        )
    return parity


def _current_parity(out: Path, lineage: dict[str, Any], processes: int) -> dict[str, Any] | None:
    """Return the parity figures of `out` if it is the whole, unchanged export of these weights.

    Raises:
        UserError: something else is there, which an export must not replace.
    """
    if not out.exists():
        return None
    present, files = read_lineage(out) or ({}, {})
    if present.get("kind") != "export":
        raise UserError(f"{out} exists and is no export; give a new directory or remove it")
    if any(present.get(key) != lineage[key] for key in ("checkpoint_sha256", "weights", "dtype")):
        return None
    damage = first_damage_in_parallel(out, files, processes)
    return None if damage else dict(present["parity"])


def _copy_configuration(out: Path, checkpoint: Path, record: CheckpointRecord, dtype: str) -> None:
    """Write config.json, generation_config.json and the tokenizer, of the run or of the import."""
    # Imports transformers, while other processes already write the weights.
    from ckpt_tools.hf.configuration import change_dtype, write_configuration

    if record.imported is not None:
        for name in record.files:
            if Path(name).parent == Path(IMPORTED_FROM):
                shutil.copyfile(checkpoint / name, out / Path(name).name)
        if dtype != record.precision:
            change_dtype(out, dtype)
        return
    directory, run = run_of(checkpoint, record)
    tokenizer = directory.resolve(run.data.tokenizer)
    _, eos_token_id = load_tokenizer(tokenizer)
    model = model_of(checkpoint, record)
    write_configuration(
        out, model.family, hf_settings(model, run.data.sequence_length, eos_token_id), dtype
    )
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, out / name)


def _check(hf_dir: Path, checkpoint: Path, record: CheckpointRecord, dtype: str) -> dict[str, Any]:
    """Return the figures of `check_probe` for a directory that is not committed yet."""
    from ckpt_tools.probe import check_probe  # imports transformers

    try:
        probe = load_file(checkpoint / PROBE)
    except SafetensorError as error:
        raise UserError(
            f"{checkpoint / PROBE} is damaged ({error}); give another checkpoint"
        ) from None
    # The probe of an import is computed in fp32 from the stored weights, whatever their type.
    computed = EXACT if record.imported is not None else record.precision
    exact = computed == EXACT and dtype in (EXACT, record.precision)
    try:
        return check_probe(hf_dir, probe, EXACT if exact else "bf16")
    except UserError as error:
        raise UserError(f"{checkpoint}: {error}; nothing was exported") from None
