"""Bad runs: one line that names the next action, exit code 2, nothing half-written."""

import json
import shutil
from pathlib import Path

import pytest

from base.errors import UserError
from base.frozen import fingerprint
from tests.interpreter import interpreter
from tests.runs import execute, make_run, refusal, torchrun
from train.run.config import dump_run, load_run, with_settings


def edit(run_dir: Path, change) -> None:
    path = run_dir / "run.json"
    content = json.loads(path.read_text())
    content.pop("fingerprint")
    change(content)
    path.write_text(json.dumps(content))


REFUSED = {
    "unknown key": (
        lambda run: run["optimizer"].update(learning_rate=1e-3),
        "unknown key 'optimizer.learning_rate'",
    ),
    "mistyped value": (lambda run: run.update(batch_size="eight"), "'batch_size'"),
    "number as text": (lambda run: run["model"].update(vocab_size="320"), "'model.vocab_size'"),
    "missing key": (lambda run: run.pop("seed"), "key 'seed' is missing"),
    "heads by TP": (
        lambda run: run["parallel"].update(tensor=3),
        "num_attention_heads 4 does not divide over parallel.tensor 3",
    ),
    "layers by PP": (
        lambda run: run["parallel"].update(pipeline=3),
        "num_hidden_layers 2 does not divide over parallel.pipeline 3",
    ),
    "batch by micro": (
        lambda run: run.update(micro_batch_size=3),
        "not a multiple of micro_batch_size 3",
    ),
    "smaller batch by micro": (
        lambda run: run.update(batch_warmup=[{"until_step": 3, "batch_size": 2}]),
        "batch_size 2 is not a multiple of micro_batch_size 4",
    ),
    "stages that do not rise": (
        lambda run: run.update(batch_warmup=[{"until_step": 3, "batch_size": 4}] * 2),
        "end at [3, 3]; let the steps rise",
    ),
    "no last checkpoint": (lambda run: run.update(save_steps=[10]), "end with 20"),
    "anneal after the end": (
        lambda run: run["schedule"]["anneal"].update(start_step=30),
        "after the end 20",
    ),
    "vocabulary": (
        lambda run: run["model"].update(vocab_size=100),
        "outside the model's vocabulary of 100",
    ),
    "short corpus": (
        lambda run: run["data"].update(sequence_length=10**6),
        "fewer than one sequence",
    ),
    "no corpus": (
        lambda run: run["data"].update(train="nowhere/train"),
        "make it with 'python -m train prepare'",
    ),
    "few held-out": (lambda run: run["data"].update(held_out_sequences=10**6), "ask for fewer"),
    "ZeRO 3": (lambda run: run.update(engine="deepspeed", zero={"stage": 3}), "'zero.stage'"),
    "ZeRO on megatron": (
        lambda run: run.update(zero={"stage": 2}),
        "zero belongs to the deepspeed engine",
    ),
    "fp8 by torch": (lambda run: run.update(precision="fp8"), "needs kernels 'transformer_engine'"),
    "fp8 by DeepSpeed": (
        lambda run: run.update(precision="fp8", engine="deepspeed"),
        "belongs to the megatron engine; set engine to megatron",
    ),
    "a probe in fp8": (
        lambda run: run.update(
            precision="fp8", kernels="transformer_engine", probe={"every_steps": 5}
        ),
        "set precision to 'bf16' or remove probe",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_run_is_refused(tmp_path, inputs, case):
    change, expected = REFUSED[case]
    make_run(tmp_path / "run", **inputs)
    edit(tmp_path / "run", change)
    assert expected in refusal(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


def test_batch_that_does_not_fit_the_processes(tmp_path, inputs):
    """Under torchrun the line is printed once; the exit code is torchrun's own."""
    make_run(tmp_path / "run", **inputs, batch_size=6, micro_batch_size=2)
    done = execute(torchrun(2, "train", "run", str(tmp_path / "run"), python=interpreter()))
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "batch_size 6 is not a multiple of data-parallel size 2 x micro_batch_size 2" in lines[0]
    assert done.returncode != 0


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
    edit(tmp_path / "run", lambda run: None)
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


def test_run_json_round_trips(tmp_path, inputs):
    run = make_run(tmp_path / "run", **inputs)
    assert load_run(tmp_path / "run" / "run.json") == run
    assert dump_run(run)["fingerprint"] == fingerprint(run)
