"""A checkpoint as another layout would have saved it, without an engine: weights and optimizer state, bit for bit."""

import shutil
from pathlib import Path

import torch
from pydantic import ValidationError

from ckpt_tools.checkpoint import model_of, run_of, verified_record
from ckpt_tools.formats.deepspeed_weights import RankState
from ckpt_tools.formats.megatron_shards import METADATA, ShardedTensors, check_names
from ckpt_tools.formats.megatron_writer import COMMON, FORMAT_JSON, write_shards
from ckpt_tools.formats.parallel import default_processes, each, first_damage_in_parallel
from train.command import UserError, explain_validation
from train.config import RunConfig
from train.run_directory import (
    CHECKPOINT_JSON,
    PROBE,
    CheckpointRecord,
    FileRecord,
    committed_directory,
    read_checkpoint_record,
    record_file,
    step_name,
    write_json,
)
from train.settings import ModelConfig, OptimizerConfig, ParallelConfig

REWRITTEN = {"megatron": ("__*.distcp", METADATA, COMMON, FORMAT_JSON), "deepspeed": ("optimizer-*.safetensors",)}


def reshard_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int = 1,
    data: int = 1,
    zero: int | None = None,
    processes: int | None = None,
) -> None:
    """Writes `out`, the files that the engine would have saved at the given layout, and says how to use it.

    Engines load checkpoints of any layout but ZeRO stage 3 by themselves. With this, each rank finds what it needs in
    its own file, and stage 3 goes on with another number of processes, or from and to other stages.

    Args:
        checkpoint: of either engine; an average and an imported one too.
        out: a new directory, anywhere; if it already is this checkpoint at this layout, nothing is done.
        tensor: tensor-parallel size, of megatron as the next two.
        pipeline: pipeline stages.
        virtual_pipeline: model chunks of a stage.
        data: data-parallel size.
        zero: ZeRO stage, of deepspeed; None: as it is.
        processes: at once; None: one per core.

    Raises:
        UserError: the checkpoint is damaged, its model does not divide so, the layout is not its engine's, or `out` is
            something else.
    """
    processes = processes or default_processes()
    record = read_checkpoint_record(checkpoint)
    parallel = _parallel(record, tensor, pipeline, virtual_pipeline, zero)
    if record.engine == "megatron":
        _check_fits(parallel, model_of(checkpoint, record))
        sizes = {"tensor": tensor, "pipeline": pipeline, "virtual_pipeline": virtual_pipeline, "context": 1}
        layout = sizes | {"data": data}
    else:
        layout = {"tensor": 1, "pipeline": 1, "data": data, "zero": record.layout["zero"] if zero is None else zero}
    world_size = tensor * pipeline * data
    target = record.model_copy(update={"layout": layout, "world_size": world_size, "files": {}})
    if not _is_there(out, record, target, processes):
        verified_record(checkpoint, processes)
        with committed_directory(out) as aside:
            if record.engine == "megatron":
                files = _rewrite_megatron(checkpoint, aside, record, parallel, data, processes)
            else:
                files = _rewrite_deepspeed(checkpoint, aside, target, processes)
            files |= _copy(checkpoint, aside, record, processes)
            complete = target.model_copy(update={"files": dict(sorted(files.items()))})
            write_json(aside / CHECKPOINT_JSON, complete.model_dump(mode="json"))
    shown = ", ".join(f"{name} {size}" for name, size in layout.items())
    print(f"{out}: {shown}; {_use(target)}")


def _use(record: CheckpointRecord) -> str:
    """What can be done with a resharded checkpoint."""
    if record.imported is not None:
        return "start_from in a run.json names it"
    if record.average is not None:
        return "to export it, move it to checkpoints/ of a run directory with the same run.json"
    return (
        f"to train on from it, move it to checkpoints/{step_name(record.step)} of a run directory whose run.json is "
        f"the same but for parallel and zero, and start {record.world_size} process(es)"
    )


def _parallel(
    record: CheckpointRecord, tensor: int, pipeline: int, virtual_pipeline: int, zero: int | None
) -> ParallelConfig:
    """The layout of the model; UserError where it is none, or the engine of the checkpoint knows none."""
    if record.engine == "either":
        raise UserError("this checkpoint holds weights alone, which start either engine at any layout; use it as it is")
    if record.engine == "megatron" and zero is not None:
        raise UserError("--zero belongs to deepspeed's checkpoints, this one is megatron's; leave it out")
    if record.engine == "deepspeed" and (tensor, pipeline, virtual_pipeline) != (1, 1, 1):
        raise UserError(
            "--tensor, --pipeline and --virtual-pipeline belong to megatron's checkpoints, this one is deepspeed's; "
            "leave them out"
        )
    try:
        return ParallelConfig(tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual_pipeline)
    except ValidationError as error:
        raise explain_validation("the layout", error) from None


def _check_fits(parallel: ParallelConfig, model: ModelConfig) -> None:
    try:
        parallel.check_fits(model)
    except ValueError as error:
        raise UserError(str(error)) from None


def _is_there(out: Path, record: CheckpointRecord, target: CheckpointRecord, processes: int) -> bool:
    """Whether `out` is whole and what would be written; UserError if it is something else."""
    if not out.exists():
        return False
    if (out / CHECKPOINT_JSON).is_file():
        found = read_checkpoint_record(out)
        same_model = found.files.get(PROBE) == record.files.get(PROBE)
        if same_model and found.model_copy(update={"files": {}}) == target:
            return first_damage_in_parallel(out, found.files, processes) is None
    raise UserError(f"{out} exists and is not this checkpoint at this layout; give a new directory or remove it")


def _rewrite_megatron(
    checkpoint: Path, aside: Path, record: CheckpointRecord, parallel: ParallelConfig, data: int, processes: int
) -> dict[str, FileRecord]:
    model, source = model_of(checkpoint, record), ShardedTensors(checkpoint)
    check_names(source, model)
    objects = {}
    for key, (path, offset, length) in source.objects.items():
        with path.open("rb") as file:
            file.seek(offset)
            objects[key] = file.read(length)
    common = torch.load(checkpoint / COMMON, weights_only=True)
    return write_shards(
        aside, source, model, parallel, data, common=common, objects=objects, processes=processes, label="reshard"
    )


def _rewrite_deepspeed(
    checkpoint: Path, aside: Path, target: CheckpointRecord, processes: int
) -> dict[str, FileRecord]:
    from ckpt_tools.formats.deepspeed_writer import write_state  # needs transformers

    model = model_of(checkpoint, target)
    state, stage = RankState(checkpoint, model), target.layout["zero"]
    if not state.kinds:  # an average: its weights lie in one file at every layout
        return {}
    optimizer = OptimizerConfig(peak_lr=0.0)
    if target.imported is None:
        optimizer = _at_stage(run_of(checkpoint, target)[1], stage).optimizer
    return write_state(
        aside,
        state,
        model,
        optimizer.decays,
        stage=stage,
        world_size=target.world_size,
        step=state.header["step"],
        processes=processes,
        label="reshard",
    )


def _at_stage(run: RunConfig, stage: int) -> RunConfig:
    """The run at another ZeRO stage; UserError where it cannot be trained there."""
    settings = run.model_dump(mode="json") | {"zero": {"stage": stage, "allow_stage_3": stage == 3}}
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise explain_validation(f"ZeRO stage {stage}", error) from None


def _copy(checkpoint: Path, aside: Path, record: CheckpointRecord, processes: int) -> dict[str, FileRecord]:
    """Copies what does not depend on the layout: the probe, whole weights, the tokenizer of an import."""
    names = [
        name for name in record.files if not any(Path(name).match(pattern) for pattern in REWRITTEN[record.engine])
    ]

    def copy(name: str) -> FileRecord:
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint / name, aside / name)
        return record_file(aside / name)

    return {names[index]: file for index, file in each(copy, names, processes)}
