"""Import of an HF model as a checkpoint that runs start from: its weights, bit for bit."""

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from base.errors import UserError
from base.files import committed_directory, fsync_path, record_file, sha256_of, write_sealed
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.formats.parallel import hash_in_parallel, is_whole, verify_in_parallel
from ckpt_tools.formats.weight_files import weight_files
from ckpt_tools.formats.weights import DTYPES, dtype_of
from ckpt_tools.hf.directory import CONFIGURATION_FILES, TOKENIZER_FILES, copy_files
from ckpt_tools.hf.forward import check_shapes, empty_model, spread_ids
from ckpt_tools.hf.source import Source, find_source, read_model
from ckpt_tools.probe import compute_probe
from train.model.config import ModelConfig
from train.model.families import parameter_shapes
from train.run.directory import (
    CHECKPOINT_JSON,
    IMPORTED_FROM,
    PROBE,
    PROBE_SEQUENCES,
    PROBE_TOKENS,
    CheckpointRecord,
    read_checkpoint_record,
)

IMPORTED = "imported"  # in the place of a run's name and fingerprint


def import_checkpoint(source: str, out: Path) -> None:
    """Write a checkpoint from an HF model, and print the `start_from` of a run that begins with it.

    It holds the weights by HF name, which both engines start from at any layout; the probe, which
    transformers computes in fp32 from the source; configuration and tokenizer of the source
    unchanged; and in checkpoint.json the hashes of all its sources, with the step and tokens of a
    lineage or of the revision's name, else 0.

    Args:
        source: HF directory, or OWNER/NAME@REVISION of the hub.
        out: a new directory; if it already is this import, nothing is done.

    Raises:
        UserError: the source is damaged, or of an architecture, configuration or type that runs do
            not know; or `out` is something else.
    """
    origin = find_source(source)
    verify_in_parallel(origin.path, origin.files, f"restore {origin.path}, or make it again")
    model, config = read_model(origin.path)
    weights = HFWeights(origin.path)
    check_shapes(empty_model(config), weights, origin.path)
    weights.tensors = {name: weights.tensors[name] for name in parameter_shapes(model)}

    record = _record(origin, model, weights)
    if not _is_there(out, record):
        length = min(PROBE_TOKENS, config.max_position_embeddings)
        input_ids_BS = spread_ids(model.vocab_size, PROBE_SEQUENCES, length)
        _write(out, origin.path, record, weights, input_ids_BS)

    start_from = {"checkpoint": str(out.resolve()), "sha256": sha256_of(out / CHECKPOINT_JSON)}
    print(
        f"{out}: as of step {record.step}, {record.tokens} tokens; to start a run from it, add to"
        " its run.json"
    )
    print(f'"start_from": {json.dumps(start_from)}')


def _record(origin: Source, model: ModelConfig, weights: HFWeights) -> CheckpointRecord:
    """Return checkpoint.json of an import, without the files that are still to be written."""
    files = [path.name for path in weight_files(origin.path)]
    tokenizer = [name for name in TOKENIZER_FILES if (origin.path / name).is_file()]
    hashes = hash_in_parallel(origin.path, [*files, *tokenizer], origin.files)
    return CheckpointRecord(
        run=IMPORTED,
        fingerprint=IMPORTED,
        step=origin.step or 0,
        tokens=origin.tokens or 0,
        learning_rate=0.0,
        train_loss=None,
        held_out_loss=None,
        engine="either",
        precision=dtype_of(weights, tuple(DTYPES), origin.path),
        world_size=1,
        layout={"tensor": 1, "pipeline": 1, "data": 1},
        attempt=0,
        data_sha256={},
        model=model.model_dump(mode="json"),
        imported={
            "source": origin.repository or str(origin.path.resolve()),
            "revision": origin.revision,
            "weights_digests": {name: hashes[name].digest for name in files},
            "tokenizer_digests": {name: hashes[name].digest for name in tokenizer},
            "optimizer_state": False,
        },
        files={},
    )


def _write(
    out: Path, source: Path, record: CheckpointRecord, weights: HFWeights, input_ids_BS: Tensor
) -> None:
    """Write the checkpoint; checkpoint.json, which makes it complete, comes last."""
    with committed_directory(out) as aside:
        files = write_weights(aside, weights)
        for name in files:
            fsync_path(aside / name)

        (aside / IMPORTED_FROM).mkdir()
        names = (*CONFIGURATION_FILES, *TOKENIZER_FILES)
        copied = copy_files(source, aside / IMPORTED_FROM, names)

        probe = {"input_ids": input_ids_BS, **compute_probe(source, input_ids_BS)}
        save_file({key: tensor.contiguous() for key, tensor in probe.items()}, aside / PROBE)

        for name in (PROBE, *(f"{IMPORTED_FROM}/{name}" for name in copied)):
            files[name] = record_file(aside / name)
        complete = record.model_copy(update={"files": dict(sorted(files.items()))})
        write_sealed(aside / CHECKPOINT_JSON, complete.model_dump(mode="json"))


def _is_there(out: Path, record: CheckpointRecord) -> bool:
    """Return whether `out` is this import and undamaged; UserError if it is something else."""
    if not out.exists():
        return False
    if (out / CHECKPOINT_JSON).is_file():
        present = read_checkpoint_record(out)
        if present.model_copy(update={"files": {}}) == record:
            return is_whole(out, present.files)
    raise UserError(f"{out} exists and is not this import; give a new directory")
