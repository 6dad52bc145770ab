"""A tokenizer from a hub that answers on this machine."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from base.errors import UserError
from ckpt_tools.released.download import fetch_tokenizer
from tests.ckpt_tools.released.fake_hub import REPO, model_files
from train.data.tokenizer import load_tokenizer

TOKENIZER = Tokenizer(WordLevel({"a": 0, "<eos>": 1}, unk_token="a")).to_str().encode()
CONFIG = json.dumps({"eos_token": "<eos>"}).encode()

FILES = ["merges.txt", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture
def hub(serve):
    files = {"tokenizer.json": TOKENIZER, "tokenizer_config.json": CONFIG}
    return serve({"main": model_files(0) | files})


def test_only_the_tokenizer_comes_and_only_once(hub, tmp_path):
    out = tmp_path / "tokenizer"
    for _ in range(2):
        fetch_tokenizer(REPO, out)
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert (out / "tokenizer.json").read_bytes() == TOKENIZER
    assert load_tokenizer(out)[1] == 1
    assert sorted(name for _, name in hub.got) == FILES


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"tokenizer.json": b"{}"}, "damaged"),
        ({"tokenizer_config.json": b"{}"}, "names no eos_token"),
    ],
)
def test_what_is_no_tokenizer_is_refused_and_leaves_nothing(hub, tmp_path, changed, reason):
    hub.revisions["main"] |= changed
    with pytest.raises(UserError, match=reason):
        fetch_tokenizer(REPO, tmp_path / "tokenizer")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="not on the hub"):
        fetch_tokenizer("nobody/nothing", tmp_path / "tokenizer")


def test_another_directory_is_not_replaced(hub, tmp_path, tokenizer_dir):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for source in (REPO, str(tokenizer_dir)):
        with pytest.raises(UserError, match="holds more than a tokenizer"):
            fetch_tokenizer(source, tmp_path / "mine")
    assert hub.got == []
    assert (tmp_path / "mine" / "file").exists()


def test_a_directory_is_copied_and_followed(tmp_path, tokenizer_dir):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((tokenizer_dir / name).read_bytes())
    (source / "model.safetensors").touch()  # weights stay
    for appended in ("", "\n"):
        (source / "tokenizer.json").write_text((source / "tokenizer.json").read_text() + appended)
        fetch_tokenizer(str(source), out)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == {
            name: (source / name).read_bytes()
            for name in ("tokenizer.json", "tokenizer_config.json")
        }
