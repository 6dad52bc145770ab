"""Token files: Megatron reads the same documents, OLMo's files are cut as in OLMo."""

import json
import shutil
import struct
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from base.errors import UserError
from base.files import record_file
from tests.interpreter import interpreter
from tests.runs import environment, error_line, python, succeed
from tests.sealing import reseal
from train.data.corpus import NpyCorpus, _map_bin, open_corpus, open_source
from train.data.indexing import index
from train.data.manifest import NpyManifest, verify


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
    command = [interpreter(), "-c", script, str(train_prefix), out]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    corpus = open_corpus(train_prefix, verify_hashes=True)
    assert done.stdout.splitlines()[-1] == "300 True"
    assert np.array_equal(np.load(out), corpus.tokens_T)


def copy_corpus(prefix: Path, copy: Path) -> Path:
    for suffix in ("bin", "idx", "json"):
        shutil.copy(f"{prefix}.{suffix}", f"{copy}.{suffix}")
    return copy


def test_bad_token_files_are_refused(tmp_path, train_prefix):
    copy_corpus(train_prefix, tmp_path / "copy")
    tokens = (tmp_path / "copy.bin").read_bytes()
    (tmp_path / "copy.bin").write_bytes(tokens[:-2] + b"\x01\x00")
    open_corpus(tmp_path / "copy")
    with pytest.raises(UserError, match=r"copy\.bin was changed"):
        open_corpus(tmp_path / "copy", verify_hashes=True)
    assert "copy.bin was changed" in error_line(python("train", "verify", str(tmp_path / "copy")))
    whole = python("train", "verify", str(train_prefix)).stdout
    size = sum(train_prefix.with_suffix(suffix).stat().st_size for suffix in (".bin", ".idx"))
    assert f"{size:,} bytes are as recorded" in whole
    (tmp_path / "copy.bin").write_bytes(tokens[:-2])
    with pytest.raises(UserError, match=r"copy\.bin is missing or truncated"):
        open_corpus(tmp_path / "copy")
    for content, complaint in (
        ("{", "is not valid JSON"),
        ("[]", "holds no JSON object"),
        ({"kind": "npy"}, "is missing"),
    ):
        if isinstance(content, dict):
            reseal(tmp_path / "copy.json", content)
        else:
            (tmp_path / "copy.json").write_text(content)
        with pytest.raises(UserError, match=complaint):
            open_source(tmp_path / "copy")


def indexed(paths: list[Path], out: Path, **settings: Any) -> NpyManifest:
    """The manifest of some files of uint32 tokens, 0 to 299, or of other settings."""
    defaults: dict[str, Any] = {"dtype": "uint32", "vocab_size": 300, "eos_token_id": 0}
    return index(paths, out, tokenizer_sha256="", **(defaults | settings))


LENGTHS = (70, 5, 64, 33)  # with sequences of 16: 4, 0, 4 and 2 of them


@pytest.fixture(scope="module")
def npy_files(tmp_path_factory) -> list[Path]:
    """Raw uint32 arrays as OLMo's, of tokens 0 to 299, 0 ends a document."""
    directory = tmp_path_factory.mktemp("npy")
    generator = np.random.default_rng(0)
    paths = [directory / f"part-{number}.npy" for number in range(len(LENGTHS))]
    for path, length in zip(paths, LENGTHS, strict=True):
        generator.integers(0, 300, length).astype("<u4").tofile(path)
    return paths


def test_olmo_files_are_indexed_and_cut_as_olmo_does(npy_files, tokenizer_dir, tmp_path):
    """Chunks of a file, the rest of each dropped; indexed and read from two directories."""
    out = tmp_path / "mix"
    arguments = ["--out", "mix", "--dtype", "uint32", "--tokenizer", str(tokenizer_dir)]
    succeed(python("train", "index", *map(str, npy_files), *arguments, cwd=tmp_path))
    corpus = open_source(out)
    assert isinstance(corpus, NpyCorpus)
    arrays = [np.fromfile(path, "<u4") for path in npy_files]
    assert corpus.manifest.tokens == sum(LENGTHS)
    chunks = [array[at : at + 16] for array in arrays for at in range(0, len(array) - 15, 16)]
    assert corpus.num_sequences(16) == len(chunks) == 10
    order = np.random.default_rng(1).permutation(10)
    rows = corpus.sequences(order, 16)
    assert np.array_equal(rows[:, :16], np.array(chunks)[order])
    assert (rows[:, 16] == 0).all()
    with pytest.raises(UserError, match="which have no hashes"):
        verify(out)
    with pytest.raises(UserError, match="shorten the sequence"):
        corpus.num_sequences(71)
    with pytest.raises(UserError, match="which are for training"):
        open_corpus(out)


OLMO_TOKENS = np.random.default_rng(3).integers(0, 50_280, 4096)
DOLMA2_TOKENS = np.random.default_rng(4).integers(0, 100_278, 4096)


@pytest.mark.parametrize(
    ("content", "dtype", "vocab_size", "words"),
    [
        (DOLMA2_TOKENS.astype("<u4"), "uint16", 100_278, "--dtype uint16 holds no token above"),
        (
            DOLMA2_TOKENS.astype("<u4"),
            "uint32",
            50_280,
            "as uint32, the tokenizer has tokens up to",
        ),
        (OLMO_TOKENS.astype("<u2"), "uint32", 50_280, "as uint32, the tokenizer has tokens up to"),
        (OLMO_TOKENS.astype("<u4"), "uint16", 50_280, "every second uint16 of .* is 0"),
        (OLMO_TOKENS.astype("<u8"), "uint16", 50_280, "every second uint16 of .* is 0"),
        (DOLMA2_TOKENS.astype("<u8"), "uint32", 100_278, "every second uint32 of .* is 0"),
        (
            DOLMA2_TOKENS.astype(">u4"),
            "uint32",
            100_278,
            "as uint32, the tokenizer has tokens up to",
        ),
        (np.full(64, 0x3C68, "<u2"), "uint16", 50_280, "holds text, no tokens"),
        (np.append(OLMO_TOKENS, 50_280).astype("<u2"), "uint16", 50_280, "holds 50,280 as uint16"),
    ],
)
def test_a_file_of_another_type_or_vocabulary_is_not_indexed(
    tmp_path, content, dtype, vocab_size, words
):
    """Trained on, each would be halves of tokens, or pairs of them."""
    content.tofile(tmp_path / "a.npy")
    with pytest.raises(UserError, match=words):
        indexed([tmp_path / "a.npy"], tmp_path / "mix", dtype=dtype, vocab_size=vocab_size)


@pytest.mark.parametrize(("dtype", "vocab_size"), [("<u2", 65_536), ("<u4", 65_537)])
def test_every_token_of_a_type_is_indexed(tmp_path, dtype, vocab_size):
    """Most halves of the tokens of a small vocabulary are zero, but not every second one."""
    tokens = np.concatenate([np.arange(256), np.zeros(4096), np.arange(vocab_size)])
    tokens.astype(dtype).tofile(tmp_path / "a.npy")
    manifest = indexed(
        [tmp_path / "a.npy"],
        tmp_path / "mix",
        dtype="uint16" if dtype == "<u2" else "uint32",
        vocab_size=vocab_size,
    )
    assert manifest.tokens == len(tokens)


def test_relative_paths_start_at_the_manifest(npy_files, tmp_path, monkeypatch):
    monkeypatch.chdir(npy_files[0].parent)
    manifest = indexed([Path(path.name) for path in npy_files], tmp_path / "a" / "mix")
    monkeypatch.chdir("/")
    corpus = open_source(tmp_path / "a" / "mix")
    assert corpus.num_sequences(16) == 10
    assert corpus.manifest.sha256 == manifest.sha256


def test_what_is_no_token_file_is_not_indexed(npy_files, tmp_path):
    with_header, odd = tmp_path / "header.npy", tmp_path / "odd.npy"
    np.save(with_header, np.arange(10, dtype=np.uint32))
    odd.write_bytes(b"12345")
    pointer, link = tmp_path / "pointer.npy", tmp_path / "link.npy"
    pointer.write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 9\n"
    )
    link.symlink_to(npy_files[0])
    for path, complaint in (
        (with_header, "NumPy header"),
        (odd, "correct --dtype"),
        (pointer, "is a Git LFS pointer"),
        (npy_files[0], "is given twice"),
        (link, "are one file; give every source once"),
        (tmp_path / "none.npy", "is not a file"),
        (tmp_path, "is not a file"),
    ):
        with pytest.raises(UserError, match=complaint):
            indexed([npy_files[0], path], tmp_path / "bad")
    (tmp_path / "made.bin").touch()
    for name, eos, complaint in (
        ("made", 0, "choose another --out"),
        ("bad", 300, "--eos 300 is outside"),
    ):
        with pytest.raises(UserError, match=complaint):
            indexed(npy_files, tmp_path / name, eos_token_id=eos)
    assert not list(tmp_path.glob("*.json"))


def test_a_trillion_tokens_are_opened_without_reading_them(tmp_path):
    """1,000 sparse files of 10^9 tokens: nothing grows with the tokens."""
    paths = [tmp_path / f"part-{number:04d}.npy" for number in range(1000)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(4 * 10**9)
    last = np.arange(1, 4097, dtype="<u4")
    per_file = 10**9 // 4096
    with paths[-1].open("r+b") as file:
        file.seek((per_file - 1) * 4096 * 4)
        file.write(last.tobytes())
    indexed(paths, tmp_path / "mix", vocab_size=100278)
    tracemalloc.start()
    corpus = open_source(tmp_path / "mix", verify_hashes=True)
    assert corpus.num_sequences(4096) == 1000 * per_file
    rows = corpus.sequences(np.array([1000 * per_file - 1, 5 * per_file]), 4096)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()
    assert np.array_equal(rows[0, :-1], last)
    assert (rows[1] == 0).all()


# Header of an index: magic of 9 bytes, version of 8, type of 1, two counts of 8; then the lengths.
DOCUMENTS, BOUNDS, FOURTH_LENGTH = 18, 26, 34 + 3 * 4


@pytest.mark.parametrize(
    "change",
    [
        (DOCUMENTS, "<Q", 2**62),
        (DOCUMENTS, "<Q", 10**6),
        (DOCUMENTS, "<Q", 0),
        (BOUNDS, "<Q", 2**63),
        (FOURTH_LENGTH, "<i", -5),
        (FOURTH_LENGTH, "<i", 2**31 - 1),
        *(slice(20), slice(0), slice(-500)),
    ],
)
def test_a_hostile_index_is_refused_in_one_line(tmp_path, train_prefix, change):
    """Another .idx, and a manifest whose hashes are right."""
    prefix = copy_corpus(train_prefix, tmp_path / "copy")
    index = Path(f"{prefix}.idx")
    content = bytearray(index.read_bytes())
    if isinstance(change, slice):
        content = content[change]
    else:
        offset, layout, value = change
        struct.pack_into(layout, content, offset, value)
    index.write_bytes(content)
    manifest = json.loads(Path(f"{prefix}.json").read_text())
    manifest["idx"] = record_file(index, "sha256").model_dump()
    reseal(Path(f"{prefix}.json"), manifest)
    with pytest.raises(UserError, match=r"\.idx .*make it again with") as refused:
        _ = open_corpus(prefix, verify_hashes=True).bounds_D
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_token_file_without_whole_tokens_is_refused(tmp_path, train_prefix, size):
    """As of a corpus that is too large to be hashed at every start."""
    prefix = tmp_path / "a"
    shutil.copy(f"{train_prefix}.idx", f"{prefix}.idx")
    Path(f"{prefix}.bin").write_bytes(bytes(size))
    manifest = open_corpus(train_prefix).manifest
    records = {name: record_file(Path(f"{prefix}.{name}"), "sha256") for name in ("bin", "idx")}
    with pytest.raises(UserError, match=rf"a\.bin has {size} bytes, no uint16 tokens; restore it"):
        _map_bin(prefix, manifest.model_copy(update=records))
