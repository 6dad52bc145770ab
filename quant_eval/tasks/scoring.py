"""One model's answers to the items of tasks, through lm-eval's `simple_evaluate`.

Shapes: N items of a task.
"""

import copy
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
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from base.errors import UserError
from base.progress import Progress
from base.ranks import ALONE, Ranks
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
    """lm-eval's own model, which shares requests with other ranks and notes truncated ones."""

    def sharing(self, label: str, ranks: Ranks) -> Self:
        """Return the model itself, ready to share requests and to show progress under a label."""
        self.label, self.stderr, self.ranks = label, sys.stderr, ranks
        self.truncated: set[tuple[str, str]] = set()
        return self

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], **settings: Any
    ) -> list[tuple[float, bool]]:
        for texts, context, continuation in requests:
            if not continuation:
                raise UserError(
                    f"the choice {texts[1]!r:.80} makes no token after a prompt that ends in"
                    f" {texts[0][-40:]!r}; give its document a choice with text, or leave its task"
                    " out of --tasks"
                )
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a choice of {len(continuation)} tokens does not fit the model's context of"
                    f" {self.max_length}: {texts[1]!r:.80}; leave its task out of --tasks"
                )
            # the last token is only predicted
            if len(context) + len(continuation) > self.max_length + 1:
                self.truncated.add(texts)

        # this rank's share of the batches
        mine = _batches(requests, int(self.batch_size))[self.ranks.rank :: self.ranks.size]
        answers: dict[int, tuple[float, bool]] = {}
        total = sum(map(len, mine))
        with redirect_stderr(self.stderr), Progress(self.label, total=total) as progress:
            for batch in mine:
                answered = super()._loglikelihood_tokens(
                    [requests[index] for index in batch], **(settings | {"disable_tqdm": True})
                )
                answers |= zip(batch, answered, strict=True)
                progress.advance(len(batch))

        # the answers of all ranks, in the order of the requests
        for part in self.ranks.gather_values(answers):
            answers |= part
        ordered = [answers[index] for index in range(len(requests))]
        if not all(math.isfinite(value) for value, _ in ordered):
            raise UserError(
                f"{self.label}: a log-likelihood is not finite; check the model's weights for"
                " overflow"
            )
        return ordered


def _batches(requests: Sequence[Request], size: int) -> list[list[int]]:
    """Return the requests of each batch by index, the longest first.

    lm-eval runs requests that differ in the last token of the choice once: they share a batch,
    which holds `size` such runs. The batches depend on the requests alone, not on the number of
    ranks, so neither do the bits of an answer.
    """

    def longest_first(index: int) -> tuple[int, list[int]]:
        tokens = requests[index][1] + requests[index][2]
        return -len(tokens), tokens

    runs: dict[tuple[int, ...], list[int]] = {}
    for index in sorted(range(len(requests)), key=longest_first):
        _, context, continuation = requests[index]
        runs.setdefault((*context, *continuation[:-1]), []).append(index)
    each = list(runs.values())
    return [
        [index for run in each[start : start + size] for index in run]
        for start in range(0, len(each), size)
    ]


def exact_head(model: PreTrainedModel) -> None:
    """Let the head compute logits in fp32 from the model's own weights.

    Logits rounded to bf16 are off by up to 2^-8 of themselves, as much as options differ by.
    """
    # A copy, since a tied head shares its weight with the embedding, which keeps its dtype.
    head: Any = copy.deepcopy(model.get_output_embeddings()).float()
    head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    model.set_output_embeddings(head)


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[LoadedTask],
    settings: TaskSettings,
    label: str,
    ranks: Ranks = ALONE,
) -> dict[str, Answers]:
    """Return the model's answers by task, on every rank.

    Each rank computes its share of the batches. The same tasks and settings ask every model the
    same.
    """
    if model.dtype != torch.float32:
        exact_head(model)
    scorer = _Model(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=settings.batch_size,
        softmax_dtype=SOFTMAX_DTYPE,
        backend="causal",
        add_bos_token={"template": None, "none": False}[settings.bos],  # None: by the tokenizer
    ).sharing(label, ranks)

    # lm-eval draws a bar for each of up to 68 tasks; what is wrong, it raises
    with redirect_stderr(io.StringIO()):
        output = lm_eval.simple_evaluate(
            model=scorer,
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

    answers = {}
    for task in tasks if output else ():  # lm-eval returns it on the first rank of a machine only
        samples = {leaf: output["samples"][leaf] for leaf in task.leaves}
        answers[task.name] = _answers(samples, scorer.truncated)
        reported = output["results"][task.name]["acc,none"]
        assert math.isclose(answers[task.name].correct_N.mean(), reported, rel_tol=1e-12)
    return ranks.gather_values(answers)[0]


def _answers(samples: dict[str, list[dict[str, Any]]], truncated: set[tuple[str, str]]) -> Answers:
    items = [
        item
        for leaf in samples.values()
        for item in sorted(leaf, key=lambda item: int(item["doc_id"]))
    ]
    requests_of = [[tuple(request) for request in item["arguments"]] for item in items]
    return Answers(
        correct_N=np.array([item["acc"] == 1 for item in items]),
        truncated_N=np.array([not truncated.isdisjoint(requests) for requests in requests_of]),
        documents=[item["doc_hash"] for item in items],
        prompts=[
            hashlib.sha256(json.dumps(requests).encode()).hexdigest() for requests in requests_of
        ],
        leaves={leaf: len(rows) for leaf, rows in samples.items()},
    )
