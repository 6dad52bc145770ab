"""`python -m quant_eval tasks` with another model in the place of the quantized one."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from base.files import sha256_of
from quant_eval.__main__ import app
from quant_eval.tasks.paired import UNITS
from tests.conftest import make_hf_directory
from tests.digests import blake3_of


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
    directory = tmp_path / "hf"
    directory.mkdir()
    for path in long_hf_dir.iterdir():
        if path.is_file():
            (directory / path.name).write_bytes(path.read_bytes())
    return directory


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
    for path in paths:
        assert any("measured" in line and str(path) in line for line in printed)
    again = command("--spec", "gptq-b4-g16", **given)[1]  # both are kept, and printed as before
    assert [line.replace("kept, measured before", "measured") for line in again] == printed
    assert len(asked) == 2
    assert [json.loads(path.read_text()) for path in paths] == [first, second]
    expected = measure_tasks(
        pair.full,
        pair.quantized,
        pair.tokenizer,
        settings_of("winogrande", "mmlu", shots=2, seed=0),
    )
    assert first["measured"] == expected | {"dead_linears": ["model.layers.0.mlp.down_proj"]}
    assert any(line.endswith("rounded: model.layers.0.mlp.down_proj") for line in printed)
    assert first.keys() == {"model", "spec", "measured", "environment", "sha256"}
    assert first["model"]["weights_digests"] == {
        "model.safetensors": blake3_of(copied_model / "model.safetensors")
    }
    assert first["spec"]["num_fewshot"] == 2
    files = first["spec"]["tasks"]["mmlu"]["files"]
    assert files[str(task_files / "mmlu/anatomy.jsonl")] == sha256_of(
        task_files / "mmlu/anatomy.jsonl"
    )
    for row in (*second["measured"]["tasks"].values(), second["measured"]["mean"]):
        assert row["accuracy"] == row["accuracy_quantized"]
        assert row["difference"] == row["degradation"] == 0
        assert set(row["intervals"]["difference"]) == {0.0}
    assert UNITS.keys() >= first["measured"]["tasks"]["mmlu"].keys() - {
        "intervals",
        "undefined",
        "leaves",
    } - {"documents_sha256", "prompts_sha256"}
    assert all(line.startswith("tasks, ") for line in lines), lines  # nothing of lm-eval's own


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
    assert measured["mmlu"]["leaves"] == {
        "mmlu_anatomy": 4,
        "mmlu_astronomy": 4,
        "mmlu_world_religions": 4,
    }
    assert "fewshot" not in result["spec"]["tasks"]["sciq"]


def test_items_that_do_not_fit_the_context_are_counted(
    tmp_path, pair, settings_of, task_files, measure_tasks
):
    """A context of C tokens takes prompt and choice of C + 1 tokens, the last of which is only
    predicted.
    """
    documents = [
        json.loads(line) for line in (task_files / "social_iqa.jsonl").read_text().splitlines()
    ]
    lengths = [
        max(
            len(
                pair.tokenizer(
                    f"Q: {document['context']} {document['question']}\nA: {document[answer]}"
                )["input_ids"]
            )
            for answer in ("answerA", "answerB", "answerC")
        )
        for document in documents
    ]
    longest_that_fits = sorted(lengths)[len(lengths) // 2]
    make_hf_directory(tmp_path, max_position_embeddings=longest_that_fits - 1)
    short = AutoModelForCausalLM.from_pretrained(tmp_path)
    measured = measure_tasks(short, pair.full, pair.tokenizer, settings_of("social_iqa", shots=0))
    expected = [length > longest_that_fits for length in lengths]
    assert 0 < sum(expected) < len(lengths)
    assert measured["per_item"]["social_iqa"]["truncated"] == "".join(
        str(int(is_cut)) for is_cut in expected
    )
    assert (
        measured["tasks"]["social_iqa"]["truncated_items"]
        == measured["mean"]["truncated_items"]
        == sum(expected)
    )


def test_a_choice_longer_than_the_context_is_refused(tmp_path, pair, settings_of, measure_tasks):
    make_hf_directory(tmp_path, max_position_embeddings=8)
    short = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not fit the model's context of 8"):
        measure_tasks(short, short, pair.tokenizer, settings_of("hellaswag", shots=0))


def test_a_model_that_overflows_is_refused(tmp_path, pair, settings_of, measure_tasks):
    broken = AutoModelForCausalLM.from_pretrained(
        make_hf_directory(tmp_path, max_position_embeddings=1024)
    )
    with torch.no_grad():
        broken.lm_head.weight[7] = torch.inf
    with pytest.raises(ValueError, match="a log-likelihood is not finite"):
        measure_tasks(pair.full, broken, pair.tokenizer, settings_of("piqa"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "piqa,boolq"}, "unknown task 'boolq'; take one of paper, arc_challenge"),
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
    for path in tokenizer_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    code, _, lines = command(model=tmp_path)
    assert (code, len(lines)) == (2, 1)
    assert "its tokenizer has tokens up to 319, the model 300" in lines[0]
