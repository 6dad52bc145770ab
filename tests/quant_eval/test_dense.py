"""Files of `--dense`: the weights of the measured loss, read back by safetensors and
transformers alone.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from base.errors import UserError
from base.files import sha256_of
from base.ranks import ALONE
from ckpt_tools.formats.weights import DTYPES
from quant_eval.measuring.losses import evaluation_set
from quant_eval.measuring.measurement import measure
from quant_eval.specs import parse_spec
from tests.digests import blake3_of
from tests.quant_eval.models import make_model, mean_loss, run_settings
from train.data.corpus import open_corpus

LINEARS = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}
SPECS = {
    "olmo2": ("rtn-b3-g32", "gptq-b3-g32", "nf4-g32"),
    "llama-tied": ("awq-b3-g32",),  # folds scales into norms and into linears that feed others
    "gpt_neox": ("rtn-b4-g32",),  # whose files call the head otherwise than transformers does
}
CASES = [(model, spec, "fp32") for model, specs in SPECS.items() for spec in specs] + [
    ("olmo2", "rtn-b3-g32", "bf16")
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory, train_prefix, held_out_prefix):
    """`measured(model, specs, dtype)`: the base, and the results with their directories."""
    root = tmp_path_factory.mktemp("dense")

    def run(name, specs, dtype="fp32", seeds=1, outs=None):
        base = root / name
        if not base.exists():
            make_model(base, name)
        outs = tuple(outs or [root / "out" / name / dtype / spec for spec in specs])
        changes = {"calibration_sequences": 8, "calibration_seeds": seeds, "dtype": dtype}
        settings = run_settings(train_prefix, held_out_prefix, dense=True, **changes)
        results = measure(base, list(map(parse_spec, specs)), outs, settings, ALONE)
        return base, dict(zip(specs, zip(outs, results, strict=True), strict=True))

    return run


@pytest.fixture(scope="module")
def kept(measured):
    """By model, spec and dtype: the base, the result and the kept tensors."""
    cases = {}
    for name, dtype in [(name, "fp32") for name in SPECS] + [("olmo2", "bf16")]:
        base, results = measured(name, SPECS[name] if dtype == "fp32" else SPECS[name][:1], dtype)
        for spec, (out, result) in results.items():
            files = sorted((out / "dense").glob("*.safetensors"))
            tensors = dict(item for path in files for item in load_file(path).items())
            cases[name, spec, dtype] = base, out, result, tensors
    return cases


@pytest.mark.parametrize(("name", "spec", "dtype"), CASES)
def test_transformers_with_the_files_has_the_measured_loss(
    kept, held_out_prefix, name, spec, dtype
):
    base, _, result, tensors = kept[name, spec, dtype]
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=DTYPES[dtype], attn_implementation="sdpa"
    ).eval()
    blocks = evaluation_set(open_corpus(held_out_prefix), 64, 5000, "separate", 0).blocks
    before = mean_loss(model, blocks)
    parameters = dict(model.named_parameters())
    for key, tensor in tensors.items():
        parameters[key].data.copy_(tensor)
    expected = result["measured"]
    assert abs(expected["cross_entropy_quantized"] - expected["cross_entropy"]) > 1e-3
    # bf16 matmuls round by the shape of the batch, here and there
    tolerance = 1e-6 if dtype == "fp32" else 1e-3
    assert before == pytest.approx(expected["cross_entropy"], rel=tolerance)
    after = expected["cross_entropy_quantized"]
    assert mean_loss(model, blocks) == pytest.approx(after, rel=tolerance)


@pytest.mark.parametrize(("name", "spec", "dtype"), CASES)
def test_only_what_changed_is_in_the_files(kept, name, spec, dtype):
    base, _, _, tensors = kept[name, spec, dtype]
    before = load_file(base / "model.safetensors")
    for key, tensor in tensors.items():
        assert tensor.dtype == DTYPES[dtype]
        assert not torch.equal(tensor, before[key].to(tensor.dtype))
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    for index in range(3):
        block = f".layers.{index}."
        inside = {key.split(block)[1] for key in tensors if block in key}
        if name == "gpt_neox":
            assert len(inside) == 4
        else:
            assert inside == LINEARS | (norms if spec.startswith("awq") else set())


def test_dense_json_vouches_for_the_files_and_the_result_for_it(kept):
    for (_, spec, dtype), (base, out, result, tensors) in kept.items():
        manifest = json.loads((out / "dense" / "dense.json").read_text())
        assert result["measured"]["dense"] == sha256_of(out / "dense" / "dense.json")
        assert (manifest["spec"], manifest["dtype"]) == (spec, dtype)
        assert manifest["base"]["weights_digests"] == {
            "model.safetensors": blake3_of(base / "model.safetensors")
        }
        assert list(manifest["files"]) == [f"block{index:05d}.safetensors" for index in range(3)]
        assert {path.name for path in out.iterdir()} == {"dense"}
        for index, (file, record) in enumerate(manifest["files"].items()):
            path = out / "dense" / file
            assert record == {"bytes": path.stat().st_size, "digest": blake3_of(path)}
            assert all(f".layers.{index}." in key and key in tensors for key in load_file(path))


def test_a_walk_that_fails_leaves_the_weights_of_the_one_before(measured, kept, monkeypatch):
    _, out, result, _ = kept["olmo2", "rtn-b3-g32", "fp32"]

    def fails(*_):
        raise UserError("the disk is full")

    monkeypatch.setattr("quant_eval.measuring.dense.write_json", fails)
    with pytest.raises(UserError, match="disk"):
        measured("olmo2", ["rtn-b3-g32"])
    assert [path.name for path in out.iterdir()] == ["dense"]
    assert result["measured"]["dense"] == sha256_of(out / "dense" / "dense.json")
    fresh = out.parent / "fresh"
    with pytest.raises(UserError, match="disk"):
        measured("olmo2", ["rtn-b3-g32"], outs=[fresh])
    assert not list(fresh.iterdir())


@pytest.mark.parametrize(
    ("spec", "seeds", "message"),
    [
        ("int8-t6", 1, "int8-t6 rounds more than weights.*leave --dense out"),
        ("gptq-b3-g32", 2, "leave --calibration-seeds out"),
    ],
)
def test_what_no_weights_reproduce_is_refused(measured, tmp_path, spec, seeds, message):
    with pytest.raises(UserError, match=message):
        measured("olmo2", [spec], seeds=seeds, outs=[tmp_path / "out"])
    assert not (tmp_path / "out").exists()
