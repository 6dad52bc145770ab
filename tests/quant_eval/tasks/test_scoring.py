"""Questions to a model: each of ranks asks a share of them and gets the same bits, they begin with
BOS, and what does not fit is counted or refused.
"""

import copy
import json
import random
import re
import shutil
from typing import Any

import pytest
import torch
from tokenizers.normalizers import Strip
from transformers import AutoModelForCausalLM, AutoTokenizer

from base.errors import UserError
from base.ranks import ALONE, Ranks
from ckpt_tools.hf.model import load_hf_model
from quant_eval.bos import bos_of
from quant_eval.specs import parse_spec
from quant_eval.tasks.loading import load_tasks
from quant_eval.tasks.measurement import quantized_model
from quant_eval.tasks.scoring import _Model, evaluate_tasks, exact_head
from tests.conftest import make_hf_directory
from tests.quant_eval.models import make_model
from tests.quant_eval.tasks.task_files import read_lines, write_lines
from tests.quant_eval.test_bos import BOS, write_tokenizer
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
    assert done.stdout.count("written: ") == 1


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


@pytest.mark.parametrize(("rule", "begins"), [("template", True), ("none", False)])
def test_every_prompt_begins_as_a_document_does(
    monkeypatch, tmp_path, tokenizer_dir, settings_of, rule, begins
):
    """As lm-eval's own tokenization has it; BOS is once at most."""
    hf_dir = make_model(tmp_path / "llama", "llama", vocab_size=BOS + 2, bos_token_id=BOS)
    write_tokenizer(hf_dir, tokenizer_dir, "<s> $A")
    prompts: list[list[int]] = []

    def answered(_self: Any, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        prompts.extend(prompt for _, prompt, _ in requests)
        return [(-float(index), True) for index, _ in enumerate(requests)]

    monkeypatch.setattr(_Model, "_loglikelihood_tokens", answered)
    settings = settings_of("arc_easy", shots=0, bos=rule)
    model = AutoModelForCausalLM.from_pretrained(hf_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    evaluate_tasks(model, tokenizer, load_tasks(settings), settings, "tasks")
    assert prompts
    assert [tuple(prompt[:1]) == (BOS,) for prompt in prompts] == [begins] * len(prompts)
    assert all(BOS not in prompt[1:] for prompt in prompts)
    assert bos_of(hf_dir, rule) == ((BOS,) if begins else ())


def test_items_that_do_not_fit_the_context_are_counted(
    tmp_path, pair, settings_of, task_files, measure_tasks
):
    """A context of C tokens takes prompt and choice of C + 1 tokens, the last of which is only
    predicted.
    """
    lengths = []
    for document in read_lines(task_files / "social_iqa.jsonl"):
        question = f"Q: {document['context']} {document['question']}\nA: "
        texts = [question + document[f"answer{letter}"] for letter in "ABC"]
        lengths.append(max(map(len, pair.tokenizer(texts)["input_ids"])))
    longest_that_fits = sorted(lengths)[len(lengths) // 2]
    make_hf_directory(tmp_path, max_position_embeddings=longest_that_fits - 1)
    short = AutoModelForCausalLM.from_pretrained(tmp_path)
    measured = measure_tasks(short, pair.full, pair.tokenizer, settings_of("social_iqa", shots=0))
    cut = "".join(str(int(length > longest_that_fits)) for length in lengths)
    assert 0 < cut.count("1") < len(lengths)
    assert measured["per_item"]["social_iqa"]["truncated"] == cut
    for figures in (measured["tasks"]["social_iqa"], measured["mean"]):
        assert figures["truncated_items"] == cut.count("1")


def test_a_choice_that_makes_no_token_is_refused(
    tmp_path, pair, settings_of, task_files, measure_tasks
):
    """The tokenizer drops the space before an empty choice."""
    documents = read_lines(task_files / "piqa.jsonl")
    write_lines(tmp_path / "piqa.jsonl", [documents[0], documents[1] | {"sol2": ""}])
    tokenizer = copy.deepcopy(pair.tokenizer)
    tokenizer.backend_tokenizer.normalizer = Strip(left=False, right=True)
    prompt = f"Question: {documents[1]['goal']}\nAnswer:"
    reason = f"the choice ' ' makes no token after a prompt that ends in {prompt[-40:]!r}; "
    settings = settings_of("piqa", shots=0, task_files=tmp_path)
    with pytest.raises(UserError, match=re.escape(reason) + "give its document .* --tasks$"):
        measure_tasks(pair.full, pair.full, tokenizer, settings)


def test_a_short_context_and_a_model_that_overflows_are_refused(
    tmp_path, pair, settings_of, measure_tasks
):
    make_hf_directory(tmp_path, max_position_embeddings=8)
    short = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not fit the model's context of 8"):
        measure_tasks(short, short, pair.tokenizer, settings_of("hellaswag", shots=0))
    broken = copy.deepcopy(pair.quantized)
    with torch.no_grad():
        broken.lm_head.weight[7] = torch.inf
    with pytest.raises(ValueError, match="a log-likelihood is not finite"):
        measure_tasks(pair.full, broken, pair.tokenizer, settings_of("piqa"))


@pytest.mark.parametrize("name", ["olmo3", "opensci"])
def test_blocks_that_are_put_in_attend_as_the_model_does(tiny, settings_of, name):
    """To the same tokens, in windows or not: with the weights of the quantized blocks transformers'
    own model has the same logits.
    """
    settings = settings_of("arc_easy")
    quantized, _ = quantized_model(tiny(name), parse_spec("rtn-b3-g16"), settings, ())
    plain = load_hf_model(tiny(name), torch.float32, "sdpa")
    tokens_BL = torch.randint(1, 320, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before, got = (model(tokens_BL, use_cache=False).logits for model in (plain, quantized))
        plain.load_state_dict(quantized.state_dict())
        expected = plain(tokens_BL, use_cache=False).logits
    assert torch.equal(got, expected)
    assert not torch.allclose(got, before, atol=1e-2)
