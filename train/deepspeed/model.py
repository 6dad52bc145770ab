"""The transformers model of a run, and the recorded outputs of its modules.

Shapes: B sequences, S tokens, W width of a module's output.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from train.forward_record import ForwardRecord, LinearRecord
from train.model.accumulation import SummedEmbedding, SummedLayerNorm
from train.model.config import hf_settings, parameter_shapes
from train.model.families import FAMILIES
from train.run.config import RunConfig
from train.run.directory import PROBE_OUTPUTS


def hf_parameters(model: PreTrainedModel) -> dict[str, Any]:
    """Return the parameters by their names in files, those of `parameter_shapes`.

    In memory transformers 5 has an `lm_head` in gpt_neox too, which is `embed_out` in every file.
    """
    row = FAMILIES[model.config.model_type]
    return {
        name.replace(f"{row.head}.", f"{row.head_in_files}."): parameter
        for name, parameter in model.named_parameters()
    }


def build_model(run: RunConfig) -> PreTrainedModel:
    """Return the model of a run in fp32; `Engine.start_from` sets its weights."""
    # The end-of-text token does not enter the arithmetic.
    hf_config = AutoConfig.for_model(
        run.model.family, **hf_settings(run.model, run.data.sequence_length, 0)
    )
    # Under a name of our own transformers makes no mask: to make none for "sdpa" it would read the
    # positions of every microbatch, and wait for the GPU.
    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, attn_implementation="causal_sdpa"
        )
    # Their gradients would depend on the size of a microbatch.
    model.get_input_embeddings().__class__ = SummedEmbedding
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.__class__ = SummedLayerNorm
    parameters = hf_parameters(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    assert shapes == parameter_shapes(run.model), "not the model of its row in train/model/families"
    if run.recompute == "layers":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@contextmanager
def recorded(model: Any) -> Iterator[dict[str, Tensor]]:
    """Record the module outputs of `Engine.probe` in forward passes within the block."""
    outputs: dict[str, Tensor] = {}
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = set(model.base_model.layers)

    def keep(name: str, every_token: bool) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output_BSW: Tensor) -> None:
            tokens = output_BSW if every_token else output_BSW[:, -1]
            outputs[PROBE_OUTPUTS + name] = tokens.detach().to("cpu", torch.float32, copy=True)

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            # All but the head, whose output is the logits: the caller has them.
            has_parameters = next(module.parameters(recurse=False), None) is not None
            if module in layers or (has_parameters and module is not lm_head):
                hook = keep(name, every_token=module is embedding)
                hooks.enter_context(module.register_forward_hook(hook))
        yield outputs


class _AttentionInputs(TorchFunctionMode):
    """A hook on queries and keys, after norm and rotation, where transformers hands them over."""

    def __init__(self, observe: Callable[[Tensor, Tensor, Tensor | None], None]) -> None:
        super().__init__()
        self._observe = observe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            (query, key), mask_B1SS, documents_BS = args[:2], kwargs["attn_mask"], None
            if mask_B1SS is not None:  # tokens of a document attend to the same first one
                documents_BS = mask_B1SS[:, 0].int().argmax(-1)
            self._observe(query, key, documents_BS)
        return func(*args, **kwargs)


@contextmanager
def observed(model: Any, record: ForwardRecord) -> Iterator[None]:
    """Record the figures of `Engine.record_forward` in forward passes within the block."""
    current = 0  # the layer that is computed

    def begin(index: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            nonlocal current
            current = index

        return hook

    def end(_module: nn.Module, _inputs: Any, output_BSH: Tensor) -> None:
        record.residual(current, output_BSH)

    def attention(query: Tensor, key: Tensor, documents_BS: Tensor | None) -> None:
        record.attention(current, query, key, documents_BS)

    with ExitStack() as hooks:
        for index, layer in enumerate(model.base_model.layers):
            hooks.enter_context(layer.register_forward_pre_hook(begin(index)))
            hooks.enter_context(layer.register_forward_hook(end))
        hooks.enter_context(_AttentionInputs(attention))
        yield


@contextmanager
def recorded_linears(model: Any, names: Sequence[str]) -> Iterator[dict[str, LinearRecord]]:
    """Record the inputs of linears, by HF name of weight, in forward passes within the block."""
    modules = {name: model.get_submodule(name.removesuffix(".weight")) for name in names}
    records = {name: LinearRecord.of(module.weight.detach()) for name, module in modules.items()}

    def add(name: str) -> Any:
        return lambda _, inputs: records[name].inputs.add(inputs[0])

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(add(name)))
        yield records
