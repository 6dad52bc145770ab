"""megatron-core's own optimizer reads the checkpoints that the engine writes, bit for bit.

On disk they are its `fully_reshardable` format, which `to_save` fills without gathering.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.runs import make_run, on_ranks
from train.distributed import start
from train.run.config import load_run
from train.run.directory import RunDirectory


def compare(run_dir: str, checkpoint: str) -> None:
    """Worker, on every rank: main weights and moments by mcore's loader and by the engine's."""
    from megatron.core import dist_checkpointing, parallel_state

    from train.megatron.engine import MegatronEngine

    engine = MegatronEngine(load_run(Path(run_dir) / "run.json"), start())
    state, optimizer = engine._state, engine._optimizer
    optimizer.data_parallel_group_gloo = dist.group.WORLD  # which mcore's loader sends pieces over
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    wanted = optimizer.sharded_param_state_fully_reshardable(
        engine._model_state()["model"], is_loading=True, metadata=groups
    )
    loaded = dist_checkpointing.load({"optimizer": wanted}, checkpoint)
    optimizer.load_parameter_state_from_fully_reshardable(loaded["optimizer"])
    by_mcore = []
    for piece in state.pieces:
        tensors = state._tensors(piece)
        by_mcore.append({kind: tensor.clone() for kind, tensor in tensors.items()})
        for tensor in tensors.values():
            tensor.fill_(torch.nan)

    engine.load(Path(checkpoint))
    assert by_mcore
    for piece, expected in zip(state.pieces, by_mcore, strict=True):
        assert expected.keys() == {"param", "exp_avg", "exp_avg_sq"}
        for kind, tensor in state._tensors(piece).items():
            assert tensor.any()
            assert torch.equal(tensor, expected[kind])
    engine.close()


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_stock_megatron_loads_a_checkpoint_at_another_layout(trained, inputs, tmp_path, layout):
    make_run(tmp_path / "dp", **inputs)
    saved = RunDirectory(trained(layout)).checkpoint(20)
    on_ranks(2, compare, tmp_path / "dp", saved)
