"""The needs of every step of a study: GPUs, processes, and how they share a model.

The one definition for the local runner (`study.runner`), for the jobs of a cluster (`slurm.job`) and for what
`python -m study show` says before anything starts. Nothing here decides a number of the study beyond rounding: a
layout says who computes what.
"""

import json
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from study.commands import Machine, Step, torchrun
from study.hardware import UNKNOWN_BYTES, Hardware
from study.layout import hf_directory
from study.released import ReleasedRun
from study.settings import CurvatureSettings, Study
from train.command import UserError
from train.config import RunConfig
from train.families import hf_settings
from train.flops import GPUS
from train.plan import fit, memory_if_it_fits

ON_GPU = frozenset({"train", "quantize", "methods", "blocks", "curvature", "step", "slice"})
HESSIAN = frozenset({"curvature", "step"})  # kinds whose ranks can share one model
SHARED = frozenset({"quantize", "blocks", "curvature"})  # kinds whose ranks share the work on whole models
GPUS_PER_NODE = 8  # of machines larger than one node
MACHINES = (1, 2, 4, 8, 16, 32, 64, 128)  # GPUs that are tried for the smallest machine
STEP_COPIES = 3  # of the weights in fp32 beside a product along a step: the step, a random one, the weights moved
FP32 = 4

Sharding = Literal["none", "fsdp"]


class TrainingLayout(NamedTuple):
    """A run with the layout of its model and its micro batch that fit, and its processes."""

    run: RunConfig
    ranks: int


class Needs:
    """The needs of one study's steps on some hardware.

    Args:
        study: whose steps are asked about.
        hardware: what they run on.
        directory: of the study: the size of a released model is known once it lies there.
    """

    def __init__(self, study: Study, hardware: Hardware, directory: Path) -> None:
        self.study, self.hardware, self.directory = study, hardware, directory
        self._configs: dict[str, str] = {}  # config.json by run, once known: the runner asks for every open step

    @cached_property
    def trainings(self) -> dict[str, TrainingLayout]:
        """By name every run that is trained; UserError where one fits no layout."""
        if not self.hardware.gpus:
            return {run.name: TrainingLayout(run, self.study.ranks) for run in self.study.trained}
        return {run.name: self._training(run) for run in self.study.trained}

    def _training(self, run: RunConfig) -> TrainingLayout:
        """Return the run on its share of the GPUs, or on as few more as it takes, in its own layout if that fits any.

        The share lets all runs that can train at once do so: four runs on two GPUs each communicate less than one
        after the other on eight.
        """
        gpus, gpu_bytes = len(self.hardware.gpus), self.hardware.gpu_bytes
        counts = range(1, gpus + 1)
        fitting = {count: run for count in counts if memory_if_it_fits(run, count, gpu_bytes)}
        if not fitting:
            changed = {count: fit(run, count, gpus_per_node=gpus, gpu_bytes=gpu_bytes) for count in counts}
            fitting = {count: other for count, other in changed.items() if other}
        if not fitting:
            raise UserError(no_layout(run, self.study, str(self.hardware)))
        at_once = sum(other.branch_from is None for other in self.study.trained)
        within = [count for count in fitting if count <= max(1, gpus // at_once)]
        ranks = max(within) if within else min(fitting)
        return TrainingLayout(fitting[ranks], ranks)

    def gpus(self, step: Step) -> int:
        """Return the GPUs that the local runner sets aside for a step: as few as it takes, so that more run at once."""
        if not self.hardware.gpus or step.kind not in ON_GPU:
            return 0
        if step.kind == "train":
            return self.trainings[step.run].ranks
        return self._hessian_gpus(step) if step.kind in HESSIAN else 1

    def machine(self, step: Step) -> Machine:
        """Return what the placeholders of a step's command stand for when the local runner starts it."""
        gpus = self.gpus(step)
        ranks = self.trainings[step.run].ranks if step.kind == "train" else max(gpus, 1)
        launch = torchrun(ranks) if step.kind == "train" or ranks > 1 else ("{python}",)
        return Machine(launch, self.hardware.device, gpus, self.sharding(step))

    def ranks(self, step: Step, given: int) -> int:
        """Return how many of the processes that a job was given, of a GPU each if any, the step uses."""
        shares = step.kind == "train" or step.kind in SHARED or self.sharding(step) == "fsdp"
        return given if shares else 1

    def sharding(self, step: Step) -> Sharding:
        """Return what the ranks of a Hessian product share: the model only where one GPU is too small for it."""
        return "fsdp" if step.kind in HESSIAN and self._hessian_gpus(step) > 1 else "none"

    def _hessian_gpus(self, step: Step) -> int:
        """Return the fewest GPUs that hold a Hessian product; all of them where they are too few, 1 if unknown.

        `python -m curvature` itself looks before it measures, and refuses with what would help.
        """
        gpus = len(self.hardware.gpus)
        if gpus < 2 or self.hardware.gpu_bytes == UNKNOWN_BYTES:
            return 1
        for count in (*(count for count in MACHINES if count < gpus), gpus):
            memory = self._hessian_bytes(step, count)
            if memory is None or memory <= self.hardware.gpu_bytes:
                return count
        return gpus

    def hessian_memory(self, step: Step) -> float | None:
        """Return the bytes of each GPU of a step with Hessian products; None for a model that is not there yet."""
        return self._hessian_bytes(step, self._hessian_gpus(step))

    def _hessian_bytes(self, step: Step, gpus: int) -> float | None:
        config, settings = self._config(step), self.study.curvature
        if config is None or settings is None:
            return None
        return hessian_bytes(config, settings, gpus, along=step.kind == "step")

    def _config(self, step: Step) -> str | None:
        """Return config.json of the model that a step measures; None where a released one is not there yet."""
        if step.run not in self._configs:
            run = next(run for run in self.study.runs if run.name == step.run)
            config = model_config(run) if isinstance(run, RunConfig) else self._released_config(run)
            if config is None:
                return None
            self._configs[step.run] = config
        return self._configs[step.run]

    def _released_config(self, run: ReleasedRun) -> str | None:
        for model in self.study.models_of(run):
            path = self.directory / hf_directory(run.name, model) / "config.json"
            if path.is_file():
                return path.read_text()
        return None


def model_config(run: RunConfig) -> str:
    """Return the config.json of a run's exports, as far as it decides the cost of a measurement."""
    return json.dumps({"model_type": run.model.family, **hf_settings(run.model, run.data.sequence_length, 0)})


def no_layout(run: RunConfig, study: Study, where: str) -> str:
    """Return the refusal of a run that fits no layout there, which names what takes it."""
    return (
        f"run {run.name} of {study.name} fits no layout on {where}; the smallest machines that take it: "
        f"{smallest_machines(run)}"
    )


def smallest_machines(run: RunConfig) -> str:
    """Return, of each kind of GPU, how many train the run: '4 x h200 or 8 x h100'; a word where none of 128 do."""
    counts = {}
    for kind, gpu in GPUS.items():
        for gpus in MACHINES:
            if fit(run, gpus, gpus_per_node=min(gpus, GPUS_PER_NODE), gpu_bytes=gpu.memory_bytes):
                counts[kind] = gpus
                break
    if not counts:
        return f"none of up to {MACHINES[-1]} GPUs"
    *first, last = (f"{gpus} x {kind}" for kind, gpus in sorted(counts.items(), key=lambda item: item[1]))
    return f"{', '.join(first)} or {last}" if first else last


@cache
def hessian_bytes(config: str, settings: CurvatureSettings, gpus: int, *, along: bool) -> float:
    """Return the memory of each GPU of a measurement with Hessian products, by the estimate of `curvature --dry-run`.

    Args:
        config: config.json of the model.
        settings: of the study's curvature.
        gpus: that the measurement has; from two on they share the model.
        along: a quantization step is measured, which needs no eigenvector but copies of the weights.
    """
    from transformers import AutoConfig  # takes seconds, which a study on the CPU need not spend

    from curvature.cost import Plan, estimate
    from curvature.settings import HutchinsonSettings

    content = json.loads(config)
    values = {key: value for key, value in settings.model_dump().items() if key in HutchinsonSettings.model_fields}
    values["sharding"] = "none" if gpus == 1 else "fsdp"
    if along:
        eigenvalues = ("fixed_sequences", "max_iterations", "tolerance")
        values = {key: value for key, value in values.items() if key not in eigenvalues} | {"lambda_max": False}
    model = AutoConfig.for_model(content.pop("model_type"), **content)
    cost = estimate(model, HutchinsonSettings(**values), Plan.of(gpus))
    copies = FP32 * STEP_COPIES * cost.parameters / gpus if along else 0.0
    return sum(cost.memory.values()) + copies
