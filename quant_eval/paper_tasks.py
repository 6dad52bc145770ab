"""The twelve downstream tasks of arXiv:2510.06213, and the datasets and files of their documents.

Names, splits and prompts are those of lm-eval 0.4.13, but for pubmedqa's dataset. No dataset was
loaded from the hub while this was written: that those of allenai, baber and cais need no loading
script is from lm-eval's issue 3171, that the two copies hold the rows of the originals from its
pull request 3943, pubmedqa's fields are those that public code reads, and of Rowan/hellaswag and
tau/commonsense_qa only lm-eval's own definitions are known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.names import take_one_of


@dataclass(frozen=True)
class PaperTask:
    """One task, scored by `acc` of lm-evaluation-harness, never by `acc_norm`.

    Attributes:
        name: of the task or group in lm-eval, and of its local files.
        folder: of its definition below lm_eval/tasks.
        dataset: on the Hugging Face hub.
        config: of the dataset; None: it has one only, or, for a group, one for each subject.
        evaluated: split whose documents are scored.
        fewshot: split the examples of the prompts come from.
        note: where we differ from lm-eval 0.4.13, or what to know of the dataset.
        overrides: keys of lm-eval's definition that the dataset asks for.
    """

    name: str
    folder: str
    dataset: str
    config: str | None = None
    evaluated: str = "test"
    fewshot: str = "train"
    note: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)


FEWSHOT_SUFFIX = ".fewshot.jsonl"
SCRIPT = "a loading script, which datasets refuses from version 4 on"
_ROWS = (
    PaperTask("arc_challenge", "arc", "allenai/ai2_arc", "ARC-Challenge"),
    PaperTask("arc_easy", "arc", "allenai/ai2_arc", "ARC-Easy"),
    PaperTask("openbookqa", "openbookqa", "allenai/openbookqa", "main"),
    PaperTask("piqa", "piqa", "baber/piqa", evaluated="validation"),
    PaperTask(
        "hellaswag",
        "hellaswag",
        "Rowan/hellaswag",
        evaluated="validation",
        note="lm-eval rewrites its documents: brackets of WikiHow are removed",
    ),
    PaperTask(
        "winogrande",
        "winogrande",
        "allenai/winogrande",
        "winogrande_xl",
        evaluated="validation",
        note="scored by the end of the sentence after each of two beginnings",
    ),
    PaperTask("mathqa", "mathqa", "regisss/math_qa", note=f"copy of allenai/math_qa, {SCRIPT}"),
    PaperTask(
        "pubmedqa",
        "pubmedqa",
        "qiaojin/PubMedQA",
        "pqa_labeled",
        note=(
            "lm-eval's bigbio/pubmed_qa is a loading script; this copy does not mark the 500 items"
            " of its authors' test set, so all 1000 labelled ones are scored with examples from the"
            " others; give --task-files for 500"
        ),
        overrides={
            "doc_to_text": (
                "Abstract: {{context.contexts | join('\\n')}}\nQuestion: {{question}}\nAnswer:"
            ),
            "validation_split": None,
        },
    ),
    PaperTask("sciq", "sciq", "allenai/sciq"),
    PaperTask(
        "social_iqa",
        "siqa",
        "lighteval/siqa",
        evaluated="validation",
        note=f"copy of allenai/social_i_qa, {SCRIPT}",
    ),
    PaperTask("commonsense_qa", "commonsense_qa", "tau/commonsense_qa", evaluated="validation"),
    PaperTask(
        "mmlu",
        "mmlu/default",
        "cais/mmlu",
        fewshot="dev",
        note=(
            "a group of 57 subjects, each with the first examples of its own dev split; every item"
            " counts the same"
        ),
    ),
)
PAPER_TASKS = {row.name: row for row in _ROWS}
MMLU_TAGS = (
    "mmlu_stem_tasks",
    "mmlu_other_tasks",
    "mmlu_social_sciences_tasks",
    "mmlu_humanities_tasks",
)


def local_files(task: str, directory: Path) -> list[Path]:
    """Return the files of a task that are there: its documents, each before its examples."""
    pattern = "mmlu/*.jsonl" if task == "mmlu" else f"{task}.jsonl"
    documents = sorted(path for path in directory.glob(pattern) if not is_of_examples(path))
    files = [file for path in documents for file in (path, examples_of(path))]
    return [file for file in files if file.is_file()]


def examples_of(path: Path) -> Path:
    """Return the file of the examples beside that of the evaluated documents."""
    return path.with_name(path.stem + FEWSHOT_SUFFIX)


def is_of_examples(path: Path) -> bool:
    """Return whether a file holds examples, not evaluated documents."""
    return path.name.endswith(FEWSHOT_SUFFIX)


def choose_tasks(text: str) -> tuple[str, ...]:
    """Return names of tasks, in the table's order.

    UserError for anything else.

    >>> choose_tasks("piqa,arc_easy")
    ('arc_easy', 'piqa')
    """
    if text == "paper":
        return tuple(PAPER_TASKS)
    names = text.split(",")
    unknown = [name for name in names if name not in PAPER_TASKS]
    if unknown:
        raise UserError(
            f"unknown task {unknown[0]!r:.80}; {take_one_of(unknown[0], ('paper', *PAPER_TASKS))}"
        )
    return tuple(name for name in PAPER_TASKS if name in names)
