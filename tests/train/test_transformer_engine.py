"""Transformer Engine: what is pinned has what megatron-core takes; precisions are obeyed or refused.

Where it is installed, its modules and recipes are built on the CPU; their kernels are not run.
"""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.requirements import Requirement

from base.errors import UserError
from base.libraries.private_names import USES
from tests.gpu.transformer_engine import BLOCKS
from tests.runs import PROJECT, environment, make_run, on_ranks, python, succeed
from tests.train.transformer_engine_names import RECORD, VERSIONS, derive, taken_names
from train.distributed import start
from train.model.precision import FP8_RECIPES, dtype_of
from train.run.config import RunConfig, load_run, with_settings
from train.run.metrics import read_metrics

LACKING = json.loads(RECORD.read_text())
PINNED = VERSIONS[-1]

# Not in the Python sources of a release, and why that stops nothing of ours. megatron-core catches
# the ImportError of each, or asks for the version first.
OF_THE_PINNED = {
    "attention._SplitAlongDim": "a fused split of q, k and v; torch's is used instead",
    "attention.apply_rotary_pos_emb": "imported from attention.rope since 2.3",
    "cpp_extensions.cast_to_fp8": "of releases before 2.0",
    "cpp_extensions.rmsnorm_fwd": "compiled: of transformer_engine_torch; for inference",
    "module.base.get_workspace": "routers of mixtures of experts; not since 2.10",
}
OF_OLDER_ONES = {
    "cpu_offload_v1": "offloading of activations; before 2.10 it is cpu_offload",
    "ep": "mixtures of experts",
    "ep.is_symm_backed": "mixtures of experts",
    "ops.GroupedLinear": "mixtures of experts",
    "ops.ScaledClampedQGeGLU": "mixtures of experts",
    "ops.ScaledSReLU": "mixtures of experts",
    "ops.ScaledSwiGLU": "mixtures of experts",
    "ops.basic.grouped_linear.GRAD_INPUT_BUFFER_KEY": "mixtures of experts",
    "ops.basic.grouped_linear.OUTPUT_BUFFER_KEY": "mixtures of experts",
    "optimizers.multi_tensor_scale_tensor": "clipping of gradients, which is ours",
    "permutation.moe_permute_and_pad_with_probs": "mixtures of experts",
    "quantized_tensor.QuantizedTensor": "weights gathered layer by layer (GTP)",
    "tensor.grouped_tensor.GroupedTensor": "mixtures of experts",
    "tensor.utils.post_all_gather_processing": "gathered fp8 parameters; ours are bf16",
    "tensor.utils.quantize_master_weights": "gathered fp4 parameters",
}


def test_the_lock_and_the_extra_pin_the_newest_release_that_was_read():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    (extra,) = [Requirement(line) for line in project["optional-dependencies"]["gpu"]]
    assert extra.extras == {"core-cu13", "pytorch"}
    assert str(extra.specifier) == f"=={PINNED}"
    lines = (PROJECT / "transformer-engine.lock").read_text().splitlines()
    assert {line for line in lines if line.startswith("transformer-engine")} == {
        f"transformer-engine{part}=={PINNED}" for part in ("", "-cu13", "-torch")
    }


def test_megatron_core_states_no_range():
    stated = [Requirement(line) for line in importlib.metadata.requires("megatron-core") or ()]
    assert {str(need.specifier) for need in stated if need.name == "transformer-engine"} == {""}


def test_the_record_is_of_the_installed_megatron_core():
    assert LACKING.keys() == taken_names(), "run python -m tests.train.transformer_engine_names"
    assert len(LACKING) > 120


@pytest.mark.parametrize(
    ("versions", "reasons"),
    [((PINNED,), OF_THE_PINNED), (VERSIONS, OF_THE_PINNED | OF_OLDER_ONES)],
    ids=["the pinned release", "those that containers may bring"],
)
def test_releases_have_what_megatron_core_takes(versions, reasons):
    missing = {name for name, lacking in LACKING.items() if set(lacking) & set(versions)}
    assert missing == {f"transformer_engine.pytorch.{name}" for name in reasons}


@pytest.mark.stress
def test_the_record_is_what_the_sources_say():
    assert derive() == LACKING


@pytest.fixture(scope="module")
def te() -> Iterator[ModuleType]:
    """Our use of Transformer Engine. It comes with stand-ins for CUDA, which are taken out again:
    other tests of this process have torch's own.
    """
    replaced = {
        (use.owner, name)
        for use in USES
        if use.user == "train/megatron/cpu.py" and use.owner.startswith("torch")
        for name in use.names
    }
    owners: dict[str, Any] = {owner: resolve_name(owner) for owner, _ in replaced}
    before = {(owner, name): getattr(owners[owner], name) for owner, name in replaced}
    from train.megatron import transformer_engine

    yield transformer_engine
    for (owner, name), value in before.items():
        setattr(owners[owner], name, value)


def stand_in(can: dict[str, bool]) -> ModuleType:
    """A stand-in for transformer_engine.pytorch on a GPU of one kind."""
    engine = ModuleType("transformer_engine.pytorch")
    for name, answer in can.items():
        reason = "" if answer else "Device compute capability 10.0 or higher required."
        vars(engine)[f"is_{name}_available"] = lambda *, return_reason, told=(answer, reason): told
    return engine


def install_stand_in(monkeypatch: pytest.MonkeyPatch, engine: ModuleType | None) -> None:
    """Have a GPU, and imports of Transformer Engine give the stand-in; None fails the import."""
    package: Any = ModuleType("transformer_engine")
    package.__spec__ = importlib.util.spec_from_loader("transformer_engine", None)
    package.pytorch = engine
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100")


HOPPER = {"fp8": True, "fp8_block_scaling": True, "mxfp8": False}
BLACKWELL = {"fp8": True, "fp8_block_scaling": True, "mxfp8": True}
AMPERE = dict.fromkeys(HOPPER, False)


@pytest.mark.parametrize(
    ("can", "runs"),
    [
        (AMPERE, {"bf16", "fp32"}),
        (HOPPER, {"bf16", "fp32", "fp8", "fp8_blockwise"}),
        (BLACKWELL, {"bf16", "fp32", *FP8_RECIPES}),
    ],
    ids=["Ampere", "Hopper", "Blackwell"],
)
def test_a_gpu_that_cannot_compute_in_a_precision_is_told_in_one_line(monkeypatch, te, can, runs):
    install_stand_in(monkeypatch, stand_in(can))
    for precision in ("fp32", "bf16", *FP8_RECIPES):
        if precision in runs:
            te.check_can_run(precision)
            continue
        with pytest.raises(UserError) as refused:
            te.check_can_run(precision)
        line = str(refused.value)
        assert f"precision '{precision}' does not run on this NVIDIA H100: Device" in line
        assert "10.0 or higher required; set precision to" in line


def test_a_package_that_cannot_be_imported_is_told_in_one_line(monkeypatch, te):
    """As where its binding is for another torch, or was never compiled."""
    install_stand_in(monkeypatch, None)
    with pytest.raises(
        UserError, match=r"cannot be imported .*; run make transformer-engine again"
    ):
        te.check_can_run("bf16")


def test_a_variable_that_changes_a_recipe_is_refused(monkeypatch, te):
    install_stand_in(monkeypatch, stand_in(BLACKWELL))
    assert te.CHANGE_RECIPES
    for name in te.CHANGE_RECIPES:
        monkeypatch.setenv(name, "1")
        te.check_can_run("bf16")
        with pytest.raises(UserError, match=f"{name} would change what precision 'mxfp8' means"):
            te.check_can_run("mxfp8")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("precision", FP8_RECIPES)
def test_megatron_core_is_given_the_recipe_of_the_precision(tmp_path, inputs, te, precision):
    from train.megatron.model import PARAMETER_DTYPE, transformer_config

    run = make_run(tmp_path, **inputs, precision=precision, kernels="transformer_engine")
    config = transformer_config(run)
    assert (config.fp8, config.fp8_recipe) == FP8_RECIPES[precision]
    assert not config.fp8_param
    assert config.bf16
    assert str(PARAMETER_DTYPE[precision]) == "torch.bfloat16"
    assert dtype_of(precision) == "bf16"


@pytest.mark.parametrize(
    ("precision", "width", "words"),
    [
        ("fp8", 40, "fp8 needs matrices in multiples of 16, intermediate_size .* is 40"),
        ("fp8_blockwise", 40, "fp8_blockwise needs matrices in multiples of 16"),
        ("mxfp8", 48, "mxfp8 needs matrices in multiples of 32, intermediate_size .* is 48"),
    ],
)
def test_matrices_that_8_bit_kernels_do_not_take_are_refused(
    tmp_path, inputs, te, precision, width, words
):
    run = make_run(tmp_path, **inputs, precision=precision, kernels="transformer_engine")
    model = run.model.model_copy(update={"intermediate_size": width})
    with pytest.raises(UserError, match=words):
        te.config_fields(run.model_copy(update={"model": model}))


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


CONTAINER = Path(__file__).parent / "in_container"


@pytest.mark.stress
def test_a_training_on_a_cpu_is_the_same_where_transformer_engine_is_installed(tmp_path, inputs):
    for name in ("without", "with"):
        make_run(tmp_path / name, **inputs)
    succeed(python("train", "run", str(tmp_path / "without")))

    # a new interpreter: the one that tests fork has imported megatron-core without it
    variables = environment()
    variables["PYTHONPATH"] = f"{CONTAINER}:{variables['PYTHONPATH']}"
    command = [sys.executable, "-m", "train", "run", str(tmp_path / "with")]
    succeed(subprocess.run(command, env=variables, capture_output=True, text=True))

    losses = [
        [row.get("loss") for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("without", "with")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) >= 20
