"""Writing the optimizer state of a DeepSpeed checkpoint as the engine would at a ZeRO stage and world size.

The files are the engine's own, byte for byte (train/deepspeed/checkpoint.py), and none of DeepSpeed is needed. Where a
rank's share begins and ends follows from deepspeed 0.19:

    stage 0     everything lies on rank 0
    stage 1, 2  each decay group end to end, padded to a multiple of 2 x world size, cut evenly
    stage 3     every parameter for itself, padded to a multiple of the world size, cut evenly
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AutoConfig

from ckpt_tools.formats.hf_writer import Shard, write_shard
from ckpt_tools.formats.parallel import each
from ckpt_tools.formats.weights import Described
from ckpt_tools.forward import empty_model, names_in_files
from train.command import Progress
from train.families import hf_settings, parameter_shapes
from train.run_directory import FileRecord, fsync_path
from train.settings import ModelConfig


class State(Protocol):
    """fp32 state of a model's parameters, by kind ("weights", "exp_avg", ...) and HF name."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """What there is of every parameter."""
        ...

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Numbers [start, stop) of a flattened tensor."""
        ...


class _Range(NamedTuple):
    """Numbers [start, stop) of a flattened parameter."""

    name: str
    start: int
    stop: int


class _Share:
    """What one rank holds: `ckpt_tools.formats.weights.Weights` by KIND/NAME."""

    def __init__(self, state: State, ranges: list[_Range]) -> None:
        self._state, self._ranges = state, {part.name: part for part in ranges}
        self.tensors = {  # as safetensors orders them
            f"{kind}/{name}": Described((part.stop - part.start,), torch.float32)
            for kind in sorted(state.kinds)
            for name, part in sorted(self._ranges.items())
        }

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Numbers [start, stop) of this rank's range."""
        kind, _, name = key.partition("/")
        first = self._ranges[name].start
        return self._state.read(kind, name, first + start, first + stop)


def _groups(model: ModelConfig, decays: Callable[[str], bool], stage: int) -> list[dict[str, int]]:
    """The parameters in the order in which the engine keeps them: numbers of elements by HF name.

    From stage 1 on what is decayed comes first, a group for itself.
    """
    built = empty_model(AutoConfig.for_model(model.family, **hf_settings(model, 1, 0)))
    shapes = parameter_shapes(model)
    numels = {name: torch.Size(shapes[name]).numel() for name in names_in_files(built).values()}
    if stage == 0:
        return [numels]
    groups = [{name: numel for name, numel in numels.items() if decays(name) == part} for part in (True, False)]
    return [group for group in groups if group]


def _cut(numels: dict[str, int], multiple: int, rank: int, world_size: int) -> list[_Range]:
    """A rank's share of parameters laid end to end and padded to a multiple."""
    size = -(-sum(numels.values()) // multiple) * multiple // world_size
    ranges, offset = [], 0
    for name, numel in numels.items():
        start, stop = max(rank * size - offset, 0), min((rank + 1) * size - offset, numel)
        if start < stop:
            ranges.append(_Range(name, start, stop))
        offset += numel
    return ranges


def _ranges(groups: list[dict[str, int]], stage: int, rank: int, world_size: int) -> list[_Range]:
    """What a rank holds of groups of parameters."""
    if stage == 0:
        return [_Range(name, 0, numel) for group in groups for name, numel in group.items() if rank == 0]
    if stage == 3:
        groups = [{name: numel} for group in groups for name, numel in group.items()]
    multiple = world_size if stage == 3 else 2 * world_size
    return [part for group in groups for part in _cut(group, multiple, rank, world_size)]


def write_state(
    directory: Path,
    state: State,
    model: ModelConfig,
    decays: Callable[[str], bool],
    *,
    stage: int,
    world_size: int,
    step: int,
    processes: int,
    label: str | None = None,
) -> dict[str, FileRecord]:
    """Writes `optimizer-RRRRR-of-WWWWW.safetensors` of every rank.

    Args:
        directory: where they go.
        state: what they hold.
        model: its architecture.
        decays: whether weight decay applies to a parameter, by HF name.
        stage: ZeRO's.
        world_size: number of ranks.
        step: updates that AdamW has counted.
        processes: at once; the files do not depend on it.
        label: of a progress bar over the files; None: there is none.

    Returns:
        Size and SHA-256 of every file, synced to disk.
    """
    groups = _groups(model, decays, stage)

    def write(rank: int) -> tuple[str, FileRecord]:
        ranges = _ranges(groups, stage, rank, world_size)
        starts = {part.name: part.start for part in ranges}
        header = {"stage": stage, "world_size": world_size, "step": step, "starts": starts}
        share, name = _Share(state, ranges), f"optimizer-{rank:05d}-of-{world_size:05d}.safetensors"
        record = write_shard(directory, Shard(name, share.tensors, {"state": json.dumps(header)}), share)
        fsync_path(directory / name)
        return name, record

    files: dict[str, FileRecord] = {}
    with Progress(label, total=world_size) if label else nullcontext() as progress:
        for _, (name, record) in each(write, range(world_size), processes):
            files[name] = record
            if progress:
                progress.advance()
    return files
