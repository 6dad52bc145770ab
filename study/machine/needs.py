"""The needs of every step of a study: GPUs, processes, and how they share a model.

The one definition for the local runner (`study.pipeline.runner`), for the jobs of a cluster
(`slurm.job.element`) and for what `python -m study show` says before anything starts. Nothing here
decides a number of the study beyond rounding: a layout says who computes what.
"""

import json
from collections.abc import Mapping
from functools import cache, cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from base.errors import UserError
from base.files import write_json
from base.frozen import fingerprint
from curvature.settings import HessianSettings, HutchinsonSettings
from study.definition import KINDS, Study
from study.machine.hardware import UNKNOWN_BYTES, Hardware
from study.step import Machine, Step, torchrun
from train.model.config import hf_settings
from train.planning.flops import GPUS, GPUS_PER_NODE
from train.planning.plan import fit, in_its_split, ranks_for
from train.run.config import RunConfig, dump_run, load_run
from train.run.directory import RunDirectory

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from curvature.cost.plan import Cost

ON_GPU = frozenset({"train", *(kind.name for kind, _ in KINDS)})
HESSIAN = frozenset(kind.name for kind, _ in KINDS if kind.shares_model)
SHARED = frozenset(kind.name for kind, _ in KINDS if kind.shares_work)
MACHINES = (1, 2, 4, 8, 16, 32, 64, 128)  # GPUs that are tried
# Bytes of a weight in fp32 of the step, of a random one, and of the moved weights.
STEP_BYTES = 3 * 4

Sharding = Literal["none", "fsdp"]


class TrainingLayout(NamedTuple):
    """A run with the layout of its model and its micro batch that fit, and its processes."""

    run: RunConfig
    ranks: int


class Needs:
    """The needs of one study's steps on some hardware."""

    def __init__(self, study: Study, hardware: Hardware) -> None:
        self.study, self.hardware = study, hardware
        self._runs = {run.name: run for run in study.runs}
        self._configs: dict[str, str] = {}  # by run: asked for every open step

    @cached_property
    def trainings(self) -> dict[str, TrainingLayout]:
        """By name every run that is trained; UserError where one fits no layout."""
        return {run.name: self._training(run) for run in self.study.trained}

    @property
    def at_once(self) -> int:
        """The most runs that train at once on the hardware."""
        ranks = min((training.ranks for training in self.trainings.values()), default=1)
        return max(
            1, min((len(self.hardware.gpus) or self.hardware.cores) // ranks, len(self.trainings))
        )

    def _training(self, run: RunConfig) -> TrainingLayout:
        """Return the run on its share of the GPUs, in its own split if that fits."""
        gpus, gpu = len(self.hardware.gpus), self.hardware.gpu
        if not gpus:
            return TrainingLayout(run, self.study.ranks)
        counts, node = _counts(gpus), min(gpus, GPUS_PER_NODE)
        # The split of the recipe itself, on as many GPUs as hold it, before any other.
        fitting: dict[int, RunConfig] = {}
        for layout in (in_its_split, fit):
            changed = {n: layout(run, n, gpus_per_node=node, gpu=gpu) for n in counts}
            fitting = {n: other for n, other in changed.items() if other}
            if fitting:
                break
        if not fitting:
            raise UserError(no_layout(run, self.study, str(self.hardware)))
        # Branches wait for their parents, so only the others can start at once.
        runs = sum(other.branch_from is None for other in self.study.trained)
        ranks = ranks_for(fitting, gpus, runs)
        return TrainingLayout(fitting[ranks], ranks)

    def gpus(self, step: Step) -> int:
        """Return the GPUs that the local runner sets aside for a step: as few as it takes."""
        if not self.hardware.gpus or step.kind not in ON_GPU:
            return 0
        if step.kind == "train":
            return self.trainings[step.run].ranks
        return self._hessian_gpus(step) if step.kind in HESSIAN else 1

    def machine(self, step: Step) -> Machine:
        """Return the values of a command's placeholders when the local runner starts the step."""
        gpus = self.gpus(step)
        ranks = self.trainings[step.run].ranks if step.kind == "train" else max(gpus, 1)
        launch = torchrun(ranks) if ranks > 1 else ("{python}",)
        return Machine(launch, self.hardware.device, gpus, self.sharding(step))

    def ranks(self, step: Step, processes: int) -> int:
        """Return how many of the processes that a job was given the step uses."""
        shares = step.kind == "train" or step.kind in SHARED or self.sharding(step) == "fsdp"
        return processes if shares else 1

    def sharding(self, step: Step) -> Sharding:
        """Return fsdp where the ranks of a Hessian product share a model too large for one GPU."""
        return "fsdp" if step.kind in HESSIAN and self._hessian_gpus(step) > 1 else "none"

    def _hessian_gpus(self, step: Step) -> int:
        """Return the fewest GPUs that hold a Hessian product; 1 where that is unknown.

        All of them where they are too few: `python -m curvature` itself looks before it measures,
        and refuses with what would help.
        """
        gpus = len(self.hardware.gpus)
        if gpus < 2 or self.hardware.gpu_bytes == UNKNOWN_BYTES:
            return 1
        for count in _counts(gpus):
            memory = self._hessian_bytes(step, count)
            # An unknown size passes at the first count, which is the fewest.
            if memory is None or memory <= self.hardware.gpu_bytes:
                return count
        return gpus

    def hessian_memory(self, step: Step) -> float | None:
        """Return the bytes of each GPU of a step with Hessian products; None where unknown."""
        return self._hessian_bytes(step, self._hessian_gpus(step))

    def _hessian_bytes(self, step: Step, gpus: int) -> float | None:
        along = step.kind == "step"
        config, settings = self.config(step), self.study.step if along else self.study.curvature
        if config is None or settings is None:
            return None
        return hessian_bytes(config, settings, gpus, along=along)

    def config(self, step: Step) -> str | None:
        """Return config.json of the model that a step measures; None where no source states it."""
        run = self._runs[step.run]
        if not isinstance(run, RunConfig):
            return run.config
        # Known before any checkpoint is, as far as it decides the cost.
        if step.run not in self._configs:
            shape = hf_settings(run.model, run.data.sequence_length, 0)
            self._configs[step.run] = json.dumps({"model_type": run.model.family, **shape})
        return self._configs[step.run]


def _counts(gpus: int) -> tuple[int, ...]:
    """Return how many of so many GPUs are tried."""
    return (*(count for count in MACHINES if count < gpus), gpus)


def no_layout(run: RunConfig, study: Study, where: str) -> str:
    """Return the refusal of a run that fits no layout there, which names what takes it."""
    smallest = []
    for kind, gpu in GPUS.items():
        for gpus in MACHINES:
            if fit(run, gpus, gpus_per_node=min(gpus, GPUS_PER_NODE), gpu=gpu):
                smallest.append((gpus, kind))
                break
    machines = ", ".join(f"{gpus} x {kind}" for gpus, kind in sorted(smallest, key=itemgetter(0)))
    return (
        f"run {run.name} of {study.name} fits no layout on {where}; the smallest machines that take"
        f" it: {machines or f'none of up to {MACHINES[-1]} GPUs'}"
    )


@cache
def model_config(config: str) -> "PretrainedConfig":
    """Return the configuration in a config.json."""
    # It imports transformers, which takes seconds that a study on the CPU need not spend.
    from ckpt_tools.hf.configuration import configuration

    content = json.loads(config)
    return configuration(content.pop("model_type"), **content)


@cache
def hessian_cost(
    config: str, settings: HessianSettings, gpus: int, gpu: str = "h100", *, along: bool
) -> "Cost":
    """Return the estimate of `python -m curvature hutchinson --dry-run`.

    From two GPUs on they share the model. `along` a quantization step no eigenvector is needed.
    """
    from curvature.cost.plan import GpuPlan, estimate

    values = settings.model_dump(include=set(HutchinsonSettings.model_fields))
    values["sharding"] = "none" if gpus == 1 else "fsdp"
    values |= {"lambda_max": False} if along else {}
    return estimate(model_config(config), HutchinsonSettings(**values), GpuPlan(gpus, gpu))


def hessian_bytes(config: str, settings: HessianSettings, gpus: int, *, along: bool) -> float:
    """Return the memory of each GPU of a measurement with Hessian products.

    `along` a quantization step there are copies of the weights, see STEP_BYTES.
    """
    cost = hessian_cost(config, settings, gpus, along=along)
    copies = STEP_BYTES * cost.parameters / gpus if along else 0.0
    return sum(cost.memory.values()) + copies


LAYOUT = ("parallel", "zero", "recompute", "micro_batch_size")  # what hardware decides


def write_run_configurations(
    directory: Path, study: Study, layouts: Mapping[str, RunConfig] | None = None
) -> None:
    """Write RUN/run.json of every run; UserError where another configuration has its name.

    `layouts` are the runs by name as they fit the hardware at hand. Of a run that is there already
    only the layout is replaced: a run can be resumed at another one.
    """
    changed: dict[Path, RunConfig] = {}
    for run in study.trained:
        path = RunDirectory(directory / run.name).run_json
        present = load_run(path) if path.exists() else None
        # The fingerprint leaves the layout out, so only another training is refused.
        if present and fingerprint(present) != fingerprint(run):
            raise UserError(
                f"{path} holds another configuration than recipe {study.name}; a run's name is used"
                f" once: choose another --root, or move {path.parent} away to train it again"
            )
        new = (layouts or {}).get(run.name, present or run)
        if present:
            # The rest of the file stays as it was when the run began.
            new = present.model_copy(update={field: getattr(new, field) for field in LAYOUT})
        if new != present:
            changed[path] = new
    for path, run in changed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dump_run(run))
