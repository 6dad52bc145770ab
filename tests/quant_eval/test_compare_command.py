"""Results compared pair by pair, the command that does so, and everything that it refuses."""

import json
import math
from functools import partial

import numpy as np
import pytest
from scipy.stats import t as student

from base.digests import sealed
from base.statistics import holm, pairs_of
from ckpt_tools.hf.measured import Quantization
from ckpt_tools.hf.results import read_result
from quant_eval.__main__ import app
from quant_eval.compare import compare
from tests.quant_eval.test_compare import compare_losses, pair


def content(
    sums, *, name="gptq-b3-g32", values=None, model="runs/lr3e-3/hf/step00000640", **evaluation
):
    """A result.json, of what a comparison reads."""
    method = name.split("-")[0]
    text = {
        "sha256": "ab",
        "sequence_length": 64,
        "documents": "separate",
        "prefix": "data/held_out",
    } | evaluation
    calibration = None
    if values:
        # each draw adds so many nats to every token, on average nothing
        drawn = [
            [
                nats + tokens * (value - sum(values) / len(values))
                for nats, tokens in zip(sums["nll_quantized"], sums["tokens"], strict=True)
            ]
            for value in values
        ]
        others = {key: [sums[key]] * len(values) for key in ("kl", "agreements")}
        calibration = {"seeds": len(values), "per_document": {"nll_quantized": drawn} | others}
    return {
        "model": {"path": model, "weights_digests": {}},
        "spec": {
            "name": name,
            "method": method,
            "dtype": text.pop("dtype", "fp32"),
            "evaluation": text,
        },
        "measured": {"per_document": sums, "calibration": calibration},
        "environment": {},
    }


@pytest.fixture
def written(tmp_path):
    """Writes results; returns their directories."""

    def write(*contents):
        directories = []
        for number, text in enumerate(contents):
            directory = tmp_path / str(number)
            directory.mkdir(exist_ok=True)
            (directory / "result.json").write_text(
                text if isinstance(text, str) else json.dumps(sealed(text))
            )
            directories.append(directory)
        return directories

    return write


def read(directories):
    return [read_result(directory, Quantization) for directory in directories]


@pytest.fixture
def run(in_process):
    """Runs the command; returns its exit code, and the lines that it prints and of its errors."""
    return partial(in_process, app, "quant_eval", "compare")


def test_draws_widen_a_comparison_and_methods_without_calibration_need_none(written):
    first, second = pair(added=0.004)
    result, other, rtn = read(
        written(
            content(first, values=[0.030, 0.034, 0.029]),
            content(second, values=[0.031, 0.036, 0.035]),
            content(second, name="rtn-b3-g32"),
        )
    )
    alone = compare_losses(first, second, "absolute_error")
    for better in (other, rtn):
        (compared,) = compare([result, better], [(0, 1)], "absolute_error")
        assert compared.sources == "documents and calibration draws"
        assert compared.difference.value == pytest.approx(alone.value)
        assert compared.difference.low < alone.low < alone.high < compared.difference.high
        assert compared.difference.p_value > alone.p_value


def test_draws_of_documents_that_agree_give_the_interval_of_student(written):
    tokens, ones = [100.0] * 30, [1.0] * 30
    sums = {"document": list(range(30)), "tokens": tokens, "nll": [300.0] * 30}
    sums |= {"nll_quantized": [306.0] * 30, "kl": ones, "agreements": ones}
    more = sums | {"nll_quantized": [310.0] * 30}
    results = read(
        written(content(sums, values=[0.0] * 3), content(more, values=[0.01, 0.02, 0.06]))
    )
    (compared,) = compare(results, [(0, 1)], "absolute_error")
    low, high = compared.difference.low, compared.difference.high
    error = np.std([0.01, 0.02, 0.06], ddof=1) / math.sqrt(3)
    assert (low + high) / 2 == pytest.approx(0.04)
    assert (high - low) / 2 == pytest.approx(student.ppf(0.975, df=2) * error)


def test_holm_is_over_the_pairs_of_the_call(written):
    sums = [*pair(seed=0, added=0.004), pair(seed=0, added=0.02)[1]]
    results = read(written(*map(content, sums)))
    compared = compare(results, pairs_of(3, "all"), "absolute_error")
    assert [(comparison.first, comparison.second) for comparison in compared] == [
        (0, 1),
        (0, 2),
        (1, 2),
    ]
    alone = [compare_losses(sums[i], sums[j], "absolute_error") for i, j in pairs_of(3, "all")]
    assert [comparison.difference.p_value for comparison in compared] == [
        comparison.p_value for comparison in alone
    ]
    assert [comparison.p_adjusted for comparison in compared] == holm(
        [comparison.p_value for comparison in alone]
    )
    assert compared[1].verdict == "higher"
    (same,) = compare([results[0], results[0]], [(0, 1)], "absolute_error")
    assert (same.difference, same.verdict) == ((0, 0, 0, 1), "not significant")


def test_the_command_prints_and_writes(written, run, tmp_path):
    sums = [*pair(seed=0, added=0.02), pair(seed=0, added=-0.02)[1]]
    directories = written(*map(content, sums))
    code, printed, _ = run(
        *directories, "--figure", "absolute_error", "--out", tmp_path / "out.json"
    )
    assert code == 0
    rows = [line.split() for line in printed if "gptq-b3-g32" in line]
    assert [row[-1] for row in rows] == ["higher", "lower"]
    assert any("absolute_error, nats per token" in line for line in printed)
    written_out = json.loads((tmp_path / "out.json").read_text())
    assert written_out["settings"]["pairing"] == "baseline"
    assert [entry["first"]["result"] for entry in written_out["pairs"]] == [
        f"{directories[0]}/result.json"
    ] * 2
    for index, entry in enumerate(written_out["pairs"], start=1):
        expected = compare_losses(sums[0], sums[index], "absolute_error")
        assert entry["difference"] == expected._asdict()
        error = (sum(sums[index]["nll_quantized"]) - sum(sums[0]["nll"])) / sum(sums[0]["tokens"])
        assert entry["second_value"] == pytest.approx(error)
    code, printed, _ = run(*directories, "--figure", "absolute_error", "--pairs", "successive")
    assert [line.split()[-1] for line in printed if "gptq-b3-g32" in line] == [
        "higher",
        "lower",
    ]
    assert "\n".join(run(*directories, "--pairs", "all")[1]).count("gptq-b3-g32") == 6


def changed(sums, **lists):
    return {name: lists.get(name, values) for name, values in sums.items()}


SUMS = pair()[0]
FEW = {name: values[:19] for name, values in SUMS.items()}


def one_line(outcome):
    """The one line of an error."""
    code, printed, lines = outcome
    assert (code, printed, len(lines)) == (2, [], 1)
    return lines[0]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (content(SUMS, sha256="cd"), "the text ('ab', 'cd')"),
        (content(SUMS, sequence_length=32), "sequence_length (64, 32)"),
        (content(SUMS, documents="concatenated"), "documents ('separate', 'concatenated')"),
        (content(SUMS, bos_token_ids=[1]), "bos_token_ids"),
        (content(SUMS, dtype="bf16"), "dtype ('fp32', 'bf16')"),
        (content(pair(count=59)[0]), "the documents"),
        (content({"document": [0, 1]}), "the documents"),
        (content(pair(seed=1)[0]), "the documents' numbers of tokens"),
        (content(SUMS, values=[0.1, 0.2]), "the number of calibration draws (1, 2)"),
    ],
)
def test_results_that_differ_in_a_setting_are_refused(written, run, second, reason):
    directories = written(content(SUMS), second)
    assert f"differ in {reason}" in one_line(run(*directories, "--figure", "absolute_error"))


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ([content(SUMS)], "give two results or more"),
        ([content(FEW)] * 2, "was evaluated on 19 documents, which decide nothing"),
        (
            [content(SUMS), content(changed(SUMS, nll=[math.nan] * 60))],
            "NaN is no number of JSON; run the study again, or measure again",
        ),
        (
            [content(SUMS), content(changed(SUMS, kl=SUMS["kl"][:5]))],
            "'kl' is not finite, or missing, of a document",
        ),
        ([content(changed(SUMS, nll=[0.0] * 60))] * 2, "nothing to divide by"),
        ([content(SUMS), "{"], "is not valid JSON ("),
        ([content(SUMS), {}], "is not a result of a measurement"),
        ([content(SUMS), "{}"], "has no sha256 of its values"),
    ],
)
def test_what_cannot_be_compared_is_refused(written, run, contents, reason):
    assert reason in one_line(run(*written(*contents)))


def test_other_figures_are_refused(written, run):
    outcome = run(*written(content(SUMS), content(SUMS)), "--figure", "loss")
    assert "no figure is called 'loss'" in one_line(outcome)


def test_a_result_is_given_once_and_exists(written, run, tmp_path):
    (directory,) = written(content(SUMS))
    code, _, lines = run(directory, directory / "result.json")
    assert code == 2
    assert "is given twice" in lines[-1]
    assert "does not exist; measure it" in run(directory, tmp_path / "absent")[2][-1]


def test_results_of_several_studies_have_different_labels(written, run):
    models = ["runs/a/lr3e-3/hf/step00000640", "runs/b/lr3e-3/hf/step00000640"]
    _, printed, _ = run(*written(*(content(SUMS, model=model) for model in models)))
    assert all(model.removeprefix("runs/") in "\n".join(printed) for model in models)
    _, printed, _ = run(*written(content(SUMS), content(SUMS)))  # of one model and one spec
    assert "test_results_of_several" in "\n".join(printed)
