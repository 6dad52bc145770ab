"""BOS before texts: losses against transformers' own tokenizer and lm-eval's."""

import json
from pathlib import Path
from typing import Any

import lm_eval.models.huggingface
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from base.errors import UserError
from base.ranks import ALONE
from quant_eval.bos import begun, bos_of
from quant_eval.measuring.losses import evaluation_set
from quant_eval.measuring.measurement import measure
from quant_eval.settings import Bos
from quant_eval.specs import parse_spec
from tests.quant_eval.models import make_model, mean_loss, run_settings, token_file
from tests.quant_eval.test_losses import corpus_of

BOS = 320  # the first id after those of the shared tokenizer
LENGTH = 24
# Of a few and of many windows; an empty one has no target, and its own BOS gives it none.
TEXTS = [" ".join(f"word{i * j % 37}" for j in range(3 + 7 * (i % 5))) for i in range(30)]


def write_tokenizer(directory: Path, source: Path, template: str | None) -> Path:
    """The tokenizer with special tokens where the template has them, around the text $A."""
    directory.mkdir(exist_ok=True)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    if template:
        tokenizer.add_special_tokens(["<s>", "<t>"])
        special = [("<s>", BOS), ("<t>", BOS + 1)]
        tokenizer.post_processor = TemplateProcessing(
            single=template, pair=f"{template} $B:1", special_tokens=special
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((source / "tokenizer_config.json").read_text())
    bos = {"bos_token": "<s>"} if template else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | bos))
    return directory


@pytest.fixture(scope="module")
def beginning(tmp_path_factory, tokenizer_dir) -> Path:
    """A Llama whose tokenizer puts BOS before a text, as those of its family do."""
    directory = make_model(
        tmp_path_factory.mktemp("hf") / "llama", "llama", vocab_size=BOS + 2, bos_token_id=BOS
    )
    return write_tokenizer(directory, tokenizer_dir, "<s> $A")


@pytest.fixture(scope="module")
def tokenizer(beginning) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(beginning)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory, beginning) -> tuple[Path, Path]:
    """Token files for calibration and evaluation, of which the latter are TEXTS."""
    root = tmp_path_factory.mktemp("texts")
    train = [" ".join(f"other{i * j % 41}" for j in range(60)) for i in range(40)]
    return (
        token_file(root / "train", train, beginning),
        token_file(root / "held_out", TEXTS, beginning),
    )


def loss_of_transformers(
    hf_dir: Path, tokenizer: PreTrainedTokenizerBase, *, adds: bool
) -> tuple[float, int]:
    """Mean over the targets of all texts, and their number."""
    model = AutoModelForCausalLM.from_pretrained(hf_dir).eval()
    windows = []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=adds)["input_ids"] + [tokenizer.eos_token_id]
        starts = range(0, len(ids) - 1, LENGTH)
        windows += [np.array(ids[start : start + LENGTH + 1]) for start in starts]
    return mean_loss(model, windows), sum(len(window) - 1 for window in windows)


@pytest.mark.parametrize(("rule", "ids"), [("template", [BOS]), ("none", [])])
def test_losses_are_those_of_transformers_own_tokenizer(
    tmp_path, beginning, tokenizer, prefixes, rule, ids
):
    """Every document in windows: the first begins with BOS, the others go on."""
    settings = run_settings(
        *prefixes, eval_tokens=None, sequence_length=LENGTH, bos=rule, calibration_sequences=4
    )
    (result,) = measure(
        beginning, [parse_spec("rtn-b8-perchannel")], [tmp_path / "out"], settings, ALONE
    )
    loss, count = loss_of_transformers(beginning, tokenizer, adds=rule == "template")
    measured, evaluation = result["measured"], result["spec"]["evaluation"]
    assert measured["tokens"] == count
    assert measured["cross_entropy"] == pytest.approx(loss, rel=1e-6)
    assert (evaluation["bos"], evaluation["bos_token_ids"]) == (rule, ids)


def test_losses_are_those_of_lm_eval(tmp_path, beginning, tokenizer, prefixes):
    """The text with its end as an answer to nothing, which it asks after BOS."""
    settings = run_settings(*prefixes, eval_tokens=None, sequence_length=60, bos="template")
    (result,) = measure(
        beginning, [parse_spec("rtn-b8-perchannel")], [tmp_path / "out"], settings, ALONE
    )
    per_document = result["measured"]["per_document"]
    model = AutoModelForCausalLM.from_pretrained(beginning).eval()
    peer = lm_eval.models.huggingface.HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=64
    )
    compared = 0
    for index, tokens in enumerate(per_document["tokens"]):
        if tokens >= 60:
            continue
        text = TEXTS[per_document["document"][index]]
        request = Instance("loglikelihood", {}, ("", text + tokenizer.eos_token), 0)
        ((log_likelihood, _),) = peer.loglikelihood([request], disable_tqdm=True)
        assert per_document["nll"][index] == pytest.approx(-log_likelihood, rel=1e-5)
        compared += 1
    assert compared >= 6


@pytest.mark.parametrize(
    ("template", "ids"),
    [(None, ()), ("<s> $A", (BOS,)), ("$A <s>", ()), ("<s> $A <t>", (BOS,))],
)
def test_the_template_is_that_of_the_tokenizer(tmp_path, tokenizer_dir, template, ids):
    directory = write_tokenizer(tmp_path / "t", tokenizer_dir, template)
    assert bos_of(directory, "template") == ids
    assert bos_of(directory, "none") == ()
    assert bos_of(tmp_path, "template") == (), "no tokenizer, no template"


def without_a(content: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer without a token for an a."""
    vocab = {token: index for token, index in content["model"]["vocab"].items() if "a" not in token}
    return content | {"model": content["model"] | {"vocab": vocab, "merges": []}}


@pytest.mark.parametrize(
    ("template", "change", "reason"),
    [
        ("<s> <t> $A", dict, "begins a text with 2 tokens"),
        ("<s> $A", without_a, r"makes \[\] of the text 'a' and \[320\] with"),
        ("<s> $A", lambda _: {}, "cannot be loaded"),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused(
    tmp_path, tokenizer_dir, template, change, reason
):
    path = write_tokenizer(tmp_path / "t", tokenizer_dir, template) / "tokenizer.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(UserError, match=rf"{reason}.*give --bos none"):
        bos_of(tmp_path / "t", "template")
    assert bos_of(tmp_path / "t", "none") == ()


def test_where_bos_is_by_hand():
    """0 ends texts, 99 begins them; windows of 4."""
    corpus = corpus_of([1, 2, 3, 4, 5, 0], [6, 0], [99, 7, 0], [0])
    data = evaluation_set(corpus, 4, None, "separate", 0, (99,))
    assert [block.tolist() for block in data.blocks] == [
        [99, 1, 2, 3, 4],
        [4, 5, 0],
        [99, 6, 0],
        [99, 7, 0],  # began so already
    ]
    assert (data.documents, data.owner) == ([0, 1, 2], [0, 0, 1, 2])
    joined = evaluation_set(corpus, 3, None, "concatenated", 0, (99,))
    assert [block.tolist() for block in joined.blocks] == [[99, 1, 2], [3, 4, 5], [6, 99, 7]]


def test_calibration_sequences_begin_with_it(tmp_path, beginning, prefixes, monkeypatch):
    """In the place of their last token, so that their length stays."""
    draws: dict[Bos, np.ndarray] = {}

    def noted(*arguments: Any) -> None:
        settings, texts = arguments[3], arguments[6]
        draws[settings.bos] = texts.draws[0].numpy()
        raise UserError("noted")

    monkeypatch.setattr("quant_eval.measuring.measurement._quantize", noted)
    rules: tuple[Bos, ...] = ("template", "none")
    for rule in rules:
        settings = run_settings(*prefixes, eval_tokens=None, bos=rule, sequence_length=LENGTH)
        with pytest.raises(UserError, match="noted"):
            measure(beginning, [parse_spec("gptq-b4-perchannel")], [tmp_path], settings, ALONE)
    assert (draws["template"][:, 0] == BOS).all()
    assert (draws["template"][:, 1:] == draws["none"][:, :-1]).all()
    assert begun(draws["none"][0], ()).tolist() == draws["none"][0].tolist()
