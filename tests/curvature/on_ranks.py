"""`python -m tests.curvature.on_ranks OUT` on each of several ranks: what the core of curvature
computes there.

Every rank writes the parts of vectors that it holds, by tensor, and its figures. `test_sharded.py`
computes the same in one process, where no parameter is split, and joins the parts with nothing but
torch.cat.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from base.errors import UserError
from base.ranks import Ranks, start
from curvature.products.exact import DualHessian
from curvature.products.guard import check_product, difference_product
from curvature.products.model import CurvedModel, Sharding
from curvature.products.parameters import Parameters, Probe, local
from curvature.products.sketch import CountSketch
from tests.conftest import widths
from tests.curvature.conftest import dots_of, random_tokens, tiny_model

# Rows that neither 2 nor 3 ranks share evenly; keys and values have two rows, so that a third rank
# has none of them.
UNEVEN = widths(10, 13, 5, 1, vocab_size=25)
# Weights and width of an ordinary model at its initialisation, where fp32 has its ordinary
# rounding.
ORDINARY = widths(64, 128, 4, 4, std=0.03)
BATCHES = (1, 2, 3, 5)
VARIANTS = [(tied, checkpointing) for tied in (False, True) for checkpointing in (False, True)]


class Record:
    """Results of one rank: its parts of vectors, by vector and tensor, and figures."""

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}
        self.figures: dict[str, Any] = {}

    def keep(self, label: str, parameters: Parameters, v_p: Tensor) -> None:
        """This rank's part of a vector."""
        for name, part in parameters.split(v_p).items():
            self.parts[f"{label}|{name}"] = part.clone()

    def write(self, out: Path, ranks: Ranks) -> None:
        """One file of parts and one of figures."""
        save_file(self.parts, out / f"{ranks.size}-{ranks.rank}.safetensors")
        (out / f"{ranks.size}-{ranks.rank}.json").write_text(json.dumps(self.figures))


def everything(ranks: Ranks, sharding: Sharding) -> Record:
    """Values that have to be the same on any number of ranks."""
    record = Record()
    _vectors(record, ranks, sharding)
    for tied, checkpointing in VARIANTS:
        model = tiny_model(**UNEVEN, tie_word_embeddings=tied)
        curved = CurvedModel(model, ranks=ranks, sharding=sharding, checkpointing=checkpointing)
        for batch in BATCHES:
            label = f"tied={tied} checkpointing={checkpointing} batch={batch}"
            _products(record, label, DualHessian(curved), random_tokens(batch))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = tiny_model(torch.float32, **ORDINARY)
        curved = CurvedModel(model, ranks=ranks, sharding=sharding, dtype=dtype, checkpointing=True)
        _products(record, name, DualHessian(curved), random_tokens(5, length=15))
    _plain(record, ranks, sharding)
    return record


def _vectors(record: Record, ranks: Ranks, sharding: Sharding) -> None:
    model = tiny_model(**UNEVEN)
    whole = {
        name: torch.randn(
            weight.shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64
        )
        for name, weight in model.named_parameters()
    }
    norms = {name: tensor for name, tensor in whole.items() if "norm" in name}
    parameters = CurvedModel(model, ranks=ranks, sharding=sharding).parameters
    probe_p, taken_p = parameters.probe(Probe(4, 9)), parameters.take(whole)
    record.keep("probe", parameters, probe_p)
    record.keep("probe of norms", parameters, parameters.probe(Probe(2**40, 3, only=norms)))
    record.keep("taken", parameters, taken_p)
    record.keep("taken of norms", parameters, parameters.take(norms))
    record.keep("point", parameters, parameters.point())
    record.figures["inner"] = parameters.inner(
        torch.stack([probe_p, taken_p]), parameters.point()
    ).tolist()
    record.figures["norm"] = parameters.norm(taken_p)
    record.figures["dots"] = dots_of(parameters, taken_p, parameters.point())
    record.figures["sizes"] = [parameters.size, *parameters.block_sizes().values()]
    parameters.move(taken_p)
    record.keep("moved", parameters, parameters.point())


def _products(record: Record, label: str, hessian: DualHessian, tokens_BS1: Tensor) -> None:
    v_p = hessian.parameters.probe(Probe(0, 1))
    product = hessian.product(tokens_BS1, v_p)
    record.keep(label, hessian.parameters, product.hv_p)
    quadratic = hessian.quadratic(tokens_BS1, v_p)
    probed = hessian.probed(tokens_BS1, Probe(0, 1))
    record.figures[label] = {
        "of the product": [product.loss, product.slope],
        "of the form": [quadratic.loss, quadratic.slope],
        "of the probe": [probed.loss, probed.slope],
        "dots": quadratic.dots,
        "dots of the probe": probed.dots,
    }


def _plain(record: Record, ranks: Ranks, sharding: Sharding) -> None:
    """Transformers' own forward pass: losses, a criterion by rows, differences of gradients."""
    curved = CurvedModel(tiny_model(torch.float32, **ORDINARY), ranks=ranks, sharding=sharding)
    parameters = curved.parameters
    tokens_BS1 = random_tokens(5, length=15)

    def weighted(logits_BSV: Tensor, tokens_BS1: Tensor, rows: range) -> Tensor:
        weights_B = torch.arange(1.0, 6.0)[list(rows)]
        losses_BS = nn.functional.cross_entropy(
            logits_BSV.transpose(1, 2), tokens_BS1[:, 1:], reduction="none"
        )
        return (weights_B[:, None] * losses_BS).sum()

    theta_p, step_p = parameters.point(), 0.01 * parameters.probe(Probe(0, 0))
    # Nothing is derived from these: what one pass leaves gathered must not outlive a move of the
    # parameters.
    here = [curved.loss(tokens_BS1).value, curved.loss(tokens_BS1, weighted).value]
    parameters.move(theta_p + step_p)
    there = curved.loss(tokens_BS1).value
    parameters.move(theta_p)
    record.figures["plain losses"] = [*here, there, curved.loss(tokens_BS1).value]
    sketch = CountSketch(parameters, Probe(0, 1))
    product = difference_product(curved, tokens_BS1, sketch)
    record.figures["differences"] = [product.loss, sketch.norm(product.picture_s)]
    record.figures["dots of differences"] = sketch.dots(product.picture_s)
    record.keep("put back", parameters, parameters.point())


def memory(ranks: Ranks, sharding: Sharding) -> dict[str, int]:
    """Bytes of parameters and tangents that are on this rank, and of all tensors that are alive."""
    gc.collect()
    before = _bytes_alive()
    curved = CurvedModel(tiny_model(torch.float32, **ORDINARY), ranks=ranks, sharding=sharding)
    DualHessian(curved).quadratic(random_tokens(3), curved.parameters.probe(Probe(0, 0)))
    gc.collect()
    weights = sum(local(weight).nbytes for weight in curved.parameters.weights.values())
    return {
        "weights": weights,
        "alive": _bytes_alive() - before,
        "whole": 4 * curved.parameters.size,
    }


def _bytes_alive() -> int:
    storages = {}
    for item in gc.get_objects():
        kind = type(item)  # isinstance asks a million objects for their __class__
        # A fake tensor of another test that ran in this process holds nothing.
        if issubclass(kind, Tensor) and not issubclass(kind, FakeTensor):
            storage = local(item.detach()).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def gradients_alive(hessian: DualHessian, tokens_BS1: Tensor) -> list[int]:
    """Bytes of all `.grad` whenever the backward pass of `quadratic` adds one, and at its end."""
    weights, sizes = hessian.parameters.weights.values(), []

    def count(_: Tensor | None = None) -> None:
        sizes.append(
            sum(local(weight.grad).nbytes for weight in weights if weight.grad is not None)
        )

    hooks = [weight.register_post_accumulate_grad_hook(count) for weight in weights]
    hessian.quadratic(tokens_BS1, hessian.parameters.probe(Probe(0, 0)))
    count()
    for hook in hooks:
        hook.remove()
    return sizes


def guarded(ranks: Ranks) -> dict[str, Any]:
    """The guard's figures for a right product, and its refusal of one that is wrong on one rank."""
    curved = CurvedModel(tiny_model(torch.float32), ranks=ranks, sharding="fsdp")
    tokens_BS1, sketch = random_tokens(3), CountSketch(curved.parameters, Probe(0, 0))
    right = DualHessian(curved).sketched(tokens_BS1, sketch)
    reference = difference_product(curved, tokens_BS1, sketch)
    outcome: dict[str, Any] = {"passed": check_product(right, reference, sketch)}
    factor = 1.2 if ranks.rank == ranks.size - 1 else 1.0
    wrong = right._replace(picture_s=factor * right.picture_s)
    try:
        check_product(wrong, reference, sketch)
    except UserError as error:
        outcome["refused"] = str(error)
    return outcome


def poisoned(ranks: Ranks) -> list[str]:
    """The message of each way to a product where one rank holds a weight that is not a number."""
    messages = []
    for exact in (True, False):
        curved = CurvedModel(tiny_model(torch.float32), ranks=ranks, sharding="fsdp")
        if ranks.rank == ranks.size - 1:
            local(curved.parameters.weights["model.layers.1.mlp.down_proj.weight"]).data[0, 0] = (
                torch.nan
            )
        sketch = CountSketch(curved.parameters, Probe(0, 0))
        try:
            if exact:
                DualHessian(curved).sketched(random_tokens(ranks.size), sketch)
            else:
                difference_product(curved, random_tokens(ranks.size), sketch)
        except UserError as error:
            messages.append(str(error))
    return messages


def replicated(ranks: Ranks) -> list[float]:
    """Loss and v'Hv of this rank's own batches: none for the first rank, `rank` for the others."""
    hessian = DualHessian(CurvedModel(tiny_model(), ranks=ranks, sharding="none"))
    figures = []
    for batch in range(ranks.rank):
        quadratic = hessian.quadratic(
            random_tokens(seed=batch), hessian.parameters.probe(Probe(0, batch))
        )
        figures += [quadratic.loss, quadratic.slope, sum(quadratic.dots.values())]
    return figures


def main(out: Path) -> None:
    """Everything, on a rank that others work beside."""
    ranks = start("cpu")
    record = everything(ranks, "fsdp")
    hessian = DualHessian(CurvedModel(tiny_model(**UNEVEN), ranks=ranks, sharding="fsdp"))
    record.figures["alive"] = gradients_alive(hessian, random_tokens(3))
    record.figures |= {
        "memory": memory(ranks, "fsdp"),
        "guarded": guarded(ranks),
        "poisoned": poisoned(ranks),
    }
    record.figures["replicated"] = replicated(ranks)
    record.write(out, ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
