"""Learned transforms: never worse than their start, exact, the same bits, and figures on a layer
with planted outliers; the gradient of rounding against finite differences.
"""

import pytest
import torch
from torch import nn

from base.errors import UserError
from base.ranks import ALONE, Ranks
from quant_eval.learned import (
    Learnable,
    Rotations,
    Scales,
    StraightThroughCast,
    Trial,
    descend,
    learn_transforms,
    rounded_weight,
    sample,
    straight_through,
)
from quant_eval.model.activations import Activations
from quant_eval.specs import parse_spec
from quant_eval.transforms.placement import places_of
from tests.quant_eval.learning import (
    LENGTH,
    hadamard_start,
    inputs_with_outliers,
    make_block,
    output_error,
    planted_layer,
    replaced,
)
from tests.quant_eval.models import open_model
from train.model.families import SITES

NAMES = ("spinquant-blockwise", "ostquant-blockwise", "flatquant-blockwise")
WIDTH = 32


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A block, two batches of different sizes, and their context."""
    model, block = make_block(tmp_path_factory.mktemp("olmo2"))
    batches = [inputs_with_outliers(sequences, WIDTH) for sequences in (2, 4)]
    return block, batches, model.context(LENGTH)


def learnables_of(block, name):
    widths = [next(iter(linears.values())).in_features for linears in block.linears()]
    return {
        site: Learnable(name, width, (0, number))
        for number, (site, width) in enumerate(zip(SITES, widths, strict=True))
    }


def learn(given, spec):
    block, batches, context = given
    return learn_transforms(block, batches, context, spec, seed=0)


@pytest.fixture(scope="module", params=NAMES)
def learned(request, given):
    spec = parse_spec(f"w4a4-g16-{request.param}-i8")
    return spec, learn(given, spec)


def assert_learns(given, spec, transforms):
    block, batches, context = given
    start = output_error(block, hadamard_start(block), spec, batches, context)
    assert output_error(block, transforms, spec, batches, context) < start


def test_error_falls_on_what_is_learned_on(given, learned):
    assert_learns(given, *learned)


@pytest.mark.parametrize(
    "name",
    ["rtn-b2-g16", "gptq-b3-g16-asym", "a4", "mxfp4", "ternary-g16"],
)
def test_error_falls_with_any_casts(given, name):
    spec = parse_spec(f"{name}-ostquant-blockwise-i4")
    assert_learns(given, spec, learn(given, spec))


@pytest.mark.parametrize("name", ["nvfp4", "w8a8-astatic"])
def test_static_ranges_are_those_of_the_batch(given, name):
    block, batches, context = given
    spec = parse_spec(f"{name}-ostquant-blockwise")
    learnables = learnables_of(block, "ostquant-blockwise")
    trial = Trial(block, learnables, spec, batches, context)
    start = trial.error()
    assert 0 < start < 0.1
    descend(nn.ModuleList(learnables.values()), trial, 12, ALONE)
    assert trial.error() < start


def test_steps_that_only_make_it_worse_leave_the_start(given, monkeypatch):
    block, batches, context = given
    monkeypatch.setattr(Scales, "rate", 8.0)
    monkeypatch.setattr(Rotations, "rate", 1e3)
    spec = parse_spec("w4a4-g16-ostquant-blockwise-i3")
    transforms = learn_transforms(block, batches, context, spec, seed=0)
    for site, start in hadamard_start(block).items():
        x = torch.eye(WIDTH * (1 + (site == "mlp_out")))
        assert torch.equal(transforms[site].inputs(x), start.inputs(x))


def test_rotations_are_orthogonal_and_all_have_their_inverse(learned):
    spec, transforms = learned
    for transform in transforms.values():
        width = int(transform.steps[0].width)
        identity_II = torch.eye(width, dtype=torch.float64)
        matrix_II = transform.weight(identity_II)
        torch.testing.assert_close(transform.restored(matrix_II), identity_II, rtol=0, atol=1e-10)
        gram_II = matrix_II @ matrix_II.T  # of D Q: D^2
        if spec.rotation == "ostquant-blockwise":
            gram_II = gram_II / gram_II.diagonal()
        if spec.rotation != "flatquant-blockwise":
            torch.testing.assert_close(gram_II, identity_II, rtol=0, atol=1e-10)


def test_exact_with_casts_off(given, learned):
    block, batches, context = given
    exact = replaced(block, learned[1], None)
    for x in batches:
        expected = block(x, context)
        torch.testing.assert_close(
            exact(x, context), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
        )


def test_same_bits_twice_and_the_block_stays(given, learned):
    block, batches, context = given
    spec, transforms = learned
    before = {key: value.clone() for key, value in block.module.state_dict().items()}
    again = learn_transforms(block, batches, context, spec, seed=0)
    other = learn_transforms(block, batches, context, spec, seed=1)
    for site, transform in transforms.items():
        x = torch.eye(int(transform.steps[0].width))
        assert torch.equal(again[site].inputs(x), transform.inputs(x))
        assert not torch.equal(other[site].inputs(x), transform.inputs(x))
        assert not any(value.requires_grad for value in transform.state_dict().values())
    after = block.module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert not any(value.requires_grad for value in block.module.parameters())


def test_error_pools_batches_of_different_sizes(given):
    """As in float64 by the modules that are measured; sums in fp32 are the difference."""
    block, batches, context = given
    spec = parse_spec("w4a4-g16-spinquant-blockwise")
    learnables = learnables_of(block, "spinquant-blockwise")
    trial = Trial(block, learnables, spec, batches, context)
    expected = output_error(block, hadamard_start(block), spec, batches, context)
    assert trial.error() == pytest.approx(expected, rel=1e-5)


def layer_error(name, steps=40):
    """Errors of the planted layer: where it starts, learned, and on other text."""
    layer, x, other = planted_layer(1024)
    spec = parse_spec(f"w4a4-g128-{name}")
    assert spec.rotation
    learnable = Learnable(spec.rotation, 256, (0, 0))
    trial = Trial(layer, {"attention_in": learnable}, spec, [x], {})
    start = trial.error()
    descend(nn.ModuleList([learnable]), trial, steps, ALONE)
    transforms = {"attention_in": learnable.transform()}
    return start, *(output_error(layer, transforms, spec, [text], {}) for text in (x, other))


def test_planted_outliers(monkeypatch):
    """Each learned on 1,024 tokens, judged on 1,024 others: what they do is not overfitting.

    100 steps make 0.0118, 0.0045, 0.0057 (scales alone) and 0.0054 of 0.0210; here they take 40.
    """
    start, *_, rotation = layer_error("spinquant-blockwise")
    *_, both = layer_error("ostquant-blockwise")
    *_, kronecker = layer_error("flatquant-blockwise")
    monkeypatch.setattr(Rotations, "rate", 0.0)
    *_, diagonal = layer_error("ostquant-blockwise")
    figures = f"start {start:.4f}, {rotation=:.4f} {both=:.4f} {diagonal=:.4f} {kronecker=:.4f}"
    assert start == pytest.approx(0.022, rel=0.1), figures  # of a Hadamard transform alone
    assert rotation < 0.7 * start, figures
    assert both < 0.9 * min(rotation, diagonal), figures
    assert kronecker < 0.5 * start, figures


def test_rotations_learn_nothing_past_the_scale(monkeypatch):
    """The gradient that takes a cast for the identity, as SpinQuant's does, is not a descent here."""
    plain = lambda x, rounded, size: x + (rounded - x).detach()  # noqa: E731
    monkeypatch.setattr("quant_eval.learned.straight_through", plain)
    start, learned, _ = layer_error("spinquant-blockwise", steps=20)
    assert learned > 0.95 * start


def shared(x, ranks, monkeypatch):
    """The sample as each rank adds to it, and what every rank then has; batches of 3."""
    cpu = torch.device("cpu")
    shares = [Ranks(rank, ranks, cpu).share(len(x)) for rank in range(ranks)]
    splits = [x[share.start : share.stop].split(3) if share else () for share in shares]
    shapes = [[(len(batch), LENGTH) for batch in split] for split in splits]
    monkeypatch.setattr(Ranks, "gather_values", lambda *_: shapes)
    monkeypatch.setattr(Ranks, "sum", lambda _, tensor: tensor)
    parts = []
    for rank, split in enumerate(splits):
        inputs = Activations(shapes[rank], WIDTH, x.dtype, cpu)
        for index, batch in enumerate(split):
            inputs.write(index, batch)
        parts.append(torch.cat(sample(inputs, WIDTH, x.dtype, Ranks(rank, ranks, cpu))))
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sample_is_the_same_on_any_ranks(ranks, monkeypatch):
    x = inputs_with_outliers(11, WIDTH)
    assert torch.equal(shared(x, ranks, monkeypatch), x[:8])
    assert torch.equal(shared(x[:5].bfloat16(), ranks, monkeypatch), x[:5].bfloat16())
    with pytest.raises(UserError, match="3 calibration sequences are too few for 5 ranks"):
        shared(x[:3], 5, monkeypatch)


def test_bad_input(given, tmp_path):
    block, batches, context = given
    spec = parse_spec("w4a4-g16-spinquant-blockwise-i2")
    wrong = [batches[0].clone(), batches[1]]
    wrong[0][0, 0, 0] = torch.nan
    with pytest.raises(UserError, match=r"its output error is nan at step 0; check"):
        learn_transforms(block, wrong, context, spec, seed=0)
    with pytest.raises(UserError, match="rotated by quarot; give that, or a method"):
        parse_spec("kv4-spinquant-blockwise")  # nothing to learn on
    model, _ = make_block(tmp_path, intermediate_size=70)
    with pytest.raises(UserError, match="no Hadamard matrix of size 70 is known"):
        places_of(spec, model.family, model.config)


def test_many_batches_in_bf16_add_up(tmp_path):
    """So many of one batch have its error and its gradient, to the rounding of sums in fp32."""
    make_block(tmp_path)
    model = open_model(tmp_path, torch.bfloat16)
    block, batch = model.block(0), inputs_with_outliers(2, WIDTH).bfloat16()
    spec = parse_spec("w4a4-g16-spinquant-blockwise")
    gradients = []
    for copies in (1, 64):
        learnables = learnables_of(block, "spinquant-blockwise")
        Trial(block, learnables, spec, [batch] * copies, model.context(LENGTH)).error()
        values = [value for each in learnables.values() for value in each.parameters()]
        gradients.append(
            torch.cat([value.grad.flatten() for value in values if value.grad is not None])
        )
    expected, added = gradients
    assert (added - expected).norm() < 1e-5 * expected.norm()


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def smooth(x, start, size):
    """Rounding with the error of rounding at `start` frozen in units of the scale: round(u) is u
    plus a constant, and the scale is that of x.
    """
    groups, starts = x.view(-1, size), start.view(-1, size)
    scale, scale0 = (each.abs().amax(1, keepdim=True) / 7.5 for each in (groups, starts))
    constant = (starts / scale0).round() - starts / scale0
    return (scale * (groups / scale + constant)).view(x.shape)


@pytest.mark.parametrize("size", [4, 12, 24])
def test_gradient_is_that_of_rounding_at_a_scale_that_follows(size):
    x, weights = normal(2, 12), normal(2, 12, seed=1)
    scale = x.view(-1, size).abs().amax(1, keepdim=True) / 7.5
    rounded = ((x.view(-1, size) / scale).round() * scale).view(x.shape)
    torch.testing.assert_close(smooth(x, x, size), rounded)  # the same point to begin with

    leaf = x.clone().requires_grad_()
    result = straight_through(leaf, rounded, size)
    assert torch.equal(result, rounded)
    (result * weights).sum().backward()

    expected, step = torch.empty_like(x), 1e-6
    for index in range(x.numel()):
        moved = torch.zeros(x.numel(), dtype=torch.float64)
        moved[index] = step
        change = smooth(x + moved.view(x.shape), x, size) - smooth(x - moved.view(x.shape), x, size)
        expected.view(-1)[index] = (change * weights).sum() / (2 * step)
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-7, atol=1e-8)


def test_a_group_of_zeros_passes_the_gradient_on():
    leaf = torch.zeros(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(straight_through(leaf, torch.zeros(2, 4), 4).sum(), leaf)
    assert torch.equal(gradient, torch.ones(2, 4))


@pytest.mark.parametrize("name", ["w4a4-g16", "mxfp4", "nvfp4", "fp8", "w8a8-astatic", "fp8e5m2"])
def test_multiplied_inputs_make_multiplied_outputs(name):
    """By Euler: casts with scales in proportion have the outputs as derivative along the inputs."""
    spec, x = parse_spec(f"{name}-spinquant-blockwise"), normal(3, 32).float().requires_grad_()
    output = StraightThroughCast(spec, 32, "layer")(x)
    weights = normal(3, 32, seed=1).float()
    (gradient,) = torch.autograd.grad((output * weights).sum(), x)
    torch.testing.assert_close((gradient * x).sum(), (output * weights).sum())


def test_weights_as_they_are():
    spec, weight_OI = parse_spec("a4-spinquant-blockwise"), normal(3, 32).float()
    assert rounded_weight(weight_OI, spec) is weight_OI
    spec = parse_spec("rtn-b4-g16-spinquant-blockwise")
    assert StraightThroughCast(spec, 32, "layer")(weight_OI) is weight_OI
