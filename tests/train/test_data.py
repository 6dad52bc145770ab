"""The data of a run: batches of seed and step alone, whose rows and labels are the files'; a rank's
own rows of them, and batches read ahead.
"""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from base.errors import UserError
from base.files import sha256_of
from tests.runs import error_line, make_run, ranks
from tests.train.test_corpus import copy_corpus
from tests.waiting import HANG_SECONDS
from train.data.batches import Batch, Replica, batch
from train.data.config import RepetitionFilter
from train.data.corpus import open_corpus
from train.data.indexing import index
from train.data.prepare import prepare
from train.run.directory import RunDirectory
from train.run_data import STEPS_AHEAD, Prefetch, RunData, open_data

LENGTH = 32


@pytest.fixture(scope="module")
def mix(tmp_path_factory, tokenizer_dir) -> Path:
    """An index of two OLMo token files, 200 x 32 + 7 and 100 x 32 tokens of 0 to 319."""
    directory = tmp_path_factory.mktemp("mix")
    generator = np.random.default_rng(4)
    paths = [directory / "a.npy", directory / "b.npy"]
    for path, length in zip(paths, (200 * LENGTH + 7, 100 * LENGTH), strict=True):
        generator.integers(0, 320, length).astype("<u2").tofile(path)
    index_tokens(paths, directory / "mix", tokenizer_dir)
    return directory / "mix"


def index_tokens(
    paths: list[Path], prefix: Path, tokenizer_dir: Path, vocab_size: int = 320
) -> None:
    tokenizer_sha256 = sha256_of(tokenizer_dir / "tokenizer.json")
    index(
        paths,
        prefix,
        dtype="uint16",
        vocab_size=vocab_size,
        eos_token_id=0,
        tokenizer_sha256=tokenizer_sha256,
    )


@pytest.fixture
def data_of(tmp_path, inputs):
    """`data_of(**settings of DataConfig)`: the data of a run of 8 x 32 tokens a batch."""

    def open_run(**settings) -> RunData:
        run = make_run(tmp_path / "run", **inputs, data=settings)
        return open_data(run, RunDirectory(tmp_path / "run"), verify_hashes=True)

    return open_run


def rows_of(data: RunData, steps: range) -> np.ndarray:
    return np.concatenate([data.batch(step).tokens_BS for step in steps])


def test_an_epoch_visits_every_sequence_once(train_prefix):
    corpus = open_corpus(train_prefix)
    size = corpus.num_sequences(64)
    rows = batch(corpus, step=1, batch_size=size, sequence_length=64, seed=1)
    assert sorted(rows.tolist()) == sorted(corpus.sequences(np.arange(size), 64).tolist())


def test_batches_are_a_function_of_seed_and_step(train_prefix, data_of):
    corpus = open_corpus(train_prefix)

    def at(step, seed=1, batch_size=8):
        return batch(corpus, step=step, batch_size=batch_size, sequence_length=64, seed=seed)

    assert np.array_equal(at(5), at(5))
    assert not np.array_equal(at(5), at(5, seed=2))
    assert not np.array_equal(at(5), at(6))
    assert np.array_equal(np.concatenate([at(1), at(2)]), at(1, batch_size=16))
    data = data_of()
    third = data.batch(3)
    assert np.array_equal(
        third.tokens_BS, batch(corpus, step=3, batch_size=8, sequence_length=LENGTH, seed=3)
    )
    assert third.counted_BS.all()
    assert data.sha256["train"] == sha256_of(Path(f"{train_prefix}.bin"))


def test_held_out_sequences_are_the_first(data_of, held_out_prefix):
    everything = open_corpus(held_out_prefix).tokens_T
    held_out = data_of().held_out()["held_out"]
    expected = [everything[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(5)]
    assert np.array_equal(held_out.tokens_BS, expected)
    assert held_out.counted_BS.all()


def test_documents_start_after_the_end_of_text(data_of, mix):
    """In both kinds of token file, in training and held-out sequences, and in a replica's rows."""
    for settings in ({}, {"train": str(mix), "order": "olmo"}):
        data, inside = data_of(**settings, document_mask=True), 0
        for whole in (*map(data.batch, range(1, 9)), *data.held_out().values()):
            assert whole.starts_BS is not None
            for tokens, starts in zip(whole.tokens_BS.tolist(), whole.starts_BS, strict=True):
                first = [at == 0 or tokens[at - 1] == 0 for at in range(LENGTH)]
                assert starts.tolist() == first
                inside += sum(first[1:])
        assert inside > 0
        replica = Replica(1, 2, 2)
        rows, rows_of_all = data.batch(1, replica), data.batch(1).of_replica(replica)
        assert all(map(torch.equal, rows, rows_of_all))
    assert data_of().batch(1).starts_BS is None


def test_sequential_order(data_of, train_prefix):
    tokens = open_corpus(train_prefix).tokens_T
    data = data_of(order="sequential")
    for number, row in enumerate(rows_of(data, range(1, 4))):
        assert np.array_equal(row, tokens[number * LENGTH : (number + 1) * LENGTH + 1])


def test_ai2s_batches_from_ai2s_files(data_of, mix):
    """The third batch of the second epoch, by hand; a sequence has one label fewer than tokens."""
    data = data_of(train=str(mix), order="olmo")
    files = [np.fromfile(mix.parent / name, "<u2") for name in ("a.npy", "b.npy")]
    instances = np.concatenate(
        [file[: len(file) // LENGTH * LENGTH].reshape(-1, LENGTH) for file in files]
    )
    assert len(instances) == 300
    shuffled = np.arange(300, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(3 + 1)).shuffle(shuffled)
    third = data.batch(300 // 8 + 3)
    assert np.array_equal(third.tokens_BS[:, :-1], instances[shuffled[16:24]])
    assert (third.tokens_BS[:, -1] == 0).all()
    assert third.counted_BS[:, :-1].all()
    assert not third.counted_BS[:, -1].any()


def test_repetitive_sequences_lose_their_labels(data_of, tmp_path, tokenizer_dir, mix):
    """Two of four planted sequences repeat often enough; held-out ones are never filtered."""
    generator = np.random.default_rng(2)
    instances = generator.integers(1, 320, (10, LENGTH)).astype("<u2")
    instances[3] = 5  # 32 copies of one token
    instances[5] = np.resize([7, 8], LENGTH)  # 16 copies of two
    instances[7, :15] = 9  # 15 copies: one too few
    instances[9] = np.resize([1, 2, 3], LENGTH)  # 10 copies of three
    instances.tofile(tmp_path / "few.npy")
    index_tokens([tmp_path / "few.npy"], tmp_path / "few", tokenizer_dir)
    data = data_of(
        train=str(tmp_path / "few"),
        order="sequential",
        held_out=str(mix),
        repetition_filter=RepetitionFilter(max_count=16),
    )
    counted = np.concatenate([data.batch(1).counted_BS, data.batch(2).counted_BS])
    assert np.flatnonzero(~counted.any(axis=1)).tolist() == [
        3,
        5,
        13,
        15,
    ]  # 10 to 15 are the second epoch
    assert np.array_equal(rows_of(data, range(1, 2))[:, :-1], instances[:8])
    assert data.held_out()["held_out"].counted_BS[:, :-1].all()


def test_tokens_outside_the_vocabulary_stop_the_batch(data_of, tmp_path, tokenizer_dir):
    tokens = np.ones(64 * LENGTH, "<u2")
    tokens[9 * LENGTH + 3] = 320
    tokens.tofile(tmp_path / "high.npy")
    index_tokens([tmp_path / "high.npy"], tmp_path / "high", tokenizer_dir, vocab_size=321)
    data = data_of(train=str(tmp_path / "high"), order="sequential")
    data.batch(1)
    with pytest.raises(UserError, match="token 320, outside the model's vocabulary of 320"):
        data.batch(2)


def test_what_is_held_out_must_not_be_trained_on(
    data_of, tmp_path, train_prefix, held_out_prefix, tokenizer_dir, mix
):
    same = {"train": str(train_prefix), "held_out": str(train_prefix)}
    copied = copy_corpus(train_prefix, tmp_path / "copy")
    both = [source.with_suffix(".jsonl") for source in (train_prefix, held_out_prefix)]
    prepare(both, tokenizer_dir, tmp_path / "both")
    index_tokens([mix.parent / "b.npy"], tmp_path / "b", tokenizer_dir)
    for settings, complaint in (
        (same, "hold out another file"),
        (same | {"held_out": str(copied)}, "hold out another file"),
        ({"train": str(tmp_path / "both")}, "prepare the held-out text from other sources"),
        ({"train": str(mix), "held_out": str(tmp_path / "b")}, r"b\.npy is a file of .*mix too"),
        ({"more_held_out": {"code": str(train_prefix)}}, "hold out another file"),
    ):
        with pytest.raises(UserError, match=complaint):
            data_of(**settings)


@pytest.mark.parametrize("count", [1, 7, 8, 24, 25])
@pytest.mark.parametrize(("number", "size"), [(1, 1), (2, 2), (3, 4), (4, 1)])
def test_replicas_share_a_batch_microbatch_by_microbatch(count, number, size):
    replicas = [Replica(rank, number, size).rows(count) for rank in range(number)]
    dealt = np.concatenate([rows.reshape(-1, 1, size) for rows in replicas], 1).reshape(-1)
    assert dealt[:count].tolist() == list(range(count))
    assert (dealt[count:] == -1).all()
    assert len(dealt) - count < number * size

    tokens_BS = torch.arange(4 * count).view(count, 4)
    share = Batch.of(tokens_BS).of_replica(Replica(number - 1, number, size))
    for row, tokens, counted in zip(replicas[-1], *share[:2], strict=True):
        assert torch.equal(tokens, tokens_BS[max(row, 0)])
        assert counted.all() if row >= 0 else not counted.any()
    parts = share.microbatches(size, torch.device("cpu"))
    assert all(len(part.tokens_BS) == size for part in parts)
    assert torch.equal(torch.cat([part.tokens_BS for part in parts]), share.tokens_BS)


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
