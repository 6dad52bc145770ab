"""Token files and batches: read by megatron's own reader, and a function of seed and step alone."""

import json
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.runs import environment, error_line, python
from train.command import UserError
from train.data import batch, check_vocabulary, open_corpus, permute


def test_megatron_reads_our_files(train_prefix):
    """megatron-core's IndexedDataset, in a process of its own, finds the same documents."""
    script = (
        "import sys, train.megatron, numpy as np\n"
        "from megatron.core.datasets.indexed_dataset import IndexedDataset\n"
        "data = IndexedDataset(sys.argv[1])\n"
        "print(len(data), data.document_indices.tolist() == list(range(301)))\n"
        "np.save(sys.argv[2], np.concatenate([data[i] for i in range(len(data))]))\n"
    )
    out = f"{train_prefix}.concatenated.npy"
    command = [sys.executable, "-c", script, str(train_prefix), out]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    corpus = open_corpus(train_prefix, verify_hashes=True)
    assert done.stdout.splitlines()[-1] == "300 True"
    assert np.array_equal(np.load(out), corpus.tokens_T)


def test_documents_decode_to_their_text(train_prefix, tokenizer_dir):
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    corpus = open_corpus(train_prefix)
    texts = [json.loads(line)["text"] for line in train_prefix.with_suffix(".jsonl").read_text().splitlines()]
    assert corpus.manifest.documents == len(texts)
    for index in (0, 17, 299):
        tokens = corpus.document(index)
        assert tokens[-1] == corpus.manifest.eos_token_id
        assert tokenizer.decode(tokens[:-1].tolist()) == texts[index]


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000, 4097])
def test_permutation_is_a_bijection(size):
    for epoch in (0, 1):
        assert sorted(permute(np.arange(size), size, 3, epoch)) == list(range(size))


def test_permutation_looks_random():
    """Neither the identity nor the same for another seed or epoch; neighbours land far apart."""
    size = 100_000
    one, two, three = (permute(np.arange(size), size, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0)))
    for first, second in ((one, two), (one, three), (two, three), (one, np.arange(size))):
        assert np.mean(first == second) < 1e-3
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.02
    assert np.mean(np.abs(np.diff(one))) == pytest.approx(size / 3, rel=0.02)


def test_permutation_needs_no_table():
    """A position of a corpus of 10^15 sequences is found without walking the others."""
    size = 10**15
    images = permute(np.array([0, 1, size - 1]), size, 5, 0)
    assert len(set(images.tolist())) == 3
    assert ((images >= 0) & (images < size)).all()


def test_an_epoch_visits_every_sequence_once(train_prefix):
    corpus = open_corpus(train_prefix)
    size = corpus.num_sequences(64)
    rows = [batch(corpus, step=step, batch_size=8, sequence_length=64, seed=1) for step in range(1, 2 * size // 8 + 1)]
    seen = np.concatenate(rows)[:size]
    order = np.lexsort(seen.T[::-1])
    everything = corpus.sequences(np.arange(size), 64)
    assert np.array_equal(seen[order], everything[np.lexsort(everything.T[::-1])])


def test_batches_are_a_function_of_seed_and_step(train_prefix):
    corpus = open_corpus(train_prefix)

    def at(step, seed=1, batch_size=8):
        return batch(corpus, step=step, batch_size=batch_size, sequence_length=64, seed=seed)

    assert np.array_equal(at(5), at(5))
    assert not np.array_equal(at(5), at(5, seed=2))
    assert not np.array_equal(at(5), at(6))
    assert np.array_equal(np.concatenate([at(1), at(2)]), at(1, batch_size=16))


def test_labels_are_the_next_tokens(train_prefix):
    corpus = open_corpus(train_prefix)
    row = corpus.sequences(np.array([3]), 10)[0]
    assert row.tolist() == corpus.tokens_T[30:41].tolist()


def test_bad_token_files_are_refused(tmp_path, train_prefix, tokenizer_dir):
    corpus = open_corpus(train_prefix)
    with pytest.raises(UserError, match="fewer than one sequence"):
        corpus.num_sequences(10**6)
    with pytest.raises(UserError, match=r"outside the model's vocabulary of 100"):
        check_vocabulary(corpus, 100)
    with pytest.raises(UserError, match="does not exist; make it with"):
        open_corpus(tmp_path / "none")
    for suffix in ("bin", "idx", "json"):
        (tmp_path / f"copy.{suffix}").write_bytes(train_prefix.with_suffix(f".{suffix}").read_bytes())
    tokens = (tmp_path / "copy.bin").read_bytes()
    (tmp_path / "copy.bin").write_bytes(tokens[:-2] + b"\x01\x00")
    open_corpus(tmp_path / "copy")
    with pytest.raises(UserError, match=r"copy\.bin was changed"):
        open_corpus(tmp_path / "copy", verify_hashes=True)
    (tmp_path / "copy.bin").write_bytes(tokens[:-2])
    with pytest.raises(UserError, match=r"copy\.bin is missing or truncated"):
        open_corpus(tmp_path / "copy")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("bad.jsonl", b'{"text": "one"}\n{"txt": "two"}\n', "bad.jsonl:2 is no JSON object with a 'text'"),
        ("latin.txt", b"caf\xe9 au lait", "latin.txt is not UTF-8"),
        ("surrogate.jsonl", b'{"text": "\\ud800"}\n', "surrogate.jsonl:1: 'text' is no string of valid Unicode"),
        ("empty.jsonl", b"", "no document in 1 source"),
        ("none.txt", None, "none.txt does not exist"),
    ],
)
def test_prepare_refuses_and_leaves_nothing(tmp_path, tokenizer_dir, name, content, expected):
    source = tmp_path / name
    if content is not None:
        source.write_bytes(content)
    out = tmp_path / "out" / "tokens"
    done = python("train", "prepare", str(source), "--tokenizer", str(tokenizer_dir), "--out", str(out))
    assert expected in error_line(done)
    assert list(out.parent.iterdir()) == []
