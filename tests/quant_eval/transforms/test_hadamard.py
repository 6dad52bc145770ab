"""Hadamard transforms against scipy's and compressed-tensors' dense matrices."""

import pytest
import torch
from compressed_tensors.transform.utils import hadamard as library
from scipy.linalg import hadamard as sylvester

from quant_eval.transforms.hadamard import hadamard_steps, random_signs
from quant_eval.transforms.steps import Kronecker, Transform

# hidden and FFN widths of released and of tiny models
WIDTHS = [96, 768, 1376, 2048, 4096, 5120, 5504, 11008, 13824, 14336, 18944, 27648]


def eye(width):
    return torch.eye(width, dtype=torch.float64)


def dense(width, *settings):
    return Transform(*hadamard_steps(width, *settings)).weight(eye(width))


@pytest.mark.parametrize("width", WIDTHS)
def test_orthogonal_with_entries_of_one_size(width):
    """The product of both small matrices is the whole one (test_steps), so each is looked at."""
    (step,) = hadamard_steps(width)
    assert isinstance(step, Kronecker)
    assert len(step.left_AA) * len(step.right_BB) == step.width == width
    assert len(step.left_AA) + len(step.right_BB) <= 512
    for matrix in (step.left_AA, step.right_BB):
        assert float((matrix @ matrix.T - eye(len(matrix))).abs().max()) < 1e-12
        assert float((matrix.square() * len(matrix) - 1).abs().max()) < 1e-12


@pytest.mark.parametrize("width", [2, 32, 1024])
def test_power_of_two_is_scipys(width):
    expected = torch.from_numpy(sylvester(width)).double() / width**0.5
    torch.testing.assert_close(dense(width), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("width", [344, 1376])
def test_random_transform_is_compressed_tensors(width):
    """Their random matrix with our signs, not normalised: diag(signs) H^T, where ours has H."""
    signs = random_signs(width, [3, 1])
    theirs = library._matmul_hadU(eye(width)).T / width**0.5
    torch.testing.assert_close(
        dense(width, None, [3, 1]), torch.diag(signs) @ theirs, rtol=0, atol=1e-12
    )


def test_blocks_and_kept_features():
    small = torch.from_numpy(sylvester(8)).double() / 8**0.5
    torch.testing.assert_close(dense(24, 8), torch.block_diag(small, small, small))
    block = torch.block_diag(eye(16), small)
    torch.testing.assert_close(dense(48, 24, None, 16), torch.block_diag(block, block))


def test_signs_are_a_function_of_the_seed():
    signs = random_signs(4096, [5, 2])
    assert torch.equal(signs.abs(), torch.ones(4096, dtype=torch.float64))
    assert torch.equal(signs[:100], random_signs(100, [5, 2]))
    for other in ([5, 3], [6, 2], [2, 5]):
        # 4,096 coins agree in a half, give or take 5 standard errors of 1/128
        assert abs(float((signs == random_signs(4096, other)).double().mean()) - 0.5) < 5 / 128
    assert abs(float(signs.mean())) < 5 / 64
