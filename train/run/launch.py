"""The settings of one start of a run, and the environment variables of its processes.

Nothing here changes what is trained. `python -m train run` applies it before torch is imported,
so that starts by hand, by a study and by SLURM have it alike.
"""

import os
from typing import Self

from pydantic import Field, model_validator

from base.environment import is_rank_zero
from base.frozen import MOST_SECONDS, Frozen
from base.gpus import NO_COMPILER, has_compiler, has_gpu
from train.run.config import RunConfig
from train.run.directory import RunDirectory

HUNG = "error: hung: "  # begins the line by which `train.running.watchdog` ends a run
# Of variables that decide how GPUs and their network are used; environment.json records them.
RECORDED = ("CUBLAS_", "CUDA_DEVICE_", "NCCL_", "NVTE_", "PYTORCH_", "TORCH_FR_", "TORCH_NCCL_")
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",  # else the algorithm may be another at another start
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


class Launch(Frozen):
    """The settings of one start."""

    hang_seconds: float = Field(
        default=600.0,
        gt=0,
        le=MOST_SECONDS,
        description="end training that makes no step for so long, and for 10 usual steps; saves and"
        " evaluation do not count",
    )
    deterministic: bool = Field(
        default=False,
        description="use kernels that repeat their results bit by bit only; slower on GPUs",
    )
    profile: str | None = Field(
        default=None,
        pattern=r"^\d+:\d+$",
        description="leave a trace of torch.profiler of rank 0 in RUN_DIR/profile: 20:23 for steps"
        " 20 to 22",
    )

    @property
    def profiled_steps(self) -> range:
        """The steps of `profile`; empty without one."""
        return range(*map(int, self.profile.split(":"))) if self.profile else range(0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.profile and (not self.profiled_steps or self.profiled_steps[0] < 1):
            raise ValueError(f"profile {self.profile} holds no step; write FIRST:STOP from step 1")
        return self


def set_variables(run: RunConfig, directory: RunDirectory, launch: Launch) -> None:
    """Set the environment variables of training that the user has not; print those for GPUs.

    The names are those of torch 2.14, megatron-core 0.19 and Transformer Engine 2.20.
    """
    variables = {
        # The newest collectives of each rank; written where one times out, or by the watchdog.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(directory.flight_recorder.absolute()),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    if has_gpu():
        gpu = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        if "PYTORCH_ALLOC_CONF" in os.environ:  # torch's other name of the same
            del gpu["PYTORCH_CUDA_ALLOC_CONF"]
        if run.parallel.tensor > 1:
            # Kernels start in the order of their launch: a collective before the product that is
            # to hide it.
            gpu["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        if launch.deterministic:
            gpu |= DETERMINISTIC
        gpu = {name: value for name, value in gpu.items() if name not in os.environ}
        if gpu and is_rank_zero():
            print("set", *(f"{name}={value}" for name, value in gpu.items()), flush=True)
        if is_rank_zero() and not has_compiler():
            print(NO_COMPILER, flush=True)
        variables |= gpu
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def recorded_variables() -> dict[str, str]:
    """Return the variables that environment.json records, ours and the user's."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(RECORDED)}
