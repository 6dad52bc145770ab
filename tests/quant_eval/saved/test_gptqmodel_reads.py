"""Saved checkpoints as gptqmodel reads them, and its packing beside ours."""

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools.formats.weights import read_whole
from ckpt_tools.hf.forward import names_in_files
from quant_eval.group import Rounded
from quant_eval.libraries.job import process_environment
from quant_eval.saved.checkpoint import SavedWeights
from quant_eval.saved.gptq import pack
from tests.interpreter import interpreter
from tests.quant_eval.saved.examples import SPECS, Example, logits_of
from tests.quant_eval.saved.test_packing import WIDTHS, random_rounded

NEOX = ("neox-gptq-b3-g32-asym-s16", "neox-gptq-b4-g32-actorder-s16")


def packing_example(bits: int) -> Rounded:
    """Weights that gptqmodel's packer takes: it rounds dense weights again, so scales are powers
    of two.
    """
    rounded = random_rounded(bits, num_outputs=64, num_inputs=128, groups=4, first_zero=1)
    scales_OG = torch.exp2(
        torch.randint(-6, 0, rounded.scales_OG.shape, generator=torch.Generator().manual_seed(0))
    )
    return Rounded(rounded.codes_OI, scales_OG.float(), rounded.zeros_OG, rounded.groups_I)


@pytest.fixture(scope="session")
def witness(tmp_path_factory, examples) -> Path:
    """The directory of what gptqmodel made of all examples."""
    root = tmp_path_factory.mktemp("witness")
    for name, example in examples.items():
        (root / name).symlink_to(example.out)
    for bits in WIDTHS:
        rounded = packing_example(bits)
        given = {field: getattr(rounded, field) for field in ("scales_OG", "zeros_OG", "groups_I")}
        save_file({"dense_OI": rounded.dense(), **given}, root / f"unpacked-{bits}.safetensors")
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
    example: Example = examples[name]
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


@pytest.mark.parametrize("bits", WIDTHS)
def test_gptqmodel_packs_the_same_words(bits, witness):
    theirs = load_file(witness / f"packed-{bits}.safetensors")
    ours = pack(packing_example(bits), bits, "gptq_v2")
    assert {key: theirs[key].dtype for key in ours} == {
        key: tensor.dtype for key, tensor in ours.items()
    }
    for key, tensor in ours.items():
        assert torch.equal(theirs[key], tensor), key
    assert torch.equal(theirs["qzeros_v1"], pack(packing_example(bits), bits, "gptq")["qzeros"])
