"""GPTQ against the libraries that others use: gptqmodel's GPTQ class and llmcompressor's
quantize_weight.

Each library runs once, in a process of its own, since both change what they are imported into; run
as a module this file is that process. They factor in fp32: corrections, and the grids fitted to
corrected weights, are off by some 1e-6 of a group's range, and a few weights on the border between
two points fall the other way.

The largest weights are positive here: the largest negative one of a symmetric group is on such a
border exactly, where ours takes the outer point always and gptqmodel either, as fp32 rounds its
scale. (Measured on weights with negative ones as large: 0.9896 to 1 of the weights equal; with
scales rounded as gptqmodel's the worst are 0.9991 to 1.)
"""

import os
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quant_eval.libraries import pcre
from quant_eval.quantizer import ColumnSpec
from quant_eval.rounding.gptq import gptq, prepare
from quant_eval.rounding.grid import round_to_nearest
from tests.interpreter import interpreter
from tests.quant_eval.gptq_reference import problem, relative_output_error, same_weights
from tests.quant_eval.specs import gptq_spec
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
NUM_INPUTS = 384
DEAD = slice(200, 330, 3)
SAME = 1e-5  # of a group's range; at 8 bits a step is 4e-3 of it
Tensors = dict[str, torch.Tensor]


def specs(bits: tuple[int, ...], layouts: str) -> list[str]:
    """Names for all bits, both symmetries, and layouts such as g32-actorder."""
    combined = product(bits, layouts.split(), ("sym", "asym"))
    return [
        f"gptq-b{b}-" + "-".join([layout.split("-")[0], symmetry, *layout.split("-")[1:]])
        for b, layout, symmetry in combined
    ]


# Per library, pairs of a case and a spec. llmcompressor is given its scales, so they are fitted
# before any column is rounded: static ones, and those of whole rows.
ORDERED = (
    "perchannel perchannel-actorder g128 g128-actorder g128-groupaware g32 g32-actorder"
    " g32-groupaware g96"
)
STATIC = "g128-static g32-static g32-actorder-static"
RUNS: dict[str, list[tuple[str, str]]] = {
    "gptqmodel": [
        *(("live", name) for name in specs((2, 3, 4, 8), f"{ORDERED} {STATIC}")),
        *(("dead", name) for name in specs((3,), "perchannel g32 g32-static")),
    ],
    "llmcompressor": [
        ("live", name) for name in specs((2, 3, 4, 8), f"perchannel perchannel-actorder {STATIC}")
    ],
}


@cache
def case(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and a Hessian, fp32 as the libraries take them.

    The mean of the live diagonal is 1: so the 1 with which gptqmodel replaces a dead input's zero
    is our mean, too.
    """
    weight_OI, hessian_II = problem(
        seed=20, num_outputs=128, num_inputs=NUM_INPUTS, num_tokens=1200
    )
    weight_OI = torch.where(weight_OI < 0, 0.5 * weight_OI, weight_OI)
    if kind == "dead":
        hessian_II[DEAD] = 0
        hessian_II[:, DEAD] = 0
    diagonal_I = hessian_II.diagonal()
    return weight_OI.float(), (hessian_II / diagonal_I[diagonal_I > 0].mean()).float()


def run_gptqmodel(weight_OI: torch.Tensor, hessian_II: torch.Tensor, spec: ColumnSpec) -> Tensors:
    pcre.stand_in()
    from gptqmodel import QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ

    linear = torch.nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False)
    linear.weight.data = weight_OI.clone()
    config = QuantizeConfig(
        bits=spec.bits,
        group_size=spec.group_size or -1,
        sym=spec.symmetric,
        mse=0.0,
        desc_act=spec.order == "actorder",
        act_group_aware=spec.order == "groupaware",
        static_groups=spec.static_groups,
        damp_percent=spec.damping,
        damp_auto_increment=0.0,
        device="cpu",
        offload_to_disk=False,
    )
    task = GPTQ(linear, config)
    task.fallback = None
    task.quantizer.configure(perchannel=True)
    task.H, task.nsamples = hessian_II.clone(), 1
    dense_OI, scales_OG, zeros_OG, groups_I, _, _, damping, _ = task.quantize()
    assert damping == spec.damping
    return {"dense": dense_OI.data, "scales": scales_OG, "zeros": zeros_OG, "groups": groups_I}


def run_llmcompressor(
    weight_OI: torch.Tensor, hessian_II: torch.Tensor, spec: ColumnSpec
) -> Tensors:
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    arguments = QuantizationArgs(
        num_bits=spec.bits,
        symmetric=spec.symmetric,
        strategy="group" if spec.group_size else "channel",
        group_size=spec.group_size,
        actorder="weight" if spec.order == "actorder" else None,
    )
    grids = round_to_nearest(weight_OI, spec)
    zeros_OG = grids.zeros_OG.float() - 2 ** (spec.bits - 1)  # its codes are signed
    weights, hessians = weight_OI.clone()[None], hessian_II.clone()[None]  # it overwrites both
    scales, zeros, damping = grids.scales_OG[None], zeros_OG[None], float(spec.damping or 0)
    results = quantize_weight(weights, hessians, scales, zeros, None, arguments, percdamp=damping)
    dense, _, gave_up = results  # type: ignore[misc]  # its annotation promises two
    assert not gave_up.any()
    return {"dense": dense[0]}


def main(library: str, out: str) -> None:
    run = {"gptqmodel": run_gptqmodel, "llmcompressor": run_llmcompressor}[library]
    results = {}
    for kind, name in RUNS[library]:
        for key, value in run(*case(kind), gptq_spec(name)).items():
            results[f"{kind}/{name}/{key}"] = value.contiguous()
    save_file(results, out)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Tensors]:
    """Results of each library, by "KIND/SPEC/dense" and the like."""
    results = {}
    for library in RUNS:
        directory = tmp_path_factory.mktemp(library)
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "GPTQMODEL_CPU_WORKERS": "2",
            "OMP_NUM_THREADS": "1",
        }
        command = [interpreter(), "-m", __name__, library, "made.safetensors"]
        subprocess.run(command, cwd=directory, env=environment, check=True, timeout=HANG_SECONDS)
        results[library] = load_file(directory / "made.safetensors")
    return results


@pytest.mark.parametrize(
    ("library", "kind", "name"), [(key, *pair) for key, pairs in RUNS.items() for pair in pairs]
)
def test_the_library_rounds_to_the_same_weights(results, library, kind, name):
    spec = gptq_spec(name)
    weight_OI, hessian_II = case(kind)
    theirs = {
        key.rsplit("/", 1)[1]: part
        for key, part in results[library].items()
        if key.startswith(f"{kind}/{name}/")
    }
    ours = gptq(weight_OI, prepare(hessian_II.double(), spec, "layer"), spec)
    assert same_weights(ours, theirs["dense"], SAME) >= 0.99
    error, expected = (
        relative_output_error(weight_OI, dense_OI, hessian_II.double())
        for dense_OI in (ours.dense(), theirs["dense"])
    )
    assert error == pytest.approx(expected, rel=2e-3)
    if kind == "dead":
        assert ours.dense()[:, DEAD].count_nonzero() == 0
    if library == "gptqmodel":
        assert torch.equal(ours.groups_I, theirs["groups"])
        assert (ours.zeros_OG == theirs["zeros"]).double().mean() >= 0.99
        assert ((ours.scales_OG / theirs["scales"] - 1).abs() < 1e-5).double().mean() >= 0.99


if __name__ == "__main__":
    main(*sys.argv[1:])
