"""Texts that would make a number dishonest are refused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Olmo2Config

from base.errors import UserError
from quant_eval.measuring.losses import EvaluationSet, evaluation_set
from quant_eval.measuring.texts import calibration_draw, check_apart, open_text
from quant_eval.settings import CalibrationSettings
from quant_eval.specs import parse_spec
from tests.quant_eval.models import token_file
from train.data.corpus import open_corpus

CONFIG = Olmo2Config(vocab_size=320, max_position_embeddings=64, eos_token_id=0, pad_token_id=None)


def settings_of(prefix, sequences=8, seed=0, length=48):
    return CalibrationSettings(
        calibration=prefix, calibration_sequences=sequences, sequence_length=length, seed=seed
    )


def draw(prefix, number=0, config=CONFIG, widest=1, **changes):
    linears = {"narrow": torch.nn.Linear(1, 1), "wide": torch.nn.Linear(widest, 1)}
    model: Any = SimpleNamespace(config=config, empty_linears=lambda: linears)
    return calibration_draw(open_corpus(prefix), settings_of(prefix, **changes), model, number)


def random_text(seed, length=300):
    letters = np.random.default_rng(seed).integers(26, size=length)
    return "".join(chr(97 + letter) for letter in letters)


def test_draws_hold_sequences_of_the_file_none_twice(train_prefix):
    corpus = open_corpus(train_prefix)
    drawn = draw(train_prefix, sequences=200)
    sequences_NL = corpus.sequences(np.arange(corpus.num_sequences(48)), 48)[:, :-1]
    every = {row_L.tobytes(): index for index, row_L in enumerate(sequences_NL)}
    assert len({every[row_L.numpy().tobytes()] for row_L in drawn}) == 200


def test_draws_differ_and_the_second_is_the_first_of_the_next_seed(train_prefix):
    assert not torch.equal(draw(train_prefix), draw(train_prefix, number=1))
    assert torch.equal(draw(train_prefix, number=1), draw(train_prefix, seed=1))


@pytest.mark.parametrize("bos", [(), (7,)])
def test_documents_are_those_of_the_file_in_its_order(tmp_path, tokenizer_dir, bos):
    """The authors' code takes the first texts of the file, one by one; up to 10 tokens are left
    out, and none is longer than the model's context.
    """
    texts = [random_text(seed, length) for seed, length in enumerate((40, 4, 200, 25, 60, 31))]
    prefix = token_file(tmp_path / "documents", texts, tokenizer_dir)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    ids = [[*bos, *tokenizer(text, add_special_tokens=False)["input_ids"]][:64] for text in texts]
    lengths = [len(each) for each in ids]
    assert lengths[1] <= 10 < min(lengths[0], *lengths[2:])
    assert lengths[2] == 64

    def drawn(seed: int, number: int, **changes: Any) -> list[list[int]]:
        draw = separate(prefix, sequences=3, seed=seed, number=number, bos=bos, **changes)
        return [ids_L.tolist() for ids_L in draw]

    assert drawn(0, 0) == [ids[0], ids[2]]
    # The next draw has the next documents, whichever of the two says so.
    assert drawn(0, 1) == drawn(1, 0) == ids[3:]
    assert drawn(0, 0, length=20) == [ids[0][:20], ids[2][:20]]
    with pytest.raises(UserError, match="holds 6 documents, fewer than 3 x 3 for calibration"):
        drawn(2, 0)


def separate(prefix, sequences, seed=0, number=0, length=None, bos=()):
    settings = settings_of(prefix, sequences, seed, length).model_copy(
        update={"calibration_documents": "separate"}
    )
    model: Any = SimpleNamespace(config=CONFIG, empty_linears=lambda: {"q": torch.nn.Linear(1, 1)})
    return calibration_draw(open_corpus(prefix), settings, model, number, bos)


@pytest.mark.parametrize("spec", ["autoround-b4-g32", "w4a4-g32-spinquant-blockwise"])
def test_what_is_learned_on_sequences_of_one_length_takes_no_documents(tmp_path, spec):
    settings = settings_of(tmp_path).model_copy(update={"calibration_documents": "separate"})
    with pytest.raises(UserError, match="learned on sequences of one length"):
        settings.of_specs([parse_spec(spec)])
    settings.of_specs([parse_spec("gptq-b4-g32")])


def test_padding_is_refused(tmp_path, tokenizer_dir):
    """Filled with end-of-text tokens, or with the model's own padding token."""
    texts = [random_text(1)] + [""] * 200 + [random_text(2)]
    filled = token_file(tmp_path / "filled", texts, tokenizer_dir)
    with pytest.raises(UserError, match="padding"):
        draw(filled, sequences=4)
    clean = token_file(tmp_path / "clean", map(random_text, range(4)), tokenizer_dir)
    token = int(draw(clean, sequences=4)[0, 0])
    padded = Olmo2Config(vocab_size=320, eos_token_id=0, pad_token_id=token)
    with pytest.raises(UserError, match="padding"):
        draw(clean, sequences=4, config=padded)


def test_a_text_of_another_tokenizer_is_refused(tmp_path, train_prefix, tokenizer_dir):
    (tmp_path / "tokenizer.json").write_text((tokenizer_dir / "tokenizer.json").read_text())
    open_text(train_prefix, tmp_path, 320)
    (tmp_path / "tokenizer.json").write_text((tokenizer_dir / "tokenizer.json").read_text() + "\n")
    with pytest.raises(UserError, match="another tokenizer"):
        open_text(train_prefix, tmp_path, 320)


def apart(calibration, evaluation, draws):
    corpus = open_corpus(evaluation)
    data = evaluation_set(corpus, 48, None, "separate", 0)
    return check_apart(open_corpus(calibration), draws, corpus, data)


def test_the_same_text_is_refused(train_prefix):
    with pytest.raises(UserError, match="are the same text"):
        apart(train_prefix, train_prefix, [draw(train_prefix)])


def test_an_evaluated_document_in_the_calibration_draw_is_named(tmp_path, tokenizer_dir):
    texts = [random_text(seed) for seed in range(12)]
    evaluation = token_file(tmp_path / "evaluation", texts[:6], tokenizer_dir)
    calibration = token_file(tmp_path / "calibration", [*texts[6:], texts[3]], tokenizer_dir)
    corpus = open_corpus(calibration)
    everything = draw(calibration, sequences=corpus.num_sequences(48))
    with pytest.raises(UserError, match=r"1 evaluated documents .* the first 3, are also"):
        apart(calibration, evaluation, [everything])
    # those before the copy
    sequences = torch.from_numpy(corpus.sequences(np.arange(3), 48)[:, :-1].copy())
    assert apart(calibration, evaluation, [sequences]) == 0.0


def test_the_share_of_copied_windows_is_that_of_sets_of_them():
    """Two draws of three sequences; of the documents some windows are copies, at any place."""
    generator = np.random.default_rng(0)
    draws = [torch.from_numpy(generator.integers(50, size=(3, 200))) for _ in range(2)]
    documents = [generator.integers(50, size=length) for length in (300, 15, 90, 16)]
    documents[0][32:64] = draws[0][2, 7:39]  # windows 2 and 3 of 18
    documents[2][10:60] = draws[1][0, :50]  # windows 1 and 2 of 5, and parts of two more
    blocks = [part for text in documents for part in np.split(text, [160]) if len(part)]
    data = EvaluationSet(blocks, [0, 0, 1, 2, 3], list(range(4)), 0)
    known = {
        tuple(row_L[start : start + 16].tolist())
        for draw_NL in draws
        for row_L in draw_NL
        for start in range(200 - 15)
    }
    windows = [
        tuple(block_T[start : start + 16].tolist())
        for block_T in blocks
        for start in range(0, len(block_T) - 15, 16)
    ]
    corpora: Any = [SimpleNamespace(prefix=n, manifest=SimpleNamespace(sha256=n)) for n in "ab"]
    share = check_apart(corpora[0], draws, corpora[1], data)
    assert share == np.mean([window in known for window in windows]) == 4 / len(windows)


def test_texts_of_one_kind_are_apart(train_prefix, held_out_prefix):
    assert apart(train_prefix, held_out_prefix, [draw(train_prefix, sequences=100)]) < 0.05


def test_fewer_tokens_than_inputs_are_refused(train_prefix):
    draw(train_prefix, sequences=2, widest=96)
    with pytest.raises(UserError, match="96 calibration tokens are too few for the 97 inputs of w"):
        draw(train_prefix, sequences=2, widest=97)


def test_blocks_are_2048_tokens_or_the_context(train_prefix):
    settings = settings_of(train_prefix, length=None)
    assert (settings.block_length(64), settings.block_length(4096)) == (64, 2048)
    assert settings_of(train_prefix, length=4096).block_length(4096) == 4096
    with pytest.raises(UserError, match="longer than the model's context"):
        settings_of(train_prefix, length=65).block_length(64)
