"""Functions between products of matrices, each of which a GPU runs in about one pass.

They take and return tensors; autograd does not look inside. On a GPU torch compiles them, elsewhere
they run line by line, and what counts passes sees each as one kernel that reads its arguments and
writes its results.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from train.model.elementwise import compiled_on_gpu

Observer = Callable[[Callable[..., Any], tuple[Any, ...]], Any]
_observers: list[Observer] = []


def one_pass[Function: Callable[..., Any]](function: Function) -> Function:
    """Return the function, compiled by torch where there are a GPU and a C compiler."""
    compiled = compiled_on_gpu(function)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return _observers[-1](function, arguments) if _observers else compiled(*arguments)

    result: Any = call
    return result  # type: ignore[no-any-return]


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Call `observer` with each function and its arguments instead of the function."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, or in the precision it has if that is higher."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
