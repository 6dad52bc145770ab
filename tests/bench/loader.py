"""The loader part of make bench: reading and starting against megatron-core's GPTDataset on the
same .bin/.idx.

Runs in a process of its own, as megatron-core does without CUDA. Both read from the page cache, in
one process each.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from base.files import sha256_of
from tests.bench import line
from tests.corpora import write_corpus
from tests.runs import make_run
from train.data.config import RepetitionFilter
from train.model.config import ModelConfig
from train.run.config import RunConfig
from train.run.directory import RunDirectory
from train.run_data import RunData, open_data

TOKENS = 50_000_000
VOCAB_SIZE = 50_304
SEQUENCE_LENGTH = 2048
BATCH_SIZE = 128
BATCHES = 16  # per timing
REPETITIONS = 9


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def token_file(prefix: Path, tokenizer_dir: Path, tokens: int) -> None:
    """A .bin/.idx of documents of 500 tokens whose frequencies fall as those of words do."""
    generator = np.random.default_rng(prefix.name == "train")
    lengths_D = np.full(tokens // 500, 500, np.int32)
    content = generator.zipf(1.1, len(lengths_D) * 500) % (VOCAB_SIZE - 1) + 1
    content[499::500] = 0
    write_corpus(
        prefix,
        content.astype(np.uint16),
        lengths_D,
        vocab_size=VOCAB_SIZE,
        max_token_id=VOCAB_SIZE - 1,
        tokenizer_sha256=sha256_of(tokenizer_dir / "tokenizer.json"),
    )


def configure(directory: Path, **settings: Any) -> RunConfig:
    """A run over directory/train.bin, or what `settings` say."""
    lengths = {"sequence_length": SEQUENCE_LENGTH, "held_out_sequences": 1}
    return make_run(
        directory / "run",
        train_prefix=directory / "train",
        held_out_prefix=directory / "held_out",
        tokenizer_dir=directory,
        data=lengths | settings,
        model=ModelConfig(
            vocab_size=100_352,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
        ),
        batch_size=BATCH_SIZE,
        schedule={"warmup_tokens": 0, "phase": {"kind": "constant"}},
    )


def open_ours(directory: Path, run: RunConfig) -> RunData:
    """As the training loop opens it."""
    return open_data(run, RunDirectory(directory / "run"), verify_hashes=False)


def open_peer(directory: Path, cache: Path) -> Any:
    """megatron-core's dataset over the same file, its index files in `cache`."""
    import train.megatron  # noqa: F401, I001  stands in for CUDA, hence first
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=7,
        sequence_length=SEQUENCE_LENGTH,
        blend=([str(directory / "train")], None),
        split="1,0,0",
        path_to_cache=str(cache),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(
            vocab_size=VOCAB_SIZE, eod=0, pad=0, unique_identifiers={"class": "none"}
        ),
    )
    low_level = GPTDataset.build_low_level_dataset(str(directory / "train"), config)
    documents = np.arange(TOKENS // 500, dtype=np.int32)
    return GPTDataset(low_level, str(directory / "train"), documents, None, Split.train, config)


def throughput_lines(directory: Path) -> list[str]:
    """Seconds of ours over seconds of the peer, median of neighbouring runs."""
    import torch

    ours, peer, at = (
        open_ours(directory, configure(directory)),
        open_peer(directory, directory / "cache"),
        [0],
    )
    full = configure(directory, repetition_filter=RepetitionFilter())
    filtered = open_ours(directory, full)

    def read(data: RunData) -> None:
        for step in range(at[0] + 1, at[0] + BATCHES + 1):
            data.batch(step)

    def read_peer() -> None:
        for step in range(at[0], at[0] + BATCHES):
            rows = [
                peer[row % len(peer)] for row in range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
            ]
            (
                torch.stack([row["tokens"] for row in rows]),
                torch.stack([row["labels"] for row in rows]),
            )

    times = []
    for _ in range(REPETITIONS):
        times.append(
            [seconds(lambda: read(ours)), seconds(lambda: read(filtered)), seconds(read_peer)]
        )
        at[0] = (at[0] + BATCHES) % 150
    tokens = BATCHES * BATCH_SIZE * SEQUENCE_LENGTH
    speeds = [tokens / statistics.median(column) / 1e6 for column in zip(*times, strict=True)]
    lines = []
    for column, what in enumerate(("batches", "with document numbers and repetition filter")):
        ratio = statistics.median(row[column] / row[2] for row in times)
        figures = f"{speeds[column]:.0f} / {speeds[2]:.0f} M tokens/s"
        lines.append(line(f"loader, {what} / GPTDataset", ratio, figures))
    return lines


def start_lines(directory: Path) -> list[str]:
    """Start-up on the same file."""
    run = configure(directory)
    ours = seconds(lambda: open_ours(directory, run).batch(1))
    first = seconds(lambda: open_peer(directory, directory / "cold")[0])
    again = seconds(lambda: open_peer(directory, directory / "cold")[0])
    figures = f"{ours:.3f} s / {first:.3f} s, {again:.3f} s with its index files"
    return [line("loader, start to first batch / GPTDataset", ours / first, figures)]


def main() -> None:
    """Prints a line per comparison, on a corpus made for it."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "tokenizer.json").write_text("{}")
        token_file(directory / "train", directory, TOKENS)
        token_file(directory / "held_out", directory, 100_000)
        open_peer(directory, directory / "cache")  # megatron-core imported, C++ helpers loaded
        for lines in (throughput_lines, start_lines):
            print("\n".join(lines(directory)), flush=True)


if __name__ == "__main__":
    main()
