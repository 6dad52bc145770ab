"""QTIP: its trellis codes against all walks there are, against integers of Python and against
theory; of a weight, its block update against a closed form in float64 and its errors.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from base.errors import UserError
from base.ranks import ALONE
from quant_eval.quantizers.qtip import QTIP
from quant_eval.rounding.gptq import factored, gptq, prepare
from quant_eval.rounding.trellis import dense_tiles, round_tiles
from quant_eval.rounding.trellis_code import Trellis
from quant_eval.sizes import TILE, check_tiles
from quant_eval.transforms.hadamard import hadamard_steps
from quant_eval.transforms.steps import Transform
from tests.quant_eval.gptq_reference import relative_output_error
from tests.quant_eval.specs import by_qtip, gptq_spec, typed

CPU = torch.device("cpu")
SPEC = typed(QTIP, "qtip-b2-l8")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def value_of(state):
    """The sum of the bytes of a 32-bit word, by Python's integers."""
    word = (state * 34038481 + 76625530) % 2**32
    return (sum(word.to_bytes(4, "little")) - 510) / math.sqrt(4 * (256**2 - 1) / 12)


def windows(string, bits, log_states):
    """The states of a string of 0s and 1s: the windows that end at each multiple of `bits`."""
    ends = range(log_states, len(string) + 1, bits)
    return [int(string[end - log_states : end], 2) for end in ends]


def all_walks(length, bits, log_states):
    """Every walk of `length` states, [W, T], by the strings that it reads."""
    total = log_states + (length - 1) * bits
    strings = ("".join(digits) for digits in itertools.product("01", repeat=total))
    return np.array([windows(string, bits, log_states) for string in strings])


def squared_errors(states, numbers):
    """Squared errors [W] of walks [W, T] in float64."""
    values = np.array([value_of(state) for state in range(states.max() + 1)])
    return ((values[states] - numbers) ** 2).sum(1)


# 5 is not a multiple of 2: overlaps start in the middle of a number's bits
@pytest.mark.parametrize(
    ("log_states", "length", "has_ends"), [(4, 6, False), (5, 5, False), (4, 6, True)]
)
def test_viterbi_finds_the_best_of_all_walks_or_of_those_with_given_ends(
    log_states, length, has_ends
):
    trellis, numbers_TS, overlap_S = Trellis(2, log_states, CPU), normal(length, 8), None
    if has_ends:
        overlap_S = torch.arange(8) % 4
    walks = trellis.walk(numbers_TS, overlap_S)
    every = all_walks(length, 2, log_states)

    for column, number_T in enumerate(numbers_TS.T.double().numpy()):
        fitting = every
        if has_ends:
            starts, ends = every[:, 0] >> 2, every[:, -1] & 3
            fitting = every[(starts == column % 4) & (ends == column % 4)]
        best = squared_errors(fitting, number_T).argmin()
        assert walks[:, column].tolist() == fitting[best].tolist()


def test_tail_biting_is_never_better_than_the_best_circular_string_and_mostly_as_good():
    length, count = 8, 40
    trellis, numbers_NT = Trellis(2, 4, CPU), normal(count, length)
    strings = ("".join(digits) for digits in itertools.product("01", repeat=2 * length))
    circular = np.array([windows(string[-2:] + string, 2, 4) for string in strings])

    decoded_NT = trellis.decode(trellis.encode(numbers_NT)).double()
    errors = (decoded_NT - numbers_NT).square().sum(1).numpy()
    best = np.array([squared_errors(circular, x).min() for x in numbers_NT.double().numpy()])
    assert (errors >= best - 1e-5).all()  # fp32
    # only the overlap is a guess, so at least half of them are the best there are, and the others
    # cost 10% more on average even here, where the ends are a quarter of a sequence
    assert (errors < best + 1e-5).mean() >= 0.5
    assert errors.mean() < 1.1 * best.mean()


@pytest.mark.parametrize(("bits", "log_states"), [(2, 12), (3, 12), (4, 12), (3, 8)])
def test_decoding_reads_a_circular_string_of_exactly_so_many_bits(bits, log_states):
    trellis, generator = Trellis(bits, log_states, CPU), torch.Generator().manual_seed(0)
    codes_NC = torch.randint(256, (3, 32 * bits), generator=generator, dtype=torch.uint8)
    decoded_NT = trellis.decode(codes_NC)
    assert decoded_NT.shape == (3, 256)

    for codes, decoded in zip(codes_NC.tolist(), decoded_NT.tolist(), strict=True):
        string = "".join(f"{byte:08b}" for byte in codes)
        assert len(string) == 256 * bits
        unrolled = string[-(log_states - bits) :] + string
        expected = [value_of(state) for state in windows(unrolled, bits, log_states)]
        assert decoded == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_of_normal_numbers_are_between_the_best_scalar_code_and_any_code(bits):
    trellis, numbers_NT = Trellis(bits, 12, CPU), normal(32, 256)
    codes_NC = trellis.encode(numbers_NT)
    assert codes_NC.shape == (32, 32 * bits)

    error = float((trellis.decode(codes_NC) - numbers_NT).square().mean())
    assert 4.0**-bits < error < 0.72 * lloyd_max(bits)  # measured: 0.63, 0.57, 0.58
    if bits == 2:
        assert error <= 0.08  # arXiv:2406.11235 has 0.069 with 2^16 states
        assert lloyd_max(2) == pytest.approx(0.1175, abs=1e-4)


def lloyd_max(bits):
    """Mean squared error of the best scalar code of normal numbers, by Lloyd's iteration."""
    levels = norm.ppf((np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(500):
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        shares = np.diff(norm.cdf(edges))
        levels = -np.diff(norm.pdf(edges)) / shares
    return 1 - (shares * levels**2).sum()


def test_bits_do_not_depend_on_the_sequences_encoded_together():
    trellis, numbers_NT = Trellis(2, 12, CPU), normal(67, 256)  # 64 is the largest batch
    together = trellis.encode(numbers_NT)
    assert torch.equal(together, trellis.encode(numbers_NT))
    for few in (numbers_NT[:1], numbers_NT[:6], numbers_NT[:19]):
        assert torch.equal(trellis.encode(few), together[: len(few)])


def correlated(width, seed=0):
    """A second moment of inputs that are strongly correlated."""
    mix = normal(width, width, seed=seed).double() * torch.linspace(1, 0.05, width).double()
    return mix @ mix.T / width


def factor_of(hessian_II):
    order_I = torch.arange(len(hessian_II))
    return factored(hessian_II, order_I, SPEC.damping, "w", torch.float64, ALONE).factor_II


def test_blocks_move_the_later_columns_to_where_the_objective_is_smallest():
    """Given E_p of the columns so far, tr(E A E^T) is least at E_r = -E_p A_pr A_rr^-1."""
    weight_OI, hessian_II, trellis = normal(32, 64), correlated(64), Trellis(2, 8, CPU)
    codes = round_tiles(weight_OI, factor_of(hessian_II), trellis)

    damped_II = hessian_II + SPEC.damping * hessian_II.diagonal().mean() * torch.eye(64)
    whole_OI = weight_OI.double()
    quantized_OI = torch.zeros_like(whole_OI)
    for start in range(0, 64, TILE):
        error_OP = whole_OI[:, :start] - quantized_OI[:, :start]
        pull_PR = damped_II[:start, start:] @ torch.linalg.inv(damped_II[start:, start:])
        target_OR = whole_OI[:, start:] + error_OP @ pull_PR
        own = trellis.encode(target_OR[:, :TILE].reshape(2, -1).float())
        assert torch.equal(codes[:, start // TILE], own)
        quantized_OI[:, start : start + TILE] = trellis.decode(own).view(32, TILE)
    assert torch.equal(dense_tiles(codes, trellis), quantized_OI.float())

    # what it is for
    apart_OI = dense_tiles(round_tiles(weight_OI, torch.eye(64), trellis), trellis)
    ours, apart = (
        relative_output_error(weight_OI, q, hessian_II) for q in (quantized_OI, apart_OI)
    )
    assert ours < 0.6 * apart


def test_tiles_of_rows_are_the_same_whichever_are_computed_together():
    weight_OI, trellis = normal(112, 64), Trellis(3, 8, CPU)
    factor_II = factor_of(correlated(64))
    codes = round_tiles(weight_OI, factor_II, trellis)
    for start, stop in ((0, 1), (1, 4), (4, 7)):  # tiles of 16 rows, as ranks share them
        own = round_tiles(weight_OI[start * TILE : stop * TILE], factor_II, trellis)
        assert torch.equal(own, codes[start:stop])


def test_errors_of_a_layer_with_outliers_are_less_than_those_of_gptq():
    """The layer of the other rotations: two inputs, and the weights of another, are outliers."""
    inputs_NI = normal(4096, 256) @ normal(256, 256, seed=1) / 16
    inputs_NI[:, 7] *= 30
    inputs_NI[:, 100] *= 20
    weight_OI = normal(128, 256, seed=2) * 0.02
    weight_OI[:, 5] *= 6
    hessian_II = inputs_NI.double().T @ inputs_NI.double() / 4096

    spec, transform = gptq_spec("gptq-b2-g128"), Transform(*hadamard_steps(256, seed=[1]))
    plain_OI = gptq(weight_OI, prepare(hessian_II, spec, "w"), spec).dense()
    rotated_II = transform.hessian(hessian_II)
    rounded = gptq(transform.weight(weight_OI), prepare(rotated_II, spec, "w"), spec)
    ours_OI = by_qtip(weight_OI, hessian_II, typed(QTIP, "qtip-b2"), [1])

    plain, rotated, ours = (
        relative_output_error(weight_OI, quantized_OI, hessian_II)
        for quantized_OI in (plain_OI, transform.restored(rounded.dense()), ours_OI)
    )
    # measured: 0.258, 0.041 and 0.014
    assert rotated < 0.25 * plain
    assert ours < 0.5 * rotated


def test_linears_that_read_the_same_inputs_have_signs_and_scales_of_their_own():
    small_OI, large_OI, hessian_II = normal(16, 32), 100 * normal(48, 32, seed=1), correlated(32)
    stacked_OI = torch.cat([small_OI, large_OI])
    both_OI = by_qtip(stacked_OI, hessian_II, SPEC, [3], sizes=[16, 48])
    assert torch.equal(both_OI[:16], by_qtip(small_OI, hessian_II, SPEC, [3]))
    assert torch.equal(both_OI, by_qtip(stacked_OI, hessian_II, SPEC, [3], sizes=[16, 48]))
    assert not torch.equal(both_OI[:16], by_qtip(small_OI, hessian_II, SPEC, [4]))
    twice_OI = by_qtip(torch.cat([small_OI, small_OI]), hessian_II, SPEC, [3], sizes=[16, 16])
    assert not torch.equal(twice_OI[:16], twice_OI[16:])
    for part in (slice(0, 16), slice(16, 64)):
        assert relative_output_error(stacked_OI[part], both_OI[part], hessian_II) < 0.15


def test_a_power_of_two_scales_the_result_and_zeros_stay_zeros():
    weight_OI, hessian_II = normal(16, 32), correlated(32)
    once_OI = by_qtip(weight_OI, hessian_II, SPEC, [0])
    assert torch.equal(by_qtip(8 * weight_OI, hessian_II, SPEC, [0]), 8 * once_OI)
    assert not by_qtip(0 * weight_OI, hessian_II, SPEC, [0]).any()


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (24, r"the 24 inputs of w are not a multiple of 16; give another .* gptq-b2-perchannel"),
        (1072, "no Hadamard matrix of size 1072 is known, for the inputs of w; give another"),
    ],
)
def test_sizes_without_tiles_or_hadamard_matrix_are_refused(size, message):
    with pytest.raises(UserError, match=message):
        check_tiles(size, "inputs of w", SPEC.bits)
    check_tiles(11008, "inputs of w", SPEC.bits)
    with pytest.raises(UserError, match="the 24 outputs of w are not a multiple of 16"):
        by_qtip(normal(24, 32), correlated(32), SPEC, [0])
