"""The estimate of cost against passes that are made, operations counted by hand, and the models it is meant for.

Shapes: B sequences, S positions of a sequence, D hidden, F width of the MLP, E of a head, V vocabulary, L blocks.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoModelForCausalLM, Olmo2Config

from ckpt_tools.formats.weights import DTYPES
from curvature import simulation
from curvature.cost import GRADIENTS_PER_DIFFERENCE, cost_lines, estimate, parts_of
from curvature.exact import DualHessian, streamed
from curvature.measurement import measure
from curvature.model import CurvedModel
from curvature.parameters import Probe
from curvature.settings import SPECS, CurvatureSettings, HutchinsonSettings
from curvature.simulation import simulate
from tests.conftest import make_hf_directory
from tests.curvature.conftest import ALONE
from tests.curvature.pass_memory import PASSES
from tests.runs import PROJECT, environment
from train.command import UserError

B, S, D, F, E, V, HEADS, KEY_HEADS = 2, 64, 64, 160, 16, 512, 4, 2
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
KERNELS = {
    FLASH: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value),
    FLASH_BACKWARD: lambda gradient, query, key, value, *_, **__: sdpa_backward_flop_count(gradient, query, key, value),
}


def config_of(depth: int) -> Olmo2Config:
    shape: dict[str, Any] = {"hidden_size": D, "intermediate_size": F, "num_attention_heads": HEADS, "eos_token_id": 0}
    shape |= {"num_key_value_heads": KEY_HEADS, "max_position_embeddings": S, "vocab_size": V}
    return Olmo2Config(num_hidden_layers=depth, **shape)


def settings_of(checkpointing: bool = False, dtype: str = "fp32") -> HutchinsonSettings:
    return HutchinsonSettings(microbatch_sequences=B, checkpointing=checkpointing, dtype=dtype)  # type: ignore[arg-type]


def real_flops(depth: int, settings: HutchinsonSettings, dual: bool) -> float:
    """Of a product, or of a gradient, that is made; by torch's counter."""
    model = AutoModelForCausalLM.from_config(config_of(depth), dtype=torch.float32, attn_implementation="sdpa").eval()
    curved = CurvedModel(
        model, ranks=ALONE, dual=dual, dtype=DTYPES[settings.dtype], checkpointing=settings.checkpointing
    )
    tokens_BS1 = torch.zeros(B, S + 1, dtype=torch.int64)
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        if dual:
            DualHessian(curved).probed(tokens_BS1, Probe(0, 0))
        else:
            streamed(curved.parameters, curved.loss(tokens_BS1).share, lambda _, gradient: gradient.double().sum())
    return float(counter.get_total_flops())


@pytest.mark.parametrize(
    ("dual", "checkpointing", "dtype"),
    [(False, False, "fp32"), (False, True, "fp32"), (True, False, "fp32"), (True, False, "bf16"), (True, True, "bf16")],
)
def test_operations_are_those_of_a_pass_that_is_made(dual, checkpointing, dtype):
    """Two depths are simulated, a third is run."""
    settings = settings_of(checkpointing, dtype)
    assert simulate(config_of(5), settings, S, dual=dual).flops == real_flops(5, settings, dual)


def test_operations_by_hand():
    """Of y = Wx: 1 product forward and 2 backward; in dual numbers 3 and 5, in two products of activations 3 and 6."""
    depth, tokens = 5, B * S
    block = 2 * D * D + 2 * D * KEY_HEADS * E + 3 * D * F
    linears = 2 * tokens * (depth * block + V * D)
    attention = depth * 2 * (2 * B * HEADS * S * S * E)  # of all keys, masked or not
    rotary = 2 * S * E // 2  # positions times frequencies, once, without derivative
    plain = simulate(config_of(depth), settings_of(), S, dual=False)
    assert plain.forward_flops == linears + attention + rotary
    kernels = attention // 2  # the kernel's backward pass computes the scores once more
    assert plain.flops == 3 * (linears + attention) + kernels + rotary
    dual = simulate(config_of(depth), settings_of(), S, dual=True)
    assert dual.forward_flops == 3 * (linears + attention) + rotary
    constant = 2 * tokens * (D * D + 2 * D * KEY_HEADS * E)  # the first block's input has a tangent that nobody varies
    assert dual.flops == 8 * linears + 9 * attention + rotary - constant
    thrifty = simulate(config_of(depth), settings_of(checkpointing=True), S, dual=True)
    assert thrifty.flops - dual.flops == 3 * (2 * tokens * depth * block + attention)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_other_depths_follow_from_two(monkeypatch, checkpointing):
    settings = settings_of(checkpointing, "bf16")
    extrapolated = simulate(config_of(5), settings, S, dual=True)
    monkeypatch.setattr(simulation, "DEPTHS", (5, 6))
    assert simulate(config_of(5), settings, S, dual=True) == extrapolated


def test_bytes_are_those_that_a_process_grows_by():
    """Within 10%: pages, Python's own objects, and causal masks that transformers leaves out where it may."""
    variables = environment() | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    program = [sys.executable, "-m", "tests.curvature.pass_memory"]
    done = subprocess.run(program, env=variables, cwd=PROJECT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for kind, (measured, simulated) in zip(PASSES, found, strict=True):
        assert simulated == pytest.approx(measured, rel=0.1), kind
    assert found[0][0] > 200e6


@pytest.mark.parametrize("route", ["dual", "finite-difference"])
@pytest.mark.parametrize("spec", list(SPECS))
def test_parts_are_the_products_and_gradients_that_are_made(monkeypatch, hf_dir, held_out_prefix, spec, route):
    """Counted where they are made: a difference of gradients is made of gradients."""
    few = {"hutchinson": {"pairs": 4, "norm_pairs": 3, "companion_pairs": 2}, "power": {"probes": 3}}
    few |= {"hutch++": {"products": 9}, "xtrace": {"products": 8}, "lanczos": {"starts": 2, "steps": 4}}
    ends = {"largest": 2, "smallest": 1} if spec == "lanczos" else {}
    settings: CurvatureSettings = SPECS[spec].model_validate(
        {"name": spec, "route": route, "fixed_sequences": 3, "sequence_length": 8, "max_iterations": 5}
        | {"tolerance": 1e-30}
        | few[spec]
        | ends
    )
    made = {"products": 0, "gradients": 0}

    def counted(function, what):
        def call(*arguments):
            made[what] += torch.is_grad_enabled()  # a loss alone is no gradient
            return function(*arguments)

        return call

    for name in ("product", "_quadratic"):
        monkeypatch.setattr(DualHessian, name, counted(getattr(DualHessian, name), "products"))
    monkeypatch.setattr(CurvedModel, "loss", counted(CurvedModel.loss, "gradients"))
    measure(hf_dir, settings, held_out_prefix, ALONE)
    parts = parts_of(settings)
    products, gradients = sum(part.products for part in parts), sum(part.gradients for part in parts)
    if route == "dual":
        assert made == {"products": products, "gradients": gradients}
    else:  # some differences are content with fewer gradients than the most
        most = GRADIENTS_PER_DIFFERENCE * products + gradients
        assert 0.9 * most <= made["gradients"] <= most


GIANTS: dict[str, dict[str, Any]] = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    | {"num_key_value_heads": 8},
}


def giant(tmp_path: Path, name: str) -> Path:
    """config.json of OLMo 2 (arXiv 2501.00656), and nothing else."""
    common: dict[str, Any] = {"vocab_size": 100352, "max_position_embeddings": 4096}
    Olmo2Config(architectures=["Olmo2ForCausalLM"], **common, **GIANTS[name]).save_pretrained(tmp_path)
    return tmp_path


def gigabytes(hf_dir: Path, world_size: int = 1, **settings) -> float:
    cost = estimate(hf_dir, HutchinsonSettings(**settings), world_size=world_size, gpu="h100", mfu=0.4)
    return sum(cost.memory.values()) / 1e9


def test_seven_billion_parameters_fit_one_gpu(tmp_path):
    hf_dir = giant(tmp_path, "7B")
    thrifty: dict[str, Any] = {"checkpointing": True, "vectors": "host", "microbatch_sequences": 1}
    assert gigabytes(hf_dir, dtype="fp32", **thrifty) > 80
    plan: dict[str, Any] = {"world_size": 1, "gpu": "h100", "mfu": 0.4}
    settings = HutchinsonSettings(dtype="bf16", **thrifty)
    cost = estimate(hf_dir, settings, **plan)
    assert cost.parameters == 7_298_617_344
    assert cost.product_flops > 8 * 2 * 4096 * 6.8e9  # the closed form without attention and recomputation
    assert 29.2 + 14.6 < sum(cost.memory.values()) / 1e9 < 80  # weights in fp32 and tangents in bf16 are certain
    assert ": fits" in cost_lines(cost, settings, **plan)[-1]


def test_thirty_two_billion_on_eight_gpus(tmp_path):
    hf_dir = giant(tmp_path, "32B")
    options: dict[str, Any] = {"dtype": "bf16", "checkpointing": True, "vectors": "host", "microbatch_sequences": 8}
    assert gigabytes(hf_dir, 8, sharding="fsdp", **options) < 80


def test_ranks_that_find_no_work_save_no_time(tmp_path):
    """Two sequences keep two ranks of a sharded model busy; a round of 16 microbatches keeps 16."""
    hf_dir = make_hf_directory(tmp_path / "model")

    def seconds(world_size: int, **settings) -> float:
        chosen = HutchinsonSettings(**settings)
        return estimate(hf_dir, chosen, world_size=world_size, gpu="h100", mfu=0.4).seconds

    shared: dict[str, Any] = {"sharding": "fsdp", "microbatch_sequences": 2}
    alone, two = seconds(1, **shared), seconds(2, **shared)
    assert two == pytest.approx(alone / 2, rel=1e-3)
    assert seconds(8, **shared) == two
    by_rounds = {"pairs": 64, "relative_error": 0.1}  # the rule looks after every 16 microbatches
    assert seconds(64, **by_rounds) == seconds(16, **by_rounds) > alone / 16
    assert seconds(64, pairs=64) < seconds(16, pairs=64)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"gpu": "b9000"}, "--gpu b9000 is unknown; give one of h100, h200, a100"),
        ({"mfu": 0.0}, "--mfu 0 and --world-size 1 are no plan"),
        ({"mfu": float("nan")}, "are no plan; give a share up to 1"),
        ({"mfu": 40.0}, "are no plan"),
        ({"world_size": 0}, "--world-size 0 are no plan"),
    ],
)
def test_bad_plans(hf_dir, plan, message):
    with pytest.raises(UserError, match=message):
        estimate(hf_dir, HutchinsonSettings(), **({"world_size": 1, "gpu": "h100", "mfu": 0.4} | plan))


def test_sequences_beyond_the_context(hf_dir):
    with pytest.raises(UserError, match="--sequence-length 65 is beyond the model's context 64"):
        estimate(hf_dir, HutchinsonSettings(sequence_length=65), world_size=1, gpu="h100", mfu=0.4)
