"""The cores and GPUs that a study runs on, and why a GPU of this machine cannot be used.

`study.machine.needs` says what each step takes of them, `study.pipeline.runner` hands them out.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from base.errors import UserError
from base.files import write_json
from base.gpus import VisibleGpu, check_torch, gpus_here
from base.names import take_one_of
from base.reading import read_model
from train.planning.flops import GPUS, GpuKind, kind_of

UNKNOWN_BYTES = sys.maxsize  # memory of GPUs that a site file does not state
HARDWARE_JSON = "hardware.json"  # in a study's directory


@dataclass(frozen=True)
class Hardware:
    """The hardware of a study; without GPUs everything runs on the CPU.

    GPUs are numbers in the order of the PCI bus: DeepSpeed reads no UUIDs.
    """

    cores: int  # processes that compute on the CPU at once
    gpus: tuple[str, ...] = ()
    kind: str = ""  # a key of `train.planning.flops.GPUS`, or the driver's name for another
    gpu_bytes: int = 0  # memory of the smallest of them

    @property
    def device(self) -> str:
        """The value of --device for the steps that compute."""
        return "cuda" if self.gpus else "cpu"

    @property
    def gpu(self) -> GpuKind:
        """One of the GPUs as the planner takes it; an unknown kind has an H100's speeds."""
        return GPUS.get(self.kind, GPUS["h100"])._replace(memory_bytes=self.gpu_bytes)

    @classmethod
    def recorded(cls, directory: Path) -> "Hardware":
        """Return what a study last ran on by `study run`; a core where nothing says so."""
        try:
            return read_model(cls, directory / HARDWARE_JSON)
        except (OSError, UserError):  # never there for jobs of a cluster
            return cls(1)

    def record(self, directory: Path) -> None:
        """Write the file that `recorded` reads."""
        write_json(directory / HARDWARE_JSON, asdict(self))

    def __str__(self) -> str:
        """Return the hardware in words: '8 x h100 of 80 GB'."""
        if not self.gpus:
            return f"{self.cores} cores"
        return f"{len(self.gpus)} x {self.kind} of {self.gpu_bytes / 1e9:.0f} GB"


def kind_named(kind: str) -> str:
    """Return a kind of GPU; UserError for an unknown one."""
    if kind not in GPUS:
        raise UserError(f"--gpu {kind} is unknown; {take_one_of(kind, GPUS)}")
    return kind


def planned(gpus: int, kind: str, cores: int) -> Hardware:
    """Return GPUs of a kind that need not be here; UserError for an unknown kind."""
    kind = kind_named(kind)
    return Hardware(cores, tuple(map(str, range(gpus))), kind, GPUS[kind].memory_bytes)


def this_machine(device: str, gpus: int | None, cores: int, *, sized_for: str) -> Hardware:
    """Return the part of this machine that a study may use.

    `auto` is what the study is sized for, the CPU where it trains nothing and there is no GPU.
    Without `gpus` it is all that CUDA_VISIBLE_DEVICES leaves. UserError where one is missing, busy
    or no match for this torch.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(
            f"--device {device} is unknown; {take_one_of(device, ('auto', 'cpu', 'cuda'))}"
        )
    if device == "cpu" or (device == "auto" and sized_for == "cpu"):
        if gpus is not None:
            raise UserError(
                f"--gpus {gpus} asks for GPUs and the study would run on the CPU; add --device cuda"
            )
        return Hardware(cores)

    try:
        visible = gpus_here()
    except UserError as error:
        # The CPU stands in only where neither the user nor the study asked for a GPU.
        if device == "auto" and sized_for == "any" and gpus is None:
            return Hardware(cores)
        sized = "" if device == "cuda" else "the study is sized for GPUs, and "
        raise UserError(f"{sized}{error}") from None
    check_torch()

    chosen = _idle(visible, len(visible) if gpus is None else gpus)
    model = _one_model(chosen)
    return Hardware(
        cores,
        tuple(str(gpu.number) for gpu in chosen),
        kind_of(model) or model,
        min(gpu.total_bytes for gpu in chosen),
    )


def _idle(visible: Sequence[VisibleGpu], wanted: int) -> list[VisibleGpu]:
    """Return the first GPUs that no other process uses; UserError for fewer than wanted."""
    if wanted > len(visible):
        raise UserError(
            f"--gpus {wanted} asks for more GPUs than the {len(visible)} there are; give fewer"
        )
    idle, busy = [gpu for gpu in visible if not gpu.busy], [gpu for gpu in visible if gpu.busy]
    if wanted > len(idle):
        fewer = f"give --gpus {len(idle)}" if idle else "end what runs there"
        raise UserError(
            f"{busy[0]} is busy; wait until it is free, {fewer}, or choose others with"
            " CUDA_VISIBLE_DEVICES"
        )
    return idle[:wanted]


def _one_model(gpus: Sequence[VisibleGpu]) -> str:
    """Return the model of GPUs that are all alike: a study compares what ran on them."""
    models = dict.fromkeys(gpu.model for gpu in gpus)
    if len(models) > 1:
        raise UserError(
            f"the GPUs differ ({', '.join(models)}), and a study compares what ran on equal ones;"
            " choose equal ones with CUDA_VISIBLE_DEVICES"
        )
    return gpus[0].model
