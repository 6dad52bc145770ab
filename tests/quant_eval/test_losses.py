"""Losses against plain forward passes, one document block at a time, with the labels transformers shifts itself."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from ckpt_tools.hf_model import load_hf_model
from quant_eval.losses import evaluation_set, paired_losses
from tests.conftest import make_hf_directory
from train.command import Progress, UserError
from train.corpus import open_corpus

SEQUENCE_LENGTH = 50


def corpus_of(*documents):
    """A corpus in memory with the two members that cutting reads."""
    arrays = [np.array(document, np.int64) for document in documents]
    bounds_D = np.concatenate([[0], np.cumsum([len(array) for array in arrays])])
    return SimpleNamespace(prefix="memory", bounds_D=bounds_D, document=lambda index: arrays[index])


@pytest.fixture(scope="module")
def models(hf_dir, tmp_path_factory):
    """A model and two others to compare it with: a near and a far one."""
    full, near = (load_hf_model(hf_dir, torch.float32, "sdpa") for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in near.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.02)
    far = make_hf_directory(tmp_path_factory.mktemp("far") / "model", seed=5)
    return full, [near, load_hf_model(far, torch.float32, "sdpa")]


def losses_of(models, data, batch_size):
    with Progress("evaluate", total=len(data.blocks)) as progress:
        return paired_losses(models[0], models[1], data, batch_size, progress)


@pytest.mark.parametrize("batch_size", [1, 7])
def test_losses_are_those_of_plain_forward_passes(models, held_out_prefix, batch_size):
    corpus = open_corpus(held_out_prefix)
    data = evaluation_set(corpus, SEQUENCE_LENGTH, None)
    full, others = models
    for other, measured in zip(others, losses_of(models, data, batch_size), strict=True):
        for index in range(0, 30, 4):
            document = torch.from_numpy(corpus.document(index))[None]
            expected = dict.fromkeys(("tokens", "nll", "nll_quantized", "kl", "agreements"), 0.0)
            for start in range(0, document.shape[1] - 1, SEQUENCE_LENGTH):
                block = document[:, start : start + SEQUENCE_LENGTH + 1]
                with torch.no_grad():
                    p, q = full(block, labels=block), other(block, labels=block)
                targets = block.shape[1] - 1
                expected["tokens"] += targets
                expected["nll"] += float(p.loss) * targets
                expected["nll_quantized"] += float(q.loss) * targets
                p_logits, q_logits = p.logits[0, :-1].double(), q.logits[0, :-1].double()
                expected["kl"] += float(kl_divergence(Categorical(logits=p_logits), Categorical(logits=q_logits)).sum())
                expected["agreements"] += int((p_logits.argmax(-1) == q_logits.argmax(-1)).sum())
            for name, value in expected.items():
                # fp32 logits of differently padded batches: relative 1e-6 per token
                assert getattr(measured, name)[index] == pytest.approx(value, rel=2e-5), name


def test_a_model_beside_itself_costs_nothing(models, held_out_prefix):
    data = evaluation_set(open_corpus(held_out_prefix), SEQUENCE_LENGTH, 500)
    (same,) = losses_of((models[0], [models[0]]), data, 4)
    assert np.array_equal(same.nll, same.nll_quantized)
    assert not same.kl.any()
    assert np.array_equal(same.agreements, same.tokens)


def test_a_model_beside_one_does_not_depend_on_who_else_is_measured(models, held_out_prefix):
    data = evaluation_set(open_corpus(held_out_prefix), SEQUENCE_LENGTH, 500)
    both = losses_of(models, data, 4)
    for index in (0, 1):
        (alone,) = losses_of((models[0], [models[1][index]]), data, 4)
        assert np.array_equal(alone.nll_quantized, both[index].nll_quantized)
        assert np.array_equal(alone.kl, both[index].kl)


def test_every_token_but_the_first_of_its_document_is_a_target_once():
    """Tokens are numbered through, so the targets name their positions."""
    lengths = [1, 2, 7, 8, 9, 0, 15, 16, 17]
    starts = np.cumsum([0, *lengths])
    corpus = corpus_of(*(range(start, start + length) for start, length in zip(starts, lengths, strict=False)))
    data = evaluation_set(corpus, 8, None)
    targets = [int(token) for block in data.blocks for token in block[1:]]
    assert targets == [start + k for start, n in zip(starts, lengths, strict=False) for k in range(1, n)]
    assert max(len(block) for block in data.blocks) == 9
    assert all(len(block) >= 2 for block in data.blocks)
    assert all((np.diff(block) == 1).all() for block in data.blocks)
    assert data.documents == [1, 2, 3, 4, 6, 7, 8]
    assert data.without_target == 2
    owners = [data.documents[owner] for owner in data.owner]
    assert [int(np.searchsorted(starts, block[0], "right")) - 1 for block in data.blocks] == owners


@pytest.mark.parametrize(("cap", "documents"), [(1, None), (5, None), (6, 2), (10, 2), (11, 3), (99, 4)])
def test_whole_documents_are_taken_in_file_order_until_the_cap_is_reached(cap, documents):
    corpus = corpus_of([1] * 6, [2] * 6, [3] * 6, [4] * 6)  # 5 targets each
    if documents is None:
        with pytest.raises(UserError, match=r"1 evaluated document.*at least 2"):
            evaluation_set(corpus, 4, cap)
    else:
        assert evaluation_set(corpus, 4, cap).documents == list(range(documents))
