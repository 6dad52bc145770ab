"""The export part of make bench: time and memory on a megatron checkpoint of OLMo2-1B's size in
fp32, 6 GB, cached.

    python -m tests.bench.export [DIRECTORY]      # needs 25 GB there

Against `cp -r` of the same checkpoint, and the usual way: dist_checkpointing into a whole model,
save_pretrained.
"""

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch

from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.formats.weights import read_whole
from ckpt_tools.hf.configuration import write_configuration
from tests.bench import line
from tests.ckpt_tools.checkpoints import seal
from tests.ckpt_tools.random_weights import RandomWeights
from tests.megatron_tensors import to_hf
from tests.runs import environment, torchrun
from train.model.config import ModelConfig, hf_settings
from train.model.presets import OLMO2_1B
from train.run.directory import read_checkpoint_record
from train.run.parallel import ParallelConfig

PROCESSES = 2
MODEL = OLMO2_1B
LARGEST_BYTES = 4 * MODEL.vocab_size * MODEL.hidden_size  # the embedding, in fp32
ALLOWED_BYTES = 3 * LARGEST_BYTES + (600 << 20)


def make_checkpoint(root: Path) -> Path:
    """An import's weights as two tensor-parallel ranks of megatron save them, without optimizer
    state.
    """
    from ckpt_tools.importing import import_checkpoint

    source, imported, checkpoint = root / "source", root / "imported", root / "checkpoint"
    source.mkdir()
    write_weights(source, RandomWeights(MODEL))
    write_configuration(source, MODEL.family, hf_settings(MODEL, 4096, 0), "fp32")
    import_checkpoint(str(source), imported)
    shutil.rmtree(source)
    shutil.copytree(imported, checkpoint, ignore=shutil.ignore_patterns("model*"))
    timed(torchrun(PROCESSES, "tests.bench.export", "shards", str(imported), str(checkpoint)))
    shutil.rmtree(imported)
    seal(checkpoint, engine="megatron")
    return checkpoint


def save_shards(imported: str, out: str) -> None:
    """Worker, on every rank: builds the megatron model of an import and saves its shards."""
    from tests.bench.training import bench_run
    from train.distributed import start

    device = start()
    from megatron.core import parallel_state

    from train.megatron.model import (
        build_model,
        global_parameters,
        initialize_groups,
        transformer_config,
        weight_shard,
    )
    from train.megatron.shards import ShardedSnapshot
    from train.snapshot_memory import SnapshotMemory

    model = ModelConfig(**read_checkpoint_record(Path(imported)).model)
    parallel = ParallelConfig(tensor=PROCESSES)
    run = bench_run("megatron").model_copy(update={"model": model, "parallel": parallel})
    initialize_groups(run)
    weights = HFWeights(Path(imported))
    megatron = build_model(run, transformer_config(run), device)
    with torch.no_grad():
        for name, parameter in global_parameters(megatron).items():
            parameter.copy_(weight_shard(name, lambda each: read_whole(weights, each), model))
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(True)}
    state = {"model": megatron.sharded_state_dict(metadata=metadata)}
    snapshot = ShardedSnapshot(state, Path(out), SnapshotMemory(device), known=[])
    snapshot.write()
    snapshot.seal()
    os._exit(0)


class _Memory(threading.Thread):
    """Peak memory of a process and its children: resident of the largest, and of all with shared
    pages counted once.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process, self.largest, self.together = psutil.Process(pid), 0, 0

    def run(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # once the command itself has ended
            while self._process.status() != psutil.STATUS_ZOMBIE:
                used = []
                for process in (self._process, *self._process.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):  # a child has just ended
                        used.append(process.memory_full_info())
                self.largest = max([self.largest, *(each.rss for each in used)])
                self.together = max(self.together, sum(each.pss for each in used))
                time.sleep(0.05)


def timed(command: list[str]) -> tuple[float, _Memory]:
    """Seconds and memory of a command that has to succeed."""
    began = time.perf_counter()
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        memory = _Memory(process.pid)
        memory.start()
        _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()[-2000:]
    return time.perf_counter() - began, memory


def usual_way(checkpoint: str, out: str) -> None:
    """On one rank: dist_checkpointing into a whole megatron model, its weights into an HF model,
    save_pretrained.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.bench.training import bench_run
    from train.distributed import start

    device = start()
    from megatron.core import dist_checkpointing, parallel_state

    from train.megatron.model import (
        build_model,
        global_parameters,
        initialize_groups,
        transformer_config,
    )

    run = bench_run("megatron").model_copy(update={"model": MODEL})
    initialize_groups(run)
    megatron = build_model(run, transformer_config(run), device)
    state = megatron.sharded_state_dict(
        metadata={"dp_cp_group": parallel_state.get_data_parallel_group(True)}
    )
    megatron.load_state_dict(dist_checkpointing.load({"model": state}, checkpoint)["model"])
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in global_parameters(megatron).items():
        weights |= to_hf(name, parameter.detach(), MODEL)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(MODEL.family, **hf_settings(MODEL, 4096, 0))
        )
    model.load_state_dict(weights, strict=True, assign=True)
    model.save_pretrained(out)
    os._exit(0)


def export_lines(directory: Path | None = None) -> list[str]:
    """Time against both, and peak memory."""
    with tempfile.TemporaryDirectory(dir=directory) as name:
        root = Path(name)
        checkpoint = make_checkpoint(root)
        size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        for path in checkpoint.glob("*.distcp"):  # into the page cache
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass
        tools = [sys.executable, "-m", "ckpt_tools", "export", str(checkpoint), str(root / "hf")]
        commands = {
            "cp": ["cp", "-r", str(checkpoint), str(root / "copy")],
            "ours": tools,
            "usual": torchrun(
                1, "tests.bench.export", "usual", str(checkpoint), str(root / "usual")
            ),
        }
        taken: dict[str, list[float]] = {what: [] for what in commands}
        memory = {}
        for what in ("cp", "ours", "cp", "ours", "cp", "ours", "usual"):
            elapsed, memory[what] = timed(commands[what])
            taken[what].append(elapsed)
            for folder in ("hf", "copy", "usual"):
                shutil.rmtree(root / folder, ignore_errors=True)
        seconds = {what: statistics.median(each) for what, each in taken.items()}
    mib = {what: (used.largest >> 20, used.together >> 20) for what, used in memory.items()}
    ours, usual = seconds["ours"], seconds["usual"]
    return [
        line(
            f"export of {size / 1e9:.1f} GB, {PROCESSES} cores: speed / cp -r",
            seconds["cp"] / ours,
            f"{ours:.1f} s / {seconds['cp']:.1f} s",
        ),
        line(
            "export: speed / dist_checkpointing into a model and save_pretrained",
            usual / ours,
            f"{ours:.1f} s / {usual:.1f} s",
        ),
        line(
            "export: peak memory of a process / (3 x largest tensor + 600 MiB)",
            memory["ours"].largest / ALLOWED_BYTES,
            f"{mib['ours'][0]} MiB, all together {mib['ours'][1]} MiB; the usual way"
            f" {mib['usual'][0]} MiB",
        ),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["usual"]:
        usual_way(*sys.argv[2:])
    elif sys.argv[1:2] == ["shards"]:
        save_shards(*sys.argv[2:])
    else:
        print("\n".join(export_lines(Path(sys.argv[1]) if sys.argv[1:] else None)))
