"""Small documents for all twelve tasks, and lm-eval's own definitions pointed at them by its own
means.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval.tasks
import numpy as np
from lm_eval.tasks import TaskManager

DEFINITIONS = Path(lm_eval.tasks.__file__).parent
WORDS = (
    *("stone", "river", "light", "paper", "green", "seven"),
    *("music", "north", "bread", "cloud", "iron", "glass"),
)
SUBJECTS = {"anatomy": 6, "astronomy": 8, "world_religions": 7}
ITEMS = {"arc_challenge": 14, "pubmedqa": 9}
# task -> lm-eval's definition, split that is scored, split of the examples
LM_EVAL = {
    "arc_challenge": ("arc/arc_challenge.yaml", "test", "train"),
    "arc_easy": ("arc/arc_easy.yaml", "test", "train"),
    "openbookqa": ("openbookqa/openbookqa.yaml", "test", "train"),
    "piqa": ("piqa/piqa.yaml", "validation", "train"),
    "hellaswag": ("hellaswag/hellaswag.yaml", "validation", "train"),
    "winogrande": ("winogrande/default.yaml", "validation", "train"),
    "mathqa": ("mathqa/mathqa.yaml", "test", "train"),
    "pubmedqa": ("pubmedqa/pubmedqa.yaml", "test", "train"),
    "sciq": ("sciq/sciq.yaml", "test", "train"),
    "social_iqa": ("siqa/siqa.yaml", "validation", "train"),
    "commonsense_qa": ("commonsense_qa/default.yaml", "validation", "train"),
}


class Draw:
    """Words of random documents."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator
        self.which = int(generator.integers(3))

    def text(self, words: int) -> str:
        return " ".join(self.generator.choice(WORDS, words))

    def lettered(self, count: int, labels: str) -> dict[str, Any]:
        texts = [self.text(int(self.generator.integers(1, 4))) for _ in range(count)]
        choices = {"text": texts, "label": list(labels[:count])}
        return {"choices": choices, "answerKey": labels[int(self.generator.integers(count))]}


def _arc(draw: Draw) -> dict[str, Any]:
    """Three to five choices, named by letters or by digits."""
    labels = ("ABCDE", "12345")[draw.which % 2]
    return {
        "id": draw.text(1),
        "question": draw.text(5) + "?",
        **draw.lettered(3 + draw.which, labels),
    }


def _piqa(draw: Draw) -> dict[str, Any]:
    return {
        "goal": draw.text(4),
        "sol1": draw.text(3),
        "sol2": draw.text(3),
        "label": draw.which % 2,
    }


def _hellaswag(draw: Draw) -> dict[str, Any]:
    endings = [f"[step] {draw.text(3)} [title] {draw.text(2)}" for _ in range(4)]
    context = {"ctx_a": draw.text(5) + ".", "ctx_b": draw.text(1), "activity_label": draw.text(2)}
    return {**context, "endings": endings, "label": str(draw.which)}


def _winogrande(draw: Draw) -> dict[str, Any]:
    sentence = f"{draw.text(3)} _ {draw.text(3)}."
    options = {"option1": draw.text(1), "option2": draw.text(1)}
    return {"sentence": sentence, **options, "answer": str(1 + draw.which % 2)}


def _mathqa(draw: Draw) -> dict[str, Any]:
    options = "a ) 38 , b ) 27.675 , c ) 30 , d ) data inadequate , e ) none of these"
    return {"Problem": draw.text(5), "options": options, "correct": "abcde"[draw.which]}


def _pubmedqa(draw: Draw) -> dict[str, Any]:
    context = {
        "contexts": [draw.text(6) for _ in range(1 + draw.which)],
        "labels": ["A"] * (1 + draw.which),
    }
    decision = ("yes", "no", "maybe")[draw.which]
    return {"pubid": 1, "question": draw.text(4), "context": context, "final_decision": decision}


def _sciq(draw: Draw) -> dict[str, Any]:
    distractors = {f"distractor{number}": draw.text(1) for number in (1, 2, 3)}
    support = " " + draw.text(6)
    return {
        "support": support,
        "question": draw.text(4),
        "correct_answer": draw.text(1),
        **distractors,
    }


def _social_iqa(draw: Draw) -> dict[str, Any]:
    answers = {f"answer{letter}": draw.text(3) for letter in "ABC"}
    return {
        "context": draw.text(4),
        "question": draw.text(3),
        **answers,
        "label": str(1 + draw.which),
    }


def _mmlu(draw: Draw) -> dict[str, Any]:
    choices = [draw.text(2) for _ in range(4)]
    return {
        "question": draw.text(5),
        "subject": draw.text(1),
        "choices": choices,
        "answer": draw.which,
    }


DOCUMENTS: dict[str, Callable[[Draw], dict[str, Any]]] = {
    "arc_challenge": _arc,
    "arc_easy": _arc,
    "openbookqa": lambda draw: {"question_stem": draw.text(4), **draw.lettered(4, "ABCD")},
    "piqa": _piqa,
    "hellaswag": _hellaswag,
    "winogrande": _winogrande,
    "mathqa": _mathqa,
    "pubmedqa": _pubmedqa,
    "sciq": _sciq,
    "social_iqa": _social_iqa,
    "commonsense_qa": lambda draw: {"question": draw.text(5), **draw.lettered(5, "ABCDE")},
    "mmlu": _mmlu,
}


def documents(task: str, count: int, generator: np.random.Generator) -> list[dict[str, Any]]:
    """Documents of a task with the fields of its dataset; some of what they hold is odd on
    purpose.
    """
    return [DOCUMENTS[task](Draw(generator)) for _ in range(count)]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_task_files(directory: Path) -> Path:
    """All twelve tasks, mmlu with three subjects, each with seven documents for the examples."""
    draw = np.random.default_rng(0)
    for task in LM_EVAL:
        write_lines(directory / f"{task}.jsonl", documents(task, ITEMS.get(task, 8), draw))
        write_lines(directory / f"{task}.fewshot.jsonl", documents(task, 7, draw))
    for subject, items in SUBJECTS.items():
        write_lines(directory / f"mmlu/{subject}.jsonl", documents("mmlu", items, draw))
        write_lines(directory / f"mmlu/{subject}.fewshot.jsonl", documents("mmlu", 5, draw))
    return directory


def own_task_manager(files: Path, work: Path) -> TaskManager:
    """lm-eval's definitions, included by others that name our files as a dataset of kind json.

    pubmedqa keeps lm-eval's own prompt, so its documents are brought to the fields of the dataset
    that has it.
    """
    for path in (files / "pubmedqa.jsonl", files / "pubmedqa.fewshot.jsonl"):
        ours = [json.loads(line) for line in path.read_text().splitlines()]
        original = [
            {"QUESTION": document["question"], "CONTEXTS": document["context"]["contexts"]}
            | {"final_decision": document["final_decision"]}
            for document in ours
        ]
        write_lines(work / path.name, original)
    for task, (definition, scored, examples) in LM_EVAL.items():
        where = work if task == "pubmedqa" else files
        data = {scored: where / f"{task}.jsonl", examples: where / f"{task}.fewshot.jsonl"}
        _define(work, f"own_{task}", DEFINITIONS / definition, data)
    for subject in SUBJECTS:
        data = {
            "test": files / f"mmlu/{subject}.jsonl",
            "dev": files / f"mmlu/{subject}.fewshot.jsonl",
        }
        _define(
            work, f"own_mmlu_{subject}", DEFINITIONS / f"mmlu/default/mmlu_{subject}.yaml", data
        )
    group = (
        "group: own_mmlu\naggregate_metric_list:\n  - metric: acc\n    weight_by_size:"
        " True\ntask:\n"
    )
    (work / "group.yaml").write_text(
        group + "".join(f"  - own_mmlu_{subject}\n" for subject in SUBJECTS)
    )
    return TaskManager(include_defaults=False, include_path=str(work))


def _define(work: Path, name: str, definition: Path, data: dict[str, Path]) -> None:
    lines = [f"include: {definition}", f"task: {name}", "dataset_path: json", "dataset_name: null"]
    lines += ["dataset_kwargs:", f"  cache_dir: {work / 'cache'}", "  data_files:"]
    lines += [f"    {split}: {path}" for split, path in data.items()]
    (work / f"{name}.yaml").write_text("\n".join(lines) + "\n")
