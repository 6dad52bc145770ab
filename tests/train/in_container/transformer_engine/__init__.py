"""Transformer Engine as megatron-core finds it in a container on a machine without a GPU.

Every name that it imports is there. What runs on any machine does what the real one does; all else
raises, as the real one would for want of a driver.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch

__version__ = "2.20.2"


class _OnGpuAlone(type):
    """Class of all names: what is taken from one is another, and to call it raises."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _OnGpuAlone(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(f"{cls.__name__} of Transformer Engine was called without a GPU")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _OnGpuAlone(f"{self.__name__}.{name}", (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of every module below this package."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != __name__:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def get_cpu_offload_context(enabled: bool, *_: Any, **_named: Any) -> Any:
    """Return a context and a function that do nothing: nothing is offloaded."""
    assert not enabled
    return contextlib.nullcontext(), lambda tensor: tensor


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Return a buffer on the GPU, which raises where there is none."""
    return torch.empty(shape, dtype=dtype, device="cuda").fill_(0)


sys.meta_path.append(_Finder())
for _name in ("common.recipe", "pytorch.cpu_offload", "pytorch.module.base"):
    importlib.import_module(f"{__name__}.{_name}")
_all: Any = sys.modules
_all[f"{__name__}.pytorch.cpu_offload"].get_cpu_offload_context = get_cpu_offload_context
_all[f"{__name__}.pytorch.module.base"].get_dummy_wgrad = get_dummy_wgrad
