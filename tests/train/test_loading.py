"""The part of a checkpoint that a rank loads, and the weights it computes with then."""

import json
import math
from pathlib import Path

import torch.distributed as dist

from ckpt_tools.checkpoint import open_weights, verified_record
from ckpt_tools.formats.megatron_shards import MegatronWeights
from ckpt_tools.formats.weights import read_whole
from tests.runs import on_ranks, save
from train.distributed import start
from train.engines import build_engine
from train.model.config import parameter_shapes
from train.run.config import load_run
from train.run.directory import RunDirectory

KINDS = 3  # main weights and two moments, in fp32


def load(run_dir: str, step: str, out: str) -> None:
    """Worker, on every rank: OUT/RANK.json has the bytes of the tensors that it loads into.

    OUT/weights is a checkpoint of the weights that all compute with then.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    directory, loaded = RunDirectory(Path(run_dir)), 0
    engine = build_engine(load_run(directory.run_json), start())
    load_sharded = dist_checkpointing.load

    def counted(state, *args, **kwargs):
        nonlocal loaded
        loaded = sum(entry.data.nbytes for entry in nested_values(state))
        return load_sharded(state, *args, **kwargs)

    dist_checkpointing.load = counted
    engine.load(directory.checkpoint(int(step)))
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(loaded))
    save(engine, Path(out) / "weights", weights_only=True)
    engine.close()


def test_a_rank_loads_its_own_rows_and_derives_the_model(trained, tmp_path):
    """The weights in bf16 are the rounded main weights, bit for bit: nobody reads them.

    Both ranks together load every value once, and again a row where one parameter is cut in two.
    """
    directory, processes = RunDirectory(trained("bf16-dp2")), 2
    on_ranks(processes, load, directory.path, 20, tmp_path)
    model = load_run(directory.run_json).model
    shapes = parameter_shapes(model).values()
    state = KINDS * 4 * sum(map(math.prod, shapes))
    rows = KINDS * 4 * processes * 2 * max(shape[-1] for shape in shapes)
    loaded = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]
    assert state <= sum(loaded) <= state + rows
    checkpoint = directory.checkpoint(20)
    saved = open_weights(checkpoint, verified_record(checkpoint))
    derived = MegatronWeights(tmp_path / "weights", model)
    for name in saved.tensors:
        assert read_whole(derived, name).equal(read_whole(saved, name)), name
