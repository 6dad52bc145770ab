"""Vectors split over three processes in unequal parts, one of them empty: the figures of one
process.
"""

import json

import pytest

from tests.curvature.spectrum.split_vectors import SIZE, measure
from tests.runs import ranks


def test_figures_are_those_of_one_process(tmp_path):
    alone = measure(slice(0, SIZE), lambda part: part)
    assert alone["values"][0] == pytest.approx(40, rel=1e-10)
    done = ranks(3, "tests.curvature.spectrum.split_vectors", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    first, *others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3))
    assert first["counts"] == alone["counts"]
    for name in ("values", "moments", "nodes"):
        assert first[name] == pytest.approx(alone[name], rel=1e-10), name
    # Below 1e-10 a residual is rounding itself.
    assert first["residuals"] == pytest.approx(alone["residuals"], abs=1e-10)
    assert others == [first, first]
