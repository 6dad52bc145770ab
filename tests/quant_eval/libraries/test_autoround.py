"""AutoRound by auto-round against its own formula by hand, and its repairs, all refused.

Shapes: O output features, I input features, G groups of a row, K weights of a group, N sequences,
L tokens of a sequence.
"""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from base.errors import UserError
from quant_eval.libraries.job import Job, run_job
from quant_eval.libraries.outcome import block_linears
from quant_eval.libraries.run_autoround import TuningLog, reported_grids
from quant_eval.quantizers.libraries import AutoRound
from quant_eval.sizes import check_linears
from quant_eval.specs import parse_spec
from tests.quant_eval.libraries.jobs import make_job, random_ids, share_equal, weights_of
from tests.quant_eval.models import ARCHITECTURES, make_model
from tests.quant_eval.specs import typed

WIDE = {"hidden_size": 64, "intermediate_size": 128}
GROUP = 16
IDS = random_ids(8, 32)
IDS[0, -3:] = 7  # ends in repeats, which are not padding


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A model of two blocks."""
    directory = tmp_path_factory.mktemp("autoround") / "model"
    return make_model(directory, "olmo2", **WIDE, num_hidden_layers=2)


@pytest.fixture(scope="module")
def job_of(directory, tmp_path_factory):
    """`job_of(spec)`: a job of the model, in a directory of its own."""

    def made(spec: str, ids_NL: Tensor = IDS, **changes: Any) -> Job:
        return make_job(directory, spec, tmp_path_factory.mktemp("job") / "out", ids_NL, **changes)

    return made


@pytest.fixture(scope="module")
def original(directory):
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")


def on_grid(weight_OI, bits, symmetric, moved=0.0, low=1.0, high=1.0, group=GROUP):
    """Every weight on its group's grid, with straight-through gradients.

    Symmetric: the weight of largest size is -2^(bits - 1) steps, of either sign. `low` and `high`
    shrink the two ends of a group's range, `moved` is added in steps before rounding.
    """
    weight_GK = weight_OI.reshape(-1, group)
    low_G = weight_GK.detach().amin(1).clamp(max=0) * low
    high_G = weight_GK.detach().amax(1).clamp(min=0) * high
    if symmetric:
        steps_G = torch.where(high_G >= -low_G, -high_G, -low_G) / 2 ** (bits - 1)
        zero_G = torch.full_like(steps_G, 2 ** (bits - 1))
    else:
        steps_G = (high_G - low_G) / (2**bits - 1)
        zero_G = rounded(-low_G / steps_G)
    codes_GK = rounded(weight_GK / steps_G[:, None] + moved) + zero_G[:, None]
    dense_GK = (codes_GK.clamp(0, 2**bits - 1) - zero_G[:, None]) * steps_G[:, None]
    return dense_GK.reshape(weight_OI.shape)


def rounded(values):
    """The nearest integer, with the gradient of the identity."""
    return values + (values.round() - values).detach()


def check_plain(weights, model, bits, symmetric) -> None:
    """All linears of the blocks are plainly rounded to their grids."""
    assert weights.keys() == {f"{name}.weight" for name in block_linears(model)}
    for key, held_OI in weights.items():
        expected_OI = on_grid(model.get_parameter(key).detach(), bits, symmetric)
        assert share_equal(held_OI, expected_OI) > 0.999, key  # halves fall either way in fp32


@pytest.mark.parametrize(("bits", "symmetric"), [(3, True), (4, False)])
def test_the_first_iteration_is_plain_rounding_to_its_grid(job_of, original, bits, symmetric):
    job = job_of(f"autoround-b{bits}-g{GROUP}{'' if symmetric else '-asym'}-i1")
    check_plain(weights_of(job), original, bits, symmetric)


@pytest.fixture(scope="module")
def inputs(original):
    """Per block: what it reads in the model as it is, and by name what goes with it."""
    seen: list[tuple[Tensor, dict]] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, given, named: seen.append((given[0].detach(), named)), with_kwargs=True
        )
        for layer in original.model.layers
    ]
    with torch.no_grad():
        original(IDS, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def loss_of(block, weights, hidden_NLI, named, target_NLI):
    """The squared error of a block's outputs with other weights; the last token is left out."""
    output = functional_call(block, weights, (hidden_NLI,), named)
    return (output - target_NLI)[:, :-1].square().mean()


@pytest.mark.parametrize("batch_size", [8, 3])  # 3: a batch of 8 is eight of 1
def test_the_second_iteration_is_a_signed_step(job_of, original, inputs, batch_size):
    """Block 0 by hand, in float64: V, low and high after one step of 1/2 along the gradient's
    signs, taken if it is better than plain rounding."""
    job = job_of(f"autoround-b3-g{GROUP}-asym-i2", batch_size=batch_size)
    library_weights = of_first_block(weights_of(job))
    block = copy.deepcopy(original.model.layers[0]).double()
    hidden_NLI, named = inputs[0]
    hidden_NLI = hidden_NLI.double()
    named = {
        key: tuple(part.double() for part in value) if key == "position_embeddings" else value
        for key, value in named.items()
    }
    with torch.no_grad():
        target_NLI = block(hidden_NLI, **named)

    learned, linears = {}, [n for n, m in block.named_modules() if isinstance(m, nn.Linear)]
    for name in linears:
        groups = block.get_submodule(name).weight.numel() // GROUP
        start = (torch.zeros(groups, GROUP), torch.ones(groups), torch.ones(groups))
        learned[name] = [value.double().requires_grad_() for value in start]

    def dense():
        return {
            f"{name}.weight": on_grid(
                block.get_submodule(name).weight.detach(), 3, False, *learned[name]
            )
            for name in linears
        }

    def taken(weights):
        shares = [share_equal(library_weights[key], weights[key]) for key in weights]
        return sum(shares) / len(shares)

    first = dense()
    before = loss_of(block, first, hidden_NLI, named, target_NLI)
    before.backward()
    for values in learned.values():
        for value, limit in zip(values, (None, 1.0, 1.0), strict=True):
            assert value.grad is not None
            value.data -= 0.5 * value.grad.sign()
            value.data.clamp_(0 if limit else None, limit or 1e9)
    second = dense()
    after = loss_of(block, second, hidden_NLI, named, target_NLI)
    expected, other = (second, first) if after < before else (first, second)
    assert taken(expected) > 0.99  # a gradient next to 0 has either sign in fp32
    assert taken(other) < 0.9


def test_tuning_lowers_the_error_of_a_block(job_of, original, inputs):
    plain, job = (
        weights_of(job_of(f"autoround-b3-g{GROUP}-i1")),
        job_of(f"autoround-b3-g{GROUP}-i40"),
    )
    tuned = weights_of(job)
    block, (hidden_NLI, named) = original.model.layers[0], inputs[0]
    with torch.no_grad():
        target_NLI = block(hidden_NLI, **named)
        errors = [
            float(loss_of(block, of_first_block(weights), hidden_NLI, named, target_NLI))
            for weights in (plain, tuned)
        ]
    assert errors[1] < 0.8 * errors[0]
    settings = json.loads((job.out / "report.json").read_text())["settings"]
    assert (settings["algorithm"]["iters"], settings["algorithm"]["lr"]) == (40, 1 / 40)
    again = weights_of(job.model_copy(update={"out": job.out.with_name("again")}))
    assert all(torch.equal(again[key], value) for key, value in tuned.items())


def of_first_block(weights):
    prefix = "model.layers.0."
    return {key[len(prefix) :]: value for key, value in weights.items() if key.startswith(prefix)}


def test_bf16_weights_are_the_grid_in_bf16_where_the_cpu_computes_in_it(job_of):
    job = job_of(f"autoround-b4-g{GROUP}-i2", dtype="bf16")
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        with pytest.raises(UserError, match="this one has none; give --dtype fp32"):
            run_job(job)
        return
    for key, held_OI in weights_of(job).items():
        assert held_OI.dtype == torch.bfloat16
        assert max(len(row_K.unique()) for row_K in held_OI.reshape(-1, GROUP)) <= 16, key


@pytest.mark.stress
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_all_linears_on_their_grids_and_nothing_else(tmp_path, name):
    sizes: dict[str, Any] = WIDE | ({"head_dim": 32} if name == "qwen3" else {})
    # their settings are of three blocks
    sizes |= {} if name in ("smollm3", "olmo3") else {"num_hidden_layers": 2}
    sizes |= WITHIN_WINDOWS if name == "olmo3" else {}
    directory = make_model(tmp_path / "model", name, **sizes)
    job = make_job(directory, f"autoround-b3-g{GROUP}-asym-i1", tmp_path / "out", IDS)
    model = AutoModelForCausalLM.from_pretrained(directory)
    check_plain(weights_of(job), model, 3, symmetric=False)


WITHIN_WINDOWS = {"rope_parameters": None, "sliding_window": 33}  # texts of 32 tokens


@pytest.mark.parametrize("changes", [{"rope_parameters": None}, {"sliding_window": 33}])
@pytest.mark.parametrize("spec", [f"autoround-b3-g{GROUP}-i1", f"gptqmodel-b3-g{GROUP}"])
def test_layers_that_need_their_own_masks_or_rotary_embeddings_are_refused(tmp_path, spec, changes):
    """Texts as long as a window, and YaRN in the layers with full attention alone."""
    directory = make_model(tmp_path / "model", "olmo3", **(WIDE | changes))
    with pytest.raises(UserError, match=r"gives every layer the mask and the rotary .* give gptq"):
        run_job(make_job(directory, spec, tmp_path / "out", IDS))


def test_what_auto_round_would_leave_out_is_refused(job_of):
    sizes = {"a.q": (32, 64), "a.k": (48, 64)}
    with pytest.raises(UserError, match=r"leaves out a\.k, 48 x 64: it takes multiples of 32"):
        check_linears(parse_spec("autoround-b3-g16"), sizes)
    with pytest.raises(UserError, match="batches of 8 sequences, and there are 7"):
        run_job(job_of("autoround-b3-g16", IDS[:7]))


DONE = "quantized 7/7 layers in the block, loss iter 0: 0.002 -> iter 9: {}"


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ([DONE.format("0.001")], "tuned 1 of 2 blocks"),
        ([DONE.format("0.001"), "quantized 7/7 layers in the block"], "tuned 1 of 2 blocks"),
        ([DONE.format("0.001"), DONE.format("nan")], "loss of block 1 is nan"),
        (
            [DONE.format("0.001"), DONE.format("0.1"), "Change sequence length"],
            "warned: Change seq",
        ),
    ],
)
def test_a_log_of_anything_but_tuned_blocks_is_refused(messages, line):
    def log_of(messages):
        log = TuningLog()
        for message in messages:
            level = logging.WARNING if message.startswith("Change") else logging.INFO
            log.emit(logging.LogRecord("autoround", level, "", 0, message, None, None))
        return log

    log_of([DONE.format("0.001")] * 2).check(2)
    with pytest.raises(UserError, match=line):
        log_of(messages).check(2)


def test_grids_are_those_that_the_linears_report_and_other_settings_are_refused():
    spec = typed(AutoRound, "autoround-b3-g2")
    model = nn.ModuleDict({"q": nn.Linear(4, 1, bias=False)})
    assert reported_grids(["q"], model, spec) == {}  # left out
    settings = {"bits": 3, "group_size": 2, "sym": True, "data_type": "int", "act_bits": 16}
    settings |= {"scale_dtype": torch.float32, "scale": torch.full((1, 2), 0.5), "zp": 4}
    for key, value in settings.items():
        setattr(model["q"], key, value)
    assert reported_grids(["q"], model, spec)["q"].zeros_OG.tolist() == [[4, 4]]
    for key, value in (("group_size", 4), ("scale_dtype", torch.float16), ("bits", 4)):
        model["q"].__dict__[key] = value
        with pytest.raises(UserError, match=f"took {key} {value} instead of {settings[key]} for q"):
            reported_grids(["q"], model, spec)
        model["q"].__dict__[key] = settings[key]


@pytest.mark.parametrize("method", ["gptqmodel", "gptaq", "awq", "autoround"])
@pytest.mark.parametrize("change", ["had", "quarot", "smooth0.5", "a8"])
def test_libraries_get_no_transforms(method, change):
    """Those of gptqmodel and llmcompressor are wrong on our models."""
    parse_spec(f"{method}-b4-g128")
    with pytest.raises(UserError):
        parse_spec(f"{method}-b4-g128-{change}")
