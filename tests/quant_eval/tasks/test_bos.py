"""BOS before the questions of tasks, by the rule of the losses."""

from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from quant_eval.bos import bos_of
from quant_eval.tasks import scoring
from quant_eval.tasks.loading import load_tasks
from tests.quant_eval.models import make_model
from tests.quant_eval.test_bos import BOS, template, write_tokenizer


@pytest.mark.parametrize(("rule", "begins"), [("template", True), ("none", False)])
def test_every_prompt_begins_as_a_document_does(
    monkeypatch, tmp_path, tokenizer_dir, settings_of, rule, begins
):
    """As lm-eval's own tokenization has it; BOS is once at most."""
    hf_dir = make_model(tmp_path / "llama", "llama", vocab_size=BOS + 2, bos_token_id=BOS)
    write_tokenizer(hf_dir, tokenizer_dir, template("<s>", "A"))
    prompts: list[list[int]] = []

    def answered(_self: Any, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        prompts.extend(prompt for _, prompt, _ in requests)
        return [(-float(index), True) for index, _ in enumerate(requests)]

    monkeypatch.setattr(scoring._Model, "_loglikelihood_tokens", answered)
    settings = settings_of("arc_easy", shots=0, bos=rule)
    model = AutoModelForCausalLM.from_pretrained(hf_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    scoring.evaluate_tasks(model, tokenizer, load_tasks(settings), settings, "tasks")
    assert prompts
    assert [tuple(prompt[:1]) == (BOS,) for prompt in prompts] == [begins] * len(prompts)
    assert all(BOS not in prompt[1:] for prompt in prompts)
    assert bos_of(hf_dir, rule) == ((BOS,) if begins else ())
