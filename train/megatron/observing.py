"""The hooks of `Engine.record_forward` in a megatron-core model."""

from typing import Any

from train.data.batches import Batch
from train.forward_record import ForwardRecord
from train.megatron.pipeline import Pipeline
from train.model.documents import document_numbers


def record_forward(pipeline: Pipeline, batch: Batch) -> ForwardRecord:
    """Return the figures of this rank's layers and heads in a forward pass."""
    record, handles = ForwardRecord(), []

    def watch(layer: Any) -> None:
        index = layer.layer_number - 1  # in the whole model

        def residual(_: Any, __: Any, out: Any) -> None:
            record.residual(index, out[0])

        def attention(_: Any, given: Any, named: Any, __: Any) -> None:
            query_BNSD, key_BNSD = (x_SBND.permute(1, 2, 0, 3) for x_SBND in given[:2])
            packed, documents_BS = named["packed_seq_params"], None
            if packed is not None:
                documents_BS = document_numbers(packed.cu_seqlens_q, query_BNSD.shape[2])
            record.attention(index, query_BNSD, key_BNSD, documents_BS)

        core = layer.self_attention.core_attention
        handles.append(layer.register_forward_hook(residual))
        handles.append(core.register_forward_hook(attention, with_kwargs=True))

    try:
        for layer in pipeline.model.module.decoder.layers:
            watch(layer)
        pipeline.losses(batch, forward_only=True)
    finally:
        for handle in handles:
            handle.remove()
    return record
