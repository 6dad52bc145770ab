"""An HF model as a checkpoint that runs start from: its weights bit for bit, and what transformers makes of them."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ckpt_tools.formats.deepspeed_weights import TrainedWeights
from ckpt_tools.formats.deepspeed_writer import write_state
from ckpt_tools.formats.hf_weights import HFWeights, weight_files
from ckpt_tools.formats.hf_writer import SHARD_BYTES, write_weights
from ckpt_tools.formats.megatron_fusion import FusedWeights
from ckpt_tools.formats.megatron_shards import MOMENTS
from ckpt_tools.formats.megatron_writer import empty_objects, write_shards
from ckpt_tools.formats.parallel import default_processes, each, first_damage_in_parallel
from ckpt_tools.formats.weights import DTYPES, Weights
from ckpt_tools.forward import check_shapes, empty_model, spread_ids
from ckpt_tools.hf_directory import TOKENIZER_FILES
from ckpt_tools.hf_source import CONFIGURATION_FILES, find_source, read_model
from ckpt_tools.verify import compute_probe
from train.command import UserError
from train.run_directory import (
    CHECKPOINT_JSON,
    IMPORTED_FROM,
    PROBE,
    PROBE_SEQUENCES,
    PROBE_TOKENS,
    CheckpointRecord,
    FileRecord,
    committed_directory,
    fsync_path,
    read_checkpoint_record,
    record_file,
    sha256_of,
    write_json,
)
from train.settings import ModelConfig, OptimizerConfig, ParallelConfig

IMPORTED = "imported"  # in the place of a run's name and fingerprint
LAYOUTS = {
    "either": {"tensor": 1, "pipeline": 1, "data": 1},
    "megatron": {"tensor": 1, "pipeline": 1, "virtual_pipeline": 1, "context": 1, "data": 1},
    "deepspeed": {"tensor": 1, "pipeline": 1, "data": 1, "zero": 1},
}
KINDS = ("weights", *MOMENTS)  # what DeepSpeed's checkpoints call a parameter's state


def import_checkpoint(
    source: str,
    out: Path,
    *,
    engine: str = "either",
    optimizer_state: bool = False,
    step: int | None = None,
    tokens: int | None = None,
    processes: int | None = None,
) -> None:
    """Writes a checkpoint of one rank from an HF model, and prints the `start_from` that begins a run with it.

    It holds the weights in the engine's format; the probe, which is what transformers computes in fp32 from the source;
    configuration and tokenizer of the source as they are; and in checkpoint.json the hashes of all it was made from.

    Args:
        source: HF directory, or OWNER/NAME@REVISION of the hub.
        out: a new directory; if it already is this import, nothing is done.
        engine: megatron, deepspeed, or either: weights by HF name, which both start from.
        optimizer_state: with fp32 main weights, zero moments and no updates counted; not with 'either'.
        step: updates that the weights have seen; None: what lineage or the revision's name say, else 0.
        tokens: that the weights have seen; None: as for `step`.
        processes: at once; None: one per core.

    Raises:
        UserError: the source is damaged, or of an architecture, configuration or type that runs do not know; or `out`
            is something else.
    """
    if engine == "either" and optimizer_state:
        raise UserError("optimizer state has an engine's format; give --engine megatron or deepspeed, or leave it out")
    processes = processes or default_processes()
    found = find_source(source)
    damage = first_damage_in_parallel(found.path, found.files, processes)
    if damage:
        raise UserError(f"{damage}; restore {found.path}, or make it again")
    model, config = read_model(found.path)
    if engine == "megatron" and model.family != "olmo2":
        raise UserError(f"the megatron engine trains olmo2, not {model.family}; give --engine either or deepspeed")
    stored = HFWeights(found.path)
    check_shapes(empty_model(config), stored, found.path)
    precision = _precision(stored)
    weights = [path.name for path in weight_files(found.path)]
    tokenizer = [name for name in TOKENIZER_FILES if (found.path / name).is_file()]
    hashes = _hashes(found.path, [*weights, *tokenizer], found.files, processes)
    record = CheckpointRecord(
        run=IMPORTED,
        fingerprint=IMPORTED,
        step=(found.step or 0) if step is None else step,
        tokens=(found.tokens or 0) if tokens is None else tokens,
        learning_rate=0.0,
        train_loss=None,
        held_out_loss=None,
        engine=engine,
        precision=precision,
        world_size=1,
        layout=LAYOUTS[engine],
        attempt=0,
        data_sha256={},
        model=model.model_dump(mode="json"),
        imported={
            "source": found.repository or str(found.path.resolve()),
            "revision": found.revision,
            "weights_sha256": {name: hashes[name] for name in weights},
            "tokenizer_sha256": {name: hashes[name] for name in tokenizer},
            "optimizer_state": optimizer_state,
        },
        files={},
    )
    if not _is_there(out, record, processes):
        with committed_directory(out) as aside:
            ordered = TrainedWeights(found.path, model, DTYPES[precision])
            files = _write(aside, ordered, model, engine, optimizer_state=optimizer_state, processes=processes)
            (aside / IMPORTED_FROM).mkdir()
            for name in (*CONFIGURATION_FILES, *tokenizer):
                if (found.path / name).is_file():
                    shutil.copyfile(found.path / name, aside / IMPORTED_FROM / name)
                    files[f"{IMPORTED_FROM}/{name}"] = record_file(aside / IMPORTED_FROM / name)
            tokens_each = min(PROBE_TOKENS, config.max_position_embeddings)
            input_ids_BS = spread_ids(model.vocab_size, PROBE_SEQUENCES, tokens_each)
            probe = {"input_ids": input_ids_BS, **compute_probe(found.path, input_ids_BS)}
            save_file({name: tensor.contiguous() for name, tensor in probe.items()}, aside / PROBE)
            files[PROBE] = record_file(aside / PROBE)
            complete = record.model_copy(update={"files": dict(sorted(files.items()))})
            write_json(aside / CHECKPOINT_JSON, complete.model_dump(mode="json"))
    start_from = {"checkpoint": str(out.resolve()), "sha256": sha256_of(out / CHECKPOINT_JSON)}
    print(f"{out}: as of step {record.step}, {record.tokens} tokens; to start a run from it, add to its run.json")
    print(f'"start_from": {json.dumps(start_from)}')


def _precision(weights: Weights) -> str:
    """The one type of all weights, by its name in run.json."""
    names = {dtype: name for name, dtype in DTYPES.items() if name != "fp16"}
    first = next(iter(weights.tensors.values())).dtype
    for name, tensor in weights.tensors.items():
        if tensor.dtype not in names:
            raise UserError(f"'{name}' is {tensor.dtype}, runs are trained in fp32 or bf16; convert the weights")
        if tensor.dtype != first:
            raise UserError(f"'{name}' is {tensor.dtype}, others are {first}; convert the weights to one type")
    return names[first]


def _hashes(directory: Path, names: list[str], checked: dict[str, FileRecord], processes: int) -> dict[str, str]:
    """SHA-256 of every file; those that were checked just now are not read again."""

    def digest(name: str) -> str:
        return checked[name].sha256 if name in checked else sha256_of(directory / name)

    return {names[index]: found for index, found in each(digest, names, processes)}


def _is_there(out: Path, record: CheckpointRecord, processes: int) -> bool:
    """Whether `out` is whole and this import; UserError if it is something else."""
    if not out.exists():
        return False
    if (out / CHECKPOINT_JSON).is_file():
        found = read_checkpoint_record(out)
        if found.model_copy(update={"files": {}}) == record:
            return first_damage_in_parallel(out, found.files, processes) is None
    raise UserError(f"{out} exists and is not this import; give a new directory or remove it")


def _write(
    aside: Path, weights: Weights, model: ModelConfig, engine: str, *, optimizer_state: bool, processes: int
) -> dict[str, FileRecord]:
    """Writes the weights in the engine's format, and the state of an optimizer that has not begun."""
    if engine == "megatron":
        return write_shards(
            aside,
            FusedWeights(weights, model, optimizer_state=optimizer_state),
            model,
            ParallelConfig(),
            data=1,
            common={"steps": 0} if optimizer_state else {},
            objects=empty_objects(model),
            processes=processes,
            label="import",
        )
    one_file = engine == "deepspeed"  # its checkpoints hold the model in one
    shard_bytes = sys.maxsize if one_file else SHARD_BYTES
    files = write_weights(aside, weights, processes=processes, shard_bytes=shard_bytes, label="import")
    for name in files:
        fsync_path(aside / name)
    if optimizer_state:
        state, decays = _FreshState(weights), OptimizerConfig(peak_lr=0.0).decays
        files |= write_state(aside, state, model, decays, stage=1, world_size=1, step=0, processes=1)
    return files


class _FreshState:
    """The weights in fp32 and zero moments: `ckpt_tools.formats.deepspeed_writer.State`."""

    kinds = KINDS

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in weights.tensors.items()}

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Numbers [start, stop) of a flattened tensor."""
        if kind in MOMENTS:
            return torch.zeros(stop - start)
        width = torch.Size(self.shapes[name][1:]).numel()
        first, last = start // width, -(-stop // width)
        return self._weights.read(name, first, last).float().flatten()[start - first * width : stop - first * width]
