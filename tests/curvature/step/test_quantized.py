"""The step of `quant_eval run --dense` from files, and what must not pass for it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from base.errors import UserError
from base.files import sha256_of
from base.ranks import ALONE
from curvature.step.quantized import read_step
from quant_eval.measuring.measurement import measure
from quant_eval.specs import parse_spec
from tests.conftest import make_hf_directory
from tests.curvature.conftest import command
from tests.digests import blake3_of
from tests.quant_eval.models import run_settings
from tests.sealing import edited, reseal
from tests.train.trajectories import flip_a_byte

SPEC = parse_spec("rtn-b3-g32")
BLOCK, DENSE = "dense/block00001.safetensors", "dense/dense.json"


@pytest.fixture(scope="module")
def measured(tmp_path_factory, train_prefix, held_out_prefix):
    """Bases in fp32 and bf16, each with a result in every dtype that it was measured in."""
    root = tmp_path_factory.mktemp("step")
    for base_dtype, dtypes in {"fp32": ("fp32", "bf16"), "bf16": ("fp32", "bf16")}.items():
        base = make_hf_directory(
            root / base_dtype, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[base_dtype]
        )
        for dtype in dtypes:
            out = root / f"{base_dtype}-{dtype}"
            settings = run_settings(
                train_prefix,
                held_out_prefix,
                calibration_sequences=8,
                eval_tokens=5000,
                dtype=dtype,
                per_block=base_dtype == dtype == "fp32",
                dense=True,
            )
            (result,) = measure(base, (SPEC,), (out,), settings, ALONE)
            reseal(out / "result.json", result)
    return root


@pytest.fixture
def place(measured, tmp_path):
    """A base and its result, to be damaged."""
    shutil.copytree(measured / "fp32", tmp_path / "base")
    shutil.copytree(measured / "fp32-fp32", tmp_path / "result")
    return tmp_path


@pytest.mark.parametrize("case", ["fp32-fp32", "bf16-bf16", "bf16-fp32"])
def test_the_step_leads_from_the_base_to_the_kept_weights(measured, case):
    base = load_file(measured / case.split("-")[0] / "model.safetensors")
    step = read_step(measured / case.split("-")[0], measured / case)
    kept = {
        k: v
        for path in sorted((measured / case / "dense").glob("*.safetensors"))
        for k, v in load_file(path).items()
    }
    assert list(step.quantized) == list(kept)
    assert len(kept) == 2 * 7
    for name, tensor in base.items():
        delta = step.delta(name)
        if name not in kept:
            assert delta is None
            continue
        assert delta is not None
        assert delta.dtype == torch.float32
        assert torch.equal(
            delta, torch.from_numpy(kept[name].float().numpy() - tensor.float().numpy())
        )


def test_what_was_measured_comes_along(measured):
    step = read_step(measured / "fp32", measured / "fp32-fp32")
    written = json.loads((measured / "fp32-fp32" / "result.json").read_text())["measured"]
    assert step.spec == "rtn-b3-g32"
    for figure in ("cross_entropy", "cross_entropy_quantized", "absolute_error"):
        assert step.measured[figure] == written[figure]
    assert step.measured["interval"] == written["intervals"]["absolute_error"]
    for block, (read, entry) in enumerate(
        zip(step.measured["blocks"], written["blocks"], strict=True)
    ):
        assert read == {
            "block": block,
            "absolute_error": entry["alone"]["absolute_error"],
            "interval": entry["alone"]["intervals"]["absolute_error"],
        }
    assert "blocks" not in read_step(measured / "bf16", measured / "bf16-bf16").measured


def test_bf16_weights_of_an_fp32_base_are_refused(measured):
    """The step would hold the base's own rounding, which is of the size of 8 bits."""
    with pytest.raises(UserError, match=r"measured in bf16.*measure it with --dtype fp32"):
        read_step(measured / "fp32", measured / "fp32-bf16")


@pytest.mark.parametrize(("on_grid", "moved"), [("layers.1.", ["layer0"]), ("layers.", None)])
def test_weights_that_are_on_their_grid_make_no_step(
    tmp_path, train_prefix, held_out_prefix, capsys, on_grid, moved
):
    """Those of a block, or all: of -0 quantization changes the bits, not the value."""
    base = make_hf_directory(tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if on_grid in name and "proj" in name:
            weight.copy_(torch.randint(-3, 5, weight.shape, generator=generator) / -32)
            weight[:, ::32], weight[:, 1::32] = -4 / 32, 3 / 32  # the ends of each group's grid
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})

    settings = run_settings(train_prefix, held_out_prefix, dense=True)
    (result,) = measure(base, (parse_spec("rtn-b3-g32-asym"),), (tmp_path / "q",), settings, ALONE)
    reseal(tmp_path / "q" / "result.json", result)
    assert any(on_grid in name for name in load_file(tmp_path / "q" / BLOCK)), "its bits differ"

    given = ["--quantized", tmp_path / "q", "--data", held_out_prefix, "--microbatches", 2]
    status = command("step", base, *given, "--out", tmp_path / "out")
    if moved is None:
        assert status == 2
        assert f"{tmp_path / 'q'} quantized nothing" in capsys.readouterr().err.splitlines()[-1]
        return
    assert status == 0
    measured = json.loads((tmp_path / "out" / "result.json").read_text())["measured"]
    assert list(measured["blocks"]) == moved
    size = sum(w.numel() for name, w in weights.items() if "layers.0." in name and "proj" in name)
    assert measured["whole"]["parameters"] == size


def cut(path):
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (BLOCK, cut, "block00001.safetensors has .* bytes instead of"),
        (BLOCK, flip_a_byte, "block00001.safetensors was changed after"),
        (BLOCK, lambda path: path.unlink(), "block00001.safetensors is missing"),
        (DENSE, flip_a_byte, "dense.json is not the one that result.json was written with"),
        (DENSE, lambda path: path.unlink(), "holds no dequantized weights"),
        ("dense", shutil.rmtree, "holds no dequantized weights"),
        ("result.json", cut, "result.json"),
        ("result.json", lambda path: path.unlink(), "result.json does not exist"),
        ("result.json", lambda path: path.write_bytes(b"\xff\xfe\x00"), "is not valid JSON"),
    ],
)
def test_damage_is_refused_by_the_files_name(place, name, damage, message):
    damage(place / "result" / name)
    with pytest.raises(UserError, match=message) as refused:
        read_step(place / "base", place / "result")
    assert "\n" not in str(refused.value)


def rewrite(place, change):
    """dense.json with other files, for which the result vouches."""
    path = place / "result" / "dense" / "dense.json"
    content = json.loads(path.read_text())
    change(content["files"])
    path.write_text(json.dumps(content))
    with edited(place / "result" / "result.json") as result:
        result["measured"]["dense"] = sha256_of(path)


def leads_elsewhere(place):
    rewrite(place, lambda files: files.update({"../../base/model.safetensors": files[BLOCK[6:]]}))


def holds_another_tensor(place):
    path = place / "result" / BLOCK
    save_file({"model.layers.1.mlp.up.weight": torch.ones(2)}, path)
    record = {"bytes": path.stat().st_size, "digest": blake3_of(path)}
    rewrite(place, lambda files: files.update({BLOCK[6:]: record}))


def holds_nothing(place):
    rewrite(place, lambda files: files.clear())


def of_another_base(place):
    weights = load_file(place / "base" / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, place / "base" / "model.safetensors", metadata={"format": "pt"})


def without_dense(place):
    """As of a later run without --dense, which leaves the old weights."""
    with edited(place / "result" / "result.json") as result:
        del result["measured"]["dense"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (leads_elsewhere, "is outside its directory"),
        (holds_another_tensor, r"'model\.layers\.1\.mlp\.up\.weight' does not fit"),
        (holds_nothing, "quantized nothing"),
        (of_another_base, "is of another model"),
        (without_dense, r"python -m quant_eval run .*base --dense"),
    ],
)
def test_what_does_not_belong_to_the_base_is_refused(place, change, message):
    change(place)
    with pytest.raises(UserError, match=message):
        read_step(place / "base", place / "result")
