"""Stand-ins for CUDA, for megatron-core 0.19 in a process without it.

megatron-core runs on CPU but for some dozen places that name the current CUDA device, its stream or
CUDA type strings. All stand-ins are here, and are set once, before the first import of megatron.
"""

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

from base.libraries.private_names import replace


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _with_cuda_type_names(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a type string as of a CUDA tensor, which the distributed optimizer asks for."""

    @functools.wraps(original)
    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    return tensor_type


def _stand_in_for_cuda() -> None:
    replace(torch.cuda, "current_device", lambda: torch.device("cpu"))
    replace(torch.cuda, "current_stream", lambda *_args, **_kwargs: None)
    replace(torch.cuda, "synchronize", lambda *_args, **_kwargs: None)
    replace(torch.Tensor, "type", _with_cuda_type_names(torch.Tensor.type))
    # Of the last stage's copy of an embedding that is the head as well.
    replace(torch.Tensor, "cuda", lambda tensor, *_args, **_kwargs: tensor)
    with torch.device("cpu"):  # torch lists its factories at the first of these, for all later ones
        torch.zeros(())
    replace(torch, "zeros", _on_cpu(torch.zeros))
    replace(torch, "tensor", _on_cpu(torch.tensor))


def _import_without_compiler() -> None:
    """Import megatron-core without torch.compile: 1.5 s, for functions that no CPU calls."""
    compiler = replace(torch, "compile", lambda function: function)
    import megatron.core  # noqa: F401

    replace(torch, "compile", compiler)


def _silence_megatron() -> None:
    """Drop the announcements that Apex and Transformer Engine are missing: no CPU could use them.

    With GPUs they stay: they also name the environment variables that cost speed.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.core.*")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    # It finds a compiler without a GPU, on a login node.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


if not torch.cuda.is_available():
    _silence_megatron()
    _stand_in_for_cuda()
    _import_without_compiler()
