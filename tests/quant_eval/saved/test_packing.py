"""Packing against a string of bits made of Python integers."""

import dataclasses

import pytest
import torch

from quant_eval.group import Rounded
from quant_eval.saved.gptq import WORD_BITS, pack, unpack

WIDTHS = (2, 3, 4, 8)


def random_rounded(
    bits: int, num_outputs: int, num_inputs: int, groups: int, *, first_zero: int = 0
) -> Rounded:
    """Codes and zeros of all values, inputs in random groups."""
    generator = torch.Generator().manual_seed(bits)
    return Rounded(
        codes_OI=torch.randint(2**bits, (num_outputs, num_inputs), generator=generator).to(
            torch.uint8
        ),
        scales_OG=torch.rand(num_outputs, groups, generator=generator).half().float(),
        zeros_OG=torch.randint(first_zero, 2**bits, (num_outputs, groups), generator=generator).to(
            torch.uint8
        ),
        groups_I=(torch.randperm(num_inputs, generator=generator) % groups).int(),
    )


def words_of(values: list[int], bits: int) -> list[int]:
    """Values as one long integer, the first in its lowest bits, cut into signed words."""
    long = sum(value << (bits * index) for index, value in enumerate(values))
    words = [
        long >> (WORD_BITS * index) & 0xFFFFFFFF for index in range(len(values) * bits // WORD_BITS)
    ]
    return [word - (1 << 32) if word >> 31 else word for word in words]


@pytest.mark.parametrize("bits", WIDTHS)
def test_words_are_one_string_of_bits(bits):
    rounded = random_rounded(bits, num_outputs=32, num_inputs=96, groups=3, first_zero=1)
    packed = {form: pack(rounded, bits, form) for form in ("gptq", "gptq_v2")}
    codes = [words_of(row, bits) for row in rounded.codes_OI.tolist()]
    assert packed["gptq"]["qweight"].T.tolist() == packed["gptq_v2"]["qweight"].T.tolist() == codes
    for form, less in (("gptq", 1), ("gptq_v2", 0)):
        zeros = [
            words_of([zero - less for zero in column], bits)
            for column in rounded.zeros_OG.T.tolist()
        ]
        assert packed[form]["qzeros"].tolist() == zeros


def test_three_bits_by_hand():
    """Value 10 begins in the last two bits of a word, value 21 in the last one: bits 30 and 63
    of the string.
    """
    codes_OI = torch.zeros(32, 32, dtype=torch.uint8)
    codes_OI[0, 10], codes_OI[1, 21], codes_OI[2, 31] = 0b101, 0b110, 0b100
    scales_OG, zeros_OG = torch.ones(32, 1), torch.full((32, 1), 4, dtype=torch.uint8)
    packed = pack(
        Rounded(codes_OI, scales_OG, zeros_OG, torch.zeros(32, dtype=torch.int32)), 3, "gptq"
    )
    assert packed["qweight"][:, 0].tolist() == [1 << 30, 1, 0]
    assert packed["qweight"][:, 1].tolist() == [0, 0, 0b11]
    assert packed["qweight"][:, 2].tolist() == [0, 0, -(1 << 31)]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(("form", "first_zero"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize(
    "outputs_per_word", [1, 3]
)  # zeros that fill one word or run of words, and several
def test_unpacking_gives_back_everything(bits, form, first_zero, outputs_per_word):
    num_outputs = outputs_per_word * {2: 16, 3: 32, 4: 8, 8: 4}[bits]
    for groups in (1, 4):
        rounded = random_rounded(
            bits, num_outputs, num_inputs=128, groups=groups, first_zero=first_zero
        )
        again = unpack(pack(rounded, bits, form), bits, form)
        assert again.numbers is None  # this format holds integers
        for name in ("codes_OI", "scales_OG", "zeros_OG", "groups_I"):
            was, now = getattr(rounded, name), getattr(again, name)
            assert was.dtype == now.dtype
            assert torch.equal(was, now), name


def test_what_a_checkpoint_cannot_hold_is_no_result_of_ours():
    rounded = random_rounded(3, num_outputs=32, num_inputs=32, groups=1)
    with pytest.raises(AssertionError, match="no place for a zero of 0"):
        pack(dataclasses.replace(rounded, zeros_OG=torch.zeros_like(rounded.zeros_OG)), 3, "gptq")
    with pytest.raises(AssertionError, match="not values of fp16"):
        pack(dataclasses.replace(rounded, scales_OG=torch.full((32, 1), 0.1)), 3, "gptq_v2")
    with pytest.raises(AssertionError, match="not of 2 bits"):
        pack(rounded, 2, "gptq_v2")
