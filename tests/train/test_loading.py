"""The part of a checkpoint that a rank loads, and the weights it computes with then."""

import json
import math

from ckpt_tools.checkpoint import open_weights, verified_record
from ckpt_tools.formats.megatron_shards import MegatronWeights
from ckpt_tools.formats.weights import read_whole
from tests.runs import ranks
from train.model.config import parameter_shapes
from train.run.config import load_run
from train.run.directory import RunDirectory

KINDS = 3  # main weights and two moments, in fp32


def test_a_rank_loads_its_own_rows_and_derives_the_model(trained, tmp_path):
    """The weights in bf16 are the rounded main weights, bit for bit: nobody reads them.

    Both ranks together load every value once, and again a row where one parameter is cut in two.
    """
    directory, processes = RunDirectory(trained("bf16-dp2")), 2
    arguments = (str(directory.path), "20", str(tmp_path))
    done = ranks(processes, "tests.train.loading", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    model = load_run(directory.run_json).model
    shapes = parameter_shapes(model).values()
    state = KINDS * 4 * sum(map(math.prod, shapes))
    rows = KINDS * 4 * processes * 2 * max(shape[-1] for shape in shapes)
    figures = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]
    assert state <= sum(rank["loaded"] for rank in figures) <= state + rows
    checkpoint = directory.checkpoint(20)
    saved = open_weights(checkpoint, verified_record(checkpoint))
    derived = MegatronWeights(tmp_path / "weights", model)
    for name in saved.tensors:
        assert read_whole(derived, name).equal(read_whole(saved, name)), name
