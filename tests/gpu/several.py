"""Training on several GPUs at every layout, by both engines, against one GPU; sums by NCCL.

A run on one GPU is made once for all checks. Its model has 4 heads and layers, which bound the
sizes of tensor and pipeline parallelism; the rest of the GPUs share the data.
"""

import contextlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu.figures import CheckedFigure, SkippedError, apart
from tests.gpu.launch import succeed
from tests.gpu.transformer_engine import check_can_run
from tests.gpu.workbench import Workbench, begin, is_done, make_run
from train.optimizers.muon import Muon
from train.run.config import RunConfig
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics
from train.run.parallel import ParallelConfig, ZeroConfig
from train.run.saving import SavingConfig

MOST_SECONDS = 180.0  # of a command
KILLED_STEPS = 40
# Losses in nats per token, and norms of gradients relative to their size, that two layouts may be
# apart after 12 steps. On one H200 losses were within 2.5e-5 of a CPU's in fp32, and within 5e-4
# between two engines in bf16. A gradient that is not summed over all ranks has half the norm.
APART = {"fp32": (1e-3, 1e-2), "bf16": (2e-2, 1e-1)}

# Runs by what they are called, plain ones by nothing.
ZERO, MUON, TRANSFORMER_ENGINE, KILLED = "ZeRO-2", "Muon", "Transformer Engine", "killed"
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    ZERO: {"engine": "deepspeed", "zero": ZeroConfig(stage=2)},
    MUON: {"optimizer": Muon(matrices="muon", peak_lr=1e-3)},
    TRANSFORMER_ENGINE: {"kernels": "transformer_engine"},
    # Of a second or two, so that ranks can be killed in the middle.
    KILLED: {
        "steps": KILLED_STEPS,
        "save_steps": (KILLED_STEPS,),
        "saving": SavingConfig(asynchronous=True, restart_every_steps=4),
    },
}
BOTH = "tensor and pipeline"
KINDS = ("data", "tensor", "pipeline", BOTH)  # of parallelism


class Trained(NamedTuple):
    """A run that several checks need: one of `SETTINGS` in a precision."""

    title: str
    precision: str

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings but the layout."""
        return SETTINGS[self.title] | {"precision": self.precision}

    def __str__(self) -> str:
        """Return the end of its name."""
        return f"{self.title}-{self.precision}".replace(" ", "-")


BOTH_PRECISIONS = ("fp32", "bf16")
PLAIN = tuple(Trained("", precision) for precision in BOTH_PRECISIONS)
OF_ZERO = tuple(Trained(ZERO, precision) for precision in BOTH_PRECISIONS)
OF_MUON = (Trained(MUON, "fp32"),)
OF_TRANSFORMER_ENGINE = (Trained(TRANSFORMER_ENGINE, "bf16"),)
KILLED_ONE = Trained(KILLED, "fp32")


def parallel(workbench: Workbench, kind: str) -> ParallelConfig:
    """Return a layout of all GPUs of a kind; SkippedError for both of fewer than four GPUs."""
    model = workbench.sizes.compared
    largest = min(workbench.gpus, model.num_attention_heads, model.num_hidden_layers)
    match kind:
        case "data":
            return ParallelConfig()
        case "tensor":
            return ParallelConfig(tensor=largest)
        case "pipeline":
            return ParallelConfig(pipeline=largest)
    if workbench.gpus < 4:
        raise SkippedError(f"{kind} parallel ranks take four GPUs")
    return ParallelConfig(tensor=2, pipeline=2)


def micro_batch(workbench: Workbench, layout: ParallelConfig) -> int:
    """Return sequences of a microbatch: a batch of 8 gives every stage of a pipeline several."""
    replicas = workbench.gpus // (layout.tensor * layout.pipeline)
    return max(1, 4 // (replicas * layout.pipeline))


def prepared(directory: Path, workbench: Workbench, settings: dict[str, Any]) -> RunConfig:
    """Write a run of the compared model."""
    sizes = workbench.sizes
    steps = {"steps": sizes.compared_steps}
    return make_run(directory, sizes.compared, sizes.compared_length, **(steps | settings))


def on_one(workbench: Workbench, *runs: Trained) -> list[Path]:
    """Return runs on one GPU each, trained at the same time; those that there are already stay."""
    directories = [workbench.shared / f"one-{run}" for run in runs]
    trainings = []
    for index, (run, directory) in enumerate(zip(runs, directories, strict=True)):
        if not is_done(directory):
            prepared(directory, workbench, run.settings)
            gpu = index % workbench.gpus
            trainings.append(begin(directory, workbench.device, gpu=gpu))
    for training in trainings:
        training.finish()
    return directories


def on_all(workbench: Workbench, kind: str, run: Trained) -> Path:
    """Return a run on all GPUs by the project's launcher; one that there is already stays.

    In bf16 tensor ranks share the tokens between their matrices, too (sequence parallelism).
    """
    layout = parallel(workbench, kind)
    sequence = layout.tensor > 1 and run.precision == "bf16"
    of_layout = {
        "parallel": layout.model_copy(update={"sequence": sequence}),
        "micro_batch_size": micro_batch(workbench, layout),
    }
    directory = workbench.shared / f"{kind.replace(' ', '-')}-{run}"
    if not is_done(directory):
        prepared(directory, workbench, run.settings | of_layout)
        words = ("train", "run", str(directory), "--device", workbench.device)
        succeed(workbench.start(workbench.gpus, *words), MOST_SECONDS)
    return directory


def rows_of(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's steps."""
    rows = read_metrics(RunDirectory(directory).metrics)
    return [row for row in rows if "loss" in row]


def compared(what: str, precision: str, one: Path, shared: Path) -> list[CheckedFigure]:
    """Return the differences of losses and of gradient norms of two runs."""
    here, there = rows_of(one), rows_of(shared)
    of_losses, of_norms = APART[precision]
    losses = apart([row["loss"] for row in here], [row["loss"] for row in there])
    norms = max(
        abs(row["grad_norm"] / other["grad_norm"] - 1)
        for row, other in zip(here, there, strict=True)
    )
    what = f"{what} in {precision} against one GPU, {len(here)} steps"
    unit = "largest difference"
    return [
        CheckedFigure(f"{what}: losses", losses, f"nats/token, {unit}", most=of_losses),
        CheckedFigure(f"{what}: norms of gradients", norms, f"relative, {unit}", most=of_norms),
    ]


def check_installed(title: str) -> None:
    """Raise SkippedError where a library that the settings ask for cannot be used."""
    if title == ZERO and not find_spec("deepspeed"):
        raise SkippedError("deepspeed is not installed")
    if title == TRANSFORMER_ENGINE:
        check_can_run("bf16")


def alone(workbench: Workbench) -> list[CheckedFigure]:
    """The runs on one GPU that others are compared with, all at the same time."""
    runs = []
    for run in (*PLAIN, KILLED_ONE, *OF_ZERO, *OF_MUON, *OF_TRANSFORMER_ENGINE):
        with contextlib.suppress(SkippedError):
            check_installed(run.title)
            runs.append(run)
    return [
        CheckedFigure(
            f"on one GPU, {run.title or 'AdamW'} in {run.precision}: loss of random tokens",
            rows_of(directory)[0]["loss"],
            "nats/token",
            least=1.0,
            most=20.0,
        )
        for run, directory in zip(runs, on_one(workbench, *runs), strict=True)
    ]


def against_one(
    workbench: Workbench, *, kind: str, runs: tuple[Trained, ...]
) -> list[CheckedFigure]:
    """Runs on all GPUs at a layout, against the same on one."""
    check_installed(runs[0].title)
    figures = []
    for run, one in zip(runs, on_one(workbench, *runs), strict=True):
        what = f"{run.title}{run.title and ', '}{kind} parallel over {workbench.gpus}"
        figures += compared(what, run.precision, one, on_all(workbench, kind, run))
    return figures


def sums(workbench: Workbench) -> list[CheckedFigure]:
    """Collectives over all ranks: right results, seconds, and the group of flags beside them."""
    out, sizes = workbench.work / "sums.json", workbench.sizes
    words = ("tests.gpu.on_ranks", "collectives", str(out), str(sizes.megabytes))
    succeed(workbench.start(workbench.gpus, *words), MOST_SECONDS)
    measured = json.loads(out.read_text())
    what = f"{measured['backend']}, {workbench.gpus} ranks"
    figures = [
        CheckedFigure(f"{what}: wrong entries, {name}", wrong, "", most=0.0)
        for name, wrong in measured["wrong"].items()
    ]
    # Every byte crosses a link 2 (N - 1) / N times: NCCL's bus bandwidth.
    crossed = 2 * (workbench.gpus - 1) / workbench.gpus * sizes.megabytes * 2**20
    each = measured["seconds"]
    return [
        *figures,
        CheckedFigure(f"{what}: start and first sum", measured["started"], "s", most=60.0),
        CheckedFigure(f"{what}: sum of {sizes.megabytes} MB", each, "s"),
        CheckedFigure(f"{what}: bus bandwidth of the sum", crossed / each / 1e9, "GB/s"),
        CheckedFigure(f"{what}: flags of a step", measured["flags"], "s", most=0.1),
    ]
