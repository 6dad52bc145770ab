"""Ranks of a test that load a checkpoint: `-m tests.train.loading RUN_DIR STEP OUT`.

Each leaves OUT/RANK.json, the bytes it read and the bytes of the tensors it loaded into, and all
together OUT/weights, a checkpoint of the weights that they compute with then.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from train.distributed import start
from train.engines import build_engine
from train.run.config import load_run
from train.run.directory import RunDirectory


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def main(run_dir: Path, step: int, out: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    directory, loaded = RunDirectory(run_dir), 0
    engine = build_engine(load_run(directory.run_json), start())
    load = dist_checkpointing.load

    def counted(state, *args, **kwargs):
        nonlocal loaded
        loaded = sum(entry.data.nbytes for entry in nested_values(state))
        return load(state, *args, **kwargs)

    dist_checkpointing.load = counted
    before = bytes_read()
    engine.load(directory.checkpoint(step))
    figures = {"read": bytes_read() - before, "loaded": loaded}
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(figures))
    (out / "weights").mkdir(exist_ok=True)
    snapshot = engine.snapshot(out / "weights", weights_only=True)
    snapshot.write()
    dist.barrier()
    snapshot.seal()
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
