"""Refusals before weights are fetched: by the names of files and config.json alone."""

import pytest
from typer.testing import CliRunner

from base.errors import UserError
from ckpt_tools.__main__ import app
from ckpt_tools.importing import find_source
from ckpt_tools.released.before import check_revisions
from ckpt_tools.released.download import download
from tests.ckpt_tools.released.fake_hub import REPO, config_json, model_files

REVISION = "stage1-step10000-tokens21B"
REMOTE = {"auto_map": {"AutoConfig": "configuration_olmo.OLMoConfig"}}
REFUSED = [
    ({"config.json": config_json("hf_olmo", **REMOTE)}, "'hf_olmo', code of its own"),
    ({"config.json": config_json("opensci", **REMOTE)}, "'opensci', code of its own"),
    ({"config.json": config_json("olmo3")}, "its type is 'olmo3'; give a model of olmo2, "),
    ({"config.json": config_json("mistral", sliding_window=8)}, "with sliding windows"),
    ({"config.json": config_json("llama", architectures=["Head"])}, "it is a Head"),
    ({"config.json": config_json("olmo2", rope_scaling=3)}, "config.json of"),
    ({"config.json": b"[1]"}, "not a JSON object"),
    ({"config.json": b"{" * 9}, "not valid JSON"),
    ({"config.json": None}, "has no config.json"),
    ({"model-00001-of-00002.safetensors": None, "model-00002-of-00002.safetensors": None},
     "no safetensors"),
]  # fmt: skip


@pytest.fixture
def hub(serve, request):
    """A hub of one revision, with files changed or missing."""
    changed = model_files(0) | getattr(request, "param", {})
    return serve({REVISION: {name: data for name, data in changed.items() if data is not None}})


@pytest.mark.parametrize(("hub", "reason"), REFUSED, indirect=["hub"])
@pytest.mark.parametrize("origin", ["hub", "directory"])
def test_what_cannot_be_measured(hub, tmp_path, origin, reason):
    place = REPO if origin == "hub" else str(hub.lay_out(tmp_path / "OLMo-2-0425-1B"))
    for refuse in (
        lambda: check_revisions(place, [REVISION]),
        lambda: download(place, tmp_path / "models"),
    ):
        with pytest.raises(UserError, match=reason) as refused:
            refuse()
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "models").exists()
    assert {name for _, name in hub.got} <= {"config.json"}


def test_a_look_before_the_download_says_so_too(hub):
    """Listed all the same, then refused."""
    hub.revisions[REVISION]["config.json"] = config_json("olmo3")
    listed = CliRunner().invoke(app, ["download", REPO, "models", "--dry-run"])
    assert REVISION in listed.stdout
    assert "cannot be measured: its type is 'olmo3'" in str(listed.exception)


def test_code_beside_a_model_of_a_known_type_matters_to_none(hub, tmp_path):
    hub.revisions[REVISION]["config.json"] = config_json("olmo2", **REMOTE)
    check_revisions(REPO, [REVISION])


def test_what_cannot_be_imported_is_refused_before_its_weights(hub, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub.revisions[REVISION]["config.json"] = config_json("apertus")
    with pytest.raises(UserError, match="is of ApertusForCausalLM; give one of"):
        find_source(f"{REPO}@{REVISION}")
    assert {name for _, name in hub.got} == {"config.json"}
