"""Files around the packed linears, and refusals before anything is written."""

import json

import pytest
import torch
from safetensors.torch import load_file

from base.errors import UserError
from base.files import first_damage
from ckpt_tools.formats.weights import read_whole
from ckpt_tools.hf.directory import read_lineage
from ckpt_tools.hf.forward import names_in_files
from quant_eval.saved.checkpoint import CheckpointWriter, SavedWeights
from quant_eval.specs import parse_spec
from tests.conftest import make_hf_directory
from tests.published import make_published
from tests.quant_eval.models import make_model
from tests.quant_eval.saved.examples import SPECS, save_example

PACK_FACTOR = {2: (16, 1), 3: (32, 3), 4: (8, 1), 8: (4, 1)}  # values in as many words
# 2^(bits - 1) - 1 everywhere: version 1
SYMMETRIC_ZERO = {2: 0x55555555, 4: 0x77777777, 8: 0x7F7F7F7F}


@pytest.mark.parametrize("name", SPECS)
def test_files_are_what_vllm_creates_its_parameters_for(name, examples, source):
    """Keys, types and shapes by hand from vllm's gptq and auto_gptq `create_weights` and
    `from_config`.
    """
    example = examples[name]
    spec, tensors = example.spec, load_file(example.out / "model.safetensors")
    config = json.loads((example.out / "config.json").read_text())["quantization_config"]
    values, words = PACK_FACTOR[spec.bits]
    wanted = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        if ".layers." not in key or "norm" in key:
            wanted[key] = (tensor.dtype, tuple(tensor.shape))
            assert torch.equal(tensors[key], tensor)
            continue
        prefix, (outputs, inputs) = key.removesuffix("weight"), tensor.shape
        groups = inputs // (spec.group_size or inputs)
        wanted[f"{prefix}qweight"] = (torch.int32, (inputs // values * words, outputs))
        wanted[f"{prefix}qzeros"] = (torch.int32, (groups, outputs // values * words))
        wanted[f"{prefix}scales"] = (torch.float16, (groups, outputs))
        wanted[f"{prefix}g_idx"] = (torch.int32, (inputs,))
        if spec.symmetric and spec.bits in SYMMETRIC_ZERO:
            assert (tensors[f"{prefix}qzeros"] == SYMMETRIC_ZERO[spec.bits]).all()
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()} == wanted
    assert config["quant_method"] == "gptq"
    form = "gptq" if spec.symmetric else "gptq_v2"
    assert config["checkpoint_format"] == config["format"] == form
    assert (config["bits"], config["sym"], config["lm_head"]) == (spec.bits, spec.symmetric, False)
    assert config["group_size"] == (spec.group_size or -1)
    has_order = any((rounded.groups_I.diff() < 0).any() for rounded in example.rounded.values())
    assert config["desc_act"] is has_order


def test_lineage_vouches_for_every_file(examples, source):
    out = examples["gptq-b3-g32-s16"].out
    lineage, files = read_lineage(out) or ({}, {})
    assert lineage["kind"] == "quantized"
    assert lineage["spec"]["name"] == "gptq-b3-g32-s16"
    assert lineage["model"] == {"path": str(source)}
    assert files.keys() == {path.name for path in out.iterdir()} - {"lineage.json"}
    assert first_damage(out, files) is None
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= files.keys()
    assert sorted(path.name for path in out.parent.iterdir() if path.name.startswith(".")) == []


def test_shards_and_dtype(tmp_path, source, monkeypatch):
    """In files of 20 kB and in bf16, the same weights: packed ones to the bit, the others
    rounded.
    """
    monkeypatch.setattr("quant_eval.saved.checkpoint.SHARD_BYTES", 20_000)
    example = save_example(source, tmp_path / "out", "gptq-b4-g32-asym-s16", dtype="bf16")
    assert len(list(example.out.glob("model-*.safetensors"))) > 3
    config = json.loads((example.out / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    saved = SavedWeights(example.out, torch.bfloat16)
    for name, weight in example.dense.state_dict().items():
        assert torch.equal(read_whole(saved, name), weight.bfloat16()), name
    exact = SavedWeights(example.out, torch.float32)
    for name, rounded in example.rounded.items():
        assert torch.equal(read_whole(exact, name), rounded.dense()), name


@pytest.mark.parametrize("kind", ["pythia", "tied-copy"])
def test_buffers_and_copies_in_the_source_are_not_saved(tmp_path, kind):
    source = make_published(tmp_path / "source", kind)
    example = save_example(source, tmp_path / "out", "rtn-b4-g16-s16")
    saved = SavedWeights(example.out, torch.float32)
    files = names_in_files(example.dense)
    assert saved.tensors.keys() == set(files.values())
    for name, weight in example.dense.state_dict().items():
        assert torch.equal(read_whole(saved, files[name]), weight), name


def test_what_ends_early_leaves_nothing(tmp_path, source, examples):
    out, spec = tmp_path / "out", parse_spec("gptq-b3-g32-s16")
    name, rounded = next(iter(examples["gptq-b3-g32-s16"].rounded.items()))

    def interrupted():
        with CheckpointWriter(source, out, spec, "fp32").collecting() as checkpoint:
            checkpoint.add(name, rounded)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with CheckpointWriter(source, out, spec, "fp32").collecting() as checkpoint:
        checkpoint.add(name, rounded)
        with pytest.raises(AssertionError, match="added before"):
            checkpoint.add(name, rounded)
        with pytest.raises(AssertionError, match="not added"):
            checkpoint.finish({})
    assert list(tmp_path.iterdir()) == []


def test_only_a_quantized_checkpoint_is_replaced(tmp_path, source):
    with pytest.raises(UserError, match="exists and is not a quantized checkpoint"):
        save_example(source, source, "gptq-b3-g32-s16")
    first = save_example(source, tmp_path / "out", "rtn-b3-g32-s16")
    second = save_example(source, first.out, "rtn-b4-g32-s16")
    assert json.loads((second.out / "config.json").read_text())["quantization_config"]["bits"] == 4


@pytest.fixture(scope="module")
def models(tmp_path_factory, source, neox):
    """HF directories by what is odd about them."""
    root = tmp_path_factory.mktemp("odd")
    return {
        "": source,
        "neox": neox,
        "mlp 72": make_hf_directory(root / "mlp72", intermediate_size=72),
        "mlp 36": make_hf_directory(root / "mlp36", intermediate_size=36),
        "odd": make_hf_directory(root / "odd", hidden_size=36, intermediate_size=72),
        "opensci": make_model(root / "opensci", "opensci"),
    }


@pytest.mark.parametrize(
    ("model", "name", "reason"),
    [
        # GPTQ's format
        ("", "gptq-b5-g32-s16", "2, 3, 4 or 8 bits, not 5"),
        ("", "gptq-b3-g8-s16", "gptqmodel loads groups of 16, 32, 64"),
        ("mlp 72", "gptq-b3-perchannel-s16", "gate_proj has 72 outputs; .* of 32 .* 3 bits"),
        ("mlp 72", "gptq-b4-perchannel-s16", "down_proj has 72 inputs; .* of 32 .* 4 bits"),
        ("mlp 36", "gptq-b4-perchannel-s16", "gate_proj has 36 outputs; .* of 8 .* 4 bits"),
        # compressed-tensors'
        ("", "awq-b4-g32", "codes of awq are not kept; give one of rtn or gptq, or write its w"),
        ("", "hqq-b4-g32", "codes of hqq are not kept; give one of rtn or gptq"),
        ("", "gptq-b4-g32-actorder", "neighbouring inputs; give actorder-static, groupaware"),
        ("", "fp8e5m2", "no E5M2; give fp8"),
        ("", "kv4", "an FP8 cache alone; give kvfp8"),
        ("", "a8", "quantized linears alone; give w8a8 or fp8"),
        ("", "rtn-b4-g32-rhad", "give -had or -quarot alone, or write its weights with --dense"),
        ("", "w8a8-smooth0.5-had", "give -had or -quarot alone, or measure it without --save"),
        ("", "rtn-b4-g32-kvfp8-quarot", "no engine rotates cached keys .* leave -kvfp8 out"),
        ("", "w4a4-g32-asym", "symmetric weights alone; leave -asym out"),
        ("neox", "kvfp8", "no cache of an attention without k_proj; leave -kvfp8"),
        ("neox", "rtn-b4-g32-had32", "query_key_value has a bias, and vLLM transforms"),
        ("opensci", "rtn-b4-g32", "no engine reads a checkpoint of opensci, .* give --dense"),
        ("odd", "rtn-b4-perchannel", "has 36 inputs, whose 4 bits fill no words of 32"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_at_once(models, tmp_path, model, name, reason):
    with pytest.raises(UserError, match=reason):
        CheckpointWriter(models[model], tmp_path / "out", parse_spec(name), "fp32")
