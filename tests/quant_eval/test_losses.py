"""Losses against plain forward passes, one document block at a time, with the labels
transformers shifts itself.
"""

import itertools
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributions import Categorical, kl_divergence

from base.ranks import ALONE
from ckpt_tools.hf.model import load_hf_model
from quant_eval.measuring.losses import evaluation_set, paired_losses
from quant_eval.measuring.streams import Stream
from tests.quant_eval.models import open_model
from train.data.corpus import open_corpus

SEQUENCE_LENGTH = 50
MODES: tuple[Literal["separate", "concatenated"], ...] = ("separate", "concatenated")


def corpus_of(*documents):
    """A corpus in memory with the members that cutting reads."""
    arrays = [np.array(document, np.int64) for document in documents]
    lengths_D = np.array([len(array) for array in arrays], np.int32)
    manifest = SimpleNamespace(eos_token_id=0)
    return SimpleNamespace(
        prefix="memory", lengths_D=lengths_D, document=arrays.__getitem__, manifest=manifest
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


def streams_of(directories, data, batches, dtype=torch.float32):
    """The residual stream of every model after all of its blocks."""
    streams = []
    for directory in directories:
        model = open_model(directory, dtype)
        stream = Stream(model, [data.padded(batch)[:, :-1] for batch in batches])
        for index in range(model.num_blocks):
            stream.advance(model.block(index))
        streams.append(stream.activations)
    return streams


def flat(directories):
    """The model and those it is compared with."""
    return (directories[0], *directories[1])


def losses_of(directories, data, batch_size):
    """All blocks of every model, then the losses, through the streaming code."""
    batches = data.batches(batch_size)
    streams = streams_of(flat(directories), data, batches)
    head = open_model(directories[0]).head()
    return paired_losses(head, streams[0], streams[1:], data, batches, ALONE)


@pytest.mark.parametrize("batch_size", [1, 7])
@pytest.mark.parametrize("mode", MODES)
def test_losses_are_those_of_plain_forward_passes(directories, held_out_prefix, batch_size, mode):
    data = evaluation_set(open_corpus(held_out_prefix), SEQUENCE_LENGTH, None, mode, 0)
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
                full_T, other_T = (Categorical(logits=x.logits[0, :-1].double()) for x in (p, q))
                expected["kl"] += float(kl_divergence(full_T, other_T).sum())
                agrees_T = full_T.logits.argmax(-1) == other_T.logits.argmax(-1)
                expected["agreements"] += int(agrees_T.sum())
            for name, value in expected.items():
                # fp32 logits of differently padded batches: relative 1e-6 per token
                assert getattr(measured, name)[index] == pytest.approx(value, rel=5e-5), name


def test_changes_of_the_last_block_are_those_of_plain_models_in_float64(
    directories, held_out_prefix
):
    data = evaluation_set(open_corpus(held_out_prefix), SEQUENCE_LENGTH, 500, "separate", 0)
    outputs = []
    models = [load_hf_model(path, torch.float32).double() for path in flat(directories)]
    for model in models:
        model.model.layers[-1].register_forward_hook(lambda _, __, out: outputs.append(out[0]))
    expected_SU = np.zeros((2, len(data.documents)))
    for owner, block in zip(data.owner, data.blocks, strict=True):
        outputs.clear()
        for model in models:
            model(torch.from_numpy(block)[None, :-1], use_cache=False)
        full, *others = (output.detach().numpy() for output in outputs)
        for number, other in enumerate(others):
            for token, exact in zip(other, full, strict=True):
                expected_SU[number, owner] += ((token - exact) ** 2).sum() / (exact**2).sum()
    near, far = losses_of(directories, data, 4)
    assert far.changes.sum() > 10 * near.changes.sum()
    for measured, expected_U in zip((near, far), expected_SU, strict=True):
        # fp32 streams, whose error is 1e-6 of a norm and so 1e-5 of a change of a tenth
        np.testing.assert_allclose(measured.changes, expected_U, rtol=1e-4)


def test_chunks_of_the_logits_change_nothing(directories, held_out_prefix, monkeypatch):
    """Nor does a model beside itself cost anything."""
    data = evaluation_set(open_corpus(held_out_prefix), SEQUENCE_LENGTH, 500, "separate", 0)
    same, *whole = losses_of((directories[0], [directories[0], *directories[1]]), data, 4)
    assert np.array_equal(same.nll, same.nll_quantized)
    assert not same.kl.any()
    assert not same.changes.any()
    assert np.array_equal(same.agreements, same.tokens)
    # seven tokens at a time
    monkeypatch.setattr("quant_eval.measuring.losses.LOGITS_BYTES", 7 * 320 * 4)
    for losses, other in zip(whole, losses_of(directories, data, 4), strict=True):
        np.testing.assert_allclose(losses.kl, other.kl, rtol=1e-5)
        np.testing.assert_allclose(losses.nll_quantized, other.nll_quantized, rtol=1e-6)


def test_every_token_but_the_first_of_its_document_is_a_target_once():
    """Tokens are numbered through, so the targets name their positions."""
    lengths = [1, 2, 7, 8, 9, 0, 15, 16, 17]
    starts = np.cumsum([0, *lengths])
    documents = [range(start, stop) for start, stop in itertools.pairwise(starts)]
    data = evaluation_set(corpus_of(*documents), 8, None, "separate", 0)
    targets = [int(token) for block in data.blocks for token in block[1:]]
    assert targets == [token for document in documents for token in document[1:]]
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
        corpus_of([1, 2, 3, 0], [4, 5, 6, 7, 8, 0], [9, 0], [10, 11, 0]), 4, None, "concatenated", 0
    )
    assert [block.tolist() for block in data.blocks] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert data.documents == data.owner == [0, 1]
    # and those are the documents that are drawn
    corpus = corpus_of(*([index, index, index, 0] for index in range(20, 40)))
    separate, joined = (evaluation_set(corpus, 3, 24, mode, 1) for mode in MODES)
    expected = np.repeat(np.array(separate.documents) + 20, 3)
    assert len(expected) == 24
    assert np.array_equal(np.concatenate(joined.blocks), expected)


def test_whole_documents_are_drawn_until_the_cap_is_reached_and_read_in_file_order():
    corpus = corpus_of(*([1] * 6 for _ in range(40)), [1], [])  # 5 targets each, two without

    def drawn(cap, seed=0):
        return evaluation_set(corpus, 4, cap, "separate", seed).documents

    for cap, count in ((6, 2), (10, 2), (11, 3), (96, 20), (100, 20)):
        assert len(drawn(cap)) == count
        assert drawn(cap) == sorted(drawn(cap))
        assert set(drawn(6)) <= set(drawn(cap))  # a larger cap adds documents
    assert drawn(10**6) == drawn(None) == list(range(40))
    assert evaluation_set(corpus, 4, 10**6, "separate", 0).without_target == 2


def test_every_document_is_drawn_equally_often():
    """Over 400 seeds 20 of 40 are drawn: 200 times each, with a standard deviation of 10."""
    corpus = corpus_of(*([1] * 6 for _ in range(40)))
    times = np.zeros(40)
    for seed in range(400):
        times[evaluation_set(corpus, 4, 100, "separate", seed).documents] += 1
    assert times.sum() == 400 * 20
    assert 150 < times.min() < times.max() < 250


def test_documents_added_to_a_file_move_none_before_another():
    few, many = (corpus_of(*([1] * 6 for _ in range(count))) for count in (30, 60))
    kept = [index for index in evaluation_set(many, 4, 150, "separate", 0).documents if index < 30]
    drawn = evaluation_set(few, 4, 5 * len(kept), "separate", 0).documents
    assert drawn == kept


def test_losses_in_bf16_are_those_of_float64_logits(hf_dir, held_out_prefix):
    """The final norm and the head by hand in float64, on two bf16 residual streams.

    Logits are made as large as those of trained models, with a standard deviation of 3.5, and the
    second stream is so near that the divergence is that of 8 bits.
    """
    data = evaluation_set(open_corpus(held_out_prefix), SEQUENCE_LENGTH, 2000, "separate", 0)
    batches = data.batches(4)
    (full,) = streams_of([hf_dir], data, batches, torch.bfloat16)
    near, generator = full.fork(), torch.Generator().manual_seed(0)
    for index, x_BLD in enumerate(full.read(index) for index in range(len(full))):
        noise_BLD = torch.randn(x_BLD.shape, generator=generator) * x_BLD.float().std() / 128
        near.write(index, x_BLD + noise_BLD)
    head = open_model(hf_dir, torch.bfloat16).head()
    head.get_submodule("1").get_parameter("weight").mul_(4)  # exact
    (measured,) = paired_losses(head, full, [near], data, batches, ALONE)

    tensors = load_file(hf_dir / "model.safetensors")
    norm_D, head_VD = (
        tensors[name].bfloat16().double() for name in ("model.norm.weight", "lm_head.weight")
    )

    def logits(stream, index, is_real_BL):
        x_TD = stream.read(index)[is_real_BL].double()
        squares_T1 = x_TD.square().mean(-1, keepdim=True) + 1e-6
        return norm_D * x_TD / squares_T1.sqrt() @ (4 * head_VD).T

    sums = {dtype: np.zeros(3) for dtype in (torch.float64, torch.bfloat16)}
    for index, batch in enumerate(batches):
        lengths_B = torch.tensor([len(data.blocks[block]) - 1 for block in batch])
        is_real_BL = torch.arange(int(lengths_B.max())) < lengths_B[:, None]
        target_T = data.padded(batch)[:, 1:][is_real_BL]
        exact = [logits(stream, index, is_real_BL) for stream in (full, near)]
        assert 3 < exact[0].std() < 4
        for dtype, values in sums.items():
            p, q = (Categorical(logits=logits_TV.to(dtype).double()) for logits_TV in exact)
            agrees_T = p.logits.argmax(-1) == q.logits.argmax(-1)
            each = (-q.log_prob(target_T), kl_divergence(p, q), agrees_T)
            values += [float(of_T.sum()) for of_T in each]
    nll, kl, agreements = sums[torch.float64] / measured.tokens.sum()
    assert 2e-4 < kl < 8e-4
    assert measured.nll_quantized.sum() / measured.tokens.sum() == pytest.approx(nll, rel=1e-6)
    # fp32 logarithms of some 10 nats are off by 1e-6, and nearly cancel over the vocabulary
    assert measured.kl.sum() / measured.tokens.sum() == pytest.approx(kl, rel=1e-3)
    assert measured.agreements.sum() == round(agreements * measured.tokens.sum())
    # what the test tells apart: logits that a bf16 head rounds
    assert sums[torch.bfloat16][1] / measured.tokens.sum() > 1.3 * kl
