"""The outputs of the megatron-core model's modules in one forward pass, by HF's names.

They are recorded while mcore computes, without `train.model.megatron_names`: where queries end and
keys begin is what the attention used. So they check an export, whose weights
`train.model.megatron_names` took apart.

Shapes: S tokens, B sequences, N heads, D head size, W width of an output on this rank.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from train.data.batches import Batch
from train.distributed import sent_to_rank_zero
from train.forward_record import ForwardRecord, LinearRecord
from train.megatron.pipeline import Pipeline
from train.model import megatron_names
from train.model.config import ModelConfig, hidden_matrices
from train.model.documents import document_numbers
from train.model.rotary import rotated, rotations
from train.run.directory import PROBE_OUTPUTS


def probe(pipeline: Pipeline, inputs_BS: Tensor) -> dict[str, Tensor]:
    """Return the outputs of `Engine.probe`: the ranks of the first replica send their parts."""
    recorder = _Recorder(pipeline, length=inputs_BS.shape[1])
    with recorder.hooks:
        recorder.attach(pipeline.model.module)
        logits_SBV = pipeline.logits(inputs_BS)
    if logits_SBV is not None:
        # Without the tokens that pad the sequence.
        recorder.keep("logits", logits_SBV[: recorder.length].transpose(0, 1), shards_features=True)
    parts: dict[str, list[Tensor]] = {}
    for outputs in sent_to_rank_zero(recorder.outputs):  # tensor ranks of a group are in order
        for name, output in outputs.items():
            parts.setdefault(name, []).append(output)
    return {name: torch.cat(features, -1) for name, features in parts.items()}


class _Recorder:
    """Keeps the outputs on this rank.

    After a column-parallel linear each tensor rank has some features of all tokens. Elsewhere it
    has all features, under sequence parallelism of its own tokens.
    """

    def __init__(self, pipeline: Pipeline, length: int) -> None:
        self.length = length
        self.outputs: dict[str, Tensor] = {}
        self.hooks = ExitStack()  # removed when it is left
        self._sequence_parallel = pipeline.run.parallel.sequence

    def attach(self, model: Any) -> None:
        """Record forward passes of a stage from now on."""
        if model.pre_process:
            self._after(
                model.embedding,
                lambda _, out: self._whole("model.embed_tokens", out, every_token=True),
            )
        if model.post_process:
            self._after(
                model.decoder.final_layernorm, lambda _, out: self._whole("model.norm", out)
            )
        for layer in model.decoder.layers:
            self._attach_layer(layer, f"model.layers.{layer.layer_number - 1}")

    def _attach_layer(self, layer: Any, name: str) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        of_attention = f"{name}.self_attn"

        def projected(_: Any, out: tuple[Tensor, None]) -> None:
            for part, heads_SBND in zip("qkv", layer.heads(out[0]), strict=True):
                self._split(f"{of_attention}.{part}_proj", heads_SBND)

        self._after(attention.linear_qkv, projected)

        def halves(_: Any, out: tuple[Tensor, None]) -> None:
            gate_SBW, up_SBW = out[0].chunk(2, -1)  # as in `swiglu`
            self._split(f"{name}.mlp.gate_proj", gate_SBW)
            self._split(f"{name}.mlp.up_proj", up_SBW)

        self._after(mlp.linear_fc1, halves)
        self._whole_after(layer, name)

        if layer.model.row.norms == "before":
            self._attach_norms_before(layer, name)
            return

        def rotated_back(inputs: Any, _: Any) -> None:
            for part, heads_SBND in zip("qk", inputs, strict=False):
                # HF has a module before the rotation and none after it, so the rotation is undone.
                length, _, _, size = heads_SBND.shape
                base, scaling = layer.model.rope_theta, layer.model.rope_scaling
                cos, sin = rotations(length, size, base, heads_SBND.device, scaling)
                self._split(f"{of_attention}.{part}_norm", rotated(heads_SBND, cos, -sin))

        self._after(attention.core_attention, rotated_back)
        names = f"{of_attention}.o_proj", f"{name}.post_attention_layernorm"
        self._norm(attention.linear_proj.post_norm, *names)
        names = f"{name}.mlp.down_proj", f"{name}.post_feedforward_layernorm"
        self._norm(mlp.linear_fc2.post_norm, *names)

    def _attach_norms_before(self, layer: Any, name: str) -> None:
        """Record norms of the inputs of attention and MLP, and what these write."""
        attention, mlp = layer.self_attention, layer.mlp
        for module, key in (
            (layer.input_layernorm, "input_layernorm"),
            (attention.linear_proj, "self_attn.o_proj"),
            (layer.pre_mlp_layernorm, "post_attention_layernorm"),
            (mlp.linear_fc2, "mlp.down_proj"),
        ):
            self._whole_after(module, f"{name}.{key}")

    def _whole_after(self, module: nn.Module, name: str) -> None:
        """Record the output of a module, which a linear of mcore returns with its bias."""

        def observe(_: Any, out: Any) -> None:
            self._whole(name, out[0] if isinstance(out, tuple) else out)

        self._after(module, observe)

    def _after(self, module: nn.Module, observe: Callable[[Any, Any], None]) -> None:
        """Call `observe` with the arguments and the output of every forward pass of the module."""
        hook = module.register_forward_hook(lambda _, inputs, output: observe(inputs, output))
        self.hooks.enter_context(hook)

    def _norm(self, module: nn.Module, before: str, after: str) -> None:
        """Record the input of a norm, the output of the linear before it, and the norm of it.

        In a layer the residual is added to the norm at once.
        """

        def observe(inputs: Any, _: Any) -> None:
            self._whole(before, inputs[0])
            # `forward` runs no hooks: calling the module would run this one again.
            self._whole(after, module.forward(inputs[0]))

        self._after(module, observe)

    def _split(self, name: str, x: Tensor) -> None:
        """Record features of this tensor-parallel rank: [S, B, W], or heads [S, B, N, D]."""
        self.keep(PROBE_OUTPUTS + name, x[self.length - 1].flatten(1), shards_features=True)

    def _whole(self, name: str, x_SBW: Tensor, *, every_token: bool = False) -> None:
        """Record an output of all features."""
        if self._sequence_parallel:
            x_SBW = gather_from_sequence_parallel_region(x_SBW)
        tokens = x_SBW[: self.length].transpose(0, 1) if every_token else x_SBW[self.length - 1]
        self.keep(PROBE_OUTPUTS + name, tokens, shards_features=False)

    def keep(self, name: str, output: Tensor, *, shards_features: bool) -> None:
        """Copy an output once: in the first replica, on its tensor ranks or the first of them."""
        replicas = parallel_state.get_data_parallel_rank()
        if replicas == 0 and (
            shards_features or parallel_state.get_tensor_model_parallel_rank() == 0
        ):
            self.outputs[name] = output.to("cpu", torch.float32, copy=True)


def record_forward(pipeline: Pipeline, batch: Batch) -> ForwardRecord:
    """Return the figures of `Engine.record_forward` for this rank's layers and heads."""
    record, hooks = ForwardRecord(), ExitStack()

    def watch(layer: Any) -> None:
        index = layer.layer_number - 1  # in the whole model

        def residual(_: Any, __: Any, out: Any) -> None:
            record.residual(index, out[0])

        def attention(_: Any, inputs: Any, options: Any, __: Any) -> None:
            query_BNSD, key_BNSD = (x_SBND.permute(1, 2, 0, 3) for x_SBND in inputs[:2])
            packed, documents_BS = options["packed_seq_params"], None
            if packed is not None:
                documents_BS = document_numbers(packed.cu_seqlens_q, query_BNSD.shape[2])
            record.attention(index, query_BNSD, key_BNSD, documents_BS)

        core = layer.self_attention.core_attention
        hooks.enter_context(layer.register_forward_hook(residual))
        hooks.enter_context(core.register_forward_hook(attention, with_kwargs=True))

    with hooks:
        for layer in pipeline.model.module.decoder.layers:
            watch(layer)
            _watch_linears(layer, pipeline.run.model, record, hooks)
        pipeline.losses(batch, forward_only=True)
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    record.summarize(partial(dist.all_reduce, group=tensor_group))
    return record


def _watch_linears(layer: Any, model: ModelConfig, record: ForwardRecord, hooks: ExitStack) -> None:
    """Record the weights of the linears of a layer, and what they read."""
    size = parallel_state.get_tensor_model_parallel_world_size()

    def watch(name: str, module: Any) -> None:
        rows = megatron_names.hf_rows(name, model, size)
        # A row-parallel linear has some inputs of every row, any other has whole rows.
        whole = all_inputs if megatron_names.shard_axis(name) == 1 else lambda part: part

        def hook(_: Any, inputs: Any) -> None:
            record.inputs(tuple(rows), whole(inputs[0]))
            if not all(map(record.has_weight, rows)):
                weight = whole(module.weight.detach())
                for hf_name, spans in rows.items():
                    record.weight(hf_name, [weight[begin:end] for begin, end in spans])

        hooks.enter_context(module.register_forward_pre_hook(hook))

    hidden = hidden_matrices(model)
    for suffix in megatron_names.inside_layer(model):
        name = f"{megatron_names.LAYERS}{layer.layer_number - 1}.{suffix}"
        if hidden.issuperset(megatron_names.hf_names(name)):
            watch(name, layer.get_submodule(suffix.removesuffix(".weight")))


def all_inputs(part: Tensor) -> Tensor:
    """Return all inputs of a row-parallel linear, the last axis; every tensor rank calls."""
    gathered: Tensor = gather_from_tensor_model_parallel_region(part)
    return gathered


def record_linears(
    pipeline: Pipeline, batch: Batch, names: Sequence[str]
) -> dict[str, LinearRecord]:
    """Return the records of `Engine.record_linears` on the first tensor rank of each stage."""
    if parallel_state.get_data_parallel_rank() != 0:
        return {}
    records, hooks = dict[str, LinearRecord](), ExitStack()

    def watch(name: str, module: Any) -> None:
        records[name] = LinearRecord.of(all_inputs(module.weight.detach()))
        hooks.enter_context(
            module.register_forward_pre_hook(
                lambda _, inputs: records[name].inputs.add(all_inputs(inputs[0]))
            )
        )

    with hooks:
        for layer in pipeline.model.module.decoder.layers:
            prefix = f"{megatron_names.LAYERS}{layer.layer_number - 1}"
            for suffix in ("self_attention.linear_proj", "mlp.linear_fc2"):
                (name,) = megatron_names.hf_names(f"{prefix}.{suffix}.weight")
                if name in names:
                    watch(name, layer.get_submodule(suffix))

        # One by one: the last may hold fewer sequences, which the stages of a pipeline do not take.
        for microbatch in batch.microbatches(pipeline.run.micro_batch_size, torch.device("cpu")):
            pipeline.losses(microbatch, forward_only=True)
    return records if parallel_state.get_tensor_model_parallel_rank() == 0 else {}
