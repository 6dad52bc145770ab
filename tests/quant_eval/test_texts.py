"""Texts that would make a number dishonest are refused."""

import json

import numpy as np
import pytest
import torch
from transformers import Olmo2Config

from quant_eval.losses import evaluation_set
from quant_eval.settings import CalibrationSettings
from quant_eval.texts import block_length, calibration_draw, check_apart, check_tokens, open_text
from train.command import UserError
from train.corpus import open_corpus
from train.prepare import prepare

CONFIG = Olmo2Config(vocab_size=320, max_position_embeddings=64, eos_token_id=0, pad_token_id=None)


def settings_of(prefix, sequences=8, seed=0):
    return CalibrationSettings(prefix=prefix, sequences=sequences, sequence_length=48, seed=seed)


def draw(prefix, number=0, config=CONFIG, **changes):
    return calibration_draw(open_corpus(prefix), settings_of(prefix, **changes), 48, number, config)


def written(directory, tokenizer_dir, texts):
    """A token file of the texts."""
    (directory / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([directory / "text.jsonl"], tokenizer_dir, directory / "text")
    return directory / "text"


def random_text(seed, length=300):
    return "".join(chr(97 + letter) for letter in np.random.default_rng(seed).integers(26, size=length))


def test_draws_hold_sequences_of_the_file_none_twice(train_prefix):
    corpus = open_corpus(train_prefix)
    drawn = draw(train_prefix, sequences=200)
    every = {
        row.tobytes(): index
        for index, row in enumerate(corpus.sequences(np.arange(corpus.num_sequences(48)), 48)[:, :-1])
    }
    places = [every[row.numpy().tobytes()] for row in drawn]
    assert len(set(places)) == 200


def test_draws_differ_and_the_second_is_the_first_of_the_next_seed(train_prefix):
    assert not torch.equal(draw(train_prefix), draw(train_prefix, number=1))
    assert torch.equal(draw(train_prefix, number=1), draw(train_prefix, seed=1))


def test_padding_is_refused(tmp_path, tokenizer_dir):
    """Filled with end-of-text tokens, or with the model's own padding token."""
    filled = written(tmp_path, tokenizer_dir, [random_text(1)] + [""] * 200 + [random_text(2)])
    with pytest.raises(UserError, match="padding"):
        draw(filled, sequences=4)
    (tmp_path / "clean").mkdir()
    clean = written(tmp_path / "clean", tokenizer_dir, [random_text(seed) for seed in range(4)])
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
    return check_apart(open_corpus(calibration), draws, corpus, evaluation_set(corpus, 48, None, "separate"))


def test_the_same_text_is_refused(train_prefix):
    with pytest.raises(UserError, match="are the same text"):
        apart(train_prefix, train_prefix, [draw(train_prefix)])


def test_an_evaluated_document_in_the_calibration_draw_is_named(tmp_path, tokenizer_dir):
    texts = [random_text(seed) for seed in range(12)]
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "calibration").mkdir()
    evaluation = written(tmp_path / "evaluation", tokenizer_dir, texts[:6])
    calibration = written(tmp_path / "calibration", tokenizer_dir, [*texts[6:], texts[3]])
    corpus = open_corpus(calibration)
    everything = calibration_draw(corpus, settings_of(calibration, sequences=corpus.num_sequences(48)), 48, 0, CONFIG)
    with pytest.raises(UserError, match=r"1 evaluated documents .* the first 3, are also"):
        apart(calibration, evaluation, [everything])
    sequences = torch.from_numpy(corpus.sequences(np.arange(3), 48)[:, :-1].copy())  # those before the copy
    assert apart(calibration, evaluation, [sequences]) == 0.0


def test_texts_of_one_kind_are_apart(train_prefix, held_out_prefix):
    assert apart(train_prefix, held_out_prefix, [draw(train_prefix, sequences=100)]) < 0.05


def test_fewer_tokens_than_inputs_are_refused():
    with pytest.raises(UserError, match=r"96 calibration tokens are too few for the 97 inputs of wide"):
        check_tokens(torch.zeros(2, 48), {"narrow": 10, "wide": 97})
    check_tokens(torch.zeros(2, 48), {"narrow": 10, "wide": 96})


def test_blocks_are_2048_tokens_or_the_context():
    assert block_length(None, CONFIG) == 64
    assert block_length(None, Olmo2Config(max_position_embeddings=4096)) == 2048
    assert block_length(4096, Olmo2Config(max_position_embeddings=4096)) == 4096
    with pytest.raises(UserError, match="longer than the model's context"):
        block_length(65, CONFIG)
