"""Every rank writes what it holds, with the buckets of GPUs and rows that borders of ranks cut."""

import json
from pathlib import Path
from unittest import mock

import pytest

from base.environment import is_rank_zero
from base.files import write_json
from tests.runs import draw_weights, make_run, on_ranks, save
from tests.train.test_overlap import OVERLAPPED
from train.distributed import gathered, start
from train.model.config import ModelConfig
from train.run.config import load_run

# Several buckets on every stage, whose borders of ranks cut rows.
BUCKETS = OVERLAPPED | {"BUCKET_ELEMENTS": 61_000}
MODEL = ModelConfig(
    vocab_size=320,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def sizes_of_files(run_dir: str) -> None:
    """Worker, on every rank: the bytes that each rank writes of weights and of all state."""
    from train.megatron.engine import MegatronEngine

    run = load_run(Path(run_dir) / "run.json")
    with mock.patch.multiple("train.megatron.data_parallel", **BUCKETS):
        engine = MegatronEngine(run, start())
    draw_weights(engine, run)
    assert len(engine._pipeline.model.bucket_groups) > 2
    sizes = {}
    for kind in ("weights", "full"):
        directory = Path(run_dir) / kind
        files = save(engine, directory, weights_only=kind == "weights")
        mine = [name for name in files if name.endswith(".distcp")]
        sizes[kind] = gathered(sum((directory / name).stat().st_size for name in mine))
    if is_rank_zero():
        write_json(Path(run_dir) / "sizes.json", sizes)
    engine.close()


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}])
def test_no_rank_writes_more_than_its_share(tmp_path, inputs, layout):
    make_run(tmp_path, **inputs, **layout, model=MODEL, micro_batch_size=2, precision="bf16")
    on_ranks(4, sizes_of_files, tmp_path)
    for sizes in json.loads((tmp_path / "sizes.json").read_text()).values():
        assert max(sizes) <= 1.1 * sum(sizes) / len(sizes)
