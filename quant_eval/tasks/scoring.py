"""One model's answers to the items of tasks, through lm-eval's `simple_evaluate`.

Shapes: N items of a task.
"""

import hashlib
import io
import json
import math
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any, Self

import lm_eval
import numpy as np
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from base.errors import UserError
from base.progress import Progress
from quant_eval.settings import TaskSettings
from quant_eval.tasks.loading import LoadedTask

SOFTMAX_DTYPE = "float32"  # in bf16, choices would tie by rounding


@dataclass(frozen=True)
class Answers:
    """One model's answers to one task.

    Attributes:
        correct_N: bool; the most likely choice is the right one, items in file order, subjects one
            after the other.
        truncated_N: bool; a prompt was longer than the model's context and lost its beginning.
        documents: hash of each item's document.
        prompts: hash of everything the model was asked for each item: prompts with examples, and
            choices.
        leaves: number of items of each of lm-eval's tasks that make up this one.
    """

    correct_N: NDArray[np.bool_]
    truncated_N: NDArray[np.bool_]
    documents: list[str]
    prompts: list[str]
    leaves: dict[str, int]


Request = tuple[tuple[str, str], list[int], list[int]]  # (context, continuation), their tokens


class _Model(HFLM):
    """lm-eval's own model, which notes what did not fit and shows our progress."""

    def noting(self, label: str) -> Self:
        """Return it, ready to note what does not fit and to show its progress under a label."""
        self.label, self.stderr = label, sys.stderr
        self.truncated: set[tuple[str, str]] = set()
        return self

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], **settings: Any
    ) -> list[tuple[float, bool]]:
        for asked, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"a choice of {len(continuation)} tokens does not fit the model's context of"
                    f" {self.max_length}: {asked[1]!r:.80}; leave its task out of --tasks"
                )
            # the last token is only predicted
            if len(context) + len(continuation) > self.max_length + 1:
                self.truncated.add(asked)
        # lm-eval runs prompts that differ in the last token of the choice once.
        runs = {hash((*context, *continuation[:-1])) for _, context, continuation in requests}
        with redirect_stderr(self.stderr), Progress(self.label, total=len(runs)) as self._progress:
            answers: list[tuple[float, bool]] = super()._loglikelihood_tokens(
                requests, **(settings | {"disable_tqdm": True})
            )
        if not all(math.isfinite(value) for value, _ in answers):
            raise UserError(
                f"{self.label}: a log-likelihood is not finite; check the model's weights for"
                " overflow"
            )
        return answers

    def _model_call(self, inps: Any, attn_mask: Any = None, labels: Any = None) -> Any:
        logits = super()._model_call(inps, attn_mask, labels)
        self._progress.advance(len(inps))
        return logits


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[LoadedTask],
    settings: TaskSettings,
    label: str,
) -> dict[str, Answers]:
    """The model's answers by task. The same tasks and settings ask every model the same."""
    asked = _Model(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=settings.batch_size,
        softmax_dtype=SOFTMAX_DTYPE,
        backend="causal",
    ).noting(label)
    # lm-eval draws a bar for each of up to 68 tasks; what is wrong, it raises
    with redirect_stderr(io.StringIO()):
        found = lm_eval.simple_evaluate(
            model=asked,
            tasks=[task.task for task in tasks],
            task_manager=TaskManager(include_defaults=False),  # the tasks are at hand
            num_fewshot=settings.shots,
            limit=settings.limit,
            log_samples=True,
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
            fewshot_random_seed=settings.seed,
        )
    assert found is not None  # on the only rank
    answers = {}
    for task in tasks:
        samples = {leaf: found["samples"][leaf] for leaf in task.leaves}
        answers[task.name] = _answers(samples, asked.truncated)
        reported = found["results"][task.name]["acc,none"]
        assert math.isclose(answers[task.name].correct_N.mean(), reported, rel_tol=1e-12)
    return answers


def _answers(samples: dict[str, list[dict[str, Any]]], truncated: set[tuple[str, str]]) -> Answers:
    items = [
        item
        for leaf in samples.values()
        for item in sorted(leaf, key=lambda item: int(item["doc_id"]))
    ]
    asked = [[tuple(request) for request in item["arguments"]] for item in items]
    return Answers(
        correct_N=np.array([item["acc"] == 1 for item in items]),
        truncated_N=np.array([not truncated.isdisjoint(requests) for requests in asked]),
        documents=[item["doc_hash"] for item in items],
        prompts=[hashlib.sha256(json.dumps(requests).encode()).hexdigest() for requests in asked],
        leaves={leaf: len(found) for leaf, found in samples.items()},
    )
