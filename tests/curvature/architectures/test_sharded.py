"""Every architecture in shards of two ranks: tied tables, biases, xIELU's single entries."""

import json
from pathlib import Path
from typing import Any

import pytest

from base.ranks import ALONE, Ranks, start
from curvature.products.exact import DualHessian
from curvature.products.model import CurvedModel, Sharding
from curvature.products.parameters import Probe
from tests.curvature.architectures.variants import VARIANTS
from tests.curvature.conftest import dots_of, random_tokens, tiny_model
from tests.runs import on_ranks

SOME = ["llama-tied", "qwen2-tied", "apertus", "gpt_neox"]


def products(names: list[str], ranks: Ranks, sharding: Sharding) -> dict[str, Any]:
    """Loss, slope and v_t'(Hv)_t of every tensor, streamed and of the whole product, by variant."""
    results: dict[str, Any] = {}
    for name in names:
        hessian = DualHessian(
            CurvedModel(tiny_model(**VARIANTS[name]), ranks=ranks, sharding=sharding)
        )
        tokens_BS1, v_p = random_tokens(batch=3), hessian.parameters.probe(Probe(0, 0))
        quadratic, product = hessian.quadratic(tokens_BS1, v_p), hessian.product(tokens_BS1, v_p)
        dots = {"streamed": quadratic.dots, "whole": dots_of(hessian.parameters, v_p, product.hv_p)}
        results[name] = {"loss": quadratic.loss, "slope": quadratic.slope, "dots": dots}
    return results


def write_products(out: str, *names: str) -> None:
    """Worker, on every rank."""
    ranks = start("cpu")
    (Path(out) / f"{ranks.rank}.json").write_text(json.dumps(products([*names], ranks, "fsdp")))


@pytest.mark.parametrize(
    "names", [SOME, pytest.param(list(VARIANTS), marks=pytest.mark.stress)], ids=["some", "all"]
)
def test_sharded_products_are_those_of_one_process(tmp_path, names):
    on_ranks(2, write_products, tmp_path, *names)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    alone = products(names, ALONE, "none")
    assert first.keys() == alone.keys()
    for name, expected in alone.items():
        assert first[name]["loss"] == pytest.approx(expected["loss"], rel=1e-13)
        assert first[name]["slope"] == pytest.approx(expected["slope"], abs=1e-12)
        size = max(map(abs, expected["dots"]["whole"].values()))
        for way in ("streamed", "whole"):
            assert first[name]["dots"][way] == pytest.approx(
                expected["dots"]["whole"], abs=1e-12 * size
            )
