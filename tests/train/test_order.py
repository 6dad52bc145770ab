"""Orders: bijections, Ai2's own batches, and the filter of repetitive sequences."""

import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from base.errors import UserError
from train.data.batches import repetitive
from train.data.config import RepetitionFilter
from train.data.order import Order, permute


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000, 4097])
def test_permutation_is_a_bijection(size):
    for epoch in (0, 1):
        assert sorted(permute(np.arange(size), size, 3, epoch)) == list(range(size))


def test_permutation_looks_random():
    """Neither the identity nor the same for another seed or epoch; neighbours land far apart."""
    size = 100_000
    base, other_epoch, other_seed = (
        permute(np.arange(size), size, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))
    )
    for first, second in (
        (base, other_epoch),
        (base, other_seed),
        (other_epoch, other_seed),
        (base, np.arange(size)),
    ):
        assert np.mean(first == second) < 1e-3
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert abs(np.corrcoef(base[:-1], base[1:])[0, 1]) < 0.02
    assert np.mean(np.abs(np.diff(base))) == pytest.approx(size / 3, rel=0.02)


def test_permutation_needs_no_table():
    """A position of a corpus of 10^15 sequences is found without walking the others."""
    size = 10**15
    images = permute(np.array([0, 1, size - 1]), size, 5, 0)
    assert len(set(images.tolist())) == 3
    assert ((images >= 0) & (images < size)).all()


def test_every_epoch_visits_everything_once():
    for order, alike in (
        (Order("permutation", 103, 7, 10), False),
        (Order("sequential", 103, 7, 10), True),
    ):
        first, second = order(np.arange(206)).reshape(2, 103)
        assert sorted(first) == sorted(second) == list(range(103))
        assert np.array_equal(first, second) == alike
    assert np.array_equal(first, np.arange(103))


def batches_as_ranks_draw_them(
    size: int, batch_size: int, ranks: int, seed: int, epochs: int
) -> list[list[list[int]]]:
    """OLMo's batches put together from its ranks: for each update what each rank draws, in turn.

    One epoch: shuffle, drop the tail that does not divide over the ranks, deal the rest out one by
    one, and let each rank cut its own into batches, of which it drops an incomplete last one.
    """
    updates = []
    for epoch in range(epochs):
        cards = np.arange(size, dtype=np.uint32)
        np.random.Generator(np.random.PCG64(seed=seed + epoch)).shuffle(cards)
        hands: list[list[int]] = [[] for _ in range(ranks)]
        for number, card in enumerate(cards.tolist()):
            if number < ranks * (size // ranks):
                hands[number % ranks].append(card)
        share = batch_size // ranks
        for update in range(min(len(hand) for hand in hands) // share):
            updates.append([hand[update * share : (update + 1) * share] for hand in hands])
    return updates


@pytest.mark.parametrize(("size", "batch_size"), [(103, 8), (96, 8), (8, 8), (1000, 24)])
def test_olmo_order_is_ai2s_at_every_number_of_ranks(size, batch_size):
    order = Order("olmo", size, 6198, batch_size)
    for ranks in (1, 2, 4, 8):
        updates = batches_as_ranks_draw_them(size, batch_size, ranks, 6198, epochs=3)
        assert len(updates) == 3 * (size // batch_size)
        for number, hands in enumerate(updates):
            drawn = order(np.arange(number * batch_size, (number + 1) * batch_size))
            assert [drawn[rank::ranks].tolist() for rank in range(ranks)] == hands


def test_a_large_shuffle_is_made_once_and_mapped(tmp_path, monkeypatch):
    """Two ranks at once, a later attempt, and one that finds what a crash left."""
    monkeypatch.setattr("train.data.order.SHUFFLE_IN_MEMORY_BYTES", 0)
    orders = [Order("olmo", 103, 6198, 8, tmp_path / "order") for _ in range(2)]
    positions = np.arange(2 * 96)
    expected = Order("olmo", 103, 6198, 8)(positions)
    with ThreadPoolExecutor(2) as threads:
        for drawn in threads.map(lambda order: order(positions), orders):
            assert np.array_equal(drawn, expected)
    files = sorted((tmp_path / "order").glob("*.u32"))
    assert [path.stat().st_size for path in files] == [4 * 103, 4 * 103]
    inode = files[0].stat().st_ino

    files[1].write_bytes(b"torn")
    (tmp_path / "order" / f".{files[1].name}.{socket.gethostname()}").write_bytes(b"torn")
    assert np.array_equal(Order("olmo", 103, 6198, 8, tmp_path / "order")(positions), expected)
    assert files[0].stat().st_ino == inode
    assert sorted((tmp_path / "order").iterdir()) == [tmp_path / "order/.lock", *files]


def test_olmo_order_refuses_what_it_cannot_do():
    with pytest.raises(UserError, match="fill no batch of 8"):
        Order("olmo", 7, 0, 8)
    with pytest.raises(UserError, match="use 'permutation'"):
        Order("olmo", 2**32, 0, 8)


def most_repeats(tokens: list[int], period: int) -> int:
    """The largest number of copies in a row of any n-gram of this length, by trying every start."""
    best = 0
    for start in range(len(tokens) - period + 1):
        gram, count = tokens[start : start + period], 1
        while tokens[start + count * period : start + (count + 1) * period] == gram:
            count += 1
        best = max(best, count)
    return best


def test_repetition_at_the_borders():
    """31, 32 and 33 copies of n-grams of 1, 13 and 14 tokens, anywhere, or one token short."""
    generator = np.random.default_rng(0)
    rows, expected = [], []
    for period in (1, 2, 13, 14):
        gram = generator.permutation(1000)[:period]
        for copies in (31, 32, 33):
            for missing in (0, 1):
                for start in (0, 5, 700 - copies * period + missing):
                    row = generator.permutation(100_000)[:700] + 1000
                    planted = np.tile(gram, copies)[: copies * period - missing]
                    row[start : start + len(planted)] = planted
                    rows.append(row)
                    expected.append(copies * period - missing >= 32 * period and period <= 13)
    rule = RepetitionFilter()
    assert np.array_equal(repetitive(np.array(rows), rule), expected)
    assert 0 < sum(expected) < len(expected)


@pytest.mark.parametrize(
    ("low", "high", "count"), [(1, 13, 32), (1, 3, 6), (2, 5, 4), (3, 3, 3), (1, 40, 2), (4, 4, 9)]
)
def test_repetition_equals_counting_by_hand(low, high, count):
    """Random tokens of tiny alphabets, with stretches of random periods: many near misses."""
    generator = np.random.default_rng(count)
    rows = []
    for _ in range(150):
        row = generator.integers(0, generator.integers(2, 9), 120)
        for _ in range(generator.integers(0, 3)):
            period, start = int(generator.integers(1, high + 3)), int(generator.integers(0, 110))
            stretch = row[
                start : start
                + int(period * (count + generator.integers(-2, 2)) + generator.integers(-1, 2))
            ]
            stretch[:] = np.resize(generator.integers(0, 9, period), len(stretch))
        rows.append(row)
    flags = repetitive(
        np.array(rows), RepetitionFilter(min_period=low, max_period=high, max_count=count)
    )
    least = max(count, 3)  # the original cannot see two copies
    expected = [
        any(most_repeats(row.tolist(), period) >= least for period in range(low, high + 1))
        for row in rows
    ]
    assert np.array_equal(flags, expected)
    assert count > 9 or 0 < sum(expected) < len(expected)
