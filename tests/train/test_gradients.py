"""Gradients under tensor parallelism against HF, parameter by parameter."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Olmo2ForCausalLM

from tests.conftest import make_hf_directory
from tests.runs import make_run, on_ranks
from tests.train.plain import figures_of, losses_of_labels
from train.data.batches import Batch
from train.distributed import start
from train.model import megatron_names
from train.run.config import load_run


def sequences() -> Batch:
    """Return 8 sequences of which all labels count, some or none."""
    generator = torch.Generator().manual_seed(3)
    tokens_BS = torch.randint(0, 320, (8, 33), generator=generator)
    counted_BS = torch.ones(8, 32, dtype=torch.bool)
    counted_BS[4:7] = torch.rand(3, 32, generator=generator) < 0.5
    counted_BS[7] = False
    return Batch(tokens_BS, counted_BS)


def gradients_of_engine(run_dir: str, hf_dir: str, out: str) -> None:
    """Worker, on every rank: load the HF weights, differentiate one batch, save the gradients."""
    from train.megatron.engine import MegatronEngine
    from train.megatron.model import global_parameters
    from train.model import losses

    # Three chunks of a microbatch of 128 tokens, the last one shorter.
    vars(losses)["CPU_CHUNK_TOKENS"] = 48
    engine = MegatronEngine(load_run(Path(run_dir) / "run.json"), start())
    engine.start_from(load_file(Path(hf_dir) / "model.safetensors").__getitem__)
    parameters = global_parameters(engine._pipeline.model.module)
    seen = engine.train_step(sequences().of_replica(engine.replica), 1.0, lambda _: False)
    gradients = {name: vars(each)["main_grad"].clone() for name, each in parameters.items()}
    some = Batch(*(part[4:7] for part in sequences()[:2]))
    held_out = engine.evaluate(some.of_replica(engine.replica))
    torch.save((gradients, seen.figures, held_out), Path(out) / f"{dist.get_rank()}.pt")
    engine.close()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gradients_under_tensor_parallelism_equal_hf(tmp_path, inputs, kv_heads):
    """Every parameter, q- and k-norms included: a plain all-reduce in them would be 6% off.

    Labels that do not count weaken the gradient and leave the reported means to the others.
    """
    run = make_run(tmp_path / "run", **inputs, tensor=2, sequence=kv_heads == 2, kv_heads=kv_heads)
    hf_dir = make_hf_directory(tmp_path / "hf", num_key_value_heads=kv_heads)
    on_ranks(2, gradients_of_engine, tmp_path / "run", hf_dir, tmp_path)
    saved = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]

    model = Olmo2ForCausalLM.from_pretrained(hf_dir, attn_implementation="eager")
    batch = sequences()
    logits = model(batch.tokens_BS[:, :-1]).logits
    expected = figures_of(model, logits, batch)
    gradients = {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }

    compared = set()
    for name in megatron_names.megatron_names(run.model):
        whole = megatron_names.from_hf(name, gradients.__getitem__, run.model)
        for rank in range(2):
            part = megatron_names.shard(name, whole, rank, 2)
            error = (saved[rank][0][name] - part).norm() / part.norm()
            assert error < 1e-5, (name, rank, error.item())
        compared.update(megatron_names.hf_names(name))
    assert compared == {name for name, _ in model.named_parameters()}
    held_out_losses, _ = losses_of_labels(logits[4:7], batch.tokens_BS[4:7])
    held_out_loss = held_out_losses[batch.counted_BS[4:7]].mean().item()
    for _, seen, held_out in saved:
        assert seen["counted_fraction"] == expected["counted_fraction"]
        assert seen["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert seen["z_loss"] == pytest.approx(expected["z_loss"], rel=1e-5)
        assert seen["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert held_out == pytest.approx(held_out_loss, abs=1e-5)
