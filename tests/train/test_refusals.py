"""Bad runs: one line that names the next action, exit code 2, nothing half-written."""

import json
import re
import shutil
import subprocess
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from base.errors import UserError
from base.files import write_json
from base.frozen import fingerprint
from tests.interpreter import interpreter
from tests.runs import environment, error_line, execute, make_run, refusal, torchrun
from train.run.config import load_run, with_settings

DROPPED = object()


def edit(run_dir: Path, changes: dict[str, Any]) -> None:
    """Change values of a run.json that never started, by the dotted path of their keys."""
    content = json.loads((run_dir / "run.json").read_text())
    del content["fingerprint"]
    for path, value in changes.items():
        *parents, key = path.split(".")
        target = reduce(getitem, parents, content)
        target[key] = value
        if value is DROPPED:
            del target[key]
    write_json(run_dir / "run.json", content)


SMALLER = {"until_step": 3, "batch_size": 4}
FP8 = {"precision": "fp8"}
LAWA = {"kind": "lawa", "interval_steps": 2, "window": 2}
SAM = {"kind": "sam", "rho": 0.1, "from_step": 1}
GRAPHS: dict[str, Any] = {"cuda_graphs": True, "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer.learning_rate": 1e-3}, "unknown key 'optimizer.learning_rate'"),
        ({"batch_size": "eight"}, "'batch_size'"),
        ({"model.vocab_size": "320"}, "'model.vocab_size'"),
        ({"seed": DROPPED}, "key 'seed' is missing"),
        (
            {"parallel.tensor": 3},
            "num_attention_heads 4 does not divide over parallel.tensor 3",
        ),
        (
            {"parallel.pipeline": 3},
            "num_hidden_layers 2 does not divide over parallel.pipeline 3",
        ),
        ({"micro_batch_size": 3}, "not a multiple of micro_batch_size 3"),
        (
            {"batch_warmup": [SMALLER | {"batch_size": 2}]},
            "batch_size 2 is not a multiple of micro_batch_size 4",
        ),
        ({"batch_warmup": [SMALLER, SMALLER]}, "end at [3, 3]; let the steps rise"),
        ({"save_steps": [10]}, "end with 20"),
        ({"schedule.anneal.start_step": 30}, "after the end 20"),
        ({"optimizer.peak_lr": 0, "optimizer.decay": "adamc"}, "set a peak_lr above 0"),
        ({"model.vocab_size": 100}, "outside the model's vocabulary of 100"),
        ({"data.sequence_length": 10**6}, "fewer than one sequence"),
        ({"data.train": "nowhere/train"}, "make it with 'python -m train prepare'"),
        ({"data.held_out_sequences": 10**6}, "ask for fewer"),
        ({"engine": "deepspeed", "zero": {"stage": 4}}, "'zero.stage'"),
        (
            {
                "engine": "deepspeed",
                "zero": {"stage": 3},
                "optimizer": {"matrices": "muon", "peak_lr": 1e-2},
            },
            "updates whole matrices, which zero.stage 3 cuts; set zero.stage to 2",
        ),
        ({"zero": {"stage": 2}}, "zero belongs to the deepspeed engine"),
        (FP8, "needs kernels 'transformer_engine'"),
        (FP8 | {"engine": "deepspeed"}, "belongs to the megatron engine; set engine to megatron"),
        (
            FP8 | {"kernels": "transformer_engine", "probe": {"every_steps": 5}},
            "set precision to 'bf16' or remove probe",
        ),
        (GRAPHS | {"data.document_mask": True}, "cuda_graphs does not go with data.document_mask"),
        (GRAPHS | {"parallel.pipeline": 2}, "does not go with parallel.tensor or parallel.pipe"),
        (GRAPHS | {"engine": "deepspeed"}, "does not go with engine 'deepspeed'"),
    ],
)
def test_a_bad_run_is_refused(tmp_path, inputs, changes, words):
    make_run(tmp_path / "run", **inputs)
    edit(tmp_path / "run", changes)
    assert words in refusal(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer.matrices": DROPPED}, "key 'optimizer.matrices' is missing; add it"),
        (
            {"optimizer.matrices": "shampoo"},
            "'optimizer.matrices': 'shampoo' is unknown; take one of adamw, muon, lion, soap",
        ),
        ({"averages": [LAWA | {"window": 0}]}, "'averages.0.window'"),
        ({"perturbation": {"rho": 0.1}}, "key 'perturbation.kind' is missing; add it"),
        ({"perturbation": SAM | {"rho": 0}}, "'perturbation.rho': Input should be greater than 0"),
        (
            {"perturbation": SAM | {"spec": "rtn-b3-g32"}},
            "unknown key 'perturbation.spec'; remove it or correct its spelling",
        ),
        (
            {"perturbation": SAM | {"every_steps": 1000}},
            "changes no update up to the last step 20; lower perturbation.every_steps",
        ),
    ],
)
def test_keys_of_one_of_several_kinds_are_named_as_in_the_file(tmp_path, inputs, changes, words):
    make_run(tmp_path / "run", **inputs)
    edit(tmp_path / "run", changes)
    with pytest.raises(UserError, match=re.escape(words)):
        load_run(tmp_path / "run" / "run.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernels": "transformer_engine"}, "need a GPU, there is none here; set kernels to"),
        (GRAPHS, "cuda_graphs needs a GPU, there is none here"),
        ({"optimizer.undecayed": ["q_proj"]}, "one matrix here; spare all of them or none"),
    ],
)
def test_what_megatron_cannot_do_is_refused(tmp_path, inputs, changes, words):
    make_run(tmp_path / "run", **inputs)
    edit(tmp_path / "run", changes)
    assert words in refusal(tmp_path / "run")


def test_batch_that_does_not_fit_the_processes(tmp_path, inputs):
    """Under torchrun the line is printed once; the exit code is torchrun's own."""
    make_run(tmp_path / "run", **inputs, batch_size=6, micro_batch_size=2)
    done = execute(torchrun(2, "train", "run", str(tmp_path / "run"), python=interpreter()))
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "batch_size 6 is not a multiple of data-parallel size 2 x micro_batch_size 2" in lines[0]
    assert done.returncode != 0


def test_a_step_too_short_for_a_graph(tmp_path, inputs):
    run = make_run(tmp_path / "run", **inputs, **GRAPHS)  # 4 microbatches
    assert run.data_parallel_size(1) == 1
    with pytest.raises(UserError, match="and there are 2; set micro_batch_size lower"):
        run.data_parallel_size(2)


def test_world_size_that_does_not_fit_the_layout(tmp_path, inputs):
    run = make_run(tmp_path / "run", **inputs, tensor=2)
    with pytest.raises(UserError, match="world size 3 is not a multiple of tensor x pipeline = 2"):
        run.data_parallel_size(3)
    assert run.data_parallel_size(4) == 2


def test_a_run_name_cannot_be_reused_with_another_configuration(trained, tmp_path):
    shutil.copytree(trained("dp1"), tmp_path / "run")
    run_json = tmp_path / "run" / "run.json"
    run_json.write_text(run_json.read_text().replace('"seed": 3', '"seed": 8'))
    assert "use another run name" in refusal(tmp_path / "run")
    edit(tmp_path / "run", {})
    assert "belongs to fingerprint" in refusal(tmp_path / "run")


def test_the_tokenizer_must_be_the_one_that_made_the_tokens(tmp_path, inputs):
    other = tmp_path / "tokenizer"
    shutil.copytree(inputs["tokenizer_dir"], other)
    make_run(tmp_path / "run", **(inputs | {"tokenizer_dir": other}))
    path = other / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    assert "was not made by" in refusal(tmp_path / "run")
    path.unlink()
    assert "let data.tokenizer name" in refusal(tmp_path / "run")


def test_paths_of_the_wrong_kind_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / "run.json").mkdir(parents=True)
    assert "Not a directory" in refusal(tmp_path / "file")
    assert "Is a directory" in refusal(tmp_path / "run")


def test_settings_make_another_run(tmp_path, inputs):
    run = make_run(tmp_path / "run", **inputs)
    changed = with_settings(run, ["optimizer.peak_lr=6e-4", "total_steps=20"])
    assert changed.optimizer.peak_lr == 6e-4
    assert changed.name == "run-peak_lr=6e-4-total_steps=20"
    assert fingerprint(changed) != fingerprint(run)
    for setting in ("optimizer.lr=1", "peak_lr=1", "optimizer.peak_lr", "name=x", "factors={}"):
        with pytest.raises(UserError, match="no such setting"):
            with_settings(run, [setting])
    with pytest.raises(UserError, match="peak_lr"):
        with_settings(run, ["optimizer.peak_lr=fast"])


REFUSED_IN_A_COLLECTIVE = """
import sys
import torch, typer
import torch.distributed as dist
from base.cli import run_command
from base.errors import UserError

rank, store = int(sys.argv.pop(1)), sys.argv.pop(1)
app = typer.Typer()
slow_to_free = [[] for _ in range(3_000_000)]  # the interpreter takes its time to go down

@app.command()
def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.barrier()
    tensors = [torch.zeros(20_000) for _ in range(300)]
    if rank == 1:
        [dist.all_reduce(tensor) for tensor in tensors]
        return
    while tensors:  # the last reference is the gloo thread's
        tensor = tensors.pop()
        tensor.held_by_python = True
        dist.all_reduce(tensor, async_op=True)
    del tensor
    raise UserError("refused")

run_command(app, "example")
"""


def test_a_refusal_beside_running_collectives_ends_with_exit_code_2(tmp_path):
    command = [interpreter(), "-c", REFUSED_IN_A_COLLECTIVE]
    store = str(tmp_path / "store")
    other = subprocess.Popen([*command, "1", store], env=environment(), stderr=subprocess.DEVNULL)
    try:
        assert error_line(execute([*command, "0", store])) == "error: refused"
    finally:
        other.kill()
        other.wait()
