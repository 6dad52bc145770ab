"""The transformers model of a run with its losses, and the recorded outputs of its modules.

Shapes: B sequences, S tokens, T = B x S, H hidden size, V vocabulary, W width of a module's output.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from base.gpus import has_compiler
from train.forward_record import ForwardRecord, LinearRecord
from train.model.accumulation import SummedEmbedding
from train.model.config import hf_settings, parameter_shapes
from train.model.families import FAMILIES
from train.model.losses import Targets, head_losses
from train.model.precision import Precision
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
    model.tie_weights()  # as the configuration says; it is left out with the initialization
    model.get_input_embeddings().__class__ = SummedEmbedding
    parameters = hf_parameters(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    assert shapes == parameter_shapes(run.model), "not the model of its row in train/model/families"
    if run.recompute == "layers":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def compiles(device: torch.device) -> bool:
    """Return whether torch compiles the layers: on a GPU, where it finds a C compiler.

    Not for deterministic algorithms: it times kernels and takes the fastest, which in another
    process may be another one, with sums in another order.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    return device.type == "cuda" and has_compiler() and not deterministic


def compile_layers(model: Any, device: torch.device) -> None:
    """Have each layer compiled at its first call, all by one graph of fixed shapes."""
    if compiles(device):
        for layer in model.base_model.layers:
            layer.compile(dynamic=False, fullgraph=True)


@contextmanager
def _uncompiled(model: Any) -> Iterator[ExitStack]:
    """Run the layers uncompiled within the block, and yield the stack of its hooks.

    They are compiled without the hooks that are set on their modules later.
    """
    with ExitStack() as hooks:
        if compiles(model.device):
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        yield hooks


class ModelWithLosses(nn.Module):
    """A transformers model that returns logits, or its losses, whose logits never exist at once.

    In bf16 it is the arithmetic of plainLM, which runs under torch's autocast: weights, the
    residual stream and norms are fp32, and the factors of matrix products are rounded to bf16.
    """

    def __init__(self, model: PreTrainedModel, precision: Precision) -> None:
        super().__init__()
        self.model = model
        self._rounds = precision == "bf16"

    def forward(
        self, inputs_BS: Tensor, mask_B1SS: Tensor | None = None, targets: Targets | None = None
    ) -> Any:
        """Return logits [B, S, V] in fp32; with targets, what `head_losses` returns.

        The mask says what attends to what; without one a token sees all that precede it.
        """
        positions_S = torch.arange(inputs_BS.shape[1], device=inputs_BS.device)
        with torch.autocast(inputs_BS.device.type, torch.bfloat16, enabled=self._rounds):
            hidden_BSH = self.model.base_model(
                input_ids=inputs_BS,
                position_ids=positions_S.expand_as(inputs_BS),
                attention_mask=mask_B1SS,
                use_cache=False,
            ).last_hidden_state
            head = self.model.get_output_embeddings()
            if targets is None:
                return head(hidden_BSH).float()
        # As autocast would round it; the head's weight is rounded to the same.
        hidden_TH = hidden_BSH.flatten(0, 1).to(torch.bfloat16 if self._rounds else None)
        return head_losses(hidden_TH, head.weight, targets)


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

    with _uncompiled(model) as hooks:
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
def observed(model: Any, record: ForwardRecord, linears: Sequence[Sequence[str]]) -> Iterator[None]:
    """Record the figures of `Engine.record_forward` in forward passes within the block.

    `linears` are HF names of weights, in groups that read the same.
    """
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

    with _uncompiled(model) as hooks:
        for index, layer in enumerate(model.base_model.layers):
            hooks.enter_context(layer.register_forward_pre_hook(begin(index)))
            hooks.enter_context(layer.register_forward_hook(end))
        for names in linears:
            _watch_linears(model, names, record, hooks)
        hooks.enter_context(_AttentionInputs(attention))
        yield


def _watch_linears(
    model: Any, names: Sequence[str], record: ForwardRecord, hooks: ExitStack
) -> None:
    """Record the weights of linears that read the same, and what they read."""

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: Any) -> None:
            if not record.has_weight(name):
                record.weight(name, [module.weight.detach()])
            if name == names[0]:
                record.inputs(names, inputs[0])

        return hook

    for name in names:
        module = model.get_submodule(name.removesuffix(".weight"))
        hooks.enter_context(module.register_forward_pre_hook(watch(name)))


@contextmanager
def recorded_linears(model: Any, records: Mapping[str, LinearRecord]) -> Iterator[None]:
    """Add the inputs of linears to records, by HF name of weight, within the block."""
    modules = {name: model.get_submodule(name.removesuffix(".weight")) for name in records}

    def add(name: str) -> Any:
        return lambda _, inputs: records[name].inputs.add(inputs[0])

    with _uncompiled(model) as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(add(name)))
        yield
