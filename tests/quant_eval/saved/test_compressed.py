"""Checkpoints in compressed-tensors' format as transformers reads them, and as our own reader does.

Shapes: N sequences, L tokens, V vocabulary.
"""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from compressed_tensors.transform import TransformConfig, apply_transform_config
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ckpt_tools.formats.weights import DTYPES
from quant_eval.model.streamed import StreamedModel
from quant_eval.rounding.grid import round_to_nearest
from quant_eval.saved.checkpoint import CheckpointWriter, SavedWeights
from tests.quant_eval.saved.examples import Measured, input_ids, logits_of, save_measured
from tests.quant_eval.specs import grid_spec

# transformers converts scales to the model's dtype, so fp32 is exact; it unpacks MX formats and
# NVFP4 to bf16 alone, and there they are exact
IN_FP32 = (
    "rtn-b2-g32-asym",
    "rtn-b3-g32",
    "gptq-b4-g32",
    "gptq-b4-g32-asym-actorder-static",
    "rtn-b5-perchannel",
    "rtn-b8-perchannel",
    "ternary-g32",
    "binary-g32",
    "w4a4-g32",
    "w8a8",
    "w8a8-astatic",
    "fp8",
    "fp8-a16",
    "fp8-astatic",
    "kvfp8",
    "gptq-b4-g32-kvfp8",
)
IN_BF16 = ("mxfp4", "gptq-mxfp4-a16", "mxfp8", "mxfp8-a16", "nvfp4", "nvfp4-a16", "ternary-g32")
ROTATED = ("gptq-b4-g32-had", "rtn-b4-g32-had32", "gptq-b4-g32-quarot")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, source):
    """Saves the model by a spec in a dtype."""

    def save(name: str, dtype: Literal["fp32", "bf16"]) -> Measured:
        return save_measured(source, tmp_path_factory.mktemp("saved") / "out", name, dtype)

    return save


def read(out: Path, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
    return model.eval()


@torch.no_grad()
def own_logits(out: Path, dtype: torch.dtype) -> Tensor:
    """Logits of `input_ids` by this project's reader, [N, L, V], in a dtype throughout."""
    weights = SavedWeights(out, dtype)
    model = StreamedModel(out, weights, dtype, torch.device("cpu"))
    x = model.embedding()(input_ids())
    context = model.context(x.shape[1])
    for index in range(model.num_blocks):
        block = model.block(index)
        weights.restore(block)
        x = block(x, context)
    logits: Tensor = model.head().to(dtype)(x)
    return logits


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "fp32") for name in IN_FP32), *((name, "bf16") for name in IN_BF16)],
)
def test_transformers_computes_what_was_measured(name, dtype, saved):
    measured = saved(name, dtype)
    expected = logits_of(measured.model)
    assert torch.equal(logits_of(read(measured.out, DTYPES[dtype])), expected)
    assert torch.equal(own_logits(measured.out, DTYPES[dtype]), expected)


@pytest.mark.parametrize("name", ["nvfp4-had", "fp8-kvfp8", "rtn-b3-g32-had32", "w4a4-g32-quarot"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_own_reader_reproduces_every_dtype(name, dtype, saved):
    measured = saved(name, dtype)
    assert torch.equal(own_logits(measured.out, DTYPES[dtype]), logits_of(measured.model))


def transformed(out: Path) -> PreTrainedModel:
    """A rotated checkpoint, with the transforms that compressed-tensors makes of config.json.

    It draws signs of a random Hadamard matrix where vLLM reads the stored one.
    """
    model = read(out, torch.float32)
    logits_of(model)  # unpacks
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    apply_transform_config(model, TransformConfig.model_validate(settings["transform_config"]))
    tensors = load_file(out / "model.safetensors")
    matrices = {
        key: tensors[key] for key in tensors if key.endswith(("_input.weight", "_output.weight"))
    }
    assert not model.load_state_dict(matrices, strict=False).unexpected_keys
    return model


@pytest.mark.parametrize("name", ROTATED)
def test_compressed_tensors_transforms_the_inputs(name, saved):
    """By products with whole matrices instead of Kronecker factors: equal but for rounding."""
    measured = saved(name, "fp32")
    expected = logits_of(measured.model)
    error = (logits_of(transformed(measured.out)) - expected).abs().max() / expected.abs().max()
    assert error <= 1e-5
    # and without them the weights mean something else
    assert (logits_of(read(measured.out, torch.float32)) - expected).abs().max() > 0.1


def test_transforms_are_told_as_vllm_reads_them(saved):
    """Heads have 16 features, and 96 is not a power of two: vLLM has no fast transform of it."""
    measured = saved("rtn-b4-g32-quarot", "fp32")
    settings = json.loads((measured.out / "config.json").read_text())["quantization_config"]
    transforms = [
        (group["type"], group["head_dim"], place["location"], place["inverse"], *place["targets"])
        for group in settings["transform_config"]["config_groups"].values()
        for place in group["apply"]
    ]
    reading = (rf"re:.*\.{name}_proj$" for name in ("q", "k", "v", "gate", "up"))
    assert transforms == [
        ("random-hadamard", None, "input", False, *reading),
        ("hadamard", 16, "input", False, r"re:.*\.o_proj$"),
        ("hadamard", 16, "output", True, r"re:.*\.v_proj$"),
        ("random-hadamard", None, "input", False, r"re:.*\.down_proj$"),
    ]
    tensors = load_file(measured.out / "model.safetensors")
    matrices = {key: tensor for key, tensor in tensors.items() if key.endswith("put.weight")}
    assert sorted(len(matrix) for matrix in matrices.values()) == [16, 64, 96]  # each once
    for matrix in matrices.values():
        products = matrix.double() @ matrix.double().T
        assert torch.equal(products, len(matrix) * torch.eye(len(matrix), dtype=torch.float64))


def test_transformed_inputs_are_cast(saved):
    """Linear by linear, since a number between two levels can go either way."""
    measured = saved("w8a8-had", "fp32")
    library = transformed(measured.out)
    for path in ("q_proj", "o_proj"):
        ours, theirs = (
            model.model.layers[1].self_attn.get_submodule(path)
            for model in (measured.model, library)
        )
        x_NI = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
        expected = ours(x_NI[None])
        difference = (theirs(x_NI[None]) - expected).abs() / expected.abs().max()
        assert (difference.amax(-1) > 1e-5).float().mean() <= 0.05
        weight_OI = ours.inputs.transform.restored(ours.weight)
        assert (ours(x_NI[None]) - x_NI @ weight_OI.T).abs().max() > 1e-3  # it casts


# by last name, as vLLM's schemes create their parameters: dtype and shape for 64 inputs
F8, INT = torch.float8_e4m3fn, torch.int32
SCALE, GLOBAL = (torch.float32, (96, 2)), (torch.float32, (1,))
PARAMETERS = {
    "rtn-b4-g32": {"weight_packed": (INT, (96, 8)), "weight_scale": SCALE},
    "rtn-b3-g32-asym": {
        "weight_packed": (INT, (96, 6)),
        "weight_scale": SCALE,
        "weight_zero_point": (INT, (9, 2)),
    },
    "w8a8": {"weight": (torch.int8, (96, 64)), "weight_scale": (torch.float32, (96, 1))},
    "fp8-astatic": {"weight": (F8, (96, 64)), "weight_scale": GLOBAL, "input_scale": GLOBAL},
    "mxfp8": {"weight": (F8, (96, 64)), "weight_scale": (torch.uint8, (96, 2))},
    "mxfp4": {"weight_packed": (torch.uint8, (96, 32)), "weight_scale": (torch.uint8, (96, 2))},
    "nvfp4": {
        "weight_packed": (torch.uint8, (96, 32)),
        "weight_scale": (F8, (96, 4)),
        "weight_global_scale": GLOBAL,
        "input_global_scale": GLOBAL,
    },
}
FORMATS = {
    "w8a8": "int-quantized",
    "fp8-astatic": "float-quantized",
    "mxfp8": "mxfp8-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_files_are_what_vllm_creates_its_parameters_for(name, saved):
    measured = saved(name, "fp32")
    tensors = load_file(measured.out / "model.safetensors")
    prefix = "model.layers.0.mlp.gate_proj."
    parameters = {
        key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)
    }
    if "weight_shape" in parameters:
        assert parameters.pop("weight_shape").tolist() == [96, 64]
    shapes = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in parameters.items()}
    assert shapes == PARAMETERS[name]
    config = json.loads((measured.out / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert config["format"] == group["format"] == FORMATS.get(name, "pack-quantized")
    assert config["ignore"] == ["lm_head"]
    assert config["quantization_status"] == "compressed"
    for key in ("weight_global_scale", "input_global_scale", "input_scale"):
        if key in parameters:  # one for all that vLLM fuses
            assert torch.equal(parameters[key], tensors[f"model.layers.0.mlp.up_proj.{key}"])


def test_a_cache_has_two_scales(saved):
    measured = saved("kvfp8", "fp32")
    tensors = load_file(measured.out / "model.safetensors")
    scales = {key for key in tensors if "scale" in key}
    assert scales == {f"model.layers.{n}.self_attn.{key}_scale" for n in (0, 1) for key in "kv"}
    config = json.loads((measured.out / "config.json").read_text())["quantization_config"]
    kept = ("type", "num_bits", "strategy", "symmetric", "dynamic")
    assert [config["kv_cache_scheme"][key] for key in kept] == ["float", 8, "tensor", True, False]


def test_codes_of_a_rotated_weight_need_their_transform(tmp_path, source):
    spec = grid_spec("rtn-b4-g32-had")
    with (
        CheckpointWriter(source, tmp_path / "out", spec, "fp32").collecting() as writer,
        pytest.raises(AssertionError, match="of which basis"),
    ):
        writer.add("model.layers.0.mlp.up_proj.weight", round_to_nearest(torch.ones(96, 64), spec))
