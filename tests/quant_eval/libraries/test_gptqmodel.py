"""gptqmodel on a small OLMo2, against a float64 walk column by column on inputs from
transformers' hooks.

Shapes: O output features, I input features, T calibration tokens, N sequences, L tokens of a
    sequence.
"""

import ast
import copy
import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from base.errors import UserError
from ckpt_tools.hf.model import load_hf_model
from quant_eval.libraries.job import REPORT, WEIGHTS, Job, run_job
from quant_eval.libraries.run_gptqmodel import Watch, quantize
from quant_eval.quantizers.libraries import GPTAQ, GPTQModel
from quant_eval.specs import parse_spec
from tests.conftest import VOCAB_SIZE, make_hf_directory

GROUP = 128
SUBSETS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
LINEARS = {f"model.layers.{i}.{name}" for i in range(2) for names in SUBSETS for name in names}
# Fields of gptqmodel's configuration that a job leaves out: what is saved and where, and which of
# several devices holds what; nothing is saved and one device is used.
WITHOUT_PART = {
    "meta",
    "telemetry",
    "pack_dtype",
    "offload_to_disk_path",
    "_offload_temp_dir",
    "gc_mode",
    "smooth",
}
WITHOUT_PART |= {
    "compute_device_filter",
    "calibration_data_device",
    "wait_for_submodule_finalizers",
}
WITHOUT_PART |= {
    f"{kind}_vram_strategy{rest}" for kind in ("dense", "moe") for rest in ("", "_devices")
}


@dataclasses.dataclass(frozen=True)
class Done:
    spec: GPTQModel | GPTAQ
    out: Path
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def wide_hf_dir(tmp_path_factory) -> Path:
    """Two blocks; q_proj reads one group of inputs, down_proj two."""
    directory = tmp_path_factory.mktemp("hf") / "wide"
    return make_hf_directory(
        directory, hidden_size=GROUP, intermediate_size=2 * GROUP, num_key_value_heads=2
    )


@pytest.fixture(scope="module")
def job(wide_hf_dir, tmp_path_factory) -> Job:
    """20 sequences of 64 tokens: three batches of 8, the last one short."""
    ids_NL = torch.randint(VOCAB_SIZE, (20, 64), generator=torch.Generator().manual_seed(0))
    place = tmp_path_factory.mktemp("gptqmodel")
    save_file({"input_ids": ids_NL}, place / "ids.safetensors")
    return Job(
        hf_dir=wide_hf_dir,
        spec=parse_spec(f"gptqmodel-b3-g{GROUP}-asym-damp0.02"),
        calibration=place / "ids.safetensors",
        dtype="fp32",
        device="cpu",
        batch_size=8,
        threads=1,
        out=place / "out",
    )


def run(job: Job) -> Done:
    run_job(job)
    assert isinstance(job.spec, GPTQModel | GPTAQ)
    return Done(job.spec, job.out, load_file(job.out / WEIGHTS))


@pytest.fixture(scope="module")
def gptq_done(job) -> Done:
    return run(job)


@pytest.fixture(scope="module")
def gptaq_done(job) -> Done:
    changes = {"spec": parse_spec(f"gptaq-b4-g{GROUP}-alpha0.5"), "out": job.out.with_name("gptaq")}
    return run(job.model_copy(update=changes))


@torch.no_grad()
def inputs_of(model: PreTrainedModel, linear: str, ids_NL: Tensor) -> Tensor:
    """Input of a linear, float64 [T, I]; those of a subset all read the same."""
    seen: list[Tensor] = []
    handle = model.get_submodule(linear).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    model(ids_NL)
    handle.remove()
    return seen[0].flatten(0, 1).double()


def walk(job: Job, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Name, weight and inputs of every linear, in the order of the model, and its inputs in the
    model as it was.

    The inputs are those after all linears before it as `weights` has them.
    """
    full = load_hf_model(job.hf_dir, torch.float32)
    model = copy.deepcopy(full)
    ids_NL = load_file(job.calibration)["input_ids"]
    for index in range(2):
        for names in SUBSETS:
            linears = [f"model.layers.{index}.{name}" for name in names]
            full_TI, inputs_TI = (
                inputs_of(network, linears[0], ids_NL) for network in (full, model)
            )
            for linear in linears:
                parameter = model.get_parameter(f"{linear}.weight")
                yield linear, parameter.detach().double(), inputs_TI, full_TI
                parameter.data.copy_(weights[f"{linear}.weight"])


def rounded_column_by_column(
    weight_OI: Tensor, inputs_TI: Tensor, full_TI: Tensor, spec: GPTQModel | GPTAQ
) -> Tensor:
    """GPTQ, and with `alpha` GPTAQ: every column moves all columns after it, in float64."""
    max_code = 2**spec.bits - 1
    hessian_II = inputs_TI.T @ inputs_TI
    damped_II = (
        hessian_II
        + spec.damping * hessian_II.diagonal().mean() * torch.eye(len(hessian_II)).double()
    )
    factor_II = torch.linalg.cholesky(torch.linalg.inv(damped_II), upper=True)
    asymmetry_II = (full_TI - inputs_TI).T @ inputs_TI
    drift_II = (
        (spec.alpha if isinstance(spec, GPTAQ) else 0.0)
        * (asymmetry_II @ factor_II.T).triu(1)
        @ factor_II
    )
    left_OI, result_OI = weight_OI.clone(), torch.empty_like(weight_OI)
    for i in range(weight_OI.shape[1]):
        if i % GROUP == 0:
            group_OK = left_OI[:, i : i + GROUP]
            low_O1, high_O1 = (
                group_OK.amin(1, keepdim=True).clamp(max=0),
                group_OK.amax(1, keepdim=True).clamp(min=0),
            )
            if spec.symmetric:
                high_O1 = torch.maximum(high_O1, -low_O1)
                low_O1 = -high_O1
            scale_O1 = (high_O1 - low_O1) / max_code
            zero_O1 = (
                torch.full_like(scale_O1, 2 ** (spec.bits - 1))
                if spec.symmetric
                else (-low_O1 / scale_O1).round()
            )
        column_O1 = left_OI[:, i : i + 1].clone()
        codes_O1 = ((column_O1 / scale_O1).round() + zero_O1).clamp(0, max_code)
        result_OI[:, i : i + 1] = scale_O1 * (codes_O1 - zero_O1)
        error_O1 = (column_O1 - result_OI[:, i : i + 1]) / factor_II[i, i]
        left_OI[:, i:] += column_O1 * drift_II[i, i:] - error_O1 * factor_II[i, i:]
    return result_OI


def share_equal(left_OI: Tensor, right_OI: Tensor) -> float:
    """Steps of the grids here are above 0.01; fp32 noise of a scale is below 1e-6."""
    return float(((left_OI - right_OI).abs() < 1e-5).double().mean())


def test_every_linear_is_gptq_on_the_inputs_it_gets(job, gptq_done):
    names = []
    for name, weight_OI, inputs_TI, full_TI in walk(job, gptq_done.weights):
        expected_OI = rounded_column_by_column(weight_OI, inputs_TI, full_TI, gptq_done.spec)
        # fp32 puts a few weights that are midway between two points on the other one
        assert share_equal(gptq_done.weights[f"{name}.weight"], expected_OI) > 0.99, name
        names.append(name)
    assert set(names) == LINEARS


def test_every_linear_is_gptaq_on_the_inputs_of_both_models(job, gptaq_done):
    differing = []
    for name, weight_OI, inputs_TI, full_TI in walk(job, gptaq_done.weights):
        if "down_proj" in name:  # wider than a block, where gptqmodel departs from the formula
            continue
        held_OI = gptaq_done.weights[f"{name}.weight"]
        expected_OI = rounded_column_by_column(weight_OI, inputs_TI, full_TI, gptaq_done.spec)
        assert share_equal(held_OI, expected_OI) > 0.99, name
        plain_OI = rounded_column_by_column(weight_OI, inputs_TI, inputs_TI, gptaq_done.spec)
        differing.append(share_equal(held_OI, plain_OI) < 0.95)
    assert (
        differing == [False] * 3 + [True] * 9
    )  # q_proj, k_proj and v_proj of block 0 read the embeddings


def test_weights_are_dense_points_of_their_grids(gptq_done):
    assert gptq_done.weights.keys() == {f"{name}.weight" for name in LINEARS}
    for name, weight_OI in gptq_done.weights.items():
        assert weight_OI.dtype == torch.float32
        for group_OK in weight_OI.split(GROUP, dim=1):
            assert max(len(row_K.unique()) for row_K in group_OK) <= 2**gptq_done.spec.bits, name


def test_the_report_names_every_setting(gptq_done, gptaq_done):
    origin = importlib.util.find_spec("gptqmodel")
    assert origin is not None
    assert origin.origin is not None
    # its source, not itself: importing it takes seconds and patches transformers
    source = ast.parse((Path(origin.origin).parent / "quantization" / "config.py").read_text())
    fields = {
        field.target.id
        for node in source.body
        if isinstance(node, ast.ClassDef)
        and node.name in ("BaseQuantizeConfig", "PreProcessorConfig", "GPTQConfig")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    for done in (gptq_done, gptaq_done):
        report = json.loads((done.out / REPORT).read_text())
        config = report["settings"]["quantize_config"]
        assert config.keys() == fields - WITHOUT_PART
        assert (config["bits"], config["damp_percent"]) == (done.spec.bits, done.spec.damping)
        assert report["settings"]["calibration"] == [20, 64]
        assert sorted(path.name for path in done.out.iterdir()) == ["job.json", REPORT, WEIGHTS]


def test_a_repaired_hessian_is_refused(job, tmp_path):
    """Every input of q_proj is the same vector: its Hessian has rank 1, and 1e-6 of damping is
    lost in fp32.
    """
    save_file({"input_ids": torch.full((8, 64), 5)}, tmp_path / "ids.safetensors")
    spec = parse_spec(f"gptqmodel-b4-g{GROUP}-damp0.000001")
    changes = {"spec": spec, "calibration": tmp_path / "ids.safetensors", "out": tmp_path / "out"}
    line = (
        r"changed damping of model\.layers\.0\.self_attn\.[qkv]_proj from 1e-06 to \S+; use a"
        r" larger damp$"
    )
    with pytest.raises(UserError, match=line) as refused:
        run_job(job.model_copy(update=changes))
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["job.json"]


def as_stated(task, hessian_II):
    return 3 * hessian_II, 0.1


def as_gptq(loss=0.5, samples=1280):
    return (torch.ones(1, 1), *[torch.ones(1, 1)] * 3, 0.0, loss, 0.1, samples)


def watched(invert=as_stated, result=None):
    """A watch of linear blocks.2.mlp.up at damping 0.1 and 1280 samples, after it was rounded, and
    the inverse of the identity.
    """
    watch = Watch(SimpleNamespace(extract_layers_node=lambda: ["blocks"]), 0.1, 1280)
    watch.subset_event(stage="quant_start", layer_idx=2)
    task, factor_II = SimpleNamespace(name="mlp.up"), None
    if invert:
        factor_II, _ = watch.over_inversion(invert)(task, torch.eye(4))
    watch.over_rounding(lambda _: result or as_gptq())(task)
    return watch, factor_II


def test_rounding_as_stated_passes_unchanged():
    watch, factor_II = watched()
    watch.subset_event(stage="quant_complete", layer_idx=2)
    assert torch.equal(factor_II, 3 * torch.eye(4))
    assert (watch.weights.keys(), watch.grids.keys()) == (
        {"blocks.2.mlp.up.weight"},
        {"blocks.2.mlp.up"},
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"invert": lambda task, hessian_II: (hessian_II, 0.3)},
            "changed damping of blocks.2.mlp.up from 0.1 to 0.3",
        ),
        (
            {"invert": lambda task, hessian_II: (hessian_II.diagonal().add_(0.5), 0.1)},
            "blocks.2.mlp.up from 0.1 to 0.6",
        ),
        (
            {"invert": lambda task, hessian_II: (None, 1.0)},
            "did not invert the Hessian of blocks.2.mlp.up",
        ),
        ({"invert": None}, "rounded blocks.2.mlp.up without a Hessian"),
        ({"result": as_gptq(loss="fallback(rtn): 0.1")}, "rounded blocks.2.mlp.up by fallback"),
        ({"result": as_gptq(samples=1279)}, "blocks.2.mlp.up on 1279 of 1280 samples"),
    ],
)
def test_anything_but_gptq_on_all_tokens_is_refused(changes, line):
    watch, _ = watched(**changes)
    with pytest.raises(UserError, match=line):
        watch.subset_event(stage="quant_complete", layer_idx=2)


def test_what_gptqmodel_cannot_do_as_told_is_refused_before_it_is_imported(job, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["OlmoForCausalLM"], "model_type": "olmo"})
    )
    with pytest.raises(UserError, match="holds a OlmoForCausalLM; give one of Olmo2ForCausalLM"):
        quantize(job.model_copy(update={"hf_dir": tmp_path}))
    with pytest.raises(UserError, match="damp above 0"):
        quantize(job.model_copy(update={"spec": job.spec.model_copy(update={"damping": 0.0})}))
    save_file({"input_ids": torch.zeros(8, 10, dtype=torch.int64)}, tmp_path / "short.safetensors")
    with pytest.raises(UserError, match="drops sequences of 10 tokens"):
        quantize(job.model_copy(update={"calibration": tmp_path / "short.safetensors"}))
