"""A tokenizer from a hub that answers on this machine."""

import json

import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from ckpt_tools.released.tokenizer import fetch_tokenizer
from tests.ckpt_tools.released.fake_hub import REPO, FakeHub, model_files
from train.command import UserError
from train.tokenizer import load_tokenizer

TOKENIZER = Tokenizer(WordLevel({"a": 0, "<eos>": 1}, unk_token="a")).to_str().encode()
CONFIG = json.dumps({"eos_token": "<eos>"}).encode()


@pytest.fixture
def hub(monkeypatch):
    server = FakeHub({"main": model_files(0) | {"tokenizer.json": TOKENIZER, "tokenizer_config.json": CONFIG}})
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + template[template.index("/{") :])
    yield server
    server.shutdown()
    server.server_close()


def test_only_the_tokenizer_comes_and_only_once(hub, tmp_path):
    out = tmp_path / "tokenizer"
    for _ in range(2):
        fetch_tokenizer(REPO, out)
    assert {path.name for path in out.iterdir()} == {"tokenizer.json", "tokenizer_config.json", "merges.txt"}
    assert (out / "tokenizer.json").read_bytes() == TOKENIZER
    assert load_tokenizer(out)[1] == 1
    assert sorted(name for _, name in hub.got) == ["merges.txt", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"tokenizer.json": b"{}"}, "damaged"), ({"tokenizer_config.json": b"{}"}, "names no eos_token")],
)
def test_what_is_no_tokenizer_is_refused_and_leaves_nothing(hub, tmp_path, changed, reason):
    hub.revisions["main"] |= changed
    with pytest.raises(UserError, match=reason):
        fetch_tokenizer(REPO, tmp_path / "tokenizer")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="not on the hub"):
        fetch_tokenizer("nobody/nothing", tmp_path / "tokenizer")


def test_another_directory_is_not_replaced(hub, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(UserError, match="remove it or give another"):
        fetch_tokenizer(REPO, tmp_path / "mine")
    assert hub.got == []
