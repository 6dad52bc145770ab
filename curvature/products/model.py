"""An HF causal language model with a tangent beside every parameter, whole or in shards (FSDP2).

Both ways through it, transformers' own forward pass and the dual layers, begin at one module and
call the same decoder blocks, so FSDP2's hooks gather the parameters of a block, and the tangents
with them, for either.

Shapes: B sequences of a batch, S positions of a sequence, D hidden, N tokens, V vocabulary, p
    parameters of this rank.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from base.errors import UserError
from base.ranks import Ranks
from ckpt_tools.hf.layer_kinds import rotary_tables
from curvature.dual.blocks import (
    TANGENT,
    Block,
    Context,
    curved_family,
    dual_block,
    dual_norm,
    parameter,
)
from curvature.dual.cross_entropy import summed_cross_entropy
from curvature.dual.numbers import Dual, rematerialised, widened
from curvature.products.parameters import Parameters, copy, local
from train.model.accumulation import embedded
from train.model.families import layer_kinds, window_of

Sharding = Literal["none", "fsdp"]
# logits_BSV, tokens_BS1, its rows in the batch -> summed loss
Criterion = Callable[[Tensor, Tensor, range], Tensor]


class Objective(NamedTuple):
    """A number of a whole batch, and this rank's share of it for the backward pass."""

    value: float
    share: Tensor


class CurvedModel:
    """A model on one or several ranks, whose loss and derivatives are those of a whole batch.

    With sharding "none" every rank holds all parameters and works on batches of its own; with
    "fsdp" the ranks hold a part of each, share the sequences of one batch, and make the same calls.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ranks: Ranks,
        sharding: Sharding = "none",
        dtype: torch.dtype | None = None,
        checkpointing: bool = False,
        queries_per_chunk: int = 512,
        tokens_per_chunk: int = 1024,
        vectors: torch.device | None = None,
    ) -> None:
        """Take over `model`.

        Args:
            model: in eval mode, on the rank's device, or on the CPU if it is to be sharded. Its
                weights may be filled in later.
            ranks: see above.
            sharding: see above.
            dtype: of the dual layers' products of matrices; by default the parameters' own.
            checkpointing: keep only the blocks' inputs for the backward pass.
            queries_per_chunk: rows of attention weights in memory at once.
            tokens_per_chunk: rows of logits in memory at once.
            vectors: the device of whole vectors; by default the model's.
        """
        # HF drops the gradient of the padding token's embedding, training does not: to the loss it
        # is like others.
        model.get_input_embeddings().padding_idx = None  # type: ignore[assignment]
        self._sharded = sharding == "fsdp" and ranks.size > 1  # the only rank's part is the whole
        self._ranks = ranks
        self._dtype = dtype or next(model.parameters()).dtype
        self.entry = _Entry(model, self._dtype, queries_per_chunk, tokens_per_chunk)
        block = dual_block(self.entry.family)
        for layer in model.get_decoder().layers:
            layer.forward = _extended(layer, block, checkpointing)
        # Before sharding, so that FSDP2 shards and gathers tangents with their weights.
        _add_tangents(model, self._dtype)
        if self._sharded:
            self._shard(model)
        self.parameters = Parameters(
            model, ranks.sum if self._sharded else lambda summed: summed, vectors
        )
        # Until `set_tangents` the direction is 0, not what empty memory holds.
        for name in self.parameters.weights:
            self.tangent(name).zero_()

    def _shard(self, model: Any) -> None:
        mesh = init_device_mesh(self._ranks.device.type, (self._ranks.size,))
        # Blocks first: the root then groups only the parameters that no block has taken.
        for layer in model.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        # FSDP2 keeps the root gathered until a backward pass; after a loss alone, a move would not
        # reach the next one.
        fully_shard(self.entry, mesh=mesh, reshard_after_forward=True)

    @torch.no_grad()
    def set_tangents(self, direction: Callable[[str], Tensor]) -> None:
        """Set v by this rank's part of every tensor, rounded to the dual layers' precision."""
        for name in self.parameters.weights:
            copy(self.tangent(name), direction(name))

    def tangent(self, name: str) -> Tensor:
        """Return this rank's part of the direction v in one tensor."""
        owner, _, leaf = name.rpartition(".")
        return local(getattr(self.entry.model.get_submodule(owner), leaf + TANGENT))

    def dual_loss(self, tokens_BS1: Tensor) -> tuple[float, Objective]:
        """Return the mean loss per token, and its derivative along v, whose gradient is Hv."""
        share_BS1, rows, scale = self._share(tokens_BS1)
        loss: Dual = self.entry(share_BS1, None, rows)
        return self._total(loss.value * scale), self._objective(loss.tangent * scale)

    def loss(self, tokens_BS1: Tensor, criterion: Criterion | None = None) -> Objective:
        """Return the mean per token of a criterion, cross-entropy by default, by transformers."""
        share_BS1, rows, scale = self._share(tokens_BS1)
        summed: Tensor = self.entry(share_BS1, criterion or cross_entropy, rows)
        return self._objective(summed * scale)

    def _objective(self, share: Tensor) -> Objective:
        # FSDP2 averages gradients, the objective is the sum.
        summands = self._ranks.size if self._sharded else 1
        return Objective(self._total(share.detach()), share * summands)

    def _share(self, tokens_BS1: Tensor) -> tuple[Tensor, range, float]:
        """Return the rank's sequences, their places in the batch, and their summed loss's scale.

        A rank without a sequence computes another's with scale 0: the others' collectives need it.
        """
        count, positions = len(tokens_BS1), tokens_BS1.shape[1] - 1
        rows = self._ranks.share(count) if self._sharded else range(count)
        # Over the tokens of the whole batch, of which this rank has a part.
        scale = 1 / (count * positions) if rows else 0.0
        rows = rows or range(1)
        return tokens_BS1[rows.start : rows.stop].to(self._ranks.device), rows, scale

    def _total(self, share: Tensor) -> float:
        """Return the sum over the ranks that share a batch, UserError if it is not finite."""
        total = float(share)
        if self._sharded:
            total = float(self._ranks.sum(torch.tensor(total, dtype=torch.float64)))
        if not math.isfinite(total):
            raise UserError(
                f"the loss or its derivative is {total}; check the checkpoint's weights for"
                " overflow"
            )
        return total


class _Entry(nn.Module):
    """The module that every pass begins at, and FSDP2's root."""

    def __init__(
        self, model: Any, dtype: torch.dtype, queries_per_chunk: int, tokens_per_chunk: int
    ) -> None:
        super().__init__()
        self.model, self.family = model, curved_family(model.config)
        self._dtype = dtype
        self._queries_per_chunk, self._tokens_per_chunk = queries_per_chunk, tokens_per_chunk

    def forward(
        self, tokens_BS1: Tensor, criterion: Criterion | None, rows: range
    ) -> Dual | Tensor:
        """Return the summed loss, by the dual layers unless there is a criterion."""
        if criterion is None:
            return self._dual_loss(tokens_BS1)
        logits_BSV = self.model(input_ids=tokens_BS1[:, :-1], use_cache=False).logits
        return criterion(logits_BSV, tokens_BS1, rows)

    def _dual_loss(self, tokens_BS1: Tensor) -> Dual:
        dtype, decoder, config = self._dtype, self.model.get_decoder(), self.model.config
        inputs_BS, labels_N = tokens_BS1[:, :-1], tokens_BS1[:, 1:].flatten()
        table = parameter(self.model.get_input_embeddings(), dtype)
        # Looking up a row is linear in the table, so the tangent is looked up likewise.
        hidden_BSD = widened(table.map(lambda t: embedded(inputs_BS, t)))
        positions = torch.arange(inputs_BS.shape[1], device=inputs_BS.device)[None]
        tables = rotary_tables(decoder.rotary_emb, config, hidden_BSD.value, positions)
        # All sequences have the same positions: the tables' axis of one sequence is dropped.
        contexts = {
            kind: Context(cos[0], sin[0], dtype, self._queries_per_chunk, window_of(config, kind))
            for kind, (cos, sin) in tables.items()
        }
        for layer, kind in zip(decoder.layers, layer_kinds(config), strict=True):
            hidden_BSD = layer(hidden_BSD, contexts[kind])
        final_norm = getattr(decoder, self.family.final_norm)
        normed_BSD = dual_norm(self.family.norm)(final_norm, hidden_BSD, dtype, None)
        return summed_cross_entropy(
            normed_BSD.map(lambda t: t.flatten(0, 1)),
            parameter(self.model.get_output_embeddings(), dtype),
            labels_N,
            tokens_per_chunk=self._tokens_per_chunk,
        )


def _extended(layer: Any, block: Block, checkpointing: bool) -> Callable[..., Any]:
    """Return a block's forward for tensors and dual numbers, which may keep its inputs alone."""
    # Bound now, as the result will take the place of `layer.forward`.
    of_tensors, of_duals = layer.forward, functools.partial(block, layer)

    def forward(hidden: Any, *arguments: Any, **kwargs: Any) -> Any:
        compute = of_duals if isinstance(hidden, Dual) else of_tensors
        if checkpointing:
            return rematerialised(compute, hidden, *arguments, **kwargs)
        return compute(hidden, *arguments, **kwargs)

    return forward


def _add_tangents(model: nn.Module, dtype: torch.dtype) -> None:
    """Register `weight_tangent` with every `weight`, one for both places of a tied parameter.

    They are empty, so that of a model to be sharded no tangent takes memory as a whole.
    """
    tangents: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        # A list, as registering changes what is iterated over.
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) not in tangents:
                empty = torch.empty_like(weight, dtype=dtype, requires_grad=False)
                tangents[id(weight)] = nn.Parameter(empty, requires_grad=False)
            module.register_parameter(name + TANGENT, tangents[id(weight)])


def cross_entropy(logits_BSV: Tensor, tokens_BS1: Tensor, _rows: range) -> Tensor:
    """Return the sum over tokens of -log softmax(logits)[label], nats.

    Example: two tokens of equal logits over a vocabulary of 4.
        >>> loss = cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[0, 1, 2]]), range(1))
        >>> round(float(loss), 4) == round(2 * math.log(4), 4)
        True
    """
    return F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS1[:, 1:].flatten(), reduction="sum")
