"""Layers of the DeepSpeed engine compiled by torch: the same numbers, and what they cost a GPU."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.runs import on_ranks
from tests.train.compiled import layer_of_deepspeed, linear_weights
from tests.train.test_deepspeed import batch_of, small_run
from train.deepspeed import model as models
from train.deepspeed.model import ModelWithLosses, build_model, compile_layers, recorded
from train.model.config import ModelConfig
from train.model.families import TRAINED
from train.model.losses import Targets
from train.model.presets import OLMO2_1B, PYTHIA_160M
from train.planning.speed import KERNELS, arrangement_of
from train.run.config import RunConfig


@pytest.fixture
def compiling(monkeypatch):
    """Compile on a CPU, without the last step, which makes kernels; count graphs."""
    whole = nn.Module.compile
    monkeypatch.setattr(models, "compiles", lambda _: True)
    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda self, **settings: whole(self, **settings, backend="aot_eager"),
    )
    torch.compiler.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch.compiler.reset()


def both(run: RunConfig) -> tuple[Any, Any]:
    """The model of a run with random weights, and a copy that is compiled."""
    plain = build_model(run)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in plain.parameters():
            weight.normal_(std=0.2, generator=generator)
    compiled = copy.deepcopy(plain)
    compile_layers(compiled, torch.device("cpu"))
    return ModelWithLosses(plain, run.precision), ModelWithLosses(compiled, run.precision)


def loss_and_gradients(model: Any, mask_B1SS: Tensor | None) -> tuple[float, list[Tensor]]:
    batch = batch_of(1)
    targets = Targets(batch.tokens_BS[:, 1:].flatten(), batch.counted_BS.flatten(), 1e-4)
    loss, _ = model.train()(batch.tokens_BS[:, :-1], mask_B1SS, targets)
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


def documents() -> Tensor:
    """A mask of documents of about five tokens."""
    tokens_BS = batch_of(1).tokens_BS[:, :-1]
    documents_BS = (torch.rand(tokens_BS.shape) < 0.2).cumsum(1)
    return (documents_BS[:, None, :, None] == documents_BS[:, None, None, :]).tril()


@pytest.mark.parametrize(
    ("family", "recompute", "mask"),
    [
        ("gpt_neox", "layers", None),
        ("olmo2", "none", documents()),
        ("llama", "none", None),
    ],
)
def test_compiled_layers_compute_the_same(compiling, family, recompute, mask):
    """Two layers are one graph in training, and one in evaluation; hooks find them uncompiled."""
    settings: dict[str, Any] = {"precision": "bf16", "recompute": recompute}
    plain, compiled = both(small_run("run", family=family, kv_heads=4, **settings))
    (loss, gradients), (expected_loss, expected) = (
        loss_and_gradients(model, mask) for model in (compiled, plain)
    )
    assert loss == expected_loss
    assert all(map(torch.equal, gradients, expected))
    inputs = batch_of(2).tokens_BS[:, :-1]
    with torch.no_grad():
        assert torch.equal(compiled.eval()(inputs, mask), plain.eval()(inputs, mask))
        graphs = compiling()
        with recorded(compiled.model) as found, recorded(plain.model) as outputs:
            for model in (compiled, plain):
                model(inputs)
    assert found.keys() == outputs.keys()
    assert all(torch.equal(found[name], outputs[name]) for name in outputs)
    # Recomputed in backward, which is a place of its own.
    assert compiling() == graphs == (3 if recompute == "layers" else 2)


TOKENS = 16 * 2048  # of a microbatch


def counted(family: str) -> ModelConfig:
    """The 1B in a family with grouped queries, and with narrow heads where it may have them.

    GPT-NeoX is Pythia-160M: at 2,048 features the compiler joins two of its kernels.
    """
    if family == "gpt_neox":
        return PYTHIA_160M
    narrow = {"head_dim": 64} if TRAINED[family].states_head_dim else {}
    return OLMO2_1B.model_copy(update={"family": family, "num_key_value_heads": 4} | narrow)


def counted_run(model: ModelConfig) -> RunConfig:
    run = small_run("run", precision="bf16", micro_batch_size=16, batch_size=16)
    data = run.data.model_copy(update={"sequence_length": TOKENS // 16})
    return run.model_copy(update={"model": model, "data": data})


def count_all(out: str, *families: str) -> None:
    """Worker: count a layer of families; torch keeps what it has seen of a GPU."""
    counts = {family: layer_of_deepspeed(counted_run(counted(family))) for family in families}
    Path(out).write_text(json.dumps(counts))


# Each compiles for seconds: norms after the linears and before them, all others under stress.
COUNTED = ("olmo2", "llama")


@pytest.mark.parametrize(
    "families", [COUNTED, pytest.param(tuple(TRAINED), marks=pytest.mark.stress)]
)
def test_kernels_and_bytes_of_a_layer(tmp_path, families):
    """Reads and writes of bf16 numbers per token, of the widths of hidden state, keys and MLP.

    Without attention, of which two kernels are counted. Beside them a weight takes 12 bytes a
    microbatch: it is rounded, fp32 to bf16, and its gradient is widened. Cosines of the rotary
    embedding and sums of norms are less than 1%. Of SmolLM3 a layer that rotates is counted.
    """
    on_ranks(1, count_all, tmp_path / "counts.json", *families)
    counts = json.loads((tmp_path / "counts.json").read_text())
    for family, (kernels, moved) in counts.items():
        model = counted(family)
        row = KERNELS[arrangement_of("deepspeed", model)]
        sizes = model.hidden_size, model.query_size, model.key_value_size, model.intermediate_size
        passes = sum(count * size for count, size in zip(row, sizes, strict=False))
        expected = 2 * passes * TOKENS + 12 * linear_weights(counted_run(model))
        assert kernels == row.starts + 2, family
        assert moved == pytest.approx(expected, rel=0.006), family
