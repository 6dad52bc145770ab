"""`python -m tests.bench.roofline_gptq`: seconds of GPTQ of OLMo2-7B in bf16 on one H100, by part.

128 sequences of 2,048 tokens. The walk of `quant_eval run` itself goes through one and two decoder
blocks and one and two batches of tensors without content (`meta` is the GPU), and every kernel is
counted: how many start, in a CUDA graph or by themselves, how many bytes they read and
write, how many FLOPs they take. Each block and each batch adds the same. A kernel takes as long as
its FLOPs, its bytes or its start; a part as long as its kernels or the host that starts them. The
rates are printed; nothing was run on a GPU. Reading the files is a rate; evaluation is not counted.
"""

import copy
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig

from base.ranks import Ranks
from base.rounding import columns
from ckpt_tools.hf.forward import empty_model
from quant_eval.measuring.walk import Variant, walk
from quant_eval.model.families import family_of
from quant_eval.model.streamed import StreamedModel
from quant_eval.settings import ComputeSettings
from quant_eval.specs import parse_spec
from train.model.families import hf_settings, parameter_shapes
from train.model.presets import OLMO2_7B
from train.planning.flops import GPUS

SPEC, SEQUENCES, LENGTH, BATCH = "gptq-b4-g128", 128, 2048, 8
GPU = torch.device("meta")
H100 = GPUS["h100"]
RATES = {  # FLOP/s
    torch.bfloat16: 0.5 * H100.peak_flops,
    torch.float32: 0.75 * H100.fp32_flops,
    torch.float64: 0.67 * 67e12,
}
FACTOR_RATE = 0.33 * 67e12  # of cuSOLVER's Cholesky and cuBLAS' triangular inverse in fp64
BYTES_PER_SECOND = 0.8 * H100.bandwidth
KERNEL_SECONDS, LAUNCH_SECONDS = 2e-6, 6e-6  # on the GPU at least; of the host without a graph
COPIED_PER_SECOND = 8e9  # bytes of pageable memory over PCIe 5
READ_PER_SECOND = 1.5e9  # bytes from files to the GPU, with the check that all are finite

aten = torch.ops.aten
COUNTED = flop_registry | {aten.addmm_: flop_registry[aten.addmm]}
NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten._unsafe_view}
PARTS = {  # by the function of the project that starts the kernel
    "hessian.py": "Hessians",
    "gptq.py prepare": "Cholesky and inverse",
    "gptq.py _order": "Cholesky and inverse",
    "gptq.py _factor": "Cholesky and inverse",
    "gptq.py row_output_errors": "record of errors",
    "gptq.py _quadratic_forms": "record of errors",
    "sequential.py BlockQuantizer._errors": "record of errors",
    "gptq.py": "rounding",
    "columns.py": "rounding",
}


@dataclass(frozen=True)
class Work:
    """The kernels of a part; sums, differences and multiples are those of every figure."""

    launches: float = 0.0  # by the host
    nodes: float = 0.0  # of replayed CUDA graphs
    flops: float = 0.0
    moved: float = 0.0  # bytes read and written on the GPU
    copied: float = 0.0  # bytes between host and GPU
    kernel_seconds: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self.figures, other.figures, strict=True)))

    def __mul__(self, times: float) -> "Work":
        return Work(*(times * figure for figure in self.figures))

    @property
    def figures(self) -> tuple[float, ...]:
        """All figures in order."""
        return tuple(vars(self).values())

    @property
    def seconds(self) -> float:
        """Seconds of the GPU or of the host, whichever is busy for longer, and of copies."""
        return (
            max(self.kernel_seconds, self.launches * LAUNCH_SECONDS)
            + self.copied / COPIED_PER_SECOND
        )


Parts = dict[str, Work]


class Count(TorchDispatchMode):
    """A count of the kernels on the GPU, by part; every value that is read is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: Parts = defaultdict(Work)
        self.captured: Parts | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return 1
        out = _from_gpu(func, args, kwargs or {})
        out = func(*args, **(kwargs or {})) if out is None else out
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        kernel = func.namespace == "aten" and func._overloadpacket not in NO_KERNEL
        on_gpu = any(x.device == GPU for x in tensors)
        if kernel and on_gpu and not func.is_view:
            into = self.parts if self.captured is None else self.captured
            into[_part()] += _work(func, args, kwargs or {}, out, tensors)
        return out

    @contextmanager
    def capture(self, graph: SimpleNamespace, **_: str) -> Iterator[None]:
        """Count the kernels of the context whenever the graph is replayed."""
        graph.parts = self.captured = defaultdict(Work)
        yield
        self.captured = None
        graph.replay = lambda: self._replayed(graph.parts)

    def _replayed(self, parts: Parts) -> None:
        for name, work in parts.items():
            self.parts[name] += Work(1, work.launches, *work.figures[2:])


def _part() -> str:
    frame = sys._getframe(2)
    while frame.f_back:
        code = frame.f_code
        file = code.co_filename.rpartition("/quant_eval/")[2].rpartition("/")[2]
        part = PARTS.get(f"{file} {code.co_qualname}") or PARTS.get(file)
        if part:
            return part
        frame = frame.f_back
    return "forward passes"


def _from_gpu(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return what a copy from the GPU to the host makes; None: this is no such copy."""
    if func is aten.copy_.default and args[1].device == GPU != args[0].device:
        return args[0]
    if func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
        return torch.ones(args[0].shape, dtype=kwargs.get("dtype", args[0].dtype))
    return None


def _work(func: Any, args: Any, kwargs: Any, out: Any, tensors: list[Tensor]) -> Work:
    """Return what one kernel does and how long it takes at the rates above."""
    sizes = [min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors]
    moved = float(sum(sizes))
    packet, first = func._overloadpacket, tensors[0]
    if len({x.device.type for x in tensors}) > 1 and packet in (aten.copy_, aten._to_copy):
        return Work(launches=1, copied=float(max(sizes)))
    flops, rate = 0.0, RATES.get(first.dtype, RATES[torch.float32])
    if packet is aten.linalg_cholesky_ex:
        flops, rate = len(first) ** 3 / 3, FACTOR_RATE
    elif packet is aten.linalg_solve_triangular:
        flops, rate = float(len(first) ** 3), FACTOR_RATE
    elif packet in COUNTED:
        flops = float(COUNTED[packet](*args, **kwargs, out_val=out))
    seconds = max(flops / rate, moved / BYTES_PER_SECOND, KERNEL_SECONDS)
    return Work(1, 0, flops, moved, 0, seconds)


class HollowModel(StreamedModel):
    """An OLMo2-7B of some blocks on the GPU, without content and without files."""

    def __init__(self, num_blocks: int) -> None:
        settings = hf_settings(OLMO2_7B, LENGTH, 0) | {"num_hidden_layers": num_blocks}
        self.config = AutoConfig.for_model(OLMO2_7B.family, **settings)
        self.family, self.num_blocks = family_of(self.config), num_blocks
        self.dtype, self.device = torch.bfloat16, GPU
        self._empty = empty_model(self.config, self.dtype)
        self._is_parallel = False

    def context(self, length: int) -> dict[str, Any]:
        """Return rotary embeddings and no mask."""
        shape = (1, length, OLMO2_7B.hidden_size // OLMO2_7B.num_attention_heads)
        angles = torch.empty(2, *shape, dtype=self.dtype, device=GPU)
        return {"position_embeddings": tuple(angles), "attention_mask": None}

    def _load(self, name: str) -> nn.Module:
        return copy.deepcopy(self._empty.get_submodule(name)).requires_grad_(False)


def counted(num_blocks: int, num_batches: int) -> Parts:
    """Count the kernels of a walk through some blocks with some batches of calibration text."""
    count = Count()
    cuda: dict[str, Any] = {
        "CUDAGraph": SimpleNamespace,
        "graph": count.capture,
        "Stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
        "current_stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
        "stream": nullcontext,
    }
    with mock.patch.multiple("torch.cuda", **cuda):
        ids_NL = torch.zeros(num_batches * BATCH, LENGTH, dtype=torch.int64)
        variant = Variant(parse_spec(SPEC), ids_NL)
        compute = ComputeSettings(batch_size=BATCH)
        columns._graph.cache_clear()  # of another count
        room = mock.patch("quant_eval.measuring.room.free_memory", return_value=80 * 10**9)
        with count, room:
            walk(HollowModel(num_blocks), [variant], None, compute, Ranks(0, 1, GPU))
    return count.parts


def whole() -> Parts:
    """Extend what one and two blocks and batches take to the model and to its calibration text."""
    blocks, batches = OLMO2_7B.num_hidden_layers - 1, SEQUENCES // BATCH - 1

    def of(num_blocks: int) -> Parts:
        once, twice = counted(num_blocks, 1), counted(num_blocks, 2)
        return {name: once[name] + (twice[name] + once[name] * -1) * batches for name in twice}

    once, twice = of(1), of(2)
    return {name: once[name] + (twice[name] + once[name] * -1) * blocks for name in twice}


def main() -> None:
    """Print the table and the rates."""
    parts = whole()
    print(f"GPTQ ({SPEC}) of OLMo2-7B, bf16, {SEQUENCES} x {LENGTH} tokens, one H100")
    heads = ("launches", "in graphs", "TFLOP", "GB moved", "GB copied", "seconds")
    print(f"{'':24}" + "".join(f"{head:>12}" for head in heads))
    for name, work in (*parts.items(), ("all kernels", sum(parts.values(), Work()))):
        seconds = (
            sum(part.seconds for part in parts.values()) if name not in parts else work.seconds
        )
        figures = (
            work.launches,
            work.nodes,
            work.flops / 1e12,
            work.moved / 1e9,
            work.copied / 1e9,
        )
        print(f"{name:24}" + "".join(f"{x:>12,.0f}" for x in figures) + f"{seconds:>12.1f}")
    reading = 2 * sum(map(prod, parameter_shapes(OLMO2_7B).values())) / READ_PER_SECOND
    print(f"{'reading the files':24}{reading:>72.1f}\n{'sum':24}{seconds + reading:>72.1f}")
    rates = ", ".join(f"{str(key)[6:]} {rate / 1e12:.0f}" for key, rate in RATES.items())
    print(
        f"rates: products in TFLOP/s {rates}, Cholesky and inverse {FACTOR_RATE / 1e12:.0f};"
        f" memory {BYTES_PER_SECOND / 1e12:.2f} TB/s; a kernel at least"
        f" {1e6 * KERNEL_SECONDS:.0f} us, a launch {1e6 * LAUNCH_SECONDS:.0f} us of the host;"
        f" copies {COPIED_PER_SECOND / 1e9:.0f} GB/s; reading {READ_PER_SECOND / 1e9:.1f} GB/s"
    )


if __name__ == "__main__":
    main()
