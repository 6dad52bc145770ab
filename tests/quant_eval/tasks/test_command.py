"""`python -m quant_eval tasks` with another model in the place of the quantized one."""

import json
import shutil

import pytest

from base.files import sha256_of
from quant_eval.__main__ import app
from quant_eval.tasks.paired import UNITS
from tests.conftest import make_hf_directory
from tests.digests import blake3_of
from tests.quant_eval.tasks.task_files import SUBJECTS


@pytest.fixture
def command(in_process, monkeypatch, long_hf_dir, train_prefix, task_files):
    """Runs the command in this process with a stand-in for the quantizer; exit code, both
    outputs.
    """

    def run(*arguments, model=long_hf_dir, quantizer=None, **options):
        defaults = {
            "spec": "rtn-b3-g16",
            "calibration": train_prefix,
            "task-files": task_files,
            "tasks": "piqa",
        }
        given = defaults | {key.replace("_", "-"): text for key, text in options.items()}
        pairs = [part for key, text in given.items() for part in (f"--{key}", text)]
        monkeypatch.setattr("quant_eval.tasks.measurement.quantized_model", quantizer)
        return in_process(app, "quant_eval", "tasks", model, *arguments, *pairs)

    return run


@pytest.fixture
def copied_model(tmp_path, long_hf_dir):
    """An HF directory of this test's own, so that results can be written into it."""
    return shutil.copytree(long_hf_dir, tmp_path / "hf")


def test_results_of_two_specs(
    command, copied_model, pair, settings_of, task_files, train_prefix, measure_tasks
):
    """The full-precision model is the same in both, the quantized one is what the quantizer made
    of the spec.
    """
    asked = []

    def quantizer(hf_dir, spec, settings, _bos):
        asked.append((hf_dir, spec.name, settings.calibration, settings.calibration_sequences))
        dead = ["model.layers.0.mlp.down_proj"]
        return (pair.quantized, dead) if spec.bits == 3 else (pair.full, [])

    given = {"model": copied_model, "quantizer": quantizer, "shots": 2, "tasks": "winogrande,mmlu"}
    given["spec"] = "gptq-b3-g16"
    code, printed, lines = command("--spec", "gptq-b4-g16", **given)
    assert code == 0, lines
    paths = [copied_model / f"tasks/gptq-b{bits}-g16/result.json" for bits in (3, 4)]
    first, second = (json.loads(path.read_text()) for path in paths)
    assert asked == [(copied_model, f"gptq-b{bits}-g16", train_prefix, 128) for bits in (4, 3)]
    below = f"below {copied_model / 'tasks'}"
    assert printed[-1] == f"2 results {below}"
    again = command("--spec", "gptq-b4-g16", **given)[1]  # both are kept, and printed as before
    assert again == [*printed[:-1], f"2 results (2 of them kept, measured before) {below}"]
    assert len(asked) == 2
    assert [json.loads(path.read_text()) for path in paths] == [first, second]
    asked_settings = settings_of("winogrande", "mmlu", shots=2, seed=0)
    expected = measure_tasks(pair.full, pair.quantized, pair.tokenizer, asked_settings)
    assert first["measured"] == expected | {"dead_linears": ["model.layers.0.mlp.down_proj"]}
    assert "are rounded: model.layers.0.mlp.down_proj" in " ".join(" ".join(printed).split())
    assert first.keys() == {"model", "spec", "measured", "environment", "sha256"}
    assert first["model"]["weights_digests"] == {
        "model.safetensors": blake3_of(copied_model / "model.safetensors")
    }
    assert first["spec"]["num_fewshot"] == 2
    files, anatomy = first["spec"]["tasks"]["mmlu"]["files"], task_files / "mmlu/anatomy.jsonl"
    assert files[str(anatomy)] == sha256_of(anatomy)
    for row in (*second["measured"]["tasks"].values(), second["measured"]["mean"]):
        assert row["accuracy"] == row["accuracy_quantized"]
        assert row["difference"] == row["degradation"] == 0
        assert set(row["intervals"]["difference"]) == {0.0}
    without = {"intervals", "undefined", "leaves", "documents_sha256", "prompts_sha256"}
    assert UNITS.keys() >= first["measured"]["tasks"]["mmlu"].keys() - without
    assert all(line.startswith("tasks, ") for line in lines), lines  # nothing of lm-eval's own


@pytest.mark.parametrize(
    ("task", "start", "added"),
    [
        ("mmlu", ["mmlu/anatomy.jsonl"], "mmlu/astronomy.jsonl"),
        *(
            pytest.param(*case, marks=pytest.mark.stress)  # seconds each, of commands
            for case in (
                ("piqa", ["piqa.jsonl"], "piqa.fewshot.jsonl"),
                ("mmlu", ["mmlu/anatomy.jsonl"], "mmlu/anatomy.fewshot.jsonl"),
            )
        ),
    ],
)
def test_a_result_is_kept_until_its_documents_change(
    task, start, added, command, copied_model, pair, task_files, tmp_path
):
    directory = tmp_path / "documents"

    def run():
        given = {"model": copied_model, "task_files": directory, "tasks": task, "shots": 2}
        code, printed, lines = command(quantizer=lambda *_: (pair.full, []), **given)
        assert code == 0, lines
        result = json.loads((copied_model / "tasks/rtn-b3-g16/result.json").read_text())
        measured = result["measured"]["tasks"][task]
        prompts = measured["items"], measured["prompts_sha256"]
        return "kept, measured before" in printed[-1], prompts, result["spec"]["tasks"][task]

    def copy(name):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(task_files / name, directory / name)

    for name in start:
        copy(name)
    first = run()
    copy("sciq.jsonl")  # of a task that is not asked
    assert (first[0], run()) == (False, (True, *first[1:]))
    copy(added)
    second = run()
    assert not second[0]
    assert second[1] != first[1]
    assert set(second[2]["files"]) == {str(directory / name) for name in (*start, added)}
    assert run() == (True, *second[1:])
    (directory / added).unlink()
    assert run() == first


def test_without_examples_and_with_a_limit(command, copied_model, pair):
    code, _, lines = command(
        model=copied_model,
        quantizer=lambda *_: (pair.full, []),
        shots=0,
        limit=4,
        tasks="sciq,mmlu",
    )
    assert code == 0, lines
    result = json.loads((copied_model / "tasks/rtn-b3-g16/result.json").read_text())
    assert result["spec"]["calibration"] is None  # given, and not read
    measured = result["measured"]["tasks"]
    assert measured["sciq"]["items"] == 4
    assert measured["mmlu"]["leaves"] == {f"mmlu_{subject}": 4 for subject in SUBJECTS}
    assert "fewshot" not in result["spec"]["tasks"]["sciq"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "piqa,boolq"}, "unknown task 'boolq'; take one of "),
        ({"spec": "gptq"}, "needs its bits"),
        ({"shots": -1}, "shots"),
        ({"limit": 0}, "limit"),
        ({"spec": "gptq-b3-g16", "calibration": "nowhere/text"}, "nowhere/text"),
        ({"task_files": "nowhere"}, "nowhere/piqa.jsonl does not exist"),
    ],
)
def test_bad_input_is_refused_with_one_line(options, message, command):
    code, _, lines = command(**options)
    assert code == 2
    assert len(lines) == 1
    assert message in lines[0]


def test_a_model_without_its_tokenizer_is_refused(command, tmp_path, tokenizer_dir):
    make_hf_directory(tmp_path, vocab_size=300)
    code, _, lines = command(model=tmp_path)
    assert (code, len(lines)) == (2, 1)
    assert "holds no tokenizer.json" in lines[0]
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    code, _, lines = command(model=tmp_path)
    assert (code, len(lines)) == (2, 1)
    assert "its tokenizer has tokens up to 319, the model 300" in lines[0]
