"""A rank's own rows of a batch, and batches read ahead."""

import json
import threading

import numpy as np
import pytest
import torch

from tests.runs import error_line, make_run, ranks
from tests.train.test_data import index_tokens
from tests.waiting import HANG_SECONDS
from train.data.batches import Batch, Replica
from train.run_data import STEPS_AHEAD, Prefetch


@pytest.mark.parametrize("count", [1, 7, 8, 24, 25])
@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (2, 2), (3, 4), (4, 1)])
def test_replicas_share_a_batch_microbatch_by_microbatch(count, ranks, size):
    replicas = [Replica(rank, ranks, size).rows(count) for rank in range(ranks)]
    dealt = np.concatenate([rows.reshape(-1, 1, size) for rows in replicas], 1).reshape(-1)
    assert dealt[:count].tolist() == list(range(count))
    assert (dealt[count:] == -1).all()
    assert len(dealt) - count < ranks * size

    tokens_BS = torch.arange(4 * count).view(count, 4)
    own = Batch.of(tokens_BS).of_replica(Replica(ranks - 1, ranks, size))
    for row, tokens, counted in zip(replicas[-1], *own[:2], strict=True):
        assert torch.equal(tokens, tokens_BS[max(row, 0)])
        assert counted.all() if row >= 0 else not counted.any()
    parts = own.microbatches(size, torch.device("cpu"))
    assert all(len(part.tokens_BS) == size for part in parts)
    assert torch.equal(torch.cat([part.tokens_BS for part in parts]), own.tokens_BS)


def batch_of(step: int) -> Batch:
    return Batch.of(torch.full((2, 3), step))


def test_batches_are_read_two_steps_ahead_and_no_further():
    asked: list[int] = []
    read = threading.Semaphore(0)

    def reading(step: int) -> Batch:
        asked.append(step)
        read.release()
        return batch_of(step)

    batches = Prefetch(reading, last_step=9)
    for step in range(4, 10):
        assert torch.equal(batches(step).tokens_BS, batch_of(step).tokens_BS)
        ahead = min(step + STEPS_AHEAD, 9)
        for _ in range(ahead - 3 if step == 4 else min(1, 9 - step - STEPS_AHEAD + 1)):
            assert read.acquire(timeout=HANG_SECONDS)
        assert asked == list(range(4, ahead + 1))


def test_what_reading_raises_is_raised_at_its_step():
    def reading(step: int) -> Batch:
        if step == 3:
            raise ValueError("step 3 is damaged")
        return batch_of(step)

    batches = Prefetch(reading, last_step=5)
    batches(1)
    batches(2)
    with pytest.raises(ValueError, match="step 3 is damaged"):
        batches(3)


@pytest.mark.parametrize("step", [1, 3])
def test_every_rank_ends_when_one_cannot_read_its_rows(tmp_path, inputs, tokenizer_dir, step):
    """The second rank's rows hold a token that has no embedding: one line, and a status."""
    tokens = np.ones(64 * 32, "<u2")
    tokens[((step - 1) * 8 + 5) * 32] = 320
    tokens.tofile(tmp_path / "text.npy")
    # The model has 320 tokens.
    index_tokens([tmp_path / "text.npy"], tmp_path / "text", tokenizer_dir, vocab_size=321)
    data = {"train": str(tmp_path / "text"), "order": "sequential"}
    make_run(tmp_path / "run", **inputs, data=data)
    line = error_line(ranks(2, "train", "run", str(tmp_path / "run")))
    assert line.startswith(f"error: rank 1 cannot read its batch of step {step}: a batch holds")
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["status"] == "failed"
    assert line == f"error: {status['reason']}"
