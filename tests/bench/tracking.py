"""Cost of an importer beside training: the median step with one over the median without,
whatever its store does.

Every round trains the same run alone, then beside a follower whose server never answers, and beside
one whose server takes its time. One rank, and a core for the follower, as a node has.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from study.definition import save_study
from tests.runs import environment, make_run
from tests.study.tracking.stores import write_small_study
from tests.study.tracking.test_follow import BARE
from train.data.prepare import prepare
from train.model.config import ModelConfig
from train.run.directory import RunDirectory

STEPS = 120
SKIPPED_STEPS = 10  # at the start, while caches fill
ROUNDS = 3
SLOW_SECONDS = 2.0


def serve_slowly(listening: socket.socket) -> None:
    """Answers every request after a while, with an error."""
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            time.sleep(SLOW_SECONDS)
            connection.recv(65536)
            connection.sendall(
                b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )


def median_step_seconds(root: Path, name: str, texts: dict[str, Any], uri: str | None) -> float:
    """Step times of one run, trained anew."""
    model = ModelConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    _, study = write_small_study(root, name, 1)
    run = make_run(
        root / name / "run",
        **texts,
        model=model,
        total_steps=STEPS,
        save_steps=(STEPS,),
        batch_size=16,
    )
    save_study(root / name, study.model_copy(update=BARE | {"runs": (run,)}))
    follower = None
    if uri:
        command = [
            sys.executable,
            "-m",
            "study",
            "mirror",
            name,
            "--root",
            str(root),
            "--run",
            "run",
            "--follow",
            "1",
        ]
        follower = subprocess.Popen(
            command,
            env=environment() | {"MLFLOW_TRACKING_URI": uri},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert follower.stderr
        follower.stderr.readline()  # it has started, and failed to reach the store once
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
    ]
    command += ["--rdzv-endpoint", "localhost:0", "-m", "train", "run", str(root / name / "run")]
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=280)
    if follower:
        follower.kill()
        follower.wait()
    lines = RunDirectory(root / name / "run").metrics.read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "tokens_per_second" in row]
    return statistics.median(
        run.tokens_per_step / row["tokens_per_second"] for row in rows[SKIPPED_STEPS:]
    )


def make_texts(root: Path) -> dict[str, Any]:
    """Token files of random letters."""
    from study.text.tokenizer import train_tokenizer

    generator, tokenizer = np.random.default_rng(0), root / "tokenizer"
    tokenizer.mkdir()
    train_tokenizer([Path(json.__file__).read_text()], 320).save(str(tokenizer / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(names))
    for split in ("train", "held_out"):
        texts = ["".join(map(chr, generator.integers(97, 123, 300))) for _ in range(300)]
        (root / f"{split}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
        prepare([root / f"{split}.jsonl"], tokenizer, root / split)
    return {
        "tokenizer_dir": tokenizer,
        "train_prefix": root / "train",
        "held_out_prefix": root / "held_out",
    }


def tracking_lines() -> Iterator[str]:
    """Yield a line per kind of store."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as silent, socket.socket() as slow:
        root, texts = Path(name), make_texts(Path(name))
        for listener in (silent, slow):
            listener.bind(("127.0.0.1", 0))
            listener.listen(100)
        threading.Thread(target=serve_slowly, args=(slow,), daemon=True).start()
        kinds: dict[str, str | None] = {"alone": None}
        kinds |= {
            kind: f"http://127.0.0.1:{listener.getsockname()[1]}"
            for kind, listener in (("silent", silent), ("slow", slow))
        }
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(ROUNDS):
            for kind, uri in kinds.items():
                times[kind].append(median_step_seconds(root, f"{kind}{number}", texts, uri))
        for kind in ("silent", "slow"):
            ratios = [
                beside / alone for beside, alone in zip(times[kind], times["alone"], strict=True)
            ]
            figures = (
                f"({min(ratios):.3f} to {max(ratios):.3f} in {ROUNDS} rounds, {os.cpu_count()}"
                " cores)"
            )
            label = f"tracking, step beside an importer whose server is {kind} / alone"
            yield f"{label:<70} {statistics.median(ratios):>6.3f}   {figures}"


if __name__ == "__main__":
    for line in tracking_lines():
        print(line, flush=True)
