"""`python -m curvature` on one, two and three ranks: the same numbers, written once."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.curvature.conftest import command
from tests.runs import error_line, ranks, succeed

# Five pairs in microbatches of two and a fixed batch of two and one: shares are uneven at two and
# at three ranks, and of three ranks that share a model or the fixed batch one has no sequence.
OPTIONS = "--sequence-length 24 --microbatch-sequences 2 --fixed-sequences 3 --tolerance 1e-3"
PAIRS = "--pairs 5 --norm-pairs 3 --companion-pairs 3 --max-iterations 50"


@pytest.fixture(scope="module")
def alone(tmp_path_factory, family, held_out_prefix) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("alone") / "out"
    options = [*OPTIONS.split(), *PAIRS.split(), "--out", out]
    assert command("hutchinson", family.base, "--data", held_out_prefix, *options) == 0
    return result_of(out)


def result_of(directory: Path) -> dict[str, Any]:
    assert [path.name for path in directory.iterdir()] == ["result.json"]
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


@pytest.mark.parametrize(
    ("size", "sharding"),
    [
        (2, "none"),
        pytest.param(2, "fsdp", marks=pytest.mark.stress),
        pytest.param(3, "none", marks=pytest.mark.stress),
        (3, "fsdp"),
    ],
)
def test_ranks_change_rounding_alone(tmp_path, family, alone, held_out_prefix, size, sharding):
    out = tmp_path / "out"
    options = [*OPTIONS.split(), *PAIRS.split(), "--sharding", sharding, "--out", str(out)]
    program = ["curvature", "hutchinson", str(family.base), "--data", str(held_out_prefix)]
    done = succeed(ranks(size, *program, *options))
    assert done.stdout.count("largest eigenvalue") == 1  # rank 0 says what it wrote
    shared = result_of(out)
    assert shared["spec"] == alone["spec"] | {"ranks": size, "sharding": sharding}
    assert shared["model"] == alone["model"]
    measured, expected = shared["measured"], alone["measured"]
    traces = [(measured["trace"], expected["trace"])]
    blocks = measured["block_traces"]
    traces += [(blocks[block], known) for block, known in expected["block_traces"].items()]
    for values, known in traces:
        scale = max(map(abs, known["per_microbatch"]))
        # 1e-6 of the trace; values of blocks are sums with cancellation, of which fp32 keeps as
        # much
        assert values["per_microbatch"] == pytest.approx(
            known["per_microbatch"], rel=1e-6, abs=2e-6 * scale
        )
        assert values["interval"] == pytest.approx(known["interval"], rel=1e-5, abs=1e-5 * scale)
    assert measured["loss"] == pytest.approx(expected["loss"], rel=1e-7)
    for name in ("gauss_newton_trace", "fisher_trace"):
        ours, theirs = measured[name], expected[name]
        assert ours["mean"] == pytest.approx(theirs["mean"], rel=1e-6)
        assert ours["standard_error"] == pytest.approx(theirs["standard_error"], rel=1e-4)
    norms, top = (measured["norm_traces"]["total"], measured["lambda_max"])
    assert norms["mean"] == pytest.approx(expected["norm_traces"]["total"]["mean"], rel=1e-5)
    assert top["value"] == pytest.approx(expected["lambda_max"]["value"], rel=1e-5)
    assert (measured["parameters"], top["converged"]) == (expected["parameters"], True)


def test_a_step_on_two_ranks(tmp_path, family, held_out_prefix):
    options = ["--quantized", family.quantized, "--data", held_out_prefix]
    options += ["--microbatches", "2", "--microbatch-sequences", "3", "--sequence-length", "24"]
    assert command("step", family.base, *options, "--out", tmp_path / "alone") == 0
    program = [
        *map(str, ("curvature", "step", family.base, *options)),
        "--out",
        str(tmp_path / "out"),
    ]
    done = succeed(ranks(2, *program, "--sharding", "fsdp"))
    assert done.stdout.count("predicted ") == 1
    measured, expected = (result_of(tmp_path / name)["measured"] for name in ("out", "alone"))
    assert measured["blocks"].keys() == expected["blocks"].keys() == {"layer0", "layer1"}
    parts = [(measured["blocks"][block], expected["blocks"][block]) for block in expected["blocks"]]
    parts.append((measured["whole"], expected["whole"]))
    for ours, theirs in parts:
        assert (ours["norm"], ours["parameters"]) == pytest.approx(
            (theirs["norm"], theirs["parameters"]), rel=1e-12
        )
        for figure in ("first_order", "second_order", "predicted"):
            assert ours[figure]["mean"] == pytest.approx(theirs[figure]["mean"], rel=1e-5)
        assert ours["measured"]["mean"] == pytest.approx(
            theirs["measured"]["mean"], rel=1e-5, abs=1e-6
        )  # of fp32 losses


def test_a_refusal_is_one_line_of_all_ranks(tmp_path, family, held_out_prefix):
    given = ["--quantized", family.quantized, "--data", held_out_prefix]
    step = ["curvature", "step", family.base, *given, "--out", tmp_path / "out"]
    line = error_line(ranks(2, *map(str, step)))
    assert "2 ranks share the products of a step; give --sharding fsdp" in line
    assert not (tmp_path / "out").exists()
