"""Real training runs of a small OLMo2, shared by the tests that need checkpoints."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import typer

from base.cli import run_command
from base.files import write_json
from tests.forked import Forked
from tests.waiting import HANG_SECONDS
from train.data.config import DataConfig
from train.engine import Engine
from train.model.config import ModelConfig
from train.model.initialization import initial_parameter
from train.optimizers.adamw import AdamW
from train.run.config import RunConfig, dump_run
from train.run.optimization import Anneal, CosinePhase, ScheduleConfig
from train.run.parallel import ParallelConfig

PROJECT = Path(__file__).resolve().parent.parent


def make_run(
    directory: Path,
    *,
    train_prefix: Path = Path("train"),
    held_out_prefix: Path = Path("held_out"),
    tokenizer_dir: Path = Path("tokenizer"),
    data: dict[str, Any] | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    sequence: bool = False,
    layers: int = 2,
    kv_heads: int = 4,
    peak_lr: float = 1e-2,
    **changes,
) -> RunConfig:
    """Writes run.json of a run of width 32: warm-up, cosine, anneal within 20 steps.

    `data` changes fields of its DataConfig. The files need not exist before the run starts.
    """
    files = {
        "train": str(train_prefix),
        "held_out": str(held_out_prefix),
        "tokenizer": str(tokenizer_dir),
    }
    lengths: dict[str, Any] = {"sequence_length": 32, "held_out_sequences": 5}
    settings: dict[str, Any] = {
        "name": directory.name,
        "seed": 3,
        "precision": "fp32",
        "model": ModelConfig(
            vocab_size=320,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
        ),
        "data": DataConfig(**(files | lengths | (data or {}))),
        "optimizer": AdamW(peak_lr=peak_lr),
        "schedule": ScheduleConfig(
            warmup_tokens=4 * 256,
            phase=CosinePhase(horizon_tokens=100 * 256),
            anneal=Anneal(start_step=15),
        ),
        "parallel": ParallelConfig(tensor=tensor, pipeline=pipeline, sequence=sequence),
        "total_steps": 20,
        "batch_size": 8,
        "micro_batch_size": 4,
        "save_steps": (0, 10, 20),
        "evaluate_every_steps": 10,
        "observe_every_steps": 10,
    }
    run = RunConfig(**(settings | changes))
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "run.json", dump_run(run))
    return run


def draw_weights(engine: Engine, run: RunConfig) -> None:
    """Give a new engine the initial weights of its run."""
    engine.start_from(
        lambda name: initial_parameter(name, run.model, run.seed, run.scaling_of(name).initial)
    )


def called(app: typer.Typer, name: str, *arguments: object) -> int:
    """The exit code of a command line that runs in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run_command(app, name)
    return int(ended.value.code or 0)


def save(engine: Engine, directory: Path, *, weights_only: bool = False) -> list[str]:
    """Write a snapshot as the loop does, on every rank; return the names of this rank's files."""
    directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    snapshot = engine.snapshot(directory, weights_only=weights_only)
    names = snapshot.write()
    dist.barrier()
    names = names + snapshot.seal()
    dist.barrier()
    return names


def leave_layout(run: RunConfig) -> None:
    """Destroy megatron-core's groups, so that this process can build another engine."""
    if run.engine == "megatron":
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()


def environment() -> dict[str, str]:
    """The environment of a child: the project importable from everywhere, one thread, no GPU."""
    return os.environ | {
        "PYTHONPATH": str(PROJECT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def torchrun(processes: int, *arguments: str, python: str = sys.executable) -> list[str]:
    """The torchrun command for `-m MODULE ARGUMENTS`, on a free port."""
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    return [*command, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", *arguments]


def execute(
    command: list[str],
    timeout_seconds: float = HANG_SECONDS,
    variables: dict[str, str] | None = None,
    **kwargs,
) -> subprocess.CompletedProcess:
    """Runs a command to its end, with these variables too; returns its output and exit code."""
    return subprocess.run(
        command,
        env=environment() | (variables or {}),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
        **kwargs,
    )


def python(
    *arguments: str, cwd: Path = PROJECT, timeout_seconds: float = HANG_SECONDS
) -> subprocess.CompletedProcess:
    """Runs `python -m MODULE ARGUMENTS`, forked."""
    return ended(Forked(arguments, [environment()], cwd), timeout_seconds)


def ranks(
    processes: int, *arguments: str, timeout_seconds: float = HANG_SECONDS
) -> subprocess.CompletedProcess:
    """Runs what `torchrun` runs, forked; the exit code is that of the first rank that fails."""
    return ended(start_ranks(processes, *arguments), timeout_seconds)


def ended(forked: Forked, timeout_seconds: float = HANG_SECONDS) -> subprocess.CompletedProcess:
    """Things that forked processes leave at their end."""
    out, err = forked.communicate(timeout_seconds)
    return subprocess.CompletedProcess(forked.arguments, forked.returncode or 0, out, err)


def refusal(run_dir: Path) -> str:
    """The one line by which a training is refused."""
    return error_line(python("train", "run", str(run_dir)))


def write_program(path: Path, text: str) -> Path:
    """Write a script that can be started, such as a stand-in for a program of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def succeed(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """A command that has ended well; else the test fails with the end of what it printed."""
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def on_ranks(
    processes: int, worker: Callable[..., object], *words: object
) -> subprocess.CompletedProcess:
    """Calls a function of a module of tests on every rank, with words; it has to end well."""
    function = worker.__module__, worker.__name__
    return succeed(ranks(processes, "tests.worker", *function, *map(str, words)))


def start_ranks(processes: int, *arguments: str, variables: dict[str, str] | None = None) -> Forked:
    """Starts what `torchrun` starts, forked; `variables` are added to the environment of every
    rank.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    shared = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is not rank 0's
    }
    shared |= variables or {}
    each = [
        environment() | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(processes)
    ]
    return Forked(arguments, each, PROJECT, beside=store)


def error_line(done: subprocess.CompletedProcess) -> str:
    """The one line of a refused command: exit code 2, and nothing else that reads like an error
    or a traceback.
    """
    assert done.returncode == 2, (done.returncode, done.stderr[-2000:])
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    return lines[0]
