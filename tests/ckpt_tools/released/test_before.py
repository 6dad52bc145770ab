"""Refusals before weights are fetched: by the names of files and config.json alone."""

import pytest
from typer.testing import CliRunner

from base.errors import UserError
from ckpt_tools.__main__ import app
from ckpt_tools.importing import find_source
from ckpt_tools.released.before import check_revisions
from ckpt_tools.released.download import download
from dynamics.recipes.trajectory import Released, trajectory_of
from tests.ckpt_tools.released.fake_hub import REPO, config_json, model_files

REVISION = "stage1-step10000-tokens21B"
REMOTE = {"auto_map": {"AutoConfig": "configuration_olmo.OLMoConfig"}}
REFUSED = [
    ({"config.json": config_json("hf_olmo", **REMOTE)}, "'hf_olmo', code of its own"),
    ({"config.json": config_json("opensci", **REMOTE)}, "opensci without qk_layernorm"),
    ({"config.json": config_json("gpt2")}, "its type is 'gpt2'; give a model of olmo2, "),
    ({"config.json": config_json("llama", sliding_window=8)}, "llama with sliding_attention"),
    ({"config.json": config_json("olmo3", rope_theta=1e4)}, "rope_theta is 10000.0, but"),
    ({"config.json": config_json("llama", architectures=["Head"])}, "it is a Head"),
    ({"config.json": config_json("olmo2", rope_scaling=3)}, "measured: config.json: "),
    ({"config.json": config_json("llama", num_hidden_layers=10**12)}, "no model has 1,000,000,000"),
    ({"config.json": config_json("qwen3", num_hidden_layers=10**12)}, "no model has 1,000,000,000"),
    ({"config.json": config_json("olmo2", num_hidden_layers=0)}, "no model has 0 layers"),
    ({"config.json": b"[1]"}, "not a JSON object"),
    ({"config.json": b'{"model_type": []}'}, "its type is \\[]"),
    ({"config.json": config_json("olmo2", architectures={})}, "it is a {}"),
    ({"config.json": b"{" * 9}, "not valid JSON"),
    ({"config.json": None}, "has no config.json"),
    ({"model-00001-of-00002.safetensors": None, "model-00002-of-00002.safetensors": None,
      "pytorch_model.bin": None}, "no safetensors"),
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
    hub.revisions[REVISION]["config.json"] = config_json("gpt2")
    listed = CliRunner().invoke(app, ["download", REPO, "models", "--dry-run"])
    assert REVISION in listed.stdout
    assert "cannot be measured: its type is 'gpt2'" in str(listed.exception)


OPENSCI = {"qk_layernorm": True, "attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(
    "config",
    [
        config_json("olmo2", **REMOTE),
        config_json("olmo3"),
        config_json("mistral", sliding_window=8),
        config_json("opensci", **REMOTE, **OPENSCI),
        config_json("opensci", **OPENSCI, architectures=["OpenSciForCausalLM"]),
    ],
)
def test_what_can_be_measured(hub, config):
    """Code beside a model of a known type matters to none."""
    hub.revisions[REVISION]["config.json"] = config
    check_revisions(REPO, [REVISION])


PICKLED = {"weights.pt": b"a pickle", "config.json": config_json("gpt_neox")}
ROUTES = {
    "download": lambda out: download(REPO, out),
    "list": lambda out: run_command(["download", REPO, str(out), "--dry-run"]),
    "study": lambda _: trajectory_of(Released(source=REPO), smoke=False, on_text=False),
    "import": lambda _: find_source(f"{REPO}@{REVISION}"),
}


def run_command(arguments):
    outcome = CliRunner().invoke(app, arguments)
    raise outcome.exception or AssertionError(outcome.output)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("files", [PICKLED, {"config.json": config_json("gpt2")}, {}])
def test_of_a_revision_that_cannot_be_used_nothing_large_is_asked_for(
    serve, tmp_path, monkeypatch, route, files
):
    """By each way that fetches: the names of files are enough for pickles, else there is one
    config.json. With two revisions of the same configuration that is looked into once.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    weights = {} if files is PICKLED else {"model.safetensors": b"weights"}
    others = {"stage1-step20000-tokens42B": files | weights} if route != "import" else {}
    hub = serve({REVISION: files | weights} | others)
    with pytest.raises(UserError, match=r"no safetensors|'gpt2'|is of Unknown|no config\.json"):
        ROUTES[route](tmp_path / "models")
    fetched = [path for path in hub.asked if "/resolve/" in path]
    assert {path.rpartition("/")[2] for path in fetched} <= {"config.json"}
    # once for its hash and once for its content
    assert len(fetched) <= (2 if "config.json" in files and files is not PICKLED else 0)
    assert not (tmp_path / "models").exists()


def test_what_cannot_be_imported_is_refused_before_its_weights(hub, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub.revisions[REVISION]["config.json"] = config_json("apertus")
    with pytest.raises(UserError, match="is of ApertusForCausalLM; give one of"):
        find_source(f"{REPO}@{REVISION}")
    assert {name for _, name in hub.got} == {"config.json"}
