"""Logits of an HF directory by transformers' modules, with a few rows of a weight in memory.

So a model of any size is checked on a machine that could not hold it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.activations import XIELUActivation

from base.errors import UserError
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import Weights, check_tensors, read_whole, same_bytes
from ckpt_tools.hf.configuration import read_config
from train.model.families import FAMILIES

CHUNK_BYTES = 1 << 20  # of fp32 weights in memory; larger ones leave holes between outputs

Observe = Callable[[str, Tensor], None]


def quiet_transformers() -> None:
    """Turn off transformers' bars and reports: stderr is for our progress and one-line errors."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def empty_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the causal language model in eval mode, without memory for its parameters."""
    quiet_transformers()
    model: PreTrainedModel
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
            )
    except Exception as error:  # of values that do not go together: nearly anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        source = f"{config.name_or_path}/config.json: " if config.name_or_path else ""
        raise UserError(f"{source}no model can be made of it ({reason}); restore it") from error
    # Buffers on the meta device hold no numbers, so their modules are made again with some.
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
                # xIELU has constants; all others with buffers are rotary embeddings.
                xielu = isinstance(module, XIELUActivation)
                real = type(module)(dtype=dtype) if xielu else type(module)(config)
                setattr(parent, name, real)
    model.eval()
    return model


def names_in_files(model: PreTrainedModel) -> dict[str, str]:
    """Return the key in the files of every parameter and saved constant; tied ones share one."""
    renamed = _renamed_in_files(model)
    tied: Any = (
        getattr(model, "_tied_weights_keys", None) if model.config.tie_word_embeddings else None
    )
    names = {name: renamed.get(name, name) for name in model.state_dict()}
    return {name: names[(tied or {}).get(name, name)] for name in names}


def _renamed_in_files(model: PreTrainedModel) -> dict[str, str]:
    """Return the names of parameters in memory whose names in files are others."""
    family = FAMILIES.get(model.config.model_type)
    if family is None or family.head == family.head_in_files:
        return {}
    return {f"{family.head}.weight": f"{family.head_in_files}.weight"}


def check_shapes(model: PreTrainedModel, weights: Weights, source: Path) -> None:
    """Raise UserError naming the keys of the files that are missing, unknown or misshapen.

    A model whose head is its embedding may have the head in its files as well, if it is the same.
    """
    state = model.state_dict()
    files = names_in_files(model)
    shapes = {file: tuple(state[name].shape) or (1,) for name, file in files.items()}
    copies = copies_in_files(model, weights)
    for name, original in copies.items():
        # A missing original is named by `check_tensors` below.
        if original in weights.tensors and not same_bytes(weights, name, original):
            raise UserError(
                f"{source}: '{name}' differs from '{original}', which config.json says it is"
                " (tie_word_embeddings); restore both"
            )

    tensors = {name: each for name, each in weights.tensors.items() if name not in copies}
    next_action = "its weights are not those of config.json, restore both"
    check_tensors(tensors, shapes, source, next_action)


def copies_in_files(model: PreTrainedModel, weights: Weights) -> dict[str, str]:
    """Return the keys of the files that repeat a tied parameter, each with the key that is read."""
    renamed = _renamed_in_files(model)
    return {
        copied: read
        for name, read in names_in_files(model).items()
        if (copied := renamed.get(name, name)) != read and copied in weights.tensors
    }


def spread_ids(vocab_size: int, sequences: int, tokens: int) -> Tensor:
    """Return token ids [sequences, tokens] all over the vocabulary, the same at every call."""
    thousandth_prime = 7919
    ids = torch.arange(sequences * tokens) * thousandth_prime % vocab_size
    return ids.view(sequences, tokens)


def stream_logits(hf_dir: Path, input_ids_BS: Tensor) -> Tensor:
    """Return logits [B, S, V] in fp32 on the CPU, by `stream_through`."""
    return stream_through(empty_model(read_config(hf_dir)), hf_dir, input_ids_BS)


@torch.no_grad()
def stream_through(
    model: PreTrainedModel, hf_dir: Path, input_ids_BS: Tensor, observe: Observe | None = None
) -> Tensor:
    """Return logits [B, S, V] in fp32 on the CPU.

    Args:
        model: the `empty_model` of the directory, which is of no use afterwards.
        hf_dir: its weights may be of any floating type.
        input_ids_BS: token ids [B, S].
        observe: called with the name and the output [B, S, width] of every module that has
            parameters of its own or below it and returns a tensor, as soon as it is computed.

    Raises:
        UserError: keys or shapes of the weights are not those of config.json.
    """
    weights = HFWeights(hf_dir)
    check_shapes(model, weights, hf_dir)
    files = names_in_files(model)
    # All modules but the model itself, whose output is the logits.
    for name, module in model.named_modules():
        if name and any(True for _ in module.parameters()):
            names = [key for key, _ in module.named_parameters(recurse=False)]
            _stream(module, weights, {key: files[f"{name}.{key}"] for key in names})
            if observe:
                module.register_forward_hook(_reporting(name, observe))
    logits_BSV: Tensor = model(input_ids=input_ids_BS, use_cache=False).logits
    return logits_BSV


def _reporting(name: str, observe: Observe) -> Any:
    def report(_module: nn.Module, _inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            observe(name, first)

    return report


def _stream(module: Any, weights: Weights, files: dict[str, str]) -> None:
    """Make a module read its own parameters when it computes; `files` has their keys in files."""
    if not files:
        return
    if isinstance(module, nn.Embedding):
        # In place of `forward` alone, so that hooks of the module still run.
        module.__dict__["forward"] = partial(_embed, weights, files["weight"])
    elif isinstance(module, nn.Linear):
        module.__dict__["forward"] = partial(_project, weights, files)
    else:  # norms

        def load(*_: Any) -> None:
            for key, name in files.items():
                weight = read_whole(weights, name).float()
                setattr(module, key, nn.Parameter(weight, requires_grad=False))

        module.register_forward_pre_hook(load)


def _embed(weights: Weights, name: str, ids: Tensor) -> Tensor:
    """Return the embeddings of ids; each row that occurs is read once."""
    used, places = ids.unique(return_inverse=True)
    rows = [weights.read(name, index, index + 1) for index in used.tolist()]
    return torch.cat(rows).float()[places]


def _project(weights: Weights, files: dict[str, str], inputs: Tensor) -> Tensor:
    """Return the outputs of a linear, by `CHUNK_BYTES` of its rows at a time."""
    rows, columns = weights.tensors[files["weight"]].shape
    bias = read_whole(weights, files["bias"]).float() if "bias" in files else None
    step = max(1, CHUNK_BYTES // (4 * columns))
    outputs = []
    for start in range(0, rows, step):
        weight = weights.read(files["weight"], start, min(start + step, rows)).float()
        part = None if bias is None else bias[start : start + step]
        outputs.append(F.linear(inputs, weight, part))
    return torch.cat(outputs, dim=-1)
