"""Modules and recipes of the real Transformer Engine, where it is installed: they are built on the
CPU, their kernels are not run.
"""

import importlib.util
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.gpu.transformer_engine import BLOCKS
from tests.runs import make_run, on_ranks
from train.distributed import start
from train.model.precision import FP8_RECIPES
from train.run.config import RunConfig, load_run, with_settings

MISSING = importlib.util.find_spec("transformer_engine") is None


def check_recipe(run: RunConfig, precision: str) -> None:
    """megatron-core makes of a precision the recipe that our products are written out from."""
    import transformer_engine.pytorch as te
    from megatron.core.fp8_utils import get_fp8_recipe
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.constants import MXFP8_BLOCK_SCALING_SIZE

    from train.megatron.model import transformer_config

    recipe = get_fp8_recipe(transformer_config(with_settings(run, [f"precision={precision}"])))
    kind = {
        "fp8": recipes.Float8CurrentScaling,
        "fp8_blockwise": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
    }[precision]
    assert type(recipe) is kind
    assert recipe.fp8_format.name.lower() == FP8_RECIPES[precision][0]
    assert not recipe.fp8_dpa
    if precision == "fp8_blockwise":
        quantizer = te.Float8BlockQuantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=True)
        row, square = (1, quantizer.block_len), (quantizer.block_len, quantizer.block_len)
        assert BLOCKS[precision] == (row, square)
        dimensions = recipe.x_block_scaling_dim, recipe.grad_block_scaling_dim
        assert (dimensions, recipe.w_block_scaling_dim) == ((1, 1), 2)
    if precision == "mxfp8":
        assert BLOCKS[precision] == ((1, MXFP8_BLOCK_SCALING_SIZE),) * 2
        assert not recipe.enable_2d_quantization


def check_variables() -> None:
    """Refused are all variables that the recipes' module reads, but for those of NVFP4."""
    from transformer_engine.common import recipe as recipes

    from train.megatron.transformer_engine import CHANGE_RECIPES

    names = re.findall(r'getenv\(\s*"(\w+)"', Path(recipes.__file__).read_text())
    assert {name for name in names if "NVFP4" not in name} == set(CHANGE_RECIPES)


def build(run_dir: str) -> None:
    """Worker: build the model with either kernels; compare names, shapes and what a checkpoint has."""
    from train.megatron.engine import _is_extra
    from train.megatron.model import build_model, initialize_groups, transformer_config

    run, device = load_run(Path(run_dir) / "run.json"), start()
    initialize_groups(run)
    models = {}
    for kernels in ("torch", "transformer_engine"):
        settings = with_settings(run, [f"kernels={kernels}"])
        config = transformer_config(settings)
        with mock.patch("torch.cuda.is_available", return_value=True):  # its modules ask for it
            models[kernels] = build_model(settings, config, device)

    shapes = [
        {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for model in models.values()
    ]
    assert shapes[0] == shapes[1]
    state = models["transformer_engine"].state_dict()
    extra = {name: value for name, value in state.items() if _is_extra(name)}
    assert extra
    assert all(value is None or value.numel() == 0 for value in extra.values())
    assert state.keys() - extra.keys() == {
        name for name in models["torch"].state_dict() if not _is_extra(name)
    }
    for precision in FP8_RECIPES:
        check_recipe(with_settings(run, ["kernels=transformer_engine"]), precision)
    check_variables()
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(MISSING, reason="transformer-engine is not installed (make transformer-engine)")
def test_modules_have_our_parameters_and_recipes_our_blocks(tmp_path, inputs):
    make_run(tmp_path, **inputs, precision="bf16")
    on_ranks(1, build, tmp_path)
