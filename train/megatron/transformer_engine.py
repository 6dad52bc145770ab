"""Transformer Engine's kernels for the same OLMo2, and fp8. Not run on a GPU yet.

The parameters have the names and shapes of `train.megatron.layers`, so checkpoints fit either kind
of kernels.
"""

import copy
import importlib.util
from dataclasses import replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from base.errors import UserError
from train.megatron.layers import post_normed
from train.model.documents import packed, unpacked
from train.run.config import RunConfig


def check_installed() -> None:
    """Raise UserError where Transformer Engine cannot run."""
    if not torch.cuda.is_available():
        raise UserError(
            "kernels 'transformer_engine' need a GPU, there is none here; set kernels to 'torch'"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise UserError(
            "transformer-engine is not installed; run make transformer-engine (it compiles, with"
            " CUDA's toolkit) or set kernels to 'torch'"
        )


def config_fields(run: RunConfig) -> dict[str, Any]:
    """Return the fields of mcore's TransformerConfig that only these kernels obey.

    fp8 is hybrid (e4m3 forward, e5m2 backward) and scales each tensor by its current maximum, so
    that no scaling history has to be saved, and a rejected step leaves no trace in it.

    Raises:
        UserError: fp8 with matrices that its kernels do not take.
    """
    fields: dict[str, Any] = {}
    if run.recompute == "layers":
        fields = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if run.precision != "fp8":
        return fields
    tensor, model = run.parallel.tensor, run.model
    key_value_rows = (model.hidden_size + 2 * model.num_key_value_heads * model.head_dim) // tensor
    for name, size in {
        "hidden_size / parallel.tensor": model.hidden_size // tensor,
        "intermediate_size / parallel.tensor": model.intermediate_size // tensor,
        "rows of q, k and v / parallel.tensor": key_value_rows,
        "micro_batch_size x sequence_length": run.micro_batch_size * run.data.sequence_length,
    }.items():
        if size % 16:
            raise UserError(
                f"fp8 needs matrices in multiples of 16, {name} is {size}; set precision to 'bf16'"
            )
    return fields | {"fp8": "hybrid", "fp8_recipe": "tensorwise"}


def kernels() -> dict[str, Any]:
    """Return the classes of a layer by role: column, row (with its norm), attention."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TEDotProductAttention,
        TERowParallelLinear,
    )

    return {
        "column": _accumulating(TEColumnParallelLinear),
        "row": post_normed(_accumulating(TERowParallelLinear)),
        "attention": with_documents(TEDotProductAttention),
    }


def _accumulating(linear: Any) -> Any:
    """Return a linear whose matrix product adds the weight's gradient to the fp32 buffer itself.

    The setting is in a copy of the configuration: mcore's own linear, the head, needs Apex for it.
    """

    class Accumulating(linear):  # type: ignore[misc]
        """A linear with gradient accumulation fused."""

        def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
            own = copy.copy(config)
            own.gradient_accumulation_fusion = True
            super().__init__(*args, config=own, **kwargs)

    return Accumulating


def with_documents(attention: Any) -> Any:
    """Return Transformer Engine's attention, given documents in its format of packed sequences."""

    class DocumentAttention(attention):  # type: ignore[misc]
        """Attention over sequences, or inside documents."""

        def forward(
            self,
            query_SBND: Tensor,
            key: Tensor,
            value: Tensor,
            *args: Any,
            packed_seq_params: PackedSeqParams | None = None,
            **kwargs: Any,
        ) -> Tensor:
            if packed_seq_params is None:
                out: Tensor = super().forward(query_SBND, key, value, *args, **kwargs)
                return out
            documents = replace(packed_seq_params, qkv_format="thd")
            tensors = (packed(x) for x in (query_SBND, key, value))
            out_TH = super().forward(*tensors, *args, packed_seq_params=documents, **kwargs)
            return unpacked(out_TH.flatten(1), query_SBND)

    return DocumentAttention
