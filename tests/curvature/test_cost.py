"""The estimate of cost against passes that are made, operations counted by hand, and the models
it is meant for.

Shapes: B sequences, S positions of a sequence, D hidden, F width of the MLP, E of a head, V
    vocabulary, L blocks.
"""

import re
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoModelForCausalLM, Olmo2Config, Olmo3Config, PretrainedConfig

import curvature.products.parameters
import curvature.spectrum.lanczos
from base.aligned import WIDTH
from base.errors import UserError
from base.ranks import ALONE
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.configuration import read_config
from curvature.cost import simulation
from curvature.cost.memory import PROCESS_BYTES, work_of
from curvature.cost.plan import GpuPlan, cost_lines, estimate
from curvature.cost.simulation import simulate
from curvature.measurement import measure
from curvature.products.exact import DualHessian, Quadratic, streamed
from curvature.products.model import CurvedModel
from curvature.products.parameters import Parameters, Probe
from curvature.settings import HutchinsonSettings, LanczosSettings, StepSettings
from curvature.step.measurement import COPIES, VECTORS
from curvature.step.measurement import measure as measure_step
from curvature.step.prediction import predict
from tests.conftest import make_hf_directory, widths
from tests.curvature.allocated import most_allocated

B, S, D, F, E, V, HEADS, KEY_HEADS = 2, 64, 64, 160, 16, 512, 4, 2
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
KERNELS = {
    FLASH: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value),
    FLASH_BACKWARD: lambda gradient, query, key, value, *_, **__: sdpa_backward_flop_count(
        gradient, query, key, value
    ),
}


def config_of(depth: int) -> Olmo2Config:
    shape = widths(D, F, HEADS, KEY_HEADS, max_position_embeddings=S, vocab_size=V)
    return Olmo2Config(num_hidden_layers=depth, eos_token_id=0, **shape)


def windowed() -> Olmo3Config:
    """Five blocks, of which one has full attention."""
    shape = widths(D, F, HEADS, KEY_HEADS, max_position_embeddings=S, vocab_size=V)
    kinds = ["sliding_attention"] * 5
    kinds[2] = "full_attention"
    return Olmo3Config(
        num_hidden_layers=5, eos_token_id=0, layer_types=kinds, sliding_window=S // 4, **shape
    )


def settings_of(checkpointing: bool = False, dtype: str = "fp32") -> HutchinsonSettings:
    return HutchinsonSettings(microbatch_sequences=B, checkpointing=checkpointing, dtype=dtype)  # type: ignore[arg-type]


def real_flops(config: PretrainedConfig, settings: HutchinsonSettings, dual: bool) -> float:
    """Operations of a product, or of a gradient, that is made; by torch's counter."""
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    curved = CurvedModel(
        model, ranks=ALONE, dtype=DTYPES[settings.dtype], checkpointing=settings.checkpointing
    )
    tokens_BS1 = torch.zeros(B, S + 1, dtype=torch.int64)
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        if dual:
            DualHessian(curved).probed(tokens_BS1, Probe(0, 0))
        else:
            streamed(
                curved.parameters,
                curved.loss(tokens_BS1).share,
                lambda _, gradient: gradient.double().sum(),
            )
    return float(counter.get_total_flops())


@pytest.mark.parametrize(
    ("dual", "checkpointing", "dtype"),
    [
        (False, False, "fp32"),
        (False, True, "fp32"),
        (True, False, "fp32"),
        (True, False, "bf16"),
        (True, True, "bf16"),
    ],
)
def test_operations_are_those_of_a_pass_that_is_made(dual, checkpointing, dtype):
    """Two depths are simulated, a third is run."""
    settings = settings_of(checkpointing, dtype)
    simulated = simulate(config_of(3), settings, S, dual=dual).flops
    assert simulated == real_flops(config_of(3), settings, dual)


@pytest.mark.parametrize("dual", [False, True])
def test_blocks_of_each_kind_count_for_themselves(dual):
    """The dual layers compute no scores outside of the windows."""
    simulated = simulate(windowed(), settings_of(), S, dual=dual)
    rotary = 2 * S * E // 2  # positions times frequencies, once more for the second kind
    assert simulated.flops + rotary == real_flops(windowed(), settings_of(), dual)
    full = windowed()
    full.layer_types = ["full_attention"] * 5
    everything = simulate(full, settings_of(), S, dual=dual)
    assert (simulated.flops < everything.flops) == dual
    assert (simulated.moved < everything.moved) == dual


def test_operations_by_hand():
    """A linear y = Wx: 1 product forward and 2 backward; in dual numbers 3 and 5, in two products of
    activations 3 and 6, and the 3 of the scores once more in the backward pass.
    """
    depth, tokens = 3, B * S
    block = 2 * D * D + 2 * D * KEY_HEADS * E + 3 * D * F
    linears = 2 * tokens * (depth * block + V * D)
    attention = depth * 2 * (2 * B * HEADS * S * S * E)  # of all keys, masked or not
    rotary = 2 * S * E // 2  # positions times frequencies, once, without derivative
    plain = simulate(config_of(depth), settings_of(), S, dual=False)
    kernels = attention // 2  # the kernel's backward pass computes the scores once more
    assert plain.flops == 3 * (linears + attention) + kernels + rotary
    dual = simulate(config_of(depth), settings_of(), S, dual=True)
    attention = attention * (S // 2 + S) // (2 * S)  # the first half of the queries sees half
    # the first block's input has a tangent that nobody varies
    constant = 2 * tokens * (D * D + 2 * D * KEY_HEADS * E)
    assert dual.flops == 8 * linears + (9 + 3 / 2) * attention + rotary - constant
    thrifty = simulate(config_of(depth), settings_of(checkpointing=True), S, dual=True)
    assert thrifty.flops - dual.flops == 3 * (2 * tokens * depth * block + attention)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_other_depths_follow_from_two(monkeypatch, checkpointing):
    settings = settings_of(checkpointing, "bf16")
    extrapolated = simulate(config_of(4), settings, S, dual=True)
    monkeypatch.setattr(simulation, "DEPTHS", (3, 4))
    assert simulate(config_of(4), settings, S, dual=True) == extrapolated


# transformers leaves out a mask where attention is causal, of bool and of fp32; not in a simulation,
# which has no values to look at.
MASKS = 2 * 192 * 192 * (1 + 4)


@pytest.mark.parametrize(
    ("dual", "dtype", "checkpointing", "left_out"),
    [(True, "bf16", False, 0), (True, "bf16", True, 0), (False, "fp32", True, MASKS)],
)
def test_bytes_are_those_that_torch_allocates(dual, dtype, checkpointing, left_out):
    """By torch's count of a pass that is made; 1% is for what kernels take beside their tensors."""
    shape = widths(128, 384, 4, 4, vocab_size=1024, max_position_embeddings=192)
    config = Olmo2Config(num_hidden_layers=3, eos_token_id=0, **shape)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    curved = CurvedModel(
        model.eval(), ranks=ALONE, dtype=DTYPES[dtype], checkpointing=checkpointing
    )
    tokens_BS1 = torch.zeros(2, 192 + 1, dtype=torch.int64)
    nothing = torch.zeros((), dtype=torch.float64)

    def run() -> None:
        if dual:
            DualHessian(curved).probed(tokens_BS1, Probe(0, 0))
        else:
            streamed(curved.parameters, curved.loss(tokens_BS1).share, lambda *_: nothing)

    run()  # what is allocated once and for all is not part of it
    simulated = simulate(config, settings_of(checkpointing, dtype), 192, dual=dual).bytes
    assert simulated > 6e6
    assert simulated - left_out == pytest.approx(most_allocated(run), rel=0.01)


FIXED: dict[str, Any] = {"fixed_sequences": 3, "tolerance": 1e-30, "sequence_length": 8}
PAIRS: dict[str, Any] = {"pairs": 4, "norm_pairs": 3, "companion_pairs": 2}


@pytest.mark.parametrize(
    "settings",
    [
        HutchinsonSettings(max_iterations=5, **PAIRS, **FIXED),
        LanczosSettings(max_iterations=5, starts=2, steps=4, largest=2, smallest=1, **FIXED),
    ],
    ids=lambda settings: settings.name,
)
def test_the_work_is_the_products_and_gradients_that_are_made(
    monkeypatch, hf_dir, held_out_prefix, settings
):
    """Counted where they are made."""
    counts = {"products": 0, "gradients": 0}

    def counted(function, what):
        def call(*arguments):
            counts[what] += torch.is_grad_enabled()  # a loss alone is not a gradient
            return function(*arguments)

        return call

    monkeypatch.setattr(CurvedModel, "dual_loss", counted(CurvedModel.dual_loss, "products"))
    monkeypatch.setattr(CurvedModel, "loss", counted(CurvedModel.loss, "gradients"))
    measure(hf_dir, settings, held_out_prefix, ALONE)
    assert (counts["products"], counts["gradients"]) == work_of(settings)[:2]


# of OLMo 2 (arXiv 2501.00656)
GIANTS = {
    "7B": widths(4096, 11008, 32, 32, num_hidden_layers=32),
    "32B": widths(5120, 27648, 40, 8, num_hidden_layers=64),
}


def giant(name: str) -> Olmo2Config:
    shape = GIANTS[name] | {"vocab_size": 100352, "max_position_embeddings": 4096}
    return Olmo2Config(architectures=["Olmo2ForCausalLM"], **shape)


THRIFTY: dict[str, Any] = {"dtype": "bf16", "checkpointing": True, "vectors": "host"}
THRIFTY |= {"microbatch_sequences": 1}
H100 = GpuPlan()


def test_traces_of_seven_billion_parameters_fit_one_gpu_and_64_gigabytes():
    settings = HutchinsonSettings(lambda_max=False, **THRIFTY)
    cost = estimate(giant("7B"), settings, H100)
    assert cost.parameters == 7_298_617_344
    # the closed form without attention and recomputation
    assert cost.product_flops > 8 * 2 * 4096 * 6.8e9
    weights, tangents = 4 * cost.parameters / 1e9, 2 * cost.parameters / 1e9
    assert weights + tangents < sum(cost.memory.values()) / 1e9 < 80  # these are certain
    assert weights < cost.host / 1e9 < 64  # theta is there, for the guard
    lines = cost_lines(cost, settings, H100)
    assert re.match(r"fits: [67]\d\.\d of 80 GB of a GPU and [345]\d\.\d GB of a node's", lines[0])
    assert max(map(len, lines)) <= WIDTH


def test_an_eigenvalue_with_its_vectors_on_the_host_takes_no_more_of_a_gpu():
    """Nothing of a product stays on the GPU; advice names what is not given yet."""
    config, settings = giant("7B"), HutchinsonSettings(**THRIFTY)
    traces, on_gpu = (
        settings.model_copy(update=change)
        for change in ({"lambda_max": False}, {"vectors": "device"})
    )
    assert estimate(config, settings, H100).memory == estimate(config, traces, H100).memory
    lines = cost_lines(estimate(config, on_gpu, H100), on_gpu, H100)
    assert lines[0].startswith("DOES NOT FIT: ")
    assert lines[1] == "give --vectors host, or more ranks with --sharding fsdp"


def test_vectors_and_models_of_all_ranks_of_a_node_count():
    config, settings = giant("7B"), HutchinsonSettings(**THRIFTY)
    eight, two_nodes = (H100._replace(world_size=size) for size in (8, 16))
    cost, sixteen = (estimate(config, settings, each) for each in (eight, two_nodes))
    vectors = cost.host - 8 * PROCESS_BYTES
    assert vectors >= 8 * 4 * cost.parameters * settings.max_iterations
    assert sixteen.host == cost.host, "8 on each of two nodes"
    traces, sharded = {"lambda_max": False}, {"sharding": "fsdp"}
    host = [
        estimate(config, settings.model_copy(update=changed), eight).host - 8 * PROCESS_BYTES
        for changed in (traces, sharded, traces | sharded)
    ]
    theta = 8 * 4 * cost.parameters
    assert host == pytest.approx([theta, vectors / 8, theta / 8]), "nothing is loaded whole"


def test_the_time_is_of_products_and_of_bytes():
    """A product of OLMo2-7B, 4,096 tokens in bf16, checkpointing. Operation by operation, without a
    fused function, it was 6.7 TB and 3.4 s, 16 to 20% of the peak, by a count made apart from this.
    """
    config, settings = giant("7B"), HutchinsonSettings(lambda_max=False, **THRIFTY)
    h100, h200 = (estimate(config, settings, H100._replace(gpu=gpu)) for gpu in ("h100", "h200"))
    assert 1.9 <= h100.product_seconds <= 2.1
    assert 0.32 < h100.product_flops / h100.product_seconds / 989e12 < 0.36
    matrices = h100.product_flops / (0.6 * 989e12)
    assert h200.product_seconds - matrices == pytest.approx(
        (h100.product_seconds - matrices) * 3.35 / 4.8
    )


@pytest.mark.stress
def test_thirty_two_billion_on_eight_gpus():
    settings = HutchinsonSettings(
        sharding="fsdp", lambda_max=False, **THRIFTY | {"microbatch_sequences": 8}
    )
    cost = estimate(giant("32B"), settings, H100._replace(world_size=8))
    assert sum(cost.memory.values()) < 80e9


def test_bytes_moved_by_hand(monkeypatch):
    """All but products of matrices reads its tensors and writes its result; views do not."""
    a, b = torch.zeros(8, 4), torch.zeros(8, 4)
    matrix = torch.zeros(4, 4, dtype=torch.bfloat16)
    with simulation.Count(set()) as count:
        torch.empty(100).view(10, 10)
        a + b  # 3 x 128
        a.add_(b)  # 3 x 128
        a.copy_(b)  # 2 x 128
        a.double()  # 128 + 256
        a + torch.zeros(4).expand(8, 4)  # 16 of zeros, then 2 x 128 and the 16 that are there
        matrix @ matrix  # flops
    assert count.moved == 3 * 128 + 3 * 128 + 2 * 128 + 384 + 16 + 2 * 128 + 16
    assert count.flops == count.bf16_flops == 2 * 4**3


def test_ranks_that_find_no_work_save_no_time(tmp_path):
    """Two sequences keep two ranks of a sharded model busy."""
    hf_dir = make_hf_directory(tmp_path / "model", max_position_embeddings=512)

    def seconds(world_size: int, **settings) -> float:
        chosen = HutchinsonSettings(**settings)
        return estimate(read_config(hf_dir), chosen, H100._replace(world_size=world_size)).seconds

    shared: dict[str, Any] = {"sharding": "fsdp", "microbatch_sequences": 2}
    alone, two = seconds(1, **shared), seconds(2, **shared)
    # kernels of less: what does not grow with the batch stays
    assert two == pytest.approx(alone / 2, rel=0.02)
    # only a probe's signs and products are shared further
    assert 0.9 * two < seconds(8, **shared) <= two


def test_plans():
    assert GpuPlan.parse("h200") == GpuPlan(1, "h200")
    assert GpuPlan.parse("8xa100") == GpuPlan(8, "a100")
    for text in ("b9000", "0xh100", "8x", "", "-1xh100", "h100x8"):
        with pytest.raises(UserError, match=r"names no GPUs; give a kind \(h100, h200, a100\)"):
            GpuPlan.parse(text)


def test_sequences_beyond_the_context(hf_dir):
    with pytest.raises(UserError, match="--sequence-length 65 is beyond the model's context 64"):
        estimate(read_config(hf_dir), HutchinsonSettings(sequence_length=65), H100)


class Vectors(TorchDispatchMode):
    """Counts vectors over all parameters alive at once; a storage may hold several."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._alive = size, dict[int, int]()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                count, odd = divmod(storage.nbytes(), self._size)
                if count and not odd and id(storage) not in self._alive:
                    self._alive[id(storage)] = count
                    weakref.finalize(storage, self._alive.pop, id(storage))
                    self.most = max(self.most, sum(self._alive.values()))
        return result


@pytest.mark.parametrize(
    "settings",
    [
        HutchinsonSettings(lambda_max=False, sequence_length=8, **PAIRS),
        HutchinsonSettings(max_iterations=7, **PAIRS, **FIXED),
        LanczosSettings(max_iterations=7, starts=2, steps=12, largest=2, smallest=1, **FIXED),
    ],
    ids=["traces", "hutchinson", "lanczos"],
)
def test_vectors_are_those_that_are_held(monkeypatch, hf_dir, held_out_prefix, settings):
    """As many as are counted, or one fewer; traces alone hold one, theta, for the guard."""
    # P is 41,248, and a part no vector
    monkeypatch.setattr(curvature.products.parameters, "ENTRIES_PER_SUM", {"cpu": 20_000})
    monkeypatch.setattr(curvature.spectrum.lanczos, "ENTRIES_AT_ONCE", 20_000)
    size = Parameters(AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)).size
    with Vectors(4 * size) as vectors:
        measure(hf_dir, settings, held_out_prefix, ALONE)
    most = work_of(settings).vectors
    assert most - 1 <= vectors.most <= most
    only_traces = isinstance(settings, HutchinsonSettings) and not settings.lambda_max
    assert only_traces == (vectors.most == 1)


def test_vectors_of_a_step_are_those_that_are_held(monkeypatch, family, held_out_prefix):
    monkeypatch.setattr(curvature.products.parameters, "ENTRIES_PER_SUM", {"cpu": 20_000})
    settings = StepSettings(microbatches=2, sequence_length=8)
    given = (family.base, [family.quantized], settings, held_out_prefix, ALONE)
    size = Parameters(AutoModelForCausalLM.from_pretrained(family.base)).size
    with Vectors(4 * size) as vectors:
        assert len(list(measure_step(*given))) == 1
    assert vectors.most == VECTORS


def test_tensors_of_a_step_are_those_that_are_held():
    """Beside the step itself, by torch's count; its squares are taken of one tensor at a time."""
    delta = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(50_000) for i in range(40)}
    dots = dict.fromkeys(delta, 1.0)

    def held() -> None:
        predict(
            lambda *_: Quadratic(7.0, 1.0, dots),
            lambda *_: 7.0,
            delta,
            lambda _: ({name: tensor.clone() for name, tensor in delta.items()}, dots),
            microbatches=3,
        )

    copy = sum(tensor.nbytes for tensor in delta.values())
    assert most_allocated(held) == pytest.approx((COPIES - 1) * copy, rel=0.05)
