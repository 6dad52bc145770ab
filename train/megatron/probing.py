"""What the modules of the megatron-core model put out in one forward pass, by their names in HF's OLMo2.

It is read off while mcore computes, and `train.layout` has no part in it: where queries end and keys begin is what the
attention used. So an export, whose weights `train.layout` took apart, can be held against it.

Shapes: S tokens, B sequences, W width of an output on this rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from train.distributed import sent_to_rank_zero
from train.megatron.pipeline import Pipeline
from train.run_directory import PROBE_OUTPUTS


def probe(pipeline: Pipeline, inputs_BS: Tensor) -> dict[str, Tensor]:
    """What `Engine.probe` returns. The ranks of the first model replica send their parts to rank 0."""
    recorder = _Recorder(pipeline, length=inputs_BS.shape[1])
    with recorder.attached():
        logits_SBV = pipeline.logits(inputs_BS)
    if logits_SBV is not None:
        recorder.keep("logits", recorder.in_order(logits_SBV)[: recorder.length].transpose(0, 1), own_features=True)
    whole: dict[str, list[Tensor]] = {}
    for part in sent_to_rank_zero(recorder.kept):  # ranks of one tensor-parallel group follow each other
        for name, output in part.items():
            whole.setdefault(name, []).append(output)
    return {name: torch.cat(outputs, -1) for name, outputs in whole.items()}


class _Recorder:
    """Keeps the outputs on this rank.

    Behind a column-parallel linear each tensor-parallel rank has features of its own of all tokens; elsewhere it has
    all features, under sequence parallelism of its own tokens.
    """

    def __init__(self, pipeline: Pipeline, length: int) -> None:
        self.length = length
        self.kept: dict[str, Tensor] = {}
        self._chunks = [chunk.module for chunk in pipeline.chunks]
        self._sequence_parallel = pipeline.run.parallel.sequence
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Records forward passes within the block."""
        try:
            for chunk in self._chunks:
                self._attach(chunk)
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def _attach(self, chunk: Any) -> None:
        if chunk.pre_process:
            self._after(chunk.embedding, lambda _, out: self._whole("model.embed_tokens", out, every_token=True))
        if chunk.post_process:
            self._after(chunk.decoder.final_layernorm, lambda _, out: self._whole("model.norm", out))
        for layer in chunk.decoder.layers:
            self._attach_layer(layer, f"model.layers.{layer.layer_number - 1}")

    def _attach_layer(self, layer: Any, name: str) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        self._norm(attention.q_layernorm, f"{name}.self_attn.q_proj", f"{name}.self_attn.q_norm", self._split)
        self._norm(attention.k_layernorm, f"{name}.self_attn.k_proj", f"{name}.self_attn.k_norm", self._split)
        self._after(attention.core_attention, lambda given, _: self._split(f"{name}.self_attn.v_proj", given[2]))
        self._norm(
            attention.linear_proj.post_norm, f"{name}.self_attn.o_proj", f"{name}.post_attention_layernorm", self._whole
        )

        def halves(_: Any, out: tuple[Tensor, None]) -> None:
            for half, x_SBW in zip(("gate_proj", "up_proj"), out[0].chunk(2, -1), strict=True):  # as SwiGluMLP does
                self._split(f"{name}.mlp.{half}", x_SBW)

        self._after(mlp.linear_fc1, halves)
        self._norm(mlp.linear_fc2.post_norm, f"{name}.mlp.down_proj", f"{name}.post_feedforward_layernorm", self._whole)
        self._after(layer, lambda _, out: self._whole(name, out[0]))

    def _after(self, module: nn.Module, see: Callable[[Any, Any], None]) -> None:
        """Calls `see` with the positional arguments and the output of the module whenever it has computed."""
        self._handles.append(module.register_forward_hook(lambda _, given, out: see(given, out)))

    def _norm(self, module: nn.Module, before: str, after: str, keep: Callable[[str, Tensor], None]) -> None:
        """Records what goes into a norm, which is the output of the linear before it, and what comes out."""

        def see(given: Any, out: Tensor) -> None:
            keep(before, given[0])
            keep(after, out)

        self._after(module, see)

    def _split(self, name: str, x: Tensor) -> None:
        """Records features of this tensor-parallel rank: [S, B, W], or heads [S, B, N, D]."""
        self.keep(PROBE_OUTPUTS + name, self.in_order(x)[self.length - 1].flatten(1), own_features=True)

    def _whole(self, name: str, x_SBW: Tensor, *, every_token: bool = False) -> None:
        """Records an output of all features."""
        if self._sequence_parallel:
            x_SBW = _joined(x_SBW, parallel_state.get_tensor_model_parallel_group())
        x_SBW = self.in_order(x_SBW)
        kept = x_SBW[: self.length].transpose(0, 1) if every_token else x_SBW[self.length - 1]
        self.keep(PROBE_OUTPUTS + name, kept, own_features=False)

    @staticmethod
    def in_order(x: Tensor) -> Tensor:
        """All tokens along the first axis, from those of this context-parallel rank: see `pipeline._own_part`."""
        ranks = parallel_state.get_context_parallel_world_size()
        if ranks == 1:
            return x
        pieces = _joined(x, parallel_state.get_context_parallel_group()).chunk(2 * ranks)
        return torch.cat([*pieces[::2], *pieces[1::2][::-1]])

    def keep(self, name: str, output: Tensor, *, own_features: bool) -> None:
        """Copies an output, once in the first replica: on every tensor-parallel rank, or on the first of them."""
        replicas = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        if replicas == 0 and (own_features or parallel_state.get_tensor_model_parallel_rank() == 0):
            self.kept[name] = output.to("cpu", torch.float32, copy=True)


def _joined(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks of the group, one after another along the first axis."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group)
    return torch.cat(parts)
