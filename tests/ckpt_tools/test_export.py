"""Exports: exact at every layout, proven by logits, and refused where anything is wrong."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoModelForCausalLM, AutoTokenizer

from base.digests import digest_of
from base.errors import UserError
from base.files import record_files, write_json
from base.frozen import fingerprint
from ckpt_tools.__main__ import app
from ckpt_tools.export import export
from ckpt_tools.hf.directory import CONFIGURATION_FILES
from ckpt_tools.hf.model import identify
from ckpt_tools.verify import verify
from tests.ckpt_tools.checkpoints import seal
from tests.conftest import LAYOUTS, layouts
from tests.runs import called, error_line, python
from tests.sealing import flip_digit, reseal
from train.run.config import dump_run, load_run
from train.run.directory import CHECKPOINT_JSON


@pytest.fixture(scope="session")
def exported(trained, tmp_path_factory):
    """`exported(layout, step)`: the HF directory of that checkpoint."""
    root = tmp_path_factory.mktemp("hf")

    def directory_of(layout, step):
        out = root / layout / f"step{step}"
        export(trained(layout) / "checkpoints" / f"step{step:08d}", out)
        return out

    return directory_of


@pytest.mark.parametrize(
    "layout", layouts(*(name for name in LAYOUTS if not name.startswith("bf16")))
)
def test_logits_equal_those_of_the_engine(exported, trained, layout):
    """Once more with transformers alone and eager attention; trained norms are not 1."""
    checkpoint = trained(layout) / "checkpoints" / "step00000020"
    model = AutoModelForCausalLM.from_pretrained(exported(layout, 20), attn_implementation="eager")
    probe = load_file(checkpoint / "probe.safetensors")
    assert probe["logits"].std() > 0.1
    norms = [weight for name, weight in model.named_parameters() if "norm" in name]
    assert min((weight - 1).abs().max().item() for weight in norms) > 1e-3
    with torch.no_grad():
        assert (model(probe["input_ids"]).logits - probe["logits"]).abs().max() <= 1e-5


def test_weights_are_bit_equal_across_layouts_and_engines(exported):
    """Neither initialisation nor what is between shards and HF files depends on the layout."""
    for reference, others in (
        ("dp1", ("dp2", "tp2", "pp2", "tp2pp2", "ds-zero1")),
        ("gqa-dp1", ("gqa-tp2",)),
    ):
        expected = load_file(exported(reference, 0) / "model.safetensors")
        for layout in others:
            weights = load_file(exported(layout, 0) / "model.safetensors")
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], expected[name]) for name in expected), layout


def test_a_run_in_fp8_is_exported_as_the_bf16_weights_that_it_keeps(trained, exported, tmp_path):
    """Its checkpoint is that of a bf16 run, for it has bf16 weights and a probe without fp8."""
    run = tmp_path / "run"
    shutil.copytree(trained("bf16-dp1"), run)
    config = load_run(run / "run.json").model_copy(
        update={"precision": "fp8", "kernels": "transformer_engine"}
    )
    write_json(run / "run.json", dump_run(config))
    checkpoint = run / "checkpoints/step00000020"
    record = json.loads((checkpoint / CHECKPOINT_JSON).read_text())
    record |= {"precision": "fp8", "fingerprint": fingerprint(config)}
    reseal(checkpoint / CHECKPOINT_JSON, record)

    parity = export(checkpoint, tmp_path / "hf")
    assert parity["precision"] == "bf16"
    lineage = json.loads((tmp_path / "hf/lineage.json").read_text())
    assert (lineage["precision"], lineage["dtype"]) == ("fp8", "bf16")
    expected = exported("bf16-dp1", 20) / "model.safetensors"
    assert (tmp_path / "hf/model.safetensors").read_bytes() == expected.read_bytes()


def test_the_directory_is_complete(exported, trained):
    out = exported("dp1", 20)
    lineage = json.loads((out / "lineage.json").read_text())
    assert lineage["step"] == 20
    assert lineage["tokens"] == 20 * 8 * 32
    assert lineage["parity"]["max_absolute_error"] <= 1e-5
    written = {"model.safetensors", *CONFIGURATION_FILES, "tokenizer.json"}
    assert written <= lineage["files"].keys()
    tokenizer = AutoTokenizer.from_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    assert tokenizer.eos_token_id == config["eos_token_id"] == 0
    assert tokenizer.decode(tokenizer("some text")["input_ids"]) == "some text"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["torch_dtype"] == config["dtype"] == "float32"


def test_a_second_export_changes_nothing_and_another_checkpoint_replaces_it(trained, tmp_path):
    checkpoints, out = trained("dp1") / "checkpoints", tmp_path / "hf"
    export(checkpoints / "step00000010", out)
    (out / "quant").mkdir()
    before = (out / "lineage.json").read_bytes()
    export(checkpoints / "step00000010", out)
    assert (out / "lineage.json").read_bytes() == before
    assert (out / "quant").exists()
    export(checkpoints / "step00000020", out)
    assert json.loads((out / "lineage.json").read_text())["step"] == 20
    assert not (out / "quant").exists(), "measurements of another checkpoint must not stay"


def test_a_damaged_export_is_put_right_and_what_was_measured_stays(exported, trained, tmp_path):
    """Only what is damaged is replaced: steps that read lineage.json find it as it was."""
    checkpoint = trained("dp1") / "checkpoints" / "step00000020"
    out = shutil.copytree(exported("dp1", 20), tmp_path / "hf")
    (out / "quant").mkdir()
    before = {name: record.digest for name, record in record_files(out).items()}

    def is_as_before() -> bool:
        present = {name: record.digest for name, record in record_files(out).items()}
        return present == before and (out / "quant").is_dir()

    (out / "model.safetensors").unlink()
    shutil.rmtree(out / "verification")
    (out / "config.json").write_text("{}")
    export(checkpoint, out)
    assert is_as_before()

    # a changed or missing lineage.json: written anew, over the same files
    flip_digit(out / "lineage.json", "learning_rate")
    with pytest.raises(
        UserError, match=r"lineage\.json was changed .* 'python -m ckpt_tools export'"
    ):
        identify(out)
    for damage in (lambda: None, (out / "lineage.json").unlink):
        damage()
        export(checkpoint, out)
        del before["lineage.json"]
        assert verify(out)["parity"]
        before["lineage.json"] = digest_of(out / "lineage.json")
        assert is_as_before()

    # what is another model's, or damaged twice, is not replaced
    flip_digit(out / "lineage.json", "step")
    with pytest.raises(UserError, match=r"lineage\.json is missing or was changed, and .*move"):
        export(checkpoint.with_name("step00000010"), out)
    assert (out / "quant").is_dir()


def test_several_checkpoints_go_under_their_own_names(trained, exported, tmp_path, monkeypatch):
    """The last is given as the directory that one is in."""
    checkpoints = trained("dp1") / "checkpoints"
    monkeypatch.chdir(checkpoints / "step00000020")
    given = [checkpoints / "step00000010", "."]
    assert called(app, "ckpt_tools", "export", *given, "--into", tmp_path / "hf") == 0
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"step00000010", "step00000020"}
    for step in (10, 20):
        weights = tmp_path / "hf" / f"step{step:08d}" / "model.safetensors"
        assert weights.read_bytes() == (exported("dp1", step) / "model.safetensors").read_bytes()


@pytest.fixture
def copy(trained, tmp_path):
    """A run directory of one's own to damage."""
    shutil.copytree(trained("dp1"), tmp_path / "run")
    return tmp_path / "run"


def refuse(copy, expected):
    """Damage of any file is refused too: formats/test_weights.py."""
    out = copy / "hf" / "step00000020"
    done = python("ckpt_tools", "export", str(copy / "checkpoints" / "step00000020"), str(out))
    assert expected in error_line(done)
    assert not out.exists()
    assert not out.parent.exists() or list(out.parent.iterdir()) == []


def test_a_checkpoint_without_its_record_is_refused(copy):
    (copy / "checkpoints" / "step00000020" / CHECKPOINT_JSON).unlink()
    refuse(copy, "not a complete checkpoint")


def rewrite_shards(checkpoint, change):
    """Stores the checkpoint again with a changed set of tensors, under a valid seal."""
    reader = FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(tuple(value.size))
        for key, value in stored.items()
        if hasattr(value, "size")
    }
    load(state, storage_reader=reader, no_dist=True)
    change(state)
    for path in [*checkpoint.glob("*.distcp"), checkpoint / ".metadata"]:
        path.unlink()
    save(state, storage_writer=FileSystemWriter(checkpoint), no_dist=True)
    seal(checkpoint)


Q_NORM = "decoder.layers.self_attention.q_layernorm.weight"
FIRST_Q_NORM = Q_NORM.replace("layers.", "layers.0.")


def drop_optimizer(state):
    for key in [key for key in state if key.startswith("optimizer.")]:
        state.pop(key)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda state: state.pop(Q_NORM), f"missing ['{FIRST_Q_NORM}', "),
        (lambda state: state.update(extra=torch.ones(3)), "unknown ['extra']"),
        (lambda state: state.update({Q_NORM: torch.ones(4, 7)}), "is (7,), the model needs (32,)"),
        (
            lambda state: state[Q_NORM].mul_(1.01),
            "not what was trained: model.layers.0.self_attn.q_norm.weight;",
        ),
    ],
    ids=["missing", "extra", "shape", "value"],
)
def test_wrong_keys_and_wrong_weights_are_refused(copy, change, expected):
    rewrite_shards(copy / "checkpoints" / "step00000020", change)
    refuse(copy, expected)


def test_an_average_needs_no_optimizer_and_lists_its_ingredients(copy, exported, tmp_path):
    """Weights alone are exported too; both ways of naming the output take its name."""
    checkpoint = (copy / "checkpoints" / "step00000020").rename(
        copy / "checkpoints" / "lawa3x5-step00000020"
    )
    rewrite_shards(checkpoint, drop_optimizer)
    average = {"kind": "lawa", "interval_steps": 5, "window": 3, "steps": [10, 15, 20]}
    seal(checkpoint, average=average)
    done = python("ckpt_tools", "export", str(checkpoint), "--into", str(copy / "hf"))
    assert done.returncode == 0, done.stderr
    export(checkpoint, tmp_path / "one")
    expected = (exported("dp1", 20) / "model.safetensors").read_bytes()
    for out in (copy / "hf" / "lawa3x5-step00000020", tmp_path / "one"):
        assert (out / "model.safetensors").read_bytes() == expected
        lineage = identify(out)["lineage"]
        assert lineage["average"] == average
        assert (lineage["kind"], lineage["step"]) == ("export", 20)


@pytest.mark.parametrize(
    "change", [lambda state: state.pop(Q_NORM), lambda state: state.update(extra=torch.ones(3))]
)
def test_training_does_not_go_on_from_wrong_keys(copy, change):
    """Hashes are valid: only the keys can tell, and mcore would load them by default."""
    rewrite_shards(copy / "checkpoints" / "step00000020", change)
    line = error_line(python("train", "run", str(copy)))
    assert "does not fit the model of run.json" in line


def test_an_existing_directory_that_is_no_export_is_kept(copy):
    out = copy / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("keep")
    done = python("ckpt_tools", "export", str(copy / "checkpoints" / "step00000020"), str(out))
    assert "exists and is not an export" in error_line(done)
    assert (out / "notes.txt").read_text() == "keep"
