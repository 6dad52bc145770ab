"""Losses against plain forward passes, one document block at a time, with the labels
transformers shifts itself.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from base.errors import UserError
from base.ranks import Ranks
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.hf.model import load_hf_model
from quant_eval.measuring.losses import evaluation_set, paired_losses
from quant_eval.measuring.streams import Stream
from quant_eval.model.streamed import StreamedModel
from train.data.corpus import open_corpus

SEQUENCE_LENGTH = 50
CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)


def corpus_of(*documents):
    """A corpus in memory with the members that cutting reads."""
    arrays = [np.array(document, np.int64) for document in documents]
    bounds_D = np.concatenate([[0], np.cumsum([len(array) for array in arrays])])
    manifest = SimpleNamespace(eos_token_id=0)
    return SimpleNamespace(
        prefix="memory", bounds_D=bounds_D, document=lambda index: arrays[index], manifest=manifest
    )


@pytest.fixture(scope="module")
def directories(hf_dir, tmp_path_factory):
    """A model and two others to compare it with: a near and a far one, with the same norm and
    head.
    """
    root = tmp_path_factory.mktemp("others")
    full = load_hf_model(hf_dir, torch.float32)
    for name, scale in (("near", 0.02), ("far", 0.3)):
        other = load_hf_model(hf_dir, torch.float32)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for key, weight in other.named_parameters():
                if ".layers." in key:
                    weight.add_(torch.randn(weight.shape, generator=generator), alpha=scale)
        other.save_pretrained(root / name)
    assert full.config.num_hidden_layers == 2
    return hf_dir, [root / "near", root / "far"]


def losses_of(directories, data, batch_size):
    """All blocks of every model, then the losses, through the streaming code."""
    batches, streams = data.batches(batch_size), []
    for directory in (directories[0], *directories[1]):
        model = StreamedModel(directory, HFWeights(directory), torch.float32, CPU)
        stream = Stream(model, [data.padded(batch)[:, :-1] for batch in batches])
        for index in range(model.num_blocks):
            stream.advance(model.block(index))
        streams.append(stream.activations)
    head = StreamedModel(directories[0], HFWeights(directories[0]), torch.float32, CPU).head()
    return paired_losses(head, streams[0], streams[1:], data, batches, ALONE)


@pytest.mark.parametrize("batch_size", [1, 7])
@pytest.mark.parametrize("mode", ["separate", "concatenated"])
def test_losses_are_those_of_plain_forward_passes(directories, held_out_prefix, batch_size, mode):
    data = evaluation_set(open_corpus(held_out_prefix), SEQUENCE_LENGTH, None, mode)
    full = load_hf_model(directories[0], torch.float32, "eager")
    measured_of = losses_of(directories, data, batch_size)
    for directory, measured in zip(directories[1], measured_of, strict=True):
        other = load_hf_model(directory, torch.float32, "eager")
        for index in range(0, len(data.documents), 5):
            expected = dict.fromkeys(("tokens", "nll", "nll_quantized", "kl", "agreements"), 0.0)
            for number in np.flatnonzero(np.array(data.owner) == index):
                block = torch.from_numpy(data.blocks[number])[None]
                with torch.no_grad():
                    p, q = full(block, labels=block), other(block, labels=block)
                targets = block.shape[1] - 1
                expected["tokens"] += targets
                expected["nll"] += float(p.loss) * targets
                expected["nll_quantized"] += float(q.loss) * targets
                p_logits, q_logits = p.logits[0, :-1].double(), q.logits[0, :-1].double()
                expected["kl"] += float(
                    kl_divergence(Categorical(logits=p_logits), Categorical(logits=q_logits)).sum()
                )
                expected["agreements"] += int((p_logits.argmax(-1) == q_logits.argmax(-1)).sum())
            for name, value in expected.items():
                # fp32 logits of differently padded batches: relative 1e-6 per token
                assert getattr(measured, name)[index] == pytest.approx(value, rel=5e-5), name


def test_a_model_beside_itself_costs_nothing(directories, held_out_prefix):
    data = evaluation_set(open_corpus(held_out_prefix), SEQUENCE_LENGTH, 500, "separate")
    (same,) = losses_of((directories[0], [directories[0]]), data, 4)
    assert np.array_equal(same.nll, same.nll_quantized)
    assert not same.kl.any()
    assert np.array_equal(same.agreements, same.tokens)


def test_chunks_of_the_logits_change_nothing(directories, held_out_prefix, monkeypatch):
    data = evaluation_set(open_corpus(held_out_prefix), SEQUENCE_LENGTH, 500, "separate")
    whole = losses_of(directories, data, 4)
    monkeypatch.setattr(
        "quant_eval.measuring.losses.LOGITS_BYTES", 7 * 320 * 4
    )  # seven tokens at a time
    for one, other in zip(whole, losses_of(directories, data, 4), strict=True):
        np.testing.assert_allclose(one.kl, other.kl, rtol=1e-5)
        np.testing.assert_allclose(one.nll_quantized, other.nll_quantized, rtol=1e-6)


def test_every_token_but_the_first_of_its_document_is_a_target_once():
    """Tokens are numbered through, so the targets name their positions."""
    lengths = [1, 2, 7, 8, 9, 0, 15, 16, 17]
    starts = np.cumsum([0, *lengths])
    corpus = corpus_of(
        *(range(start, start + length) for start, length in zip(starts, lengths, strict=False))
    )
    data = evaluation_set(corpus, 8, None, "separate")
    targets = [int(token) for block in data.blocks for token in block[1:]]
    assert targets == [
        start + k for start, n in zip(starts, lengths, strict=False) for k in range(1, n)
    ]
    assert max(len(block) for block in data.blocks) == 9
    assert all(len(block) >= 2 for block in data.blocks)
    assert all((np.diff(block) == 1).all() for block in data.blocks)
    assert data.documents == [1, 2, 3, 4, 6, 7, 8]
    assert data.without_target == 2
    owners = [data.documents[owner] for owner in data.owner]
    assert [int(np.searchsorted(starts, block[0], "right")) - 1 for block in data.blocks] == owners


def test_concatenated_documents_are_cut_as_the_paper_cuts_them():
    """Worked by hand: no end-of-text (0), blocks of 4 inputs, of which the last 3 are targets, a
    rest is dropped.
    """
    data = evaluation_set(
        corpus_of([1, 2, 3, 0], [4, 5, 6, 7, 8, 0], [9, 0], [10, 11, 0]), 4, None, "concatenated"
    )
    assert [block.tolist() for block in data.blocks] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert data.documents == data.owner == [0, 1]


@pytest.mark.parametrize(
    ("cap", "documents"), [(1, None), (5, None), (6, 2), (10, 2), (11, 3), (99, 4)]
)
def test_whole_documents_are_taken_in_file_order_until_the_cap_is_reached(cap, documents):
    corpus = corpus_of([1] * 6, [2] * 6, [3] * 6, [4] * 6)  # 5 targets each
    if documents is None:
        with pytest.raises(UserError, match=r"1 evaluated document.*at least 2"):
            evaluation_set(corpus, 4, cap, "separate")
    else:
        assert evaluation_set(corpus, 4, cap, "separate").documents == list(range(documents))


def test_a_far_model_costs_more_than_a_near_one(directories, held_out_prefix):
    data = evaluation_set(open_corpus(held_out_prefix), SEQUENCE_LENGTH, 500, "separate")
    near, far = losses_of(directories, data, 4)
    assert 0 < near.kl.sum() < far.kl.sum()
