"""Every architecture in shards of two ranks: tied tables, biases, xIELU's single entries."""

import json

import pytest

from base.ranks import ALONE
from tests.curvature.architectures.on_ranks import products
from tests.curvature.architectures.variants import VARIANTS
from tests.runs import ranks

SOME = ["llama-tied", "qwen2-tied", "apertus", "gpt_neox"]


@pytest.mark.parametrize(
    "names", [SOME, pytest.param(list(VARIANTS), marks=pytest.mark.stress)], ids=["some", "all"]
)
def test_sharded_products_are_those_of_one_process(tmp_path, names):
    done = ranks(2, "tests.curvature.architectures.on_ranks", str(tmp_path), *names)
    assert done.returncode == 0, done.stderr[-3000:]
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
