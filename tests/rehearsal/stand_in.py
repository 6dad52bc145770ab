"""A stand-in for a GPU: tensors that say `cuda`, hold their values on the CPU, and refuse to be
mixed with others.

torch's FakeTensorMode knows no values, so code that reads one (a Cholesky that may fail, a residual
that may converge) cannot go through it, and its backward pass needs a torch built for CUDA. Here
every operation is computed on the CPU, after the check that CUDA would make, so code runs to its
end and has to reach the numbers of a run on the CPU. What differs between devices shows: a tensor
that was left behind is refused, and what was moved is a copy, not an alias.

To C++ the tensors are of a device `meta`, the only one besides the CPU that every build of torch
can differentiate.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

GPU = torch.device("cuda", 0)
# what C++ takes the GPU for; tensors without content are on "meta" without a number
HIDDEN = torch.device("meta", 7)
PROJECT = Path(__file__).resolve().parents[2]
FOLDERS = tuple(
    f"{PROJECT}/{folder}/" for folder in ("base", "train", "ckpt_tools", "quant_eval", "curvature")
)
aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.matmul, aten.linear}  # of matrices
# What torch has for CUDA only, by what the CPU has instead.
ON_CUDA_ONLY = {
    aten.mm.dtype: lambda left, right, dtype: left.to(dtype) @ right.to(dtype),
    aten.addmm.dtype_out: lambda added, left, right, dtype, out: torch.addmm(
        added, left.to(dtype), right.to(dtype), out=out
    ),
}
COPIES = {aten._to_copy, aten.copy_, aten._foreach_copy_}
READ_ON_HOST = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal}
INDEXING = {aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}


class MixedDevicesError(RuntimeError):
    """An operation met tensors of the CPU and of the GPU."""


class OnGPU(Tensor):
    """A tensor of the stand-in; `on_cpu` has its values."""

    on_cpu: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, tensor: Tensor) -> "OnGPU":
        """Wraps a tensor of the CPU."""
        # a view of a tensor from outside would not be one in inference mode
        with torch.inference_mode(mode=False):
            wrapper = Tensor._make_wrapper_subclass(
                cls,
                tensor.size(),
                strides=tensor.stride(),
                storage_offset=tensor.storage_offset(),
                dtype=tensor.dtype,
                layout=tensor.layout,
                device=HIDDEN,
                requires_grad=tensor.requires_grad,
            )
        wrapper.on_cpu = tensor.detach()
        return wrapper

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """That of a GPU."""
        return GPU

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tensor without its history."""
        return super().data

    @data.setter
    def data(self, other: Tensor) -> None:
        """Becomes an alias of another, as parameters do in megatron-core's one buffer."""
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.on_cpu = _on_cpu(other)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.on_cpu!r} on {GPU}"

    def tolist(self) -> Any:
        """The values, which a GPU hands over unasked here alone and in `item`."""
        return self.on_cpu.tolist()

    def type(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As torch's, which names CUDA's types by strings of their own."""
        answer = self.on_cpu.type(*args, **kwargs)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else OnGPU(answer)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Computes what nothing but the stand-in's tensors tells to belong on it."""
        return _computed(func, args, kwargs or {}, set(), None)


class Unnumbered(TorchFunctionMode):
    """Takes a GPU's other names, and `torch.tensor` of its numbers, which C++ asks CUDA for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function with what C++ can take."""
        named = dict(kwargs or {})
        if type(named.get("device")) is int or str(named.get("device")) == "cuda":
            named["device"] = GPU
        if func is torch.tensor and isinstance(args[0], list | tuple):
            args = (
                _each(lambda leaf: leaf.item() if isinstance(leaf, OnGPU) else leaf, args[0]),
                *args[1:],
            )
        return func(*args, **named)


class StandIn(TorchDispatchMode):
    """Sees every operation while it is active.

    Attributes:
        places: functions of the project, such as "quant_eval/measuring/losses.py paired_losses",
            that put tensors on the GPU.
        on_cpu: functions of the project that multiplied matrices on the CPU.
        left: one of them whose tensors stay on the CPU: a planted fault.
    """

    def __init__(self, left: str | None = None) -> None:
        super().__init__()
        self.places, self.on_cpu, self.left = set[str](), set[str](), left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes on the CPU what belongs on the GPU."""
        if func._overloadpacket in PRODUCTS and not isinstance(args[0], OnGPU):
            self.on_cpu.add(_place() or "")
        return _computed(func, args, kwargs or {}, self.places, self.left)


class CapturedError(RuntimeError):
    """An operation that CUDA refuses while a graph is recorded: one that waits for the host."""


class RecordedGraph:
    """A CUDA graph of the stand-in: `capture` records operations, and writes to no tensor of
    before.

    Others are computed as they are recorded, for their results are tensors with shapes: their
    values are those of the last replay.
    """

    open: "RecordedGraph | None" = None

    def __init__(self) -> None:
        self._operations: list[Callable[[], Any]] = []

    @classmethod
    @contextmanager
    def capture(cls, graph: "RecordedGraph", **_: Any) -> Iterator[None]:
        """Record the operations of the context."""
        cls.open = graph
        try:
            yield
        finally:
            cls.open = None

    def record(self, operation: Callable[[], Any], results: Any = ()) -> None:
        """Keep an operation for every replay, which writes to the same results."""

        def again() -> None:
            pairs: list[tuple[Tensor, Tensor]] = list(
                zip(_tensors(results), _tensors(operation()), strict=True)
            )
            for result, value in pairs:
                result.copy_(value)

        self._operations.append(again if _tensors(results) else operation)

    def replay(self) -> None:
        """Compute all operations on the tensors as they are now."""
        with _disable_current_modes():
            for operation in self._operations:
                operation()


def _computed(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: set[str], left: str | None
) -> Any:
    tensors = _tensors([*args, *kwargs.values()])
    on_gpu = [tensor for tensor in tensors if isinstance(tensor, OnGPU)]
    stays = bool(on_gpu)
    if func._overloadpacket not in COPIES:
        check(func, args, tensors)
    elif func._overloadpacket is aten.copy_:
        stays = isinstance(args[0], OnGPU)
    if (target := kwargs.get("device")) is not None:
        stays = target == HIDDEN or target.type == "cuda"
        kwargs = kwargs | ({"device": torch.device("cpu")} if stays else {})
        if stays and not on_gpu and (place := _place()):
            places.add(place)
            stays = place != left
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    wrappers = {id(tensor.on_cpu): tensor for tensor in on_gpu}
    inputs = _each(_on_cpu, args), {name: _each(_on_cpu, value) for name, value in kwargs.items()}
    compute = partial(ON_CUDA_ONLY.get(func, func), *inputs[0], **inputs[1])
    graph = RecordedGraph.open if stays else None
    if graph:
        _check_captured(func, tensors)
        if func._schema.is_mutable:
            graph.record(compute)
            return kwargs.get("out", args[0])
    result = compute()
    if graph and not _is_view(result, tensors):
        graph.record(compute, result)
    return _each(lambda leaf: _wrapped(leaf, wrappers), result) if stays else result


def check(func: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """MixedDevicesError for what CUDA refuses: a tensor of the CPU beside one of the GPU, but
    for three exceptions.

    A single number without dimensions may be on the CPU, so may the indices of a tensor on the
    GPU, and copies cross.
    """
    on_gpu = [tensor for tensor in tensors if isinstance(tensor, OnGPU)]
    if not on_gpu:
        return
    refused = [tensor for tensor in tensors if not isinstance(tensor, OnGPU) and tensor.dim()]
    first = args[0] if args else None
    if func._overloadpacket in INDEXING and isinstance(first, OnGPU):
        indices = {id(index) for index in args[1]}
        refused = [tensor for tensor in refused if id(tensor) not in indices]
    if func._schema.is_mutable and isinstance(first, Tensor) and not isinstance(first, OnGPU):
        refused.append(first)
    if refused:
        raise MixedDevicesError(
            f"{func}: a tensor of shape {list(refused[0].shape)} is on the CPU, one of"
            f" {list(on_gpu[0].shape)} on {GPU}"
        )


def _check_captured(func: Any, tensors: list[Tensor]) -> None:
    """CapturedError for what no graph can hold: a value for the host, or one from it."""
    from_host = [each for each in tensors if not isinstance(each, OnGPU) and each.dim()]
    if from_host or func._overloadpacket in READ_ON_HOST:
        raise CapturedError(f"{func} waits for the host while a graph is recorded")


def _is_view(result: Any, tensors: list[Tensor]) -> bool:
    """Return whether a result is memory of an argument: nothing is computed."""
    memory = {_on_cpu(each).untyped_storage().data_ptr() for each in tensors}
    return any(each.untyped_storage().data_ptr() in memory for each in _tensors(result))


def _tensors(value: Any) -> list[Tensor]:
    """All tensors of a result, or of nested arguments."""
    found: list[Tensor] = []
    _each(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, value)
    return found


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """A function of an argument or a result, or of all in it: lists of tensors at most."""
    if isinstance(value, list | tuple):
        return type(value)(_each(function, element) for element in value)
    return function(value)


def _on_cpu(leaf: Any) -> Any:
    return leaf.on_cpu if isinstance(leaf, OnGPU) else leaf


def _wrapped(leaf: Any, wrappers: dict[int, OnGPU]) -> Any:
    """Result of an operation on the stand-in; one in place gives back its own argument."""
    if not isinstance(leaf, Tensor):
        return leaf
    return wrappers[id(leaf)] if id(leaf) in wrappers else OnGPU(leaf)


def _place() -> str | None:
    """The function of the project that is at work, with its file."""
    frame: FrameType | None = sys._getframe(1)
    while frame:
        code = frame.f_code
        if code.co_filename.startswith(FOLDERS):
            return f"{Path(code.co_filename).relative_to(PROJECT)} {code.co_qualname}"
        frame = frame.f_back
    return None


class Ordered:
    """A stream of the stand-in, on which everything is done at once: nothing to wait for."""

    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def wait(self, *_: Any) -> None:
        """Nothing to wait for."""

    wait_stream = wait_event = synchronize = wait

    def record_event(self) -> SimpleNamespace:
        """An event that has happened."""
        return SimpleNamespace(synchronize=self.wait)


def _swapped(parameter: Tensor, moved: Tensor) -> None:
    """Make a parameter the moved one with its attributes, which `.data = moved` leaves to it.

    megatron-core notes there how tensor ranks share it.
    """
    attributes = vars(parameter).copy()
    _swap_tensors(parameter, moved)
    # What the moved one has itself, its content above all, is newer.
    vars(parameter).update(attributes | vars(parameter))


_swap_tensors = torch.utils.swap_tensors


def without_nccl() -> Any:
    """Gloo takes the place of NCCL within the context."""
    initialize = dist.init_process_group

    def with_gloo(*_: Any, **_settings: Any) -> None:
        initialize("gloo")

    return mock.patch.object(dist, "init_process_group", with_gloo)


def without_attention_kernels() -> Any:
    """Training attends by products of matrices, within the context; enter it after `gpu()`."""
    return mock.patch("train.megatron.layers.FUSED_ATTENTION", [SDPBackend.MATH])


@contextmanager
def gpu(left: str | None = None) -> Iterator[StandIn]:
    """One stand-in is the GPU of this machine; what was made on it is useless afterwards."""
    nothing = ("_lazy_init", "set_device", "synchronize", "check_error")
    answers: dict[str, Any] = {name: lambda *_, **__: None for name in nothing}
    answers |= dict.fromkeys(
        ("max_memory_allocated", "memory_allocated", "memory_reserved", "current_device"),
        lambda *_, **__: 0,
    )
    answers |= {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_name": lambda *_, **__: "NVIDIA H100",
        "mem_get_info": lambda *_, **__: (80 * 10**9, 80 * 10**9),
        "get_device_properties": lambda *_, **__: SimpleNamespace(
            total_memory=80 * 10**9, uuid="0"
        ),
        "Stream": Ordered,
        "current_stream": Ordered,
        "stream": nullcontext,
        "CUDAGraph": RecordedGraph,
        "graph": RecordedGraph.capture,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *memory: 0),
    }
    # torch.tensor(..., device=) makes a CPU tensor first, and then moves it
    torch._C._set_only_lift_cpu_tensors(True)
    # a moved parameter stays the same object, tied or not
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with (
            mock.patch.multiple("torch.cuda", **answers),
            # torch of CUDA would ask the driver, which is not there, for a stream to capture.
            mock.patch("torch.accelerator.current_accelerator", return_value=None),
            # A GPU runs some functions compiled; here they run line by line.
            mock.patch("torch.compile", lambda function=None, **_: function or (lambda f: f)),
            mock.patch("torch.utils.swap_tensors", _swapped),
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
            mock.patch.object(torch.Tensor, "record_stream"),
            Unnumbered(),
            StandIn(left) as stand_in,
        ):
            yield stand_in
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        torch._C._set_only_lift_cpu_tensors(False)
