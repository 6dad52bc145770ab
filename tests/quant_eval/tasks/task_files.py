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
# task -> lm-eval's definition, split that is scored; examples are from "train"
LM_EVAL = {
    "arc_challenge": ("arc/arc_challenge.yaml", "test"),
    "arc_easy": ("arc/arc_easy.yaml", "test"),
    "openbookqa": ("openbookqa/openbookqa.yaml", "test"),
    "piqa": ("piqa/piqa.yaml", "validation"),
    "hellaswag": ("hellaswag/hellaswag.yaml", "validation"),
    "winogrande": ("winogrande/default.yaml", "validation"),
    "mathqa": ("mathqa/mathqa.yaml", "test"),
    "pubmedqa": ("pubmedqa/pubmedqa.yaml", "test"),
    "sciq": ("sciq/sciq.yaml", "test"),
    "social_iqa": ("siqa/siqa.yaml", "validation"),
    "commonsense_qa": ("commonsense_qa/default.yaml", "validation"),
}


class Draw:
    """Words of random documents."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator
        self.which = int(generator.integers(3))

    def text(self, words: int) -> str:
        return " ".join(self.generator.choice(WORDS, words))

    def texts(self, **words: int) -> dict[str, Any]:
        return {field: self.text(count) for field, count in words.items()}

    def lettered(self, count: int, labels: str) -> dict[str, Any]:
        texts = [self.text(int(self.generator.integers(1, 4))) for _ in range(count)]
        choices = {"text": texts, "label": list(labels[:count])}
        return {"choices": choices, "answerKey": labels[int(self.generator.integers(count))]}


def _arc(draw: Draw) -> dict[str, Any]:
    """Three to five choices, named by letters or by digits."""
    labels = ("ABCDE", "12345")[draw.which % 2]
    return draw.texts(id=1, question=5) | draw.lettered(3 + draw.which, labels)


def _hellaswag(draw: Draw) -> dict[str, Any]:
    endings = [f"[step] {draw.text(3)} [title] {draw.text(2)}" for _ in range(4)]
    context = draw.texts(ctx_a=5, ctx_b=1, activity_label=2)
    return context | {"endings": endings, "label": str(draw.which)}


def _winogrande(draw: Draw) -> dict[str, Any]:
    sentence = f"{draw.text(3)} _ {draw.text(3)}."
    return draw.texts(option1=1, option2=1) | {
        "sentence": sentence,
        "answer": str(1 + draw.which % 2),
    }


def _pubmedqa(draw: Draw) -> dict[str, Any]:
    count, decision = 1 + draw.which, ("yes", "no", "maybe")[draw.which]
    context = {"contexts": [draw.text(6) for _ in range(count)], "labels": ["A"] * count}
    return draw.texts(question=4) | {"pubid": 1, "context": context, "final_decision": decision}


def _sciq(draw: Draw) -> dict[str, Any]:
    words = draw.texts(question=4, correct_answer=1, distractor1=1, distractor2=1, distractor3=1)
    return words | {"support": " " + draw.text(6)}


MATHQA = "a ) 38 , b ) 27.675 , c ) 30 , d ) data inadequate , e ) none of these"
DOCUMENTS: dict[str, Callable[[Draw], dict[str, Any]]] = {
    "arc_challenge": _arc,
    "arc_easy": _arc,
    "openbookqa": lambda draw: draw.texts(question_stem=4) | draw.lettered(4, "ABCD"),
    "piqa": lambda draw: draw.texts(goal=4, sol1=3, sol2=3) | {"label": draw.which % 2},
    "hellaswag": _hellaswag,
    "winogrande": _winogrande,
    "mathqa": lambda draw: (
        draw.texts(Problem=5) | {"options": MATHQA, "correct": "abcde"[draw.which]}
    ),
    "pubmedqa": _pubmedqa,
    "sciq": _sciq,
    "social_iqa": lambda draw: (
        draw.texts(context=4, question=3, answerA=3, answerB=3, answerC=3)
        | {"label": str(1 + draw.which)}
    ),
    "commonsense_qa": lambda draw: draw.texts(question=5) | draw.lettered(5, "ABCDE"),
    "mmlu": lambda draw: (
        draw.texts(question=5, subject=1)
        | {"choices": [draw.text(2) for _ in range(4)], "answer": draw.which}
    ),
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


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON Lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


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
        for document in (ours := read_lines(path)):
            document["QUESTION"] = document.pop("question")
            document["CONTEXTS"] = document.pop("context")["contexts"]
        write_lines(work / path.name, ours)
    for task, (definition, scored) in LM_EVAL.items():
        path = (work if task == "pubmedqa" else files) / task
        _define(work, f"own_{task}", definition, path, scored, "train")
    for subject in SUBJECTS:
        path = files / "mmlu" / subject
        definition = f"mmlu/default/mmlu_{subject}.yaml"
        _define(work, f"own_mmlu_{subject}", definition, path, "test", "dev")
    lines = ["group: own_mmlu", "aggregate_metric_list:", "  - metric: acc"]
    lines += ["    weight_by_size: True", "task:"]
    lines += [f"  - own_mmlu_{subject}" for subject in SUBJECTS]
    (work / "group.yaml").write_text("\n".join(lines) + "\n")
    return TaskManager(include_defaults=False, include_path=str(work))


def _define(work: Path, name: str, definition: str, path: Path, scored: str, examples: str) -> None:
    """A task of that definition, whose items and examples are beside each other."""
    lines = [f"include: {DEFINITIONS / definition}", f"task: {name}"]
    lines += ["dataset_path: json", "dataset_name: null", "dataset_kwargs:"]
    lines += [f"  cache_dir: {work / 'cache'}", "  data_files:"]
    lines += [f"    {scored}: {path}.jsonl", f"    {examples}: {path}.fewshot.jsonl"]
    (work / f"{name}.yaml").write_text("\n".join(lines) + "\n")
