"""Ranks share the questions: every answer once, and the same bits as one rank's."""

import copy
import json
import random
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from base.ranks import ALONE, Ranks
from quant_eval.tasks.scoring import _Model, exact_head
from tests.runs import ranks


class StoppedError(Exception):
    """The end of a rank of these tests, once it has answered its share."""


class Alone(Ranks):
    """One of several ranks, without the others."""

    def gather_values(self, value):
        raise StoppedError(value)


def questions(vocab_size: int) -> list[tuple[tuple[str, str], list[int], list[int]]]:
    """Choices of one and of several tokens after contexts of unequal lengths."""
    draw = random.Random(0)
    asked = []
    for number in range(30):
        context = draw.choices(range(vocab_size), k=draw.randint(1, 40))
        for choice in range(4):
            continuation = draw.choices(range(vocab_size), k=1 + (number % 3) * choice)
            asked.append(((f"context {number}", f"choice {choice}"), context, continuation))
    return asked


@pytest.mark.parametrize("size", [2, 5])
def test_shares_are_all_questions_and_hold_the_bits_of_one_rank(pair, size):
    model = _Model(pretrained=pair.full, tokenizer=pair.tokenizer, batch_size=4, backend="causal")
    asked = questions(pair.full.config.vocab_size)
    expected = model.sharing("alone", ALONE)._loglikelihood_tokens(asked)
    answers: dict[int, tuple[float, bool]] = {}
    for rank in range(size):
        model.sharing("one of several", Alone(rank, size, torch.device("cpu")))
        with pytest.raises(StoppedError) as stopped:
            model._loglikelihood_tokens(asked)
        (part,) = stopped.value.args
        assert abs(len(part) - len(asked) / size) <= 16  # a batch has four runs of up to four
        assert not part.keys() & answers.keys()
        answers |= part
    assert [answers[index] for index in range(len(asked))] == expected


def test_the_command_shares_questions(
    tmp_path, long_hf_dir, pair, task_files, train_prefix, settings_of, measure_tasks
):
    """Two ranks write one result; the full model's answers are those of this process."""
    shutil.copytree(long_hf_dir, tmp_path / "hf")
    words = ["tasks", tmp_path / "hf", "--spec", "rtn-b3-g16", "--tasks", "piqa", "--shots", "0"]
    words += ["--calibration", train_prefix, "--calibration-sequences", "2"]
    words += ["--task-files", task_files]
    done = ranks(2, "quant_eval", *map(str, words))
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "hf/tasks/rtn-b3-g16/result.json").read_text())
    expected = measure_tasks(pair.full, pair.full, pair.tokenizer, settings_of("piqa", shots=0))
    measured = result["measured"]
    assert measured["per_item"]["piqa"]["correct"] == expected["per_item"]["piqa"]["correct"]
    assert done.stdout.count("measured") == 1


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_bf16_models_are_not_rounded(pair, tied):
    """They are the fp32 product of the last hidden state and the head's weights."""
    config = copy.deepcopy(pair.full.config)
    config.tie_word_embeddings = tied
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    weight = model.get_output_embeddings().weight.detach().float()
    exact_head(model)
    with torch.no_grad():
        output = model(torch.arange(24).view(2, 12), output_hidden_states=True)
    assert torch.equal(output.logits, output.hidden_states[-1].float() @ weight.T)
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
