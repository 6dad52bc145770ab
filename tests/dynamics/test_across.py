"""Several studies in one table, and a power law planted in their errors."""

import csv
import math
import re
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import linregress

from base.errors import UserError
from dynamics.across import (
    PARAMETERS,
    PER_PARAMETER,
    SCATTER,
    SizePoint,
    fit,
    write_comparison,
    write_ends,
)
from study.recipes.parts import sweep
from study.results.table import Row, write_table
from tests.study import factors
from tests.study.claimed import SPEC, rows_of, run_of, study_of
from train.model.config import multiplied_parameters
from train.model.presets import OLMO2_30M
from train.run.config import RunConfig

OF_SIZE, OF_RATIO = -0.3, 0.2  # the planted exponents
COLUMN = f"quant/{SPEC}/relative_error"


def planted(parameters: float, tokens: float) -> float:
    return 0.02 * (parameters / 1e5) ** OF_SIZE * (tokens / parameters) ** OF_RATIO


def scattered(generator, scatter: float = 0.05) -> list[SizePoint]:
    """Four sizes at two budgets each, with errors off the law by `scatter`."""
    places = [(size, size * ratio) for size in (1e8, 3e8, 1e9, 7e9) for ratio in (20, 60)]
    return [
        SizePoint(size, tokens, planted(size, tokens) * math.exp(scatter * generator.normal()))
        for size, tokens in places
    ]


def test_the_intervals_hold_the_planted_exponents_as_often_as_they_say():
    generator, draws = np.random.default_rng(0), 2_000
    counts = {PARAMETERS: 0, PER_PARAMETER: 0}
    for _ in range(draws):
        exponents = fit(scattered(generator)).exponents
        for name, truth in ((PARAMETERS, OF_SIZE), (PER_PARAMETER, OF_RATIO)):
            low, high = exponents[name].interval(0.95)
            counts[name] += low <= truth <= high
    error = math.sqrt(0.95 * 0.05 / draws)
    assert all(abs(count / draws - 0.95) < 3 * error for count in counts.values())


def test_at_equal_tokens_per_parameter_the_fit_is_that_of_a_line():
    """Against scipy's line through the logarithms."""
    generator = np.random.default_rng(1)
    points = [point for point in scattered(generator) if point.tokens == 20 * point.parameters]
    law = fit(points)
    assert set(law.exponents) == {PARAMETERS}
    line = linregress(
        *zip(*((math.log(values[0]), math.log(values[2])) for values in points), strict=True)
    )
    assert law.exponents[PARAMETERS].value == pytest.approx(line.slope, rel=1e-9)
    error = law.exponents[PARAMETERS].sources[SCATTER].standard_error
    assert error == pytest.approx(line.stderr, rel=1e-9)
    assert math.log(law.at(5e8)) == pytest.approx(
        line.intercept + line.slope * math.log(5e8), rel=1e-9
    )


def test_runs_of_one_size_and_budget_are_one_point():
    """Copies of a run decide nothing more."""
    points = scattered(np.random.default_rng(2))
    once, thrice = fit(points).exponents[PARAMETERS], fit(points * 3).exponents[PARAMETERS]
    assert thrice.value == pytest.approx(once.value, rel=1e-9)
    assert thrice.interval(0.95) == pytest.approx(once.interval(0.95), rel=1e-9)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        (
            [SizePoint(1e8, 2e9, 0.01), SizePoint(1e9, 2e10, 0.02)],
            "2 of 3 sizes that decide an exponent",
        ),
        ([SizePoint(10**k, 2e9, 0.01 * k) for k in (7, 8, 9)], "vary together"),
        ([SizePoint(10**k, 10 ** (k * k / 7), 0.01) for k in (7, 8, 9)], "3 sizes and budgets"),
        ([SizePoint(10**k, 10 ** (k + 1), -0.01) for k in (7, 8, 9)], "no logarithm"),
    ],
)
def test_what_decides_no_exponent_is_refused(points, words):
    with pytest.raises(UserError, match=words):
        fit(points)


def test_parameters_are_those_that_the_name_of_a_size_says():
    assert 28e6 < multiplied_parameters(OLMO2_30M) < 32e6


def written(root, width: int, engine: str = "megatron"):
    """A study of one size with two budgets, and its table."""
    template = run_of("template")
    sizes = {"hidden_size": width, "intermediate_size": 3 * width}
    model = template.model.model_copy(update=sizes)
    runs = [
        run_of(f"to{total}", total=total, model=model, engine=engine, seed=seed)
        for seed, total in enumerate((400, 1200))
    ]
    study = study_of(*runs, controls=False, name=f"width{width}")
    directory = root / study.name
    scatter = 1 + 0.01 * math.sin(width)
    rows = rows_of(
        directory,
        study,
        lambda run, model: (
            scatter * planted(multiplied_parameters(run.model), model.step * run.tokens_per_step)
        ),
    )
    whose = {run.name: {"engine": run.engine, "seed": run.seed} for run in runs}
    table = [Row.of(row | {"study": study.name} | whose[row["run"]]) for row in rows]
    write_table(directory, study, table)
    return directory, study


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    root = tmp_path_factory.mktemp("sizes")
    engines = {64: "megatron", 96: "deepspeed", 128: "megatron"}
    return dict(written(root, width, engine) for width, engine in engines.items())


def test_a_planted_exponent_is_found_in_studies_of_three_sizes(studies, tmp_path):
    lines = list(write_comparison(studies, tmp_path))
    table = pq.read_table(tmp_path / "ends.parquet").to_pylist()
    assert [(row["study"], row["engine"], row["seed"]) for row in table] == [
        *(("width64", "megatron", 0), ("width64", "megatron", 1)),
        *(("width96", "deepspeed", 0), ("width96", "deepspeed", 1)),
        *(("width128", "megatron", 0), ("width128", "megatron", 1)),
    ]
    points = [SizePoint(row["parameters"], row["tokens"], row[COLUMN]) for row in table]
    exponents = fit(points).exponents
    for name, truth in ((PARAMETERS, OF_SIZE), (PER_PARAMETER, OF_RATIO)):
        assert abs(exponents[name].value - truth) < 2 * exponents[name].standard_error
    laws = re.findall(r"~ N\^(\S+) \[", " ".join(lines))
    shown = pytest.approx(exponents[PARAMETERS].value, rel=0.05)
    assert any(float(exponent) == shown for exponent in laws), "to the digits of its interval"
    assert lines[-2:] == [
        f"{tmp_path / 'ends.csv'}: 6 ends of training of 3 studies",
        f"{tmp_path / 'scaling.png'}: each error against the size",
    ]

    with (tmp_path / "ends.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row[COLUMN]) for row in rows] == [row[COLUMN] for row in table]
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "scaling.pdf").read_bytes().startswith(b"%PDF")


def test_one_size_is_a_table_and_a_figure_without_a_law(studies, tmp_path):
    first = dict([next(iter(studies.items()))])
    lines = list(write_comparison(first, tmp_path))
    assert lines[0].startswith("no scaling law of any error: 1 of 3 sizes")
    assert (tmp_path / "scaling.png").exists()


def test_a_factor_of_words_in_one_study_and_numbers_in_another_is_text(tmp_path):
    words = factors.of("words", sweep(factors.with_data, order=["olmo", "sequential"]))
    numbers = factors.of("numbers", sweep(with_order, order=[1, 2]))
    depths = factors.of("depths", sweep(factors.run, layers=[2, 4]))
    ends: list[dict[str, Any]] = [
        {"run": "a", "label": "a", "order": "olmo"},
        {"run": "b", "label": "b", "order": 2},
        {"run": "c", "label": "c", "layers": 4},
    ]
    write_ends(tmp_path / "ends.parquet", ends, [words, numbers, depths])
    table = pq.read_table(tmp_path / "ends.parquet").to_pydict()
    assert table["order"] == ["olmo", "2", None]
    assert table["layers"] == [None, None, 4]


def with_order(name: str, order: int) -> RunConfig:
    """A factor whose name is that of a setting, for something else."""
    return factors.run(name, layers=order)
