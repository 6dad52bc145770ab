"""The processor of this process, and kinds of processors: another kind rounds in another way."""

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from base.frozen import Frozen

CPUINFO = Path("/proc/cpuinfo")
ARM_NUMBERS = ("CPU implementer", "CPU part", "CPU variant")
# Variables that keep torch, oneDNN, MKL and OpenBLAS from instructions that a CPU has.
LIMITS = (
    *("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"),
    *("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "OPENBLAS_CORETYPE"),
)
# The widest instructions first, as torch names them: oneDNN takes the first that a CPU has.
INSTRUCTIONS = (
    *("avx10_2", "avx10_1", "amx_fp16", "amx_bf16", "amx_int8"),
    *("avx512_fp16", "avx512_bf16", "avx512_vnni", "avx512_f", "avx_vnni", "avx2", "avx", "sse4_1"),
    *("sve2", "sve"),
)


class Processor(Frozen):
    """The parts of a machine that decide how a process rounds on its CPU."""

    architecture: str = Field(description="x86_64 or aarch64")
    cpu: str = Field(description="name of the model")
    limits: dict[str, str] = Field(description="variables of LIMITS that are set")
    # The others are known where torch is imported, which takes seconds.
    instructions: str = Field(default="", description="the widest that the CPU has")
    kernels: str = Field(default="", description="the set of kernels that torch chose")
    threads: int | None = Field(default=None, description="of torch")

    def __str__(self) -> str:
        """Return the kind in words: what is of one kind rounds alike."""
        plural = "" if self.threads == 1 else "s"
        parts = [self.architecture, self.instructions]
        parts += [f"kernels {self.kernels}"] if self.kernels else []
        parts += [f"{self.threads} thread{plural}"] if self.threads else []
        parts += [f"{name}={value}" for name, value in self.limits.items()]
        return f"{self.cpu} ({', '.join(filter(None, parts))})"


def processor() -> Processor:
    """Return the processor of this process."""
    limits = {name: os.environ[name] for name in LIMITS if name in os.environ}
    here = Processor(architecture=platform.machine(), cpu=cpu_model(), limits=limits)
    torch = sys.modules.get("torch")
    if torch is None:
        return here
    has = torch.cpu.get_capabilities()
    known = {
        "instructions": next((name for name in INSTRUCTIONS if has.get(name)), ""),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    return here.model_copy(update=known)


def cpu_model() -> str:
    """Return the name of this machine's CPU; of ARM, whose kernel knows none, its numbers."""
    text = CPUINFO.read_text(errors="replace") if CPUINFO.exists() else ""
    # Every core has its own paragraph, and the first one speaks for all.
    fields = [line.partition(":") for line in text.partition("\n\n")[0].splitlines()]
    first = {name.strip(): " ".join(value.split()) for name, _, value in fields}
    if "model name" in first:
        return first["model name"]
    numbers = (f"{name} {first[name]}" for name in ARM_NUMBERS if name in first)
    return ", ".join(numbers) or "unknown CPU"


def kind_of(environment: Mapping[str, Any]) -> str | None:
    """Return in words the kind of processor that an environment ran on; None if none is recorded.

    That is its GPUs where it sees any, else its CPU.

    >>> kind_of({"gpus": ["NVIDIA H200", "NVIDIA H200"]})
    'NVIDIA H200'
    >>> kind_of({"processor": {"architecture": "x86_64", "cpu": "AMD EPYC", "kernels": "AVX2",
    ...     "instructions": "avx2", "threads": 1, "limits": {"MKL_CBWR": "AVX2"}}})
    'AMD EPYC (x86_64, avx2, kernels AVX2, 1 thread, MKL_CBWR=AVX2)'
    """
    if environment.get("gpus"):
        return " and ".join(sorted(set(environment["gpus"])))
    cpu = environment.get("processor")
    return str(Processor.model_validate(cpu)) if cpu else None
