"""Damaged checkpoints are refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from base.errors import UserError
from ckpt_tools.formats.weights import read_whole
from quant_eval.gptq_format.reader import SavedWeights

LINEAR = "model.layers.1.mlp.up_proj"


@pytest.fixture
def copied(tmp_path, examples):
    """`copied(settings, change)`: a copy with other settings and tensors, a change of None takes
    a tensor away.
    """

    def copy(settings=None, change=None, name="gptq-b4-g32-groupaware-s16"):
        out = shutil.copytree(examples[name].out, tmp_path / "copy")
        if settings is not None:
            path = out / "config.json"
            config = json.loads(path.read_text())
            config["quantization_config"] |= settings
            path.write_text(json.dumps(config))
        if change is not None:
            tensors = load_file(out / "model.safetensors") | change
            save_file(
                {key: tensor for key, tensor in tensors.items() if tensor is not None},
                out / "model.safetensors",
            )
        return out

    return copy


@pytest.mark.parametrize(
    ("settings", "change", "reason"),
    [
        ({"checkpoint_format": "marlin"}, None, "'checkpoint_format'.*'gptq' or 'gptq_v2'.*marlin"),
        ({"quant_method": "awq"}, None, "'quant_method'.*'gptq'.*awq"),
        ({"bits": 5}, None, "'bits'.*2, 3, 4 or 8"),
        ({"pack_dtype": "int64"}, None, "'pack_dtype'.*'int32'"),
        ({"dynamic": {"-:.*": {}}}, None, "differ by layer"),
        (
            {"bits": 8},
            None,
            (
                r"down_proj.qweight' is torch.int32 \(12, 64\), config.json needs torch.int32 \(24,"
                r" 64\)"
            ),
        ),
        ({"group_size": 64}, None, "qzeros' is .*, config.json needs"),
        ({"desc_act": False}, None, "g_idx' is not in order although desc_act is false"),
        (None, {f"{LINEAR}.scales": None}, f"'{LINEAR}.scales' is missing"),
        (
            None,
            {f"{LINEAR}.weight": torch.ones(96, 64)},
            f"'{LINEAR}.weight' is there, and packed too",
        ),
        (None, {f"{LINEAR}.scales": torch.ones(2, 96)}, f"'{LINEAR}.scales' is torch.float32"),
        (
            None,
            {f"{LINEAR}.qweight": torch.zeros(8, 95, dtype=torch.int32)},
            f"'{LINEAR}.qweight' is",
        ),
        (
            None,
            {f"{LINEAR}.g_idx": torch.full((64,), 2, dtype=torch.int32)},
            f"'{LINEAR}.g_idx' names a group outside",
        ),
        (
            None,
            {f"{LINEAR}.g_idx": torch.full((64,), -1, dtype=torch.int32)},
            f"'{LINEAR}.g_idx' names a group outside",
        ),
    ],
)
def test_what_cannot_be_right_is_not_opened(copied, settings, change, reason):
    with pytest.raises(UserError, match=reason):
        SavedWeights(copied(settings, change))


def test_a_zero_that_version_1_cannot_mean(copied):
    """Stored as 15, of 4 bits: 16 to some loaders, 0 to others."""
    saved = SavedWeights(
        copied(None, {f"{LINEAR}.qzeros": torch.full((2, 12), -1, dtype=torch.int32)})
    )
    with pytest.raises(
        UserError, match=rf"'{LINEAR}.qzeros' holds a zero that format gptq has no place for"
    ):
        read_whole(saved, f"{LINEAR}.weight")


def test_other_configurations(tmp_path, source, copied):
    with pytest.raises(
        UserError, match="has no quantization_config; give a directory saved in the GPTQ format"
    ):
        SavedWeights(source)
    out = copied()
    (out / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is damaged"):
        SavedWeights(out)
    (out / "config.json").unlink()
    with pytest.raises(UserError, match=r"config.json does not exist"):
        SavedWeights(out)
