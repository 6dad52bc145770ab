"""Sources of documents, and every way to give unfit ones."""

import http.server
import json
import re
import threading
from dataclasses import replace

import datasets
import pytest
from huggingface_hub import constants

from base.errors import UserError
from quant_eval.paper_tasks import PAPER_TASKS, choose_tasks
from quant_eval.tasks.documents import hub_revision
from quant_eval.tasks.loading import load_tasks
from tests.quant_eval.tasks.task_files import read_lines, write_lines

PIQA = {"goal": "to walk", "sol1": "use legs", "sol2": "use wings", "label": 0}


def piqa(number, **changes):
    return PIQA | {"goal": f"to walk {number}"} | changes


@pytest.fixture
def refused(tmp_path, settings_of):
    """The line that refuses the settings on the files of tmp_path."""

    def line(*tasks, **changes):
        with pytest.raises(UserError) as error:
            load_tasks(settings_of(*tasks, **{"task_files": tmp_path} | changes))
        return str(error.value)

    return line


def test_tasks_are_chosen_by_name():
    assert len(choose_tasks("paper")) == 12
    with pytest.raises(UserError, match=r"unknown task 'boolq'; take one of .* and 8 more"):
        choose_tasks("piqa,boolq")
    assert choose_tasks("piqa,arc_easy,piqa") == ("arc_easy", "piqa")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "piqa.jsonl does not exist; write it"),
        ("", "holds no document"),
        ("{\n", ":1 is not JSON"),
        ("[1]\n", ":1 is not an object with the fields"),
        ([PIQA, {"goal": "x", "sol1": "y", "label": 0}], ":2 is not an object with the fields"),
        ([PIQA | {"id": 1}, PIQA | {"id": "b"}], "of the first line and their types"),
        ([PIQA | {"label": "0"}], "document 1: its answer '0' is none of its 2 choices"),
        ([PIQA, PIQA | {"label": 2}], "document 2: its answer 2 is none of its 2 choices"),
        (json.dumps(PIQA) + '\n\n{"id": ' + "1" * 5000 + "}", ":3 is not JSON .a number has too"),
    ],
)
def test_unfit_files_are_refused(text, message, tmp_path, refused):
    if isinstance(text, list):
        write_lines(tmp_path / "piqa.jsonl", text)
    elif text is not None:
        (tmp_path / "piqa.jsonl").write_text(text)
    line = refused("piqa", shots=0)
    assert "piqa.jsonl" in line
    assert re.search(message, line)


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("arc_easy", {"answerKey": "Z"}, "lm-eval cannot read it .ValueError"),
        ("winogrande", {"sentence": "no gap"}, "lm-eval cannot read it .ValueError"),
        ("winogrande", {"answer": ""}, "lm-eval cannot read it .KeyError"),
        ("hellaswag", {"label": "7"}, "its answer 7 is none of its 4 choices"),
        ("hellaswag", {"endings": []}, "its answer . is none of its 0 choices"),
        ("social_iqa", {"label": "0"}, "its answer '-1' is none of its 3 choices"),
        ("commonsense_qa", {"choices": {"text": ["one"], "label": ["A"]}}, ".UndefinedError"),
        ("pubmedqa", {"context": {"labels": ["A"]}}, "not an object with the fields of the first"),
        ("mathqa", {"options": "a ) 1 , b ) 2", "correct": "e"}, "its answer 4 is none of its"),
    ],
)
@pytest.mark.parametrize("where", ["", ".fewshot"])
def test_the_line_of_an_unfit_document_is_named(
    task, change, message, where, task_files, tmp_path, refused
):
    for suffix in ("", ".fewshot"):
        lines = read_lines(task_files / f"{task}{suffix}.jsonl")
        if suffix == where:
            lines[2] |= change
        write_lines(tmp_path / f"{task}{suffix}.jsonl", lines)
    line = refused(task)
    place = ":3" if task == "pubmedqa" else ", document 3"  # of the file, of the dataset
    assert f"{tmp_path}/{task}{where}.jsonl{place}" in line
    assert re.search(message, line)


def test_without_a_file_of_examples_they_are_the_other_items(
    tmp_path, pair, settings_of, measure_tasks
):
    """The asked item is never its own example; the same goal occurs in its own question alone."""
    write_lines(tmp_path / "piqa.jsonl", [piqa(number) for number in range(6)])
    settings = settings_of("piqa", task_files=tmp_path, shots=5)
    (loaded,) = load_tasks(settings)
    assert loaded.source["fewshot"] == "the evaluated items, without the asked one"
    loaded.task.set_fewshot_seed(0)
    for number, document in enumerate(loaded.task.eval_docs):
        prompt = loaded.task.fewshot_context(document, num_fewshot=5)
        assert sorted(prompt.split("to walk ")[1:][-1][:1]) == [str(number)]
        assert all(prompt.count(f"to walk {other}") == 1 for other in range(6))
    measured = measure_tasks(pair.full, pair.quantized, pair.tokenizer, settings)
    assert measured["tasks"]["piqa"]["items"] == 6


def test_too_few_examples_are_refused(tmp_path, refused):
    write_lines(tmp_path / "piqa.jsonl", [piqa(number) for number in range(5)] + [piqa(4)])
    assert "holds 5 different documents, 5 examples need 6" in refused("piqa", shots=5)


def test_subjects_of_mmlu(tmp_path, refused, task_files):
    assert "mmlu holds no subject of mmlu; they are abstract_algebra, anatomy" in refused("mmlu")
    for name in ("anatomy.jsonl", "anatomy.fewshot.jsonl", "astronomy.jsonl"):
        (tmp_path / "mmlu").mkdir(exist_ok=True)
        (tmp_path / "mmlu" / name).write_bytes((task_files / "mmlu" / name).read_bytes())
    assert "astronomy.fewshot.jsonl does not exist" in refused("mmlu")
    (tmp_path / "mmlu/alchemy.jsonl").write_text("{}")
    assert "alchemy.jsonl holds no subject of mmlu" in refused("mmlu")


@pytest.fixture
def hub(monkeypatch):
    """A hub that answers what is put into `answer`, and the paths it was asked for."""

    class Handler(http.server.BaseHTTPRequestHandler):
        answer = (404, {"error": "none"})
        asked: list[str] = []  # noqa: RUF012

        def do_GET(self):
            self.asked.append(self.path)
            status, content = type(self).answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        do_HEAD = do_GET

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield Handler
        server.shutdown()


def test_the_hub_is_asked_once_for_the_revision_or_what_is_missing(hub, refused):
    line = refused("arc_easy", task_files=None)
    assert line.startswith("dataset allenai/ai2_arc of task arc_easy cannot be loaded")
    assert "--task-files DIR with DIR/arc_easy.jsonl" in line
    assert [path for path in hub.asked if "datasets" in path] == ["/api/datasets/allenai/ai2_arc"]
    hub.answer = (200, {"id": "allenai/ai2_arc", "sha": "0123abc", "siblings": []})
    assert hub_revision(PAPER_TASKS["arc_easy"]) == "0123abc"


def test_without_network_or_cache_the_missing_dataset_is_named(monkeypatch, refused):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "dataset cais/mmlu of task mmlu cannot be loaded" in refused("mmlu", task_files=None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    absent = replace(PAPER_TASKS["piqa"], dataset="quantdyn/absent")
    monkeypatch.setitem(PAPER_TASKS, "piqa", absent)
    line = refused("piqa", task_files=None)
    assert "dataset quantdyn/absent of task piqa cannot be loaded" in line


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """Writes a task's splits into a directory, which stands for the hub's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def write(task, **splits):
        for split, lines in splits.items():
            write_lines(tmp_path / f"hub/{split}.jsonl", lines)
        row = replace(PAPER_TASKS[task], dataset=str(tmp_path / "hub"), config=None)
        monkeypatch.setitem(PAPER_TASKS, task, row)

    return write


def test_a_dataset_is_loaded_and_its_unanswerable_items_are_counted(
    dataset, pair, settings_of, measure_tasks
):
    """lm-eval scores an item without answer as wrong."""
    scored = [piqa(number, label=number) for number in range(3)]
    dataset("piqa", train=[piqa(number) for number in range(8)], validation=scored)
    measured = measure_tasks(
        pair.full, pair.quantized, pair.tokenizer, settings_of("piqa", task_files=None)
    )
    assert measured["tasks"]["piqa"]["unanswerable_items"] == 1
    per_item = measured["per_item"]["piqa"]
    assert per_item["correct"][2] == per_item["correct_quantized"][2] == "0"


def test_pubmedqa_is_scored_on_all_labelled_items(dataset, settings_of):
    """The hub's copy has one split. No item is among its own examples."""
    contexts = [{"contexts": [f"Abstract {number}."]} for number in range(5)]
    items = [
        {"question": "Is it even?", "context": context, "final_decision": answer}
        for context, answer in zip(contexts, ["yes", "no", "maybe", "yes", "no"], strict=True)
    ]
    dataset("pubmedqa", train=items)
    (loaded,) = load_tasks(settings_of("pubmedqa", task_files=None))
    assert len(list(loaded.task.eval_docs)) == 5
    assert loaded.task.fewshot_cfg.split == loaded.task.config.test_split == "test"
