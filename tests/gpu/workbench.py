"""The device of the checks, how large they are, and the inputs they make."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from base.files import sha256_of, write_json
from tests.corpora import write_corpus
from tests.gpu.launch import Started, start
from train.data.config import DataConfig
from train.model.config import ModelConfig, hf_settings
from train.model.presets import OLMO2_1B, OLMO2_190M
from train.optimizers.adamw import AdamW
from train.run.config import RunConfig
from train.run.directory import RunDirectory
from train.run.optimization import ConstantPhase, ScheduleConfig
from train.run.saving import SavingConfig
from train.run.status import read_status

# Processes forked from one that has imported what takes seconds, and that has not asked CUDA for
# anything. There is one fork server in a process; whoever starts checks decides what it imports:
# `tests.gpu.__main__`, and their rehearsal on the CPU.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
FORKS = multiprocessing.get_context("forkserver")
ERRORS = "errors.log"  # of a training, in the directory of its run


def small_model(hidden: int, layers: int, vocabulary: int) -> ModelConfig:
    """An OLMo2 with heads of 64, and an MLP of three times its width."""
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=max(2, hidden // 64),
    )


@dataclass(frozen=True)
class CheckSizes:
    """Sizes of the checks.

    Attributes:
        compared: the model that a CPU runs too, its tokens per sequence and its training steps.
        timed: models whose training step and Hessian product are timed, and sequences of a
            microbatch, by name.
        timed_length: tokens of their sequences.
        timed_micro: microbatches of a timed step.
        saved: the model whose saves are timed, its tokens per sequence and sequences of a batch.
        steps_between_saves: more than are trained while one is written, for 4 s on an H200.
        block: the model whose blocks are quantized against the clock, two of them.
        calibration: its sequences and their tokens.
        megabytes: of a message between ranks.
    """

    compared: ModelConfig
    compared_length: int
    compared_steps: int
    timed: dict[str, tuple[ModelConfig, int]]
    timed_length: int
    timed_micro: int
    saved: ModelConfig
    saved_length: int
    saved_batch: int
    steps_between_saves: int
    block: ModelConfig
    calibration: tuple[int, int]
    megabytes: int


FULL = CheckSizes(
    compared=small_model(256, 4, 4096),
    compared_length=256,
    compared_steps=12,
    timed={"190M": (OLMO2_190M, 4), "1B": (OLMO2_1B, 2)},
    timed_length=4096,
    timed_micro=4,
    saved=OLMO2_190M.model_copy(update={"vocab_size": 32_768}),
    saved_length=1024,
    saved_batch=64,
    steps_between_saves=50,
    block=OLMO2_1B.model_copy(update={"vocab_size": 4096, "num_hidden_layers": 2}),
    calibration=(128, 2048),
    megabytes=1024,
)
IN_SMALL = CheckSizes(
    compared=small_model(32, 2, 320),
    compared_length=32,
    compared_steps=4,
    timed=dict.fromkeys(("190M", "1B"), (small_model(32, 3, 320), 1)),
    timed_length=32,
    timed_micro=2,
    saved=small_model(32, 2, 320),
    saved_length=32,
    saved_batch=8,
    steps_between_saves=2,
    block=small_model(64, 2, 320),
    calibration=(6, 64),
    megabytes=1,
)


@dataclass(frozen=True)
class Workbench:
    """A device, the sizes of the checks on it, and room for their files.

    Attributes:
        device: "cuda", or "cpu" for a rehearsal.
        sizes: of the checks.
        work: a directory that is thrown away.
        gpus: that the checks share.
        base: the older tree whose speed is compared, if any.
        start: that starts a command of the project on so many ranks.
    """

    device: str
    sizes: CheckSizes
    work: Path
    gpus: int = 1
    base: Path | None = None
    start: Callable[..., Started] = start

    def at(self, name: str) -> "Workbench":
        """Return the same bench with room of its own."""
        work = self.work / name
        work.mkdir(parents=True)
        return replace(self, work=work)

    @property
    def shared(self) -> Path:
        """The directory of what several checks need, which the first of them makes."""
        return self.work.parent / "shared"

    @property
    def torch_device(self) -> torch.device:
        """The one that is measured."""
        return torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")

    def synchronize(self) -> None:
        """Waits for the GPU."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak_memory(self) -> float | None:
        """Bytes allocated at most since the process began; None on a CPU."""
        return float(torch.cuda.max_memory_allocated()) if self.device == "cuda" else None


def token_file(prefix: Path, vocabulary: int, *, tokens: int, seed: int) -> Path:
    """Random tokens in documents of 500, with their manifest and an empty tokenizer."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = prefix.parent / "tokenizer.json"
    tokenizer.write_text("{}")
    drawn = np.random.default_rng(seed).integers(1, vocabulary, size=tokens, dtype=np.int32)
    drawn[499::500] = 0  # ends a document
    drawn[-1] = 0
    lengths = np.diff(np.flatnonzero(drawn == 0), prepend=-1)
    write_corpus(
        prefix,
        drawn,
        lengths,
        vocab_size=vocabulary,
        max_token_id=int(drawn.max()),
        tokenizer_sha256=sha256_of(tokenizer),
    )
    return prefix


def make_run(
    directory: Path, model: ModelConfig, length: int, *, steps: int, **changes: Any
) -> RunConfig:
    """Writes run.json of an fp32 run that saves half-way and at the end, on random text."""
    tokens = length * changes.get("batch_size", 8) * (steps + 2)
    text = directory.parent / f"text-{model.vocab_size}-{tokens}"
    if not text.exists():
        token_file(text / "train", model.vocab_size, tokens=tokens, seed=1)
        token_file(text / "held_out", model.vocab_size, tokens=length * 8, seed=2)
    settings: dict[str, Any] = {
        "name": directory.name,
        "seed": 7,
        "precision": "fp32",
        "model": model,
        "data": DataConfig(
            train=str(text / "train"),
            held_out=str(text / "held_out"),
            tokenizer=str(text),
            sequence_length=length,
            held_out_sequences=4,
        ),
        "optimizer": AdamW(matrices="adamw", peak_lr=1e-3),
        "schedule": ScheduleConfig(warmup_tokens=0, phase=ConstantPhase(kind="constant")),
        "total_steps": steps,
        "batch_size": 8,
        "micro_batch_size": 4,
        "save_steps": (steps // 2, steps),
        "evaluate_every_steps": steps,
        "saving": SavingConfig(asynchronous=True),
    }
    run = RunConfig(**(settings | changes))
    directory.mkdir(parents=True, exist_ok=True)
    # What is not set is left to the defaults of the tree that reads it, which may be an older one.
    content = run.model_dump(mode="json", exclude_unset=True)
    write_json(RunDirectory(directory).run_json, content)
    return run


def is_done(directory: Path) -> bool:
    """Return whether a run has reached its end."""
    status = read_status(RunDirectory(directory))
    return status is not None and status.status == "done"


class Training(NamedTuple):
    """`python -m train run` in a process of its own, a fork."""

    process: Any
    directory: Path

    def finish(self) -> None:
        """Wait for its end; RuntimeError if it failed."""
        self.process.join()
        if code := self.process.exitcode:
            errors = (self.directory / ERRORS).read_text()[-2000:]
            raise RuntimeError(f"train run {self.directory}, exit code {code}: {errors}")


def begin(directory: Path, device: str, *options: str, gpu: int = 0) -> Training:
    """Start a training that sees all GPUs and takes the one of this number, or that sees none."""
    process = FORKS.Process(target=_train, args=(directory, device, gpu, options))
    process.start()
    return Training(process, directory)


def train(directory: Path, device: str, *options: str) -> None:
    """Train a run to its end."""
    begin(directory, device, *options).finish()


def _train(directory: Path, device: str, gpu: int, options: tuple[str, ...]) -> None:
    if device != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["LOCAL_RANK"] = str(gpu)
    os.dup2(os.open(directory / ERRORS, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.argv = ["train", "run", str(directory), *options]
    runpy.run_module("train", run_name="__main__", alter_sys=True)


def random_model(model: ModelConfig, length: int, device: torch.device | None = None) -> Any:
    """Random weights in fp32, norms of 1, made where they are: on the CPU unless told."""
    config = AutoConfig.for_model(model.family, **hf_settings(model, length, 0))
    torch.manual_seed(0)
    with device or torch.device("cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def hf_model(directory: Path, model: ModelConfig, length: int) -> Path:
    """Random weights, norms included, as an HF directory."""
    network = random_model(model, length)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    network.save_pretrained(directory)
    return directory


def random_tokens(sequences: int, length: int, vocabulary: int) -> torch.Tensor:
    """Int64 [sequences, length]; the same every time."""
    return torch.randint(
        1, vocabulary, (sequences, length), generator=torch.Generator().manual_seed(3)
    )
