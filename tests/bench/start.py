"""`python -m tests.bench.start [LAYERS]`: seconds of a start that resumes, at OLMo2-1B's shape.

Slow, so no part of `make bench`. The layers are the 1B's, 2 of 16 by default, and the vocabulary is
4,096: a process holds 18 bytes a parameter, and 32 while it saves, on the CPU as on a GPU. One
process trains a step and ends; another one starts as `python -m train run` does and loads it.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

BEGAN_AT = time.perf_counter()

from tests.bench.loader import seconds, token_file  # noqa: E402
from tests.runs import execute, make_run, torchrun  # noqa: E402
from train.checkpoints import resuming  # noqa: E402
from train.distributed import start  # noqa: E402
from train.engines import build_engine  # noqa: E402
from train.model import initialization  # noqa: E402
from train.model.families import parameter_shapes  # noqa: E402
from train.model.presets import OLMO2_1B  # noqa: E402
from train.planning.memory import parameter_count  # noqa: E402
from train.run.config import RunConfig, load_run  # noqa: E402
from train.run.directory import RunDirectory, read_checkpoint_record  # noqa: E402

VOCAB_SIZE = 4096


def one_step(directory: Path, layers: int) -> RunConfig:
    """Trains a run of one step to its end, in bf16."""
    model = OLMO2_1B.model_copy(update={"num_hidden_layers": layers, "vocab_size": VOCAB_SIZE})
    (directory / "tokenizer.json").write_text("{}")
    for name in ("train", "held_out"):
        token_file(directory / name, directory, 10_000, VOCAB_SIZE)
    run = make_run(
        directory / "run",
        train_prefix=directory / "train",
        held_out_prefix=directory / "held_out",
        tokenizer_dir=directory,
        model=model,
        precision="bf16",
        total_steps=1,
        save_steps=(1,),
        batch_size=1,
        micro_batch_size=1,
        schedule={"warmup_tokens": 0, "phase": {"kind": "constant"}},
    )
    done = execute(torchrun(1, "train", "run", str(directory / "run")), timeout_seconds=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return run


def start_again(path: Path) -> None:
    """Worker: prints the seconds of each phase and how many weights were drawn."""
    import train.megatron.engine  # noqa: F401  which takes longest

    imported = time.perf_counter() - BEGAN_AT
    run, directory = load_run(path / "run.json"), RunDirectory(path)
    engines = []
    built = seconds(lambda: engines.append(build_engine(run, start())))
    took: dict[str, float] = {}

    def timed(name: str, call: Any) -> Any:
        def measured(*arguments: Any) -> Any:
            began_at = time.perf_counter()
            result = call(*arguments)
            took[name] = took.get(name, 0.0) + time.perf_counter() - began_at
            return result

        return measured

    engine = engines[0]
    data = read_checkpoint_record(directory.checkpoint(1)).data_sha256
    with (
        mock.patch.object(engine, "load", timed("load", engine.load)),
        mock.patch.object(initialization, "draw_normal") as draw,
        mock.patch.object(resuming, "_damage", timed("hashes", resuming._damage)),
    ):
        begun = resuming.resume(engine, run, directory, data_sha256=data, attempt=2)
    assert begun.step == 1
    engine.close()
    first = seconds(lambda: [*drawn(run)])
    print(
        f"imports {imported:.1f} s, model and optimizer {built:.1f} s, hashes {took['hashes']:.1f}"
        f" s, load {took['load']:.1f} s; matrices drawn {draw.call_count}; a first start draws them"
        f" in {first:.1f} s"
    )


def drawn(run: RunConfig) -> Any:
    """The initial parameters, one after another."""
    for name in parameter_shapes(run.model):
        yield initialization.initial_parameter(name, run.model, run.seed)


def main(layers: int) -> None:
    """Prints the phases, and what grows with the model at the size of the whole 1B."""
    with tempfile.TemporaryDirectory() as name:
        run = one_step(Path(name), layers)
        again = torchrun(1, "tests.bench.start", "again", str(Path(name) / "run"))
        done = execute(again, timeout_seconds=900)
        assert done.returncode == 0, done.stderr[-3000:]
    count = parameter_count(run)
    whole = parameter_count(run.model_copy(update={"model": OLMO2_1B})) / count
    print(f"start that resumes {count / 1e6:.0f} M parameters of OLMo2-1B's layers: {done.stdout}")
    print(f"all but imports grows with the parameters, {whole:.1f} times for the whole 1B")


if __name__ == "__main__":
    if sys.argv[1:2] == ["again"]:
        start_again(Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 2)
