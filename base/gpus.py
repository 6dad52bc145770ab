"""The GPUs of this machine, and why torch cannot use them.

They are read through NVML, which needs the driver alone: nobody has to import torch to find out
that it cannot run.
"""

import importlib.util
import os
import runpy
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pynvml

from base.errors import UserError

FREE_SHARE = 0.9  # of a GPU's memory; what is missing belongs to somebody else
C_COMPILERS = ("gcc", "clang", "cc")
NO_COMPILER = (
    "no C compiler is on this node's PATH: torch cannot compile the functions between matrix"
    " products, and passes take longer; install gcc, or set CC"
)


def has_compiler() -> bool:
    """Return whether torch.compile finds the C compiler with which it builds kernels' launchers."""
    return any(map(shutil.which, (os.environ.get("CC", ""), *C_COMPILERS)))


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU as NVML shows it, with nvidia-smi's number and its UUID."""

    number: int
    uuid: str
    model: str
    total_bytes: int
    free_bytes: int

    @property
    def busy(self) -> bool:
        """Return whether somebody else uses it."""
        return self.free_bytes < FREE_SHARE * self.total_bytes

    def __str__(self) -> str:
        """Return the GPU in words."""
        used = self.total_bytes - self.free_bytes
        return (
            f"GPU {self.number} ({self.model}, {used / 1e9:.1f} of {self.total_bytes / 1e9:.1f} GB"
            " in use)"
        )


def gpus_here() -> list[VisibleGpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES shows, in its order; UserError for none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={visible} hides every GPU; unset it, or give --device cpu"
        )

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise UserError(
            f"this machine has no usable NVIDIA GPU (NVML: {error}); look at what 'nvidia-smi'"
            " says, or give --device cpu"
        ) from None
    try:
        gpus = [_gpu(number) for number in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    if not gpus:
        raise UserError("this machine has no NVIDIA GPU; give --device cpu")
    return gpus if visible is None else [_named(name.strip(), gpus) for name in visible.split(",")]


def has_gpu() -> bool:
    """Return whether there is a GPU that CUDA_VISIBLE_DEVICES shows."""
    try:
        return bool(gpus_here())
    except UserError:
        return False


def _gpu(number: int) -> VisibleGpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    # Version 2 counts the driver's reserved memory separately.
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return VisibleGpu(
        number,
        pynvml.nvmlDeviceGetUUID(handle),
        pynvml.nvmlDeviceGetName(handle),
        memory.total - memory.reserved,
        memory.free,
    )


def _named(name: str, gpus: list[VisibleGpu]) -> VisibleGpu:
    """Return the GPU that a word of CUDA_VISIBLE_DEVICES means: a number, or a UUID's beginning."""
    matches = [
        gpu
        for gpu in gpus
        # Longer than "GPU-", with which every UUID begins.
        if str(gpu.number) == name or (len(name) > 4 and gpu.uuid.startswith(name))
    ]
    if len(matches) == 1:
        return matches[0]
    raise UserError(
        f"CUDA_VISIBLE_DEVICES names {name}, and the GPUs here are 0 to {len(gpus) - 1} (slices of"
        " MIG are not supported); correct it, or unset it"
    )


def near_cpus(uuid: str) -> set[int]:
    """Return the CPUs of the NUMA node of a GPU; none where the driver cannot tell."""
    # NVML gives a mask with a bit for every CPU, in words of 64.
    words_of_cpus = -(-(os.cpu_count() or 1) // 64)
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        words = pynvml.nvmlDeviceGetCpuAffinityWithinScope(
            handle, words_of_cpus, pynvml.NVML_AFFINITY_SCOPE_NODE
        )
    except pynvml.NVMLError:
        return set()
    return {
        64 * index + bit for index, word in enumerate(words) for bit in range(64) if word >> bit & 1
    }


def check_torch() -> None:
    """Raise UserError where the installed torch has no CUDA, or a newer one than the driver."""
    torch = _torch_version()
    if torch.cuda is None:
        raise UserError(
            f"torch {torch.__version__} is a build without CUDA; build .venv with CUDA's "
            "('make venv TORCH_INDEX='), or give --device cpu"
        )
    pynvml.nvmlInit()
    try:
        # CUDA 12.4 is the number 12040.
        newest = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        driver = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    # Within a major version CUDA is compatible.
    if newest // 1000 < int(torch.cuda.partition(".")[0]):
        raise UserError(
            f"driver {driver} runs CUDA up to {newest // 1000}.{newest % 1000 // 10} and torch"
            f" {torch.__version__} needs {torch.cuda}; update the driver, build .venv with torch"
            " for an older CUDA (docs/guides/one-gpu.md), or give --device cpu"
        )


def _torch_version() -> Any:
    """Return torch's module `version` without importing torch, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec
    assert spec.origin
    return SimpleNamespace(**runpy.run_path(str(Path(spec.origin).with_name("version.py"))))


def choose(device: str) -> None:
    """Make torch, not imported yet, compute on `device`; UserError for cuda without a GPU."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            refuse_cuda()


def check_fp32() -> None:
    """Raise UserError where torch would round the factors of fp32 products to TF32.

    NVIDIA's containers ask for that by a variable, and no setting of ours does.
    """
    import torch

    if torch.get_float32_matmul_precision() != "highest":
        raise UserError(
            "torch would multiply fp32 matrices in TF32 here, as NVIDIA's containers ask for; set"
            " TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0"
        )


def refuse_cuda() -> NoReturn:
    """Raise the UserError that says why torch sees no GPU."""
    gpus = gpus_here()
    check_torch()
    raise UserError(
        f"torch sees none of the {len(gpus)} GPUs here; look at what 'nvidia-smi' says, or give"
        " --device cpu"
    )
