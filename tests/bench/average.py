"""The averages part of make bench: ten models of 214 MB against reading them, which an average
cannot do without.

    python -m tests.bench.average [DIRECTORY]      # needs 3 GB there

Times without the start of Python, in two processes or threads each, with the files in the page cache and
without. Reading is done by plain readinto; with the BLAKE3 that makes sure of the ingredients; and
by safetensors, every tensor touched.
"""

import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from base.digests import digest_of
from ckpt_tools.averaging.average import average_models
from ckpt_tools.formats import parallel
from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.hf.configuration import write_configuration
from tests.bench.export import RandomWeights
from train.model.config import ModelConfig
from train.model.families import hf_settings

PROCESSES, MODELS, REPETITIONS = 2, 10, 5
MODEL = ModelConfig(
    vocab_size=16_384,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=12,
)


def read_plainly(path: Path) -> None:
    """Every byte into one buffer."""
    buffer = bytearray(4 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def load(path: Path) -> None:
    """Every page of every tensor."""
    for tensor in load_file(path).values():
        tensor.flatten()[::1024].sum()


def in_processes(work: Callable[[Path], object], paths: list[Path]) -> None:
    """The work on every file, divided over forked processes."""

    def share(index: int) -> None:
        for path in paths[index::PROCESSES]:
            work(path)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=share, args=(index,)) for index in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def forget(paths: list[Path]) -> None:
    """Drops files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def average_lines(directory: Path | None = None) -> list[str]:
    """Time over that of each way to read: medians of ratios of neighbouring runs."""
    with tempfile.TemporaryDirectory(dir=directory) as name:
        root = Path(name)
        models = [root / str(index) for index in range(MODELS)]
        parallel.MOST_THREADS = PROCESSES
        for model in models:
            model.mkdir()
            write_weights(model, RandomWeights(MODEL))
            write_configuration(model, MODEL.family, hf_settings(MODEL, 1024, 0), "fp32")
        files = [model / "model.safetensors" for model in models]
        ways: dict[str, Callable[[], object]] = {
            "ours": lambda: average_models(root / "out", models),
            "reading": lambda: in_processes(read_plainly, files),
            "reading and BLAKE3": lambda: in_processes(digest_of, files),
            "safetensors load_file": lambda: in_processes(load, files),
        }
        lines = []
        for cache in ("warm", "cold"):
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(REPETITIONS):
                for way, call in ways.items():
                    if cache == "cold":
                        forget(files)
                    began = time.perf_counter()
                    call()
                    seconds[way].append(time.perf_counter() - began)
                    shutil.rmtree(root / "out", ignore_errors=True)
            for way in list(ways)[1:]:
                ratio = statistics.median(
                    a / b for a, b in zip(seconds["ours"], seconds[way], strict=True)
                )
                medians = (
                    f"{statistics.median(seconds['ours']):.2f} s /"
                    f" {statistics.median(seconds[way]):.2f} s"
                )
                lines.append(
                    f"{f'average of {MODELS} models, {cache} / {way}':<70} {ratio:>6.2f}  "
                    f" ({medians})"
                )
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in average_lines(Path(sys.argv[1]) if sys.argv[1:] else None):
        print(line, flush=True)
