"""Checkpoints in GPTQ's format: packing against a string of bits made of Python integers, and what
gptqmodel, transformers and our own reader load.
"""

import copy
import dataclasses
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_tools.formats.weights import read_whole
from ckpt_tools.hf.forward import names_in_files
from quant_eval.group import Rounded
from quant_eval.libraries.job import process_environment
from quant_eval.saved.checkpoint import SavedWeights
from quant_eval.saved.gptq import WORD_BITS, pack, unpack
from tests.interpreter import interpreter
from tests.quant_eval.saved.examples import BY_TRANSFORMERS, SPECS, logits_of

WIDTHS = (2, 3, 4, 8)


def random_rounded(
    bits: int, num_outputs: int, num_inputs: int, groups: int, *, first_zero: int = 0
) -> Rounded:
    """Codes and zeros of all values, inputs in random groups."""
    generator = torch.Generator().manual_seed(bits)

    def drawn(first: int, columns: int) -> torch.Tensor:
        return torch.randint(first, 2**bits, (num_outputs, columns), generator=generator).byte()

    return Rounded(
        codes_OI=drawn(0, num_inputs),
        scales_OG=torch.rand(num_outputs, groups, generator=generator).half().float(),
        zeros_OG=drawn(first_zero, groups),
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


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(("form", "first_zero"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("words", [1, 3])  # or runs of words, which zeros fill
def test_unpacking_gives_back_everything(bits, form, first_zero, words):
    num_outputs = words * {2: 16, 3: 32, 4: 8, 8: 4}[bits]
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


NEOX = ("neox-gptq-b3-g32-asym-s16", "neox-gptq-b4-g32-actorder-s16")


@pytest.fixture(scope="session")
def witness(tmp_path_factory, examples) -> Path:
    """The directory of what gptqmodel loaded of all examples."""
    root = tmp_path_factory.mktemp("witness")
    for name, example in examples.items():
        (root / name).symlink_to(example.out)
    done = subprocess.run(
        [interpreter(), "-m", "tests.quant_eval.saved.witness", str(root)],
        capture_output=True,
        text=True,
        check=False,
        env=process_environment(threads=1),
        cwd=tmp_path_factory.mktemp("logs"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.mark.parametrize("name", [*SPECS, *NEOX])
def test_gptqmodel_reads_the_weights_that_were_measured(name, witness, examples):
    outputs, example = load_file(witness / f"{name}.safetensors"), examples[name]
    assert outputs.keys() - {"logits"} == example.rounded.keys()
    for path, rounded in example.rounded.items():  # products of 11 and 8 bits: exact in fp32
        assert torch.equal(outputs[path], rounded.dense()), path
    expected = logits_of(example.dense)  # beside which its sums run in another order
    torch.testing.assert_close(
        outputs["logits"], expected, rtol=0, atol=1e-5 * float(expected.abs().max())
    )


@pytest.mark.parametrize("name", [*SPECS, *NEOX])
def test_our_reader_gives_the_dense_model(name, examples):
    example = examples[name]
    saved = SavedWeights(example.out, torch.float32)
    model = example.dense
    files = names_in_files(model)
    assert saved.tensors.keys() == set(files.values())
    for path, parameter in model.state_dict().items():
        tensor = saved.tensors[files[path]]
        assert (tensor.shape, tensor.dtype) == (tuple(parameter.shape), parameter.dtype)
        assert torch.equal(read_whole(saved, files[path]), parameter), path
    path = next(iter(example.rounded))
    assert torch.equal(saved.read(path, 3, 11), example.rounded[path].dense()[3:11])


@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_transformers_computes_with_the_weights_that_were_measured(name, witness, examples):
    """In bf16, where the dense weights move the logits too: by as much, give or take a factor of
    two.

    A zero that is off by one, or groups in another order, move them by as much as they are.
    """
    exact = logits_of(examples[name].dense)
    rounded = logits_of(copy.deepcopy(examples[name].dense).to(torch.bfloat16)).float()
    logits = load_file(witness / f"transformers-{name}.safetensors")["logits"]
    moved = float((logits - exact).norm() / exact.norm())
    assert moved <= 2 * float((rounded - exact).norm() / exact.norm())
    assert moved < 0.05
