"""A model of which one decoder block is in memory at a time, computed by transformers' own modules.

Shapes: B sequences of a batch, L tokens of a sequence, D hidden features, T tokens, V vocabulary, G
    linear inputs.
"""

import copy
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from base.errors import UserError
from ckpt_tools.formats.weights import Weights, read_whole
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.forward import check_shapes, empty_model, names_in_files
from ckpt_tools.hf.layer_kinds import attention_masks, rotary_tables
from train.model.families import FULL, LAYERS, family_of, layer_kinds
from train.model.families.family import Family

Context = dict[str, dict[str, Any]]  # what blocks of each kind need besides the stream


class Block:
    """A decoder block, whole or taken apart where its linears read.

    Attributes:
        module: transformers' own.
        prefix: of its parameters' names in the model.
        kind: says which tokens its queries see.
        mixes_sequences: whether what it makes of a sequence depends on what else is in the batch,
            padding included: it is then given one sequence at a time. LLM.int8() calls a feature an
            outlier for all tokens of a batch.
    """

    def __init__(
        self, module: Any, prefix: str, family: Family, is_parallel: bool, kind: str = FULL
    ) -> None:
        self.module, self.prefix, self.family = module, prefix, family
        self.is_parallel, self.kind = is_parallel, kind
        self.mixes_sequences = False
        self.attention, self.mlp = getattr(module, family.attention), getattr(module, family.mlp)
        self._norms = getattr(module, family.attention_norm), getattr(module, family.mlp_norm)

    def copy(self) -> "Block":
        """Return a block with its own modules, which share weights until a linear's is replaced."""
        # deepcopy takes from its memo what is there already: modules are copied, tensors are not.
        tensors = (*self.module.parameters(), *self.module.buffers())
        module = copy.deepcopy(self.module, {id(tensor): tensor for tensor in tensors})
        return Block(module, self.prefix, self.family, self.is_parallel, self.kind)

    def linears(self) -> list[dict[str, nn.Linear]]:
        """Return linears by name in groups of one input, in the order in which they compute."""
        family = self.family
        groups = []
        for part, reading, writing in (
            (family.attention, family.reading, family.writing),
            (family.mlp, family.mlp_reading, family.mlp_writing),
        ):
            owner = getattr(self.module, part)
            for names in (reading, (writing,)):
                groups.append(
                    {f"{self.prefix}.{part}.{name}": getattr(owner, name) for name in names}
                )
        return groups

    def gain(self, site: str) -> Tensor | None:
        """Return the gain of the norm whose outputs a site reads, None if there is no such norm."""
        norms = {"attention_in": 0, "mlp_in": 1}
        if self.family.norms == "after" or site not in norms:
            return None
        gain: Tensor | None = getattr(self._norms[norms[site]], "weight", None)
        return gain

    def __call__(self, x_BLD: Tensor, context: Context) -> Tensor:
        """Return the block's output."""
        output: Tensor = self.module(x_BLD, **context[self.kind])
        return output

    def attention_input(self, x_BLD: Tensor) -> Tensor:
        """Return the input of q, k and v."""
        normed_BLD: Tensor = self._norms[0](x_BLD) if self.family.norms == "before" else x_BLD
        return normed_BLD

    def attended(self, x_BLD: Tensor, context: Context) -> Tensor:
        """Return the input of the attention's last linear, [B, L, G]."""
        # With the last linear as the identity, the module returns what that linear reads.
        with _skipped(self.attention, self.family.writing):
            inputs: tuple[Tensor, ...] = self.attention(
                hidden_states=self.attention_input(x_BLD), **context[self.kind]
            )
        return inputs[0]

    def after_attention(self, x_BLD: Tensor, attended_BLG: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream that the MLP reads, and what it is added to in the end."""
        written = getattr(self.attention, self.family.writing)(attended_BLG)
        # The MLP of a parallel block reads the input of the block, not the sum with attention.
        if self.is_parallel:
            return x_BLD, x_BLD + written
        added = x_BLD + (written if self.family.norms == "before" else self._norms[0](written))
        return added, added

    def mlp_input(self, x_BLD: Tensor) -> Tensor:
        """Return the input of the MLP's first linears."""
        normed_BLD: Tensor = self._norms[1](x_BLD) if self.family.norms == "before" else x_BLD
        return normed_BLD

    def gated(self, x_BLD: Tensor) -> Tensor:
        """Return the input of the MLP's last linear, [B, L, G]."""
        with _skipped(self.mlp, self.family.mlp_writing):
            input_BLG: Tensor = self.mlp(self.mlp_input(x_BLD))
        return input_BLG

    def after_mlp(self, x_BLD: Tensor, gated_BLG: Tensor) -> Tensor:
        """Return the block's output, from the residual stream the MLP is added to."""
        written: Tensor = getattr(self.mlp, self.family.mlp_writing)(gated_BLG)
        return x_BLD + (written if self.family.norms == "before" else self._norms[1](written))


@contextmanager
def _skipped(owner: nn.Module, linear: str) -> Any:
    """Replace a linear by the identity while the context lasts."""
    original = getattr(owner, linear)
    setattr(owner, linear, nn.Identity())
    try:
        yield
    finally:
        setattr(owner, linear, original)


class StreamedModel:
    """The causal language model of an HF directory, read block by block.

    Attributes:
        config: transformers' configuration.
        num_blocks: decoder blocks.
        dtype, device: of the weights once they are read.
    """

    def __init__(
        self, hf_dir: Path, weights: Weights, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Read no weight yet. UserError if keys or shapes are not those of config.json."""
        self.config = read_config(hf_dir)
        self.family = family_of(self.config)
        self._empty = empty_model(self.config, dtype)
        check_shapes(self._empty, weights, hf_dir)
        self._source, self._weights, self.dtype, self.device = hf_dir, weights, dtype, device
        self._files = names_in_files(self._empty)
        self.num_blocks: int = self.config.num_hidden_layers
        self._is_parallel = bool(getattr(self.config, "use_parallel_residual", False))

    def empty_linears(self) -> dict[str, nn.Linear]:
        """Return all linears of the decoder blocks by name, without weights: what is quantized."""
        name = f"{self.family.decoder}.{LAYERS}."
        modules = self._empty.named_modules()
        return {
            key: module
            for key, module in modules
            if isinstance(module, nn.Linear) and key.startswith(name)
        }

    def block(self, index: int) -> Block:
        """Return a decoder block with its weights.

        UserError with the name of a weight that is not finite.
        """
        name = f"{self.family.decoder}.{LAYERS}.{index}"
        kind = layer_kinds(self.config)[index]
        return Block(self._load(name), name, self.family, self._is_parallel, kind)

    def context(self, length: int) -> Context:
        """Return what blocks need besides the stream of sequences of that length, by their kind."""
        rotary = getattr(self._empty, self.family.decoder).rotary_emb.to(self.device)
        # without features: one sequence stands for those of a batch
        example_1L0 = torch.empty(1, length, 0, dtype=self.dtype, device=self.device)
        positions_1L = torch.arange(length, device=self.device)[None]
        masks = attention_masks(self._empty.config, example_1L0)
        return {
            kind: {"position_embeddings": tables, "attention_mask": masks[kind]}
            for kind, tables in rotary_tables(
                rotary, self.config, example_1L0, positions_1L
            ).items()
        }

    def embedding(self) -> nn.Module:
        """Return the map from token ids [B, L] to the residual stream [B, L, D]."""
        module: nn.Module = self._load(f"{self.family.decoder}.{self.family.embedding}")
        return module

    def head(self) -> nn.Sequential:
        """Return the map of the last block's output, fp32 [..., D], to fp32 logits [..., V].

        Its weights are those of the model's dtype, which fp32 holds exactly.
        """
        norm = f"{self.family.decoder}.{self.family.final_norm}"
        return nn.Sequential(self._load(norm), self._load(self.family.head)).float()

    def _load(self, name: str) -> Any:
        # From a copy: the empty model never holds a weight, so a block is freed with its user.
        module = copy.deepcopy(self._empty.get_submodule(name))
        tensors = {}
        for key, empty in module.state_dict().items():
            tensor = read_whole(self._weights, self._files[f"{name}.{key}"])
            if not bool(tensor.isfinite().all()):
                raise UserError(
                    f"{self._source}: '{name}.{key}' holds values that are not finite; give an"
                    " earlier checkpoint"
                )
            tensors[key] = tensor.to(self.dtype).view(empty.shape)
        # The parameters are on the meta device, where there is nothing to copy into.
        module.load_state_dict(tensors, assign=True)
        return module.requires_grad_(False).to(self.device)
