"""Transformer Engine's kernels for the same models, and 8-bit products. Not run on a GPU yet.

The parameters have the names and shapes of `train.megatron.layers`, so checkpoints fit either kind
of kernels.
"""

import importlib.util
import os
from dataclasses import replace
from typing import Any

import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from base.errors import UserError
from train.model.documents import packed, unpacked
from train.model.precision import FP8_RECIPES
from train.run.config import RunConfig

# Variables by which Transformer Engine 2.20 computes recipes in another way than it documents.
CHANGE_RECIPES = (
    "NVTE_BACKWARD_OVERRIDE",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
)


def check_can_run(precision: str) -> None:
    """Raise UserError where Transformer Engine, or this precision of its products, cannot run."""
    if not torch.cuda.is_available():
        raise UserError(
            "kernels 'transformer_engine' need a GPU, there is none here; set kernels to 'torch'"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise UserError(
            "transformer-engine is not installed; run make transformer-engine or set kernels to"
            " 'torch'"
        )
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"transformer-engine cannot be imported ({reason:.200}); run make transformer-engine"
            " again or set kernels to 'torch'"
        ) from error

    if precision not in FP8_RECIPES:
        return
    can_run = {
        "fp8": te.is_fp8_available,
        "fp8_blockwise": te.is_fp8_block_scaling_available,
        "mxfp8": te.is_mxfp8_available,
    }
    changed = [name for name in CHANGE_RECIPES if os.environ.get(name, "0") != "0"]
    if changed:
        raise UserError(
            f"{changed[0]} would change what precision '{precision}' means; unset this variable"
        )
    available, reason = can_run[precision](return_reason=True)
    if not available:
        raise UserError(
            f"precision '{precision}' does not run on this {torch.cuda.get_device_name()}:"
            f" {reason.rstrip('.')}; set precision to 'bf16', or to another of its products"
        )


def config_fields(run: RunConfig) -> dict[str, Any]:
    """Return the fields of mcore's TransformerConfig that only these kernels obey.

    Raises:
        UserError: 8-bit products of matrices that their kernels do not take.
    """
    fields: dict[str, Any] = {}
    if run.recompute == "layers":
        fields = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if run.precision not in FP8_RECIPES:
        return fields

    number_format, recipe = FP8_RECIPES[run.precision]
    multiple = get_fp8_align_size(Fp8Recipe(recipe))
    tensor, model = run.parallel.tensor, run.model
    # Rows of the fused linear of queries, keys and values on one rank.
    key_value_rows = (model.query_size + 2 * model.key_value_size) // tensor
    for name, size in {
        "hidden_size / parallel.tensor": model.hidden_size // tensor,
        "intermediate_size / parallel.tensor": model.intermediate_size // tensor,
        "rows of q, k and v / parallel.tensor": key_value_rows,
        "micro_batch_size x sequence_length": run.micro_batch_size * run.data.sequence_length,
    }.items():
        if size % multiple:
            raise UserError(
                f"{run.precision} needs matrices in multiples of {multiple}, {name} is {size};"
                " set precision to 'bf16'"
            )
    return fields | {"fp8": number_format, "fp8_recipe": recipe}


def kernels() -> dict[str, Any]:
    """Return the classes of a layer by role: column, row, attention."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TEDotProductAttention,
        TERowParallelLinear,
    )

    return {
        "column": TEColumnParallelLinear,
        "row": TERowParallelLinear,
        "attention": with_documents(TEDotProductAttention),
    }


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
            # In its format "thd" the tokens of all sequences are one row.
            documents = replace(packed_seq_params, qkv_format="thd")
            tensors = (packed(x) for x in (query_SBND, key, value))
            out_TH = super().forward(*tensors, *args, packed_seq_params=documents, **kwargs)
            return unpacked(out_TH.flatten(1), query_SBND)

    return DocumentAttention
