"""Training steps against the clock: seconds, MFU and memory of `python -m train run`, in this tree
and in that of an older commit.

The command is timed as a whole, with what ranks agree on after every step. An older tree has its
own modules; both share the command, run.json and metrics.jsonl.
"""

import shutil
import statistics
import subprocess
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from base import CHECKOUT
from base.errors import UserError
from tests.gpu.figures import CheckedFigure, apart
from tests.gpu.launch import succeed
from tests.gpu.workbench import Workbench, is_done, make_run
from train.planning.flops import GPUS, flops_per_token, kind_of, peak_flops
from train.planning.memory import rank_memory
from train.planning.speed import EXPECTED, FAST, SLOW, Roofline
from train.run.config import RunConfig
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics
from train.run.parallel import ParallelConfig
from train.run.saving import SavingConfig

STEPS = 10
WARM = 3  # steps that compile, connect and load kernels
MOST_SECONDS = 300.0  # of a training
# Of the last step weights alone are saved: state of 1B would be 17 GB.
WEIGHTS_ALONE = SavingConfig(full_steps=(), restart_every_steps=10**6)


class Timed(NamedTuple):
    """A timed training.

    Attributes:
        run: its configuration.
        seconds: of a step, their median.
        memory_bytes: peak of the rank with most, allocated on a GPU.
        losses: of its steps, nats per token.
    """

    run: RunConfig
    seconds: float
    memory_bytes: float
    losses: list[float]


def tree_of(base: str, out: Path) -> Path:
    """Return the directory `base`, or export the tree of a commit of that name to `out`.

    Raises:
        UserError: it is neither.
    """
    if (Path(base) / "train" / "__main__.py").is_file():
        return Path(base).absolute()
    archive = out.with_suffix(".tar")
    git = ["git", "-C", str(CHECKOUT), "archive", f"--output={archive}", "--end-of-options", base]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        words = done.stderr.strip() if done.returncode else ""
    except FileNotFoundError:
        words = "git is not installed"
    if words:
        raise UserError(
            f"BASE {base} is no directory with a tree of this project, nor a commit of this"
            f" checkout ({words}); give one of them"
        )
    with tarfile.open(archive) as file:
        file.extractall(out, filter="data")
    return out


def timed(
    workbench: Workbench, shape: str, tree: Path = CHECKOUT, layout: ParallelConfig | None = None
) -> Timed:
    """Train a few steps, all GPUs for the run where a layout is given, and one otherwise.

    A training that another check has made is not repeated.
    """
    model, micro = workbench.sizes.timed[shape]
    ranks = workbench.gpus if layout else 1
    parallel = layout or ParallelConfig()
    replicas = ranks // (parallel.tensor * parallel.pipeline)
    when = "after" if tree == CHECKOUT else "before"
    name = f"{shape}-{when}-{ranks}-{parallel.tensor}-{parallel.pipeline}"
    directory = workbench.shared / name
    run = make_run(
        directory,
        model,
        workbench.sizes.timed_length,
        steps=STEPS,
        precision="bf16",
        batch_size=replicas * micro * workbench.sizes.timed_micro,
        micro_batch_size=micro,
        parallel=parallel,
        save_steps=(STEPS,),
        saving=WEIGHTS_ALONE,
    )
    files = RunDirectory(directory)
    if not is_done(directory):
        words = ("train", "run", str(directory), "--device", workbench.device)
        succeed(workbench.start(ranks, *words, tree=tree), MOST_SECONDS)
        shutil.rmtree(files.checkpoints)
    rows = [row for row in read_metrics(files.metrics) if "loss" in row]
    seconds = [run.tokens_per_step / row["tokens_per_second"] for row in rows[WARM:]]
    losses = [row["loss"] for row in rows]
    return Timed(run, statistics.median(seconds), rows[-1]["memory_bytes"], losses)


def figures_of(workbench: Workbench, what: str, result: Timed, ranks: int) -> dict[str, Any]:
    """Return the figures of a timed training by name: value, unit, and limits if any."""
    run = result.run
    tokens = run.tokens_per_step
    name = torch.cuda.get_device_name() if workbench.device == "cuda" else ""
    figures: dict[str, Any] = {
        f"{what}: step": (result.seconds, "s"),
        f"{what}: tokens": (tokens / result.seconds, "tokens/s"),
    }
    if peak := peak_flops(name):
        flops = flops_per_token(run.model, run.data.sequence_length) * tokens
        share = flops / result.seconds / (ranks * peak)
        figures[f"{what}: MFU"] = share, "of the peak"
    if workbench.device == "cuda":
        figures[f"{what}: peak memory"] = result.memory_bytes / 1e9, "GB"
    return figures


def in_words(run: RunConfig, shape: str) -> str:
    """Return model and batch of a timed training."""
    return f"{shape}, {run.batch_size} x {run.data.sequence_length} tokens"


def speed(workbench: Workbench, shape: str) -> list[CheckedFigure]:
    """Step time, MFU and peak memory of a shape in bf16 on one GPU, against the planner."""
    result = timed(workbench, shape)
    return judged(workbench, in_words(result.run, shape), result, 1)


def judged(workbench: Workbench, what: str, result: Timed, ranks: int) -> list[CheckedFigure]:
    """Return the figures of a timed training with their limits."""
    figures = [
        CheckedFigure(
            f"{what}: loss of random tokens", result.losses[0], "nats/token", least=1.0, most=20.0
        )
    ]
    figures += [
        CheckedFigure(name, value, unit)
        for name, (value, unit) in figures_of(workbench, what, result, ranks).items()
    ]
    kind = kind_of(torch.cuda.get_device_name()) if workbench.device == "cuda" else None
    if kind:
        expected, fast, slow = (
            Roofline(result.run, ranks, ranks, GPUS[kind], rates).seconds
            for rates in (EXPECTED, FAST, SLOW)
        )
        figures.append(
            CheckedFigure(
                f"{what}: step over the roofline's",
                result.seconds / expected,
                least=fast / expected,
                most=slow / expected,
                note="train/planning/speed.py; the limits are its range",
            )
        )
    if workbench.device == "cuda":
        planned = rank_memory(result.run, ranks).bytes
        note = f"planned {planned / 1e9:.1f} GB, of which 4 GB for what the allocator does not see"
        ratio = result.memory_bytes / planned
        name = f"{what}: peak memory over the planned"
        figures.append(CheckedFigure(name, ratio, "", least=0.5, most=1.0, note=note))
    return figures


def before_and_after(workbench: Workbench, shape: str) -> list[CheckedFigure]:
    """The same steps in the older tree and in this one."""
    assert workbench.base
    before, after = timed(workbench, shape, workbench.base), timed(workbench, shape)
    what = in_words(after.run, shape)
    figures = [
        CheckedFigure(name, value, unit)
        for when, result in (("before", before), ("after", after))
        for name, (value, unit) in figures_of(workbench, f"{what}, {when}", result, 1).items()
    ]
    moved = apart(before.losses, after.losses)
    return [
        *figures,
        CheckedFigure(f"{what}: step before over after", before.seconds / after.seconds, "x"),
        CheckedFigure(
            f"{what}: losses of {STEPS} steps, before against after",
            moved,
            "nats/token, largest difference",
            most=2e-2,
        ),
    ]


def on_all_gpus(workbench: Workbench, shape: str, kind: str) -> list[CheckedFigure]:
    """Step time, MFU and memory where all GPUs share one run: its data, or each matrix."""
    tensor = workbench.gpus if kind == "tensor" else 1
    layout = ParallelConfig(tensor=tensor, sequence=tensor > 1)
    result = timed(workbench, shape, layout=layout)
    what = f"{in_words(result.run, shape)}, {kind} parallel over {workbench.gpus}"
    return judged(workbench, what, result, workbench.gpus)
