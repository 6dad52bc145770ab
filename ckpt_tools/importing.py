"""Import of an HF model as a checkpoint that runs start from: its weights, bit for bit."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from base.errors import UserError
from base.files import (
    FileRecord,
    committed_directory,
    fsync_path,
    record_file,
    sha256_of,
    write_json,
)
from ckpt_tools.formats.hf_weights import HFWeights, weight_files
from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.formats.parallel import default_processes, each, first_damage_in_parallel
from ckpt_tools.formats.weights import DTYPES, Weights
from ckpt_tools.hf.directory import TOKENIZER_FILES
from ckpt_tools.hf.forward import check_shapes, empty_model, spread_ids
from ckpt_tools.hf.source import CONFIGURATION_FILES, find_source, read_model
from ckpt_tools.probe import compute_probe
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


def import_checkpoint(source: str, out: Path, *, processes: int | None = None) -> None:
    """Write a checkpoint from an HF model, and print the `start_from` of a run that begins with it.

    It holds the weights by HF name, which both engines start from at any layout; the probe, which
    is what transformers computes in fp32 from the source; configuration and tokenizer of the source
    unchanged; and in checkpoint.json the hashes of all it was made from, with the step and tokens
    that a lineage or the revision's name says, else 0.

    Args:
        source: HF directory, or OWNER/NAME@REVISION of the hub.
        out: a new directory; if it already is this import, nothing is done.
        processes: at once; None: one per core.

    Raises:
        UserError: the source is damaged, or of an architecture, configuration or type that runs do
            not know; or `out` is something else.
    """
    processes = processes or default_processes()
    origin = find_source(source)
    damage = first_damage_in_parallel(origin.path, origin.files, processes)
    if damage:
        raise UserError(f"{damage}; restore {origin.path}, or make it again")
    model, config = read_model(origin.path)
    weights = HFWeights(origin.path)
    check_shapes(empty_model(config), weights, origin.path)
    weights.stored = {name: weights.stored[name] for name in parameter_shapes(model)}
    files = [path.name for path in weight_files(origin.path)]
    tokenizer = [name for name in TOKENIZER_FILES if (origin.path / name).is_file()]
    hashes = _hashes(origin.path, [*files, *tokenizer], origin.files, processes)
    record = CheckpointRecord(
        run=IMPORTED,
        fingerprint=IMPORTED,
        step=origin.step or 0,
        tokens=origin.tokens or 0,
        learning_rate=0.0,
        train_loss=None,
        held_out_loss=None,
        engine="either",
        precision=_precision(weights),
        world_size=1,
        layout={"tensor": 1, "pipeline": 1, "data": 1},
        attempt=0,
        data_sha256={},
        model=model.model_dump(mode="json"),
        imported={
            "source": origin.repository or str(origin.path.resolve()),
            "revision": origin.revision,
            "weights_sha256": {name: hashes[name] for name in files},
            "tokenizer_sha256": {name: hashes[name] for name in tokenizer},
            "optimizer_state": False,
        },
        files={},
    )
    if not _is_there(out, record, processes):
        with committed_directory(out) as aside:
            written = write_weights(aside, weights, processes=processes, label="import")
            for name in written:
                fsync_path(aside / name)
            written |= _copy_configuration(origin.path, aside / IMPORTED_FROM, tokenizer)
            length = min(PROBE_TOKENS, config.max_position_embeddings)
            written[PROBE] = _write_probe(origin.path, aside, model.vocab_size, length)
            complete = record.model_copy(update={"files": dict(sorted(written.items()))})
            write_json(aside / CHECKPOINT_JSON, complete.model_dump(mode="json"))
    start_from = {"checkpoint": str(out.resolve()), "sha256": sha256_of(out / CHECKPOINT_JSON)}
    print(
        f"{out}: as of step {record.step}, {record.tokens} tokens; to start a run from it, add to"
        " its run.json"
    )
    print(f'"start_from": {json.dumps(start_from)}')


def _precision(weights: Weights) -> str:
    """Return the one type of all weights, by its name in run.json."""
    names = {dtype: name for name, dtype in DTYPES.items() if name != "fp16"}
    first = next(iter(weights.tensors.values())).dtype
    for name, tensor in weights.tensors.items():
        if tensor.dtype not in names:
            raise UserError(
                f"'{name}' is {tensor.dtype}, runs are trained in fp32 or bf16; convert the weights"
            )
        if tensor.dtype != first:
            raise UserError(
                f"'{name}' is {tensor.dtype}, others are {first}; convert the weights to one type"
            )
    return names[first]


def _hashes(
    directory: Path, names: list[str], checked: dict[str, FileRecord], processes: int
) -> dict[str, str]:
    """Return the SHA-256 of every file; files that were just checked are not read again."""

    def digest(name: str) -> str:
        return checked[name].sha256 if name in checked else sha256_of(directory / name)

    return {names[index]: sha256 for index, sha256 in each(digest, names, processes)}


def _is_there(out: Path, record: CheckpointRecord, processes: int) -> bool:
    """Return whether `out` is whole and this import; UserError if it is something else."""
    if not out.exists():
        return False
    if (out / CHECKPOINT_JSON).is_file():
        present = read_checkpoint_record(out)
        if present.model_copy(update={"files": {}}) == record:
            return first_damage_in_parallel(out, present.files, processes) is None
    raise UserError(f"{out} exists and is not this import; give a new directory or remove it")


def _copy_configuration(source: Path, target: Path, tokenizer: list[str]) -> dict[str, FileRecord]:
    """Copy configuration and tokenizer; return their records, by path within the checkpoint."""
    target.mkdir()
    names = [name for name in CONFIGURATION_FILES if (source / name).is_file()] + tokenizer
    for name in names:
        shutil.copyfile(source / name, target / name)
    return {f"{target.name}/{name}": record_file(target / name) for name in names}


def _write_probe(source: Path, target: Path, vocab_size: int, length: int) -> FileRecord:
    """Write what transformers computes from the source for fixed tokens."""
    input_ids_BS = spread_ids(vocab_size, PROBE_SEQUENCES, length)
    probe = {"input_ids": input_ids_BS, **compute_probe(source, input_ids_BS)}
    save_file({name: tensor.contiguous() for name, tensor in probe.items()}, target / PROBE)
    return record_file(target / PROBE)
