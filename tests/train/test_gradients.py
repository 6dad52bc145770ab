"""Gradients under tensor parallelism against HF, parameter by parameter."""

import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import make_hf_directory
from tests.runs import execute, make_run, torchrun
from train import layout
from train.config import load_run
from train.data import batch, open_corpus


def gradients_of_engine(run_dir: str, hf_dir: str, out: str) -> None:
    """Worker, on every rank: loads the HF weights into the engine, differentiates one batch, rank-locally saves."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    from train.distributed import start
    from train.engine import Batch
    from train.megatron.engine import MegatronEngine
    from train.megatron.model import global_name

    run = load_run(Path(run_dir) / "run.json")
    engine = MegatronEngine(run, start())
    weights = load_file(Path(hf_dir) / "model.safetensors")
    rank, size = dist.get_rank(), dist.get_world_size()
    parameters = dict(engine._model.module.named_parameters())
    names = {name: global_name(name, engine._config) for name in parameters}
    with torch.no_grad():
        for name, parameter in parameters.items():
            whole = layout.from_hf(names[name], weights.__getitem__, run.model)
            parameter.copy_(layout.shard(names[name], whole, rank, size))
    tokens = batch(open_corpus(run.data.train_sources[0].source), step=1, batch_size=8, sequence_length=32, seed=7)
    engine._model.zero_grad_buffer()
    engine._run_microbatches(Batch.of(torch.from_numpy(tokens)), forward_only=False)
    gradients = {names[name]: parameter.main_grad.clone() for name, parameter in parameters.items()}
    torch.save(gradients, Path(out) / f"{rank}.pt")
    engine.close()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gradients_under_tensor_parallelism_equal_hf(tmp_path, inputs, kv_heads):
    """Every parameter, q- and k-norm weights included: a plain all-reduce in the norm would be 6% off."""
    run = make_run(tmp_path / "run", **inputs, tensor=2, kv_heads=kv_heads)
    hf_dir = make_hf_directory(tmp_path / "hf", num_hidden_layers=4, num_key_value_heads=kv_heads)
    worker = torchrun(2, "tests.train.test_gradients", str(tmp_path / "run"), str(hf_dir), str(tmp_path))
    done = execute(worker)
    assert done.returncode == 0, done.stderr[-3000:]
    shards = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]

    from transformers import Olmo2ForCausalLM

    model = Olmo2ForCausalLM.from_pretrained(hf_dir, attn_implementation="eager")
    rows = batch(open_corpus(run.data.train_sources[0].source), step=1, batch_size=8, sequence_length=32, seed=7)
    tokens = torch.from_numpy(rows)
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    (loss + 1e-5 * logits.logsumexp(-1).square().mean()).backward()
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    compared = set()
    for name in layout.megatron_names(4):
        whole = layout.from_hf(name, expected.__getitem__, run.model)
        for rank in range(2):
            part = layout.shard(name, whole, rank, 2)
            error = (shards[rank][name] - part).norm() / part.norm()
            assert error < 1e-5, (name, rank, error.item())
        compared.update(layout.hf_names(name))
    assert compared == {name for name, _ in model.named_parameters()}


if __name__ == "__main__":
    gradients_of_engine(*sys.argv[1:])
