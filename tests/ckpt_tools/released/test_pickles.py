"""Pickled weights: converted bit for bit as they are fetched; nothing of a pickle is run."""

import errno
import hashlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from base.errors import UserError
from base.reading import read_sealed
from ckpt_tools.__main__ import app
from ckpt_tools.formats.weight_files import pickles_of
from ckpt_tools.hf.forward import stream_logits
from ckpt_tools.released import pickles
from ckpt_tools.released.download import download
from tests.ckpt_tools.released.fake_hub import REPO
from tests.quant_eval.models import random_model
from tests.runs import environment
from tests.waiting import HANG_SECONDS

REVISION = "stage1-step10000-tokens21B"
SHARDS = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
CONVERTED = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


def saved(content: object, **options) -> bytes:
    """Bytes of torch.save."""
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def sharded(model) -> dict[str, bytes]:
    """A model's files, its weights in two pickles of several dtypes."""
    weights = dict(model.state_dict())
    names = sorted(weights)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    files = {
        shard: saved({name: weights[name] for name in half})
        for shard, half in zip(SHARDS, halves, strict=True)
    }
    weight_map = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    return files | {
        "pytorch_model.bin.index.json": json.dumps({"weight_map": weight_map}).encode(),
        "config.json": model.config.to_json_string(use_diff=False).encode(),
        "tokenizer.json": b"{}",
    }


@pytest.fixture
def model(tmp_path_factory):
    """A small llama in bfloat16, as transformers reads it from safetensors."""
    directory = tmp_path_factory.mktemp("published")
    made = random_model("llama").to(torch.bfloat16)
    made.save_pretrained(directory)
    return load(directory)


def load(directory: Path):
    """The model of a directory, by transformers."""
    return AutoModelForCausalLM.from_pretrained(
        directory, use_safetensors=True, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, bytes(tensor.contiguous().reshape(-1).view(torch.uint8))


def read(directory: Path) -> dict[str, Tensor]:
    """Every tensor of every safetensors file."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def check(directory: Path, model, files: dict[str, bytes]) -> None:
    """The model's weights bit for bit, its logits, no pickle, and a record that says so."""
    made = {path.relative_to(directory).as_posix() for path in directory.rglob("*")}
    others = {"config.json", "tokenizer.json", "download.json", "model.safetensors.index.json"}
    assert made == {*CONVERTED, *others}
    expected = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    assert {name: bits(tensor) for name, tensor in read(directory).items()} == expected

    record = read_sealed(directory / "download.json", "")
    assert set(record["files"]) == made - {"download.json"}
    for name, shard in zip(CONVERTED, SHARDS, strict=True):
        digest = f"sha256:{hashlib.sha256(files[shard]).hexdigest()}"
        assert record["converted"][name] == {
            "pickle": shard,
            "record": {"bytes": len(files[shard]), "digest": digest},
            "left_out": [],
            "torch": torch.__version__,
        }

    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in model.state_dict().values()
    )
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(load(directory)(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("origin", ["hub", "directory"])
def test_shards_are_converted_bit_for_bit(serve, model, tmp_path, origin):
    files = sharded(model)
    hub = serve({REVISION: files})
    source = hub.lay_out(tmp_path / "OLMo-2-0425-1B")
    place = REPO if origin == "hub" else str(source)
    download(place, tmp_path / "models", revisions=[REVISION])
    check(tmp_path / "models" / REVISION, model, files)
    for name, content in files.items():
        assert (source / REVISION / name).read_bytes() == content, "the source is left as it is"
    asked = len(hub.got)
    download(place, tmp_path / "models", revisions=[REVISION])
    assert len(hub.got) == asked

    copies = tmp_path / "copies"
    download(str(tmp_path / "models"), copies, revisions=[REVISION])
    check(copies / REVISION, model, files)


def test_a_look_before_says_that_they_will_be_converted(serve, model):
    hub = serve({REVISION: sharded(model)})
    listed = CliRunner().invoke(app, ["download", REPO, "models", "--dry-run"])
    assert listed.exit_code == 0
    assert f"weights of {REVISION} are pickles: they will be converted" in listed.stdout
    assert {name for _, name in hub.got} == {"config.json"}


class Trap:
    """Pickled, it makes a file when it is opened."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self):
        return os.system, (f"touch {self.sprung}",)


def compressed(content: bytes) -> bytes:
    """A file of torch.save whose first tensor is deflated."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as stored, zipfile.ZipFile(file, "w") as archive:
        for name in stored.namelist():
            method = zipfile.ZIP_DEFLATED if name.endswith("data/0") else zipfile.ZIP_STORED
            archive.writestr(name, stored.read(name), method)
    return file.getvalue()


REFUSED = {
    "a call": lambda sprung: saved({"lm_head.weight": torch.zeros(3), "x": Trap(sprung)}),
    "a bare call": lambda sprung: pickle.dumps(Trap(sprung)),
    "an old file": lambda _: saved({"w": torch.zeros(3)}, _use_new_zipfile_serialization=False),
    "no tensor": lambda _: saved({"step": 3}),
    "within": lambda _: saved({"state_dict": {"w": torch.zeros(3)}}),
    "no names": lambda _: saved([torch.zeros(3)]),
    "sparse": lambda _: saved({"w": torch.eye(3).to_sparse()}),
    "without memory": lambda _: saved({"w": torch.zeros(3, device="meta")}),
    "of any size": lambda _: saved({"w": torch.zeros(1).expand(1 << 40)}),
    "negated as it is read": lambda _: saved({"w": torch.ones(3, dtype=torch.cfloat).conj().imag}),
    "compressed": lambda _: compressed(saved({"w": torch.zeros(3000), "v": torch.rand(30000)})),
    "torn": lambda _: saved({"w": torch.zeros(3000)})[:-500],
}


@pytest.mark.parametrize("origin", ["hub", "directory"])
@pytest.mark.parametrize("kind", REFUSED)
def test_more_than_tensors_is_refused_and_nothing_is_run_or_left(
    serve, model, tmp_path, origin, kind
):
    sprung = tmp_path / "sprung"
    files = sharded(model) | {SHARDS[1]: REFUSED[kind](sprung)}
    source = serve({REVISION: files}).lay_out(tmp_path / "OLMo-2-0425-1B")
    into = tmp_path / "models"
    with pytest.raises(UserError, match=SHARDS[1]) as refused:
        download(REPO if origin == "hub" else str(source), into, revisions=[REVISION])
    assert "\n" not in str(refused.value)
    assert "nothing of it was run" in str(refused.value)
    assert not sprung.exists()
    assert list(into.iterdir()) == []
    if kind == "a bare call":
        pickle.loads(files[SHARDS[1]])  # made above: shows that the trap works
        assert sprung.exists()


def test_a_pickle_of_other_bytes_is_not_opened(serve, model, tmp_path):
    """By the hash that the hub states; what was converted before it is not fetched again."""
    files = sharded(model)
    hub = serve({REVISION: files})
    hub.corrupted = SHARDS[1]
    with pytest.raises(UserError, match="other bytes than the hub says"):
        download(REPO, tmp_path / "models", revisions=[REVISION])
    assert not (tmp_path / "models" / REVISION / CONVERTED[1]).exists()
    hub.corrupted = None
    download(REPO, tmp_path / "models", revisions=[REVISION])
    check(tmp_path / "models" / REVISION, model, files)
    assert hub.got.count((REVISION, SHARDS[0])) == 1


@pytest.mark.parametrize("disk", ["does not answer", "is full"])
def test_a_disk_says_nothing_of_a_pickle(serve, model, tmp_path, monkeypatch, disk):
    """The next attempt resumes with what was fetched and converted."""
    files = sharded(model)
    hub = serve({REVISION: files})
    opened, written = torch.load, save_file

    def load_failing(path: Path, **options):
        if path.name == SHARDS[1]:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, **options)

    def save_failing(tensors, path: Path, metadata):
        if path.name == CONVERTED[1]:
            raise SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            )
        written(tensors, path, metadata)

    with monkeypatch.context() as patch:
        if disk == "is full":
            patch.setattr(pickles, "save_file", save_failing)
        else:
            patch.setattr(torch, "load", load_failing)
        with pytest.raises(OSError, match=r"Input/output error|No space left"):
            download(REPO, tmp_path / "models", revisions=[REVISION])
    download(REPO, tmp_path / "models", revisions=[REVISION])
    check(tmp_path / "models" / REVISION, model, files)
    assert all(hub.got.count((REVISION, shard)) == 1 for shard in SHARDS)


KILLED = """
import os, signal, sys
import ckpt_tools.released.pickles as pickles
from ckpt_tools.released.download import download
from pathlib import Path

def killed(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def last(function, number):
    calls = []
    def counted(*args, **kwargs):
        calls.append(0)
        return killed() if len(calls) == number else function(*args, **kwargs)
    return counted

import ckpt_tools.released.download as module
place, number, repo, into, revision = sys.argv[1:]
owner, name = {
    "before the rename": (pickles, "_verify"),
    "after it": (module, "write_sealed"),
    "before the index": (pickles, "write_index"),
}[place]
setattr(owner, name, last(getattr(owner, name), int(number)))
download(repo, Path(into), revisions=[revision])
"""


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("before the rename", 2),
        *(
            pytest.param(*case, marks=pytest.mark.stress)  # 10 s each, of imports
            for case in (
                ("before the rename", 1),
                ("after it", 1),  # the note of the first shard
                ("after it", 2),
                ("before the index", 1),
                ("after it", 3),  # download.json
            )
        ),
    ],
)
def test_a_killed_conversion_goes_on(serve, model, tmp_path, place, number):
    """SIGKILL: every shard is there as a pickle or as safetensors, and there is no record."""
    files = sharded(model)
    hub = serve({REVISION: files})
    into = tmp_path / "models"
    command = [sys.executable, "-c", KILLED, place, str(number), REPO, str(into), REVISION]
    variables = environment() | {"HF_ENDPOINT": hub.endpoint}
    process = subprocess.run(
        command, env=variables, timeout=HANG_SECONDS, capture_output=True, check=False
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    directory = into / REVISION
    assert not (directory / "download.json").exists()
    fetched = {name for _, name in hub.got if name in SHARDS}
    for pickled, name in zip(SHARDS, CONVERTED, strict=True):
        assert (
            pickled not in fetched or (directory / pickled).exists() or (directory / name).exists()
        )
    download(REPO, into, revisions=[REVISION])
    check(directory, model, files)
    assert all(hub.got.count((REVISION, shard)) == 1 for shard in SHARDS)
    assert [path.name for path in into.iterdir()] == [REVISION]


def test_damage_after_a_conversion_is_repaired_by_that_shard_alone(serve, model, tmp_path):
    files = sharded(model)
    hub = serve({REVISION: files})
    download(REPO, tmp_path / "models", revisions=[REVISION])
    (tmp_path / "models" / REVISION / CONVERTED[1]).unlink()
    download(REPO, tmp_path / "models", revisions=[REVISION])
    check(tmp_path / "models" / REVISION, model, files)
    assert [hub.got.count((REVISION, shard)) for shard in SHARDS] == [1, 2]


@pytest.mark.parametrize("ties", [True, False])
def test_tensors_that_share_memory(serve, tmp_path, ties):
    """The head of a tied model is left out; other shared tensors become two, views their part."""
    model = random_model("llama-tied" if ties else "llama")
    model.config.architectures = ["LlamaForCausalLM"]
    weights = dict(model.state_dict())
    if not ties:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_state_dict(weights)
    fused = torch.stack(
        [weights[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("up", "gate")]
    )
    weights["model.layers.0.mlp.up_proj.weight"] = fused[0]
    weights["model.layers.0.mlp.gate_proj.weight"] = fused[1]
    down = "model.layers.0.mlp.down_proj.weight"
    weights[down] = weights[down].T.contiguous().T
    files = {
        "pytorch_model.bin": saved(weights),
        "config.json": model.config.to_json_string(use_diff=False).encode(),
    }
    serve({REVISION: files})
    download(REPO, tmp_path, revisions=[REVISION])
    directory = tmp_path / REVISION
    assert {path.name for path in directory.iterdir()} == {
        *("model.safetensors", "config.json", "download.json")
    }
    head = {"lm_head.weight"} if ties else set()
    written = read(directory)
    assert {name: bits(tensor) for name, tensor in written.items()} == {
        name: bits(tensor) for name, tensor in weights.items() if name not in head
    }
    record = read_sealed(directory / "download.json", "")
    assert record["converted"]["model.safetensors"]["left_out"] == sorted(head)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(stream_logits(directory, tokens), expected, rtol=1e-5, atol=1e-5)


def two_of_a_name(files: dict[str, bytes]) -> None:
    del files["pytorch_model.bin.index.json"]
    files[SHARDS[1]] = files[SHARDS[0]]


def another_index(files: dict[str, bytes]) -> None:
    files["pytorch_model.bin.index.json"] = json.dumps({"weight_map": {"w": SHARDS[0]}}).encode()


@pytest.mark.parametrize(
    ("change", "reason"), [(two_of_a_name, "is in two shards"), (another_index, "does not fit")]
)
def test_shards_that_do_not_fit_together(serve, model, tmp_path, change, reason):
    files = sharded(model)
    change(files)
    serve({REVISION: files})
    with pytest.raises(UserError, match=reason):
        download(REPO, tmp_path / "models", revisions=[REVISION])
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (SHARDS, SHARDS),
        ([*SHARDS, "model.safetensors"], []),
        (["a/pytorch_model.bin", "model.pt", "model.ckpt", "training_args.bin"], []),
        (["pytorch_model.bin", "README.md"], ["pytorch_model.bin"]),
        (SHARDS[:1], None),
        ([*SHARDS, "pytorch_model.bin"], None),
        ([*SHARDS, "pytorch_model-00003-of-00003.bin"], None),
    ],
)
def test_pickles_are_known_by_their_names(names, found):
    if found is not None:
        assert pickles_of("x", names) == found
        return
    with pytest.raises(UserError, match="not all shards of one model"):
        pickles_of("x", names)
