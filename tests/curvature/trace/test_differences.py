"""Differences of traces against t-tests, the truth and hand-made results; the command."""

import json
import math

import numpy as np
import pytest
from scipy.stats import t, ttest_1samp, ttest_rel

from base.aligned import WIDTH
from base.digests import sealed
from base.errors import UserError
from base.statistics import holm
from ckpt_tools.hf.measured import Curvature
from ckpt_tools.hf.results import read_result
from curvature.trace.estimates import compare, paired_difference
from tests.curvature.conftest import command
from tests.sealing import reseal


def content(trace, *, model="runs/lr3e-3/hf/step00000640", name="hutchinson", **settings):
    """A result.json, of what a comparison reads."""
    spec = {"sequence_length": 64, "microbatch_sequences": 2, "seed": 0, "dtype": "fp32"}
    spec |= {"name": name, "route": "dual", "data": {"bin_sha256": "ab" * 32}} | settings
    measured = {"trace": {"mean": 0.0, "per_microbatch": list(trace)}}
    return {"model": {"path": model}, "spec": spec, "measured": measured, "environment": {}}


def correlated(microbatches, *, difference, seed):
    """Traces of two checkpoints on the same microbatches, the second higher by `difference`."""
    generator = np.random.default_rng(seed)
    common_M = generator.normal(500, 100, microbatches)
    own_2M = generator.normal(0, 100 / 3, (2, microbatches))
    return common_M + own_2M[0], common_M + own_2M[1] + difference


def test_a_difference_is_a_paired_t_test():
    first_M, second_M = correlated(32, difference=20, seed=0)
    for level in (0.5, 0.95, 0.999):
        difference = paired_difference(first_M.tolist(), second_M.tolist(), level)
        expected = ttest_rel(second_M, first_M)
        interval = expected.confidence_interval(level)
        assert difference.value == pytest.approx(second_M.mean() - first_M.mean(), rel=1e-12)
        assert difference.standard_error == pytest.approx(
            difference.value / expected.statistic, rel=1e-10
        )
        assert (difference.low, difference.high) == pytest.approx(
            (interval.low, interval.high), rel=1e-10
        )
        assert difference.p_value == pytest.approx(expected.pvalue, rel=1e-10)
    value, error, low, high, p_value = difference
    exchanged = paired_difference(second_M.tolist(), first_M.tolist(), 0.999)
    assert exchanged == pytest.approx((-value, error, -high, -low, p_value))


def test_differences_without_any_spread():
    same = paired_difference([3.0, 5.0], [3.0, 5.0], 0.95)
    assert same == (0.0, 0.0, 0.0, 0.0, 1.0)
    shifted = paired_difference([3.0, 5.0, 8.0], [4.0, 6.0, 9.0], 0.95)
    assert shifted == (1.0, 0.0, 1.0, 1.0, 0.0)


@pytest.fixture
def check(tmp_path):
    """Compares two contents of result.json."""

    def start(first, second):
        results = []
        for name, result in (("first", first), ("second", second)):
            path = tmp_path / f"{name}.json"
            reseal(path, result)
            results.append(read_result(path, Curvature))
        return compare(results, [(0, 1)], level=0.95)

    return start


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": {"bin_sha256": "cd" * 32}}, "--data abababababab and cdcdcdcdcdcd"),
        ({"sequence_length": 32}, "--sequence-length 64 and 32"),
        ({"microbatch_sequences": 4}, "--microbatch-sequences 2 and 4"),
        ({"seed": 1}, "--seed 0 and 1"),
        ({"dtype": "bf16"}, "--dtype fp32 and bf16"),
    ],
)
def test_other_settings_are_not_comparable(check, changed, message):
    given = content([1.0, 2.0, 4.0])
    check(given, content([5.0, 3.0, 4.0], model="elsewhere"))
    check(given, content([5.0, 3.0, 4.0], level=0.5, pairs=7, max_iterations=3))
    with pytest.raises(UserError, match=message):
        check(given, content([1.0, 2.0, 4.0], **changed))


def test_other_numbers_and_other_results_are_not_comparable(check):
    given = content([1.0, 2.0, 4.0])
    with pytest.raises(UserError, match="number of microbatches 3 and 2; measure both"):
        check(given, content([1.0, 2.0]))
    lanczos = content([1.0, 2.0, 4.0], name="lanczos")
    del lanczos["measured"]["trace"]["per_microbatch"]
    with pytest.raises(UserError, match=r"no finite trace .* by 'python -m curvature hutchinson'"):
        check(given, lanczos)
    for damaged, words in (([1.0, math.nan, 4.0], "NaN is no"), ([1.0], "no finite trace of two")):
        with pytest.raises(UserError, match=words):
            check(given, content(damaged))


@pytest.fixture
def written(tmp_path):
    """Writes results; returns their directories."""

    def write(*contents):
        directories = [tmp_path / str(number) for number in range(len(contents))]
        for directory, result in zip(directories, contents, strict=True):
            directory.mkdir(exist_ok=True)
            (directory / "result.json").write_text(
                result if isinstance(result, str) else json.dumps(sealed(result))
            )
        return directories

    return write


@pytest.fixture
def run(capsys):
    """Runs the command; returns its exit code, what it printed, and the lines of its errors."""

    def start(*arguments):
        code = command("compare", *arguments)
        streams = capsys.readouterr()
        return code, streams.out, streams.err.splitlines()

    return start


@pytest.fixture
def three(written):
    """Three checkpoints of which the last two are alike, and their traces."""
    first_M, second_M = correlated(24, difference=60, seed=3)
    traces = [first_M, second_M, second_M + np.random.default_rng(0).normal(0, 5, 24)]
    contents = [
        content(trace_M.tolist(), model=f"runs/lr/hf/step{number}")
        for number, trace_M in enumerate(traces)
    ]
    return written(*contents), traces


def test_every_pair_and_its_corrected_test(run, three, tmp_path):
    directories, traces = three
    code, printed, errors = run(*directories, "--pairs", "all", "--out", tmp_path / "out.json")
    assert (code, errors) == (0, [])
    pairs = json.loads((tmp_path / "out.json").read_text())["pairs"]
    tests = [ttest_rel(traces[b], traces[a]) for a, b in ((0, 1), (0, 2), (1, 2))]
    assert [pair["p_adjusted"] for pair in pairs] == pytest.approx(
        holm([test.pvalue for test in tests]), rel=1e-9
    )
    assert [pair["verdict"] for pair in pairs] == ["higher", "higher", "not significant"]
    for pair, (a, b), test in zip(pairs, ((0, 1), (0, 2), (1, 2)), tests, strict=True):
        assert pair["first"]["result"] == str(directories[a] / "result.json")
        assert pair["second"]["model"] == f"runs/lr/hf/step{b}"
        interval = test.confidence_interval(0.95)
        assert [pair["difference"][end] for end in ("low", "high")] == pytest.approx(
            [*interval], rel=1e-9
        )
        squares = [ttest_1samp(traces[index], 0).confidence_interval(0.5) for index in (a, b)]
        alone = [(each.high - each.low) / 2 / t.ppf(0.75, 23) for each in squares]
        assert pair["unpaired_standard_error"] == pytest.approx(math.hypot(*alone), rel=1e-9)
    lines = printed.splitlines()
    assert " ".join(lines[:2]).startswith("2 of 3 pairs differ significantly in trace")
    assert printed.count("hf/step2") == 2
    assert "not significant" in printed
    assert max(map(len, lines)) <= WIDTH


def test_pairings(run, three, tmp_path):
    directories, traces = three
    for option, expected in ((None, [(0, 1), (0, 2)]), ("successive", [(0, 1), (1, 2)])):
        arguments = ["--out", tmp_path / "out.json", *(["--pairs", option] if option else [])]
        assert run(*directories, *arguments)[0] == 0
        pairs = json.loads((tmp_path / "out.json").read_text())["pairs"]
        assert [(pair["first"]["model"][-1], pair["second"]["model"][-1]) for pair in pairs] == [
            (str(a), str(b)) for a, b in expected
        ]
        values = [pair["difference"]["value"] for pair in pairs]
        assert values == pytest.approx(
            [(traces[b] - traces[a]).mean() for a, b in expected], rel=1e-9
        )


def test_a_missing_result_ends_with_one_line_and_nothing_written(run, three, tmp_path):
    code, printed, errors = run(*three[0], "nowhere", "--out", tmp_path / "out.json")
    assert (code, printed, len(errors)) == (2, "", 1)
    assert "nowhere does not exist; measure it" in errors[0]
    assert not (tmp_path / "out.json").exists()


def test_bad_results_are_refused(run, written):
    good, text, empty, other = written(content([1.0, 2.0]), "no json", "", {"a": 3})
    for bad in (text, empty):
        line = run(good, bad)[2][-1]
        assert "is not valid JSON (" in line
        assert "; run the study again, or measure again" in line
    assert "is not a result of a measurement" in run(good, other)[2][-1]
    assert "there is nothing to compare with; give two results or more" in run(good)[2][-1]
    assert "is given twice" in run(good, good / "result.json")[2][-1]


def test_results_of_two_studies_have_labels_of_their_own(run, written):
    models = ("one/lr/hf/step9", "two/lr/hf/step9")
    _, printed, _ = run(*written(*(content([1.0, 2.0, 4.0], model=model) for model in models)))
    assert all(model in printed for model in models)
