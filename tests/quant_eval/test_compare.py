"""Differences of results against sign flips, slow definitions and the truth; the command that
compares results pair by pair, and everything that it refuses.
"""

import json
import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from scipy.stats import t as student

from base.digests import sealed
from base.statistics import holm, pairs_of
from ckpt_tools.hf.measured import Quantization
from ckpt_tools.hf.results import Result
from quant_eval.__main__ import app
from quant_eval.compare import compare
from quant_eval.measuring.losses import PairedLosses
from quant_eval.measuring.statistics import figures_of
from tests.quant_eval.test_coverage import documents, is_within


def per_document(losses):
    sums = {name: values_D.tolist() for name, values_D in vars(losses).items()}
    return {"document": list(range(len(losses.tokens)))} | sums


def content(
    sums, *, name="gptq-b3-g32", values=None, model="runs/a/hf/step1", dtype="fp32", **evaluation
):
    """A result.json, of what a comparison reads."""
    text = {"sha256": "ab", "sequence_length": 64, "documents": "separate"} | evaluation
    calibration = None
    if values:
        # each draw adds so many nats to every token, on average nothing
        tokens_D, nats_D = np.array(sums["tokens"]), np.array(sums["nll_quantized"])
        drawn = [(nats_D + tokens_D * (value - np.mean(values))).tolist() for value in values]
        others = {key: [sums[key]] * len(values) for key in ("kl", "agreements")}
        calibration = {"seeds": len(values), "per_document": {"nll_quantized": drawn} | others}
    return {
        "model": {"path": model, "weights_digests": {}},
        "spec": {"name": name, "method": name.split("-")[0], "dtype": dtype, "evaluation": text},
        "measured": {"per_document": sums, "calibration": calibration},
        "environment": {},
    }


def result_of(sums, **changes):
    """A result with those sums over documents."""
    return Result[Quantization].model_validate(content(sums, **changes) | {"path": "result.json"})


def compare_losses(first, second, figure):
    """The difference of one pair."""
    (compared,) = compare([result_of(first), result_of(second)], [(0, 1)], figure)
    return compared.difference


def pair(seed=0, count=60, added=0.0, setting="lognormal"):
    """Two quantizations of one model: what they add has a part that they share; the second adds
    more on average.
    """
    generator = np.random.default_rng(seed)
    losses = documents(generator, count, setting)
    models = []
    for extra in (0.0, added):
        quantized = losses.nll_quantized + losses.tokens * (
            extra + 0.01 * generator.normal(size=count)
        )
        models.append(per_document(replace(losses, nll_quantized=quantized)))
    return models


def rejected(p_values, alpha):
    """Holm's procedure as he states it: the smallest p-value first, each against alpha over
    those that are left.
    """
    left, indices = list(range(len(p_values))), []
    while left:
        index = min(left, key=lambda index: p_values[index])
        if p_values[index] > alpha / len(left):
            break
        indices.append(index)
        left.remove(index)
    return sorted(indices)


def test_holm_rejects_what_the_procedure_rejects():
    generator = np.random.default_rng(0)
    for _ in range(50):
        p_values = (generator.random(generator.integers(1, 9)) ** 3).tolist()
        for alpha in generator.random(20):
            adjusted = holm(p_values)
            by_adjusted = [index for index, p in enumerate(adjusted) if p <= alpha]
            assert by_adjusted == rejected(p_values, alpha)
            assert max(adjusted) <= 1


def test_sign_flips_find_about_the_same_p_value():
    """Under no difference the linearised contributions of the documents have either sign alike."""
    p_values = []
    for seed in range(5):
        first, second = pair(seed, count=200, added=0.001, setting="short")
        difference = compare_losses(first, second, "relative_error")
        nll_D = np.array(first["nll"])  # of both
        quantized_MD = np.array([first["nll_quantized"], second["nll_quantized"]])
        ratio_M = quantized_MD.sum(1) / nll_D.sum()
        change = ratio_M[1] - ratio_M[0]
        residual_MD = (quantized_MD - ratio_M[:, None] * nll_D) / nll_D.sum()
        contribution_D = residual_MD[1] - residual_MD[0] + change / 200
        signs_SD = np.random.default_rng(0).choice([-1, 1], size=(4000, 200))
        flipped = float((np.abs(signs_SD @ contribution_D) >= abs(change)).mean())
        # 4000 samples of each place p within 0.01 of itself.
        assert difference.p_value == pytest.approx(flipped, abs=0.03)
        p_values.append(flipped)
    assert min(p_values) < 0.2 < 0.4 < max(p_values)


def test_pairs_are_compared_on_the_documents_they_share():
    """An addition to a document that both share cancels: the difference is known far better than either."""
    generator = np.random.default_rng(3)
    losses = documents(generator, 60, "lognormal")
    more = replace(losses, nll_quantized=losses.nll_quantized + 0.001 * losses.tokens)
    difference = compare_losses(per_document(losses), per_document(more), "absolute_error")
    assert difference[:3] == pytest.approx([0.001, 0.001, 0.001], rel=1e-6)
    low, high = figures_of([losses], samples=999, level=0.95, seed=0)["intervals"]["absolute_error"]
    assert high - low > 0.005


def null_pair(seed, count, setting):
    """Two models whose losses, errors and divergences differ on every document, but not on
    average.
    """
    generator = np.random.default_rng(seed)
    shared = documents(generator, count, setting)
    models = []
    for _ in range(2):
        nll = shared.nll * generator.gamma(400, 1 / 400, count)
        added = 0.01 * nll + shared.tokens * 0.02 * generator.normal(size=count)
        kl = shared.kl * generator.lognormal(-0.02, 0.2, count)
        models.append(
            per_document(PairedLosses(shared.tokens, nll, nll + added, kl, shared.agreements, kl))
        )
    return models


def size(figure, count, setting, repetitions):
    """The share of quantizations without a true difference that are significant at 5%."""
    pairs = (null_pair(seed, count, setting) for seed in range(repetitions))
    differences = [compare_losses(first, second, figure) for first, second in pairs]
    return np.mean([difference.p_value <= 0.05 for difference in differences])


def test_equal_models_differ_significantly_in_five_percent():
    """Accepted is what a size of 3-7% gives with 99% on either side."""
    for figure in ("relative_error", "kl_divergence"):
        share = size(figure, 50, "lognormal", repetitions=800)
        assert is_within(share, 800, (0.03, 0.07)), (figure, share)


@pytest.mark.stress
@pytest.mark.parametrize("setting", ["short", "lognormal", "heavy"])
@pytest.mark.parametrize("count", [50, 200])
def test_the_size_is_five_percent(setting, count):
    reached = {
        figure: size(figure, count, setting, 2000) for figure in ("relative_error", "kl_divergence")
    }
    print(setting, count, reached)
    assert all(0.03 <= share <= 0.07 for share in reached.values()), reached


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


@pytest.fixture
def run(in_process):
    """Runs the command; returns its exit code, and the lines that it prints and of its errors."""
    return partial(in_process, app, "quant_eval", "compare")


@pytest.fixture
def refused(run):
    """Runs the command; returns the one line of its error."""

    def line(*words):
        code, printed, lines = run(*words)
        assert (code, printed, len(lines)) == (2, [], 1)
        return lines[0]

    return line


def test_draws_widen_a_comparison_and_methods_without_calibration_need_none():
    first, second = pair(added=0.004)
    result = result_of(first, values=[0.030, 0.034, 0.029])
    other = result_of(second, values=[0.031, 0.036, 0.035])
    rtn = result_of(second, name="rtn-b3-g32")
    alone = compare_losses(first, second, "absolute_error")
    for better in (other, rtn):
        (compared,) = compare([result, better], [(0, 1)], "absolute_error")
        assert compared.sources == "documents and calibration draws"
        assert compared.difference.value == pytest.approx(alone.value)
        assert compared.difference.low < alone.low < alone.high < compared.difference.high
        assert compared.difference.p_value > alone.p_value


def test_draws_of_documents_that_agree_give_the_interval_of_student():
    tokens, ones = [100.0] * 30, [1.0] * 30
    sums = {"document": list(range(30)), "tokens": tokens, "nll": [300.0] * 30}
    sums |= {"nll_quantized": [306.0] * 30, "kl": ones, "agreements": ones}
    more = sums | {"nll_quantized": [310.0] * 30}
    results = [result_of(sums, values=[0.0] * 3), result_of(more, values=[0.01, 0.02, 0.06])]
    (compared,) = compare(results, [(0, 1)], "absolute_error")
    low, high = compared.difference.low, compared.difference.high
    error = np.std([0.01, 0.02, 0.06], ddof=1) / math.sqrt(3)
    assert (low + high) / 2 == pytest.approx(0.04)
    assert (high - low) / 2 == pytest.approx(student.ppf(0.975, df=2) * error)


def test_holm_is_over_the_pairs_of_the_call():
    sums = [*pair(seed=0, added=0.004), pair(seed=0, added=0.02)[1]]
    results = list(map(result_of, sums))
    pairs = [(0, 1), (0, 2), (1, 2)]
    compared = compare(results, pairs_of(3, "all"), "absolute_error")
    assert [(each.first, each.second) for each in compared] == pairs
    alone = [compare_losses(sums[i], sums[j], "absolute_error").p_value for i, j in pairs]
    assert [each.difference.p_value for each in compared] == alone
    assert [each.p_adjusted for each in compared] == holm(alone)
    assert compared[1].verdict == "higher"
    (same,) = compare([results[0], results[0]], [(0, 1)], "absolute_error")
    assert (same.difference, same.verdict) == ((0, 0, 0, 1), "not significant")


def verdicts(printed):
    return [line.split()[-1] for line in printed if line.endswith(("higher", "lower"))]


def test_the_command_prints_and_writes(written, run, tmp_path):
    sums = [*pair(seed=0, added=0.02), pair(seed=0, added=-0.02)[1]]
    directories = written(*map(content, sums))
    out = tmp_path / "out.json"
    code, printed, _ = run(*directories, "--figure", "absolute_error", "--out", out)
    assert (code, verdicts(printed)) == (0, ["higher", "lower"])
    assert printed[0] == (
        "2 of 2 pairs differ significantly in increase of the loss (p below 0.05 after Holm's"
        " correction)"
    )
    heading = "increase of the loss and its difference, 10^-3 nats/token, "
    assert any(line.startswith(heading) for line in printed)
    written_out = json.loads(out.read_text())
    assert written_out["settings"]["pairing"] == "baseline"
    for index, entry in enumerate(written_out["pairs"], start=1):
        assert entry["first"]["result"] == f"{directories[0]}/result.json"
        expected = compare_losses(sums[0], sums[index], "absolute_error")
        assert entry["difference"] == expected._asdict()
        error = (sum(sums[index]["nll_quantized"]) - sum(sums[0]["nll"])) / sum(sums[0]["tokens"])
        assert entry["second_value"] == pytest.approx(error)
    assert index == 2
    _, printed, _ = run(*directories, "--figure", "absolute_error", "--pairs", "successive")
    assert verdicts(printed) == ["higher", "lower"]
    _, printed, _ = run(*directories, "--pairs", "all")
    assert printed[0].startswith("3 of 3 pairs differ significantly in relative increase of the")
    assert len(verdicts(printed)) == 3


def test_the_verdict_on_one_pair_is_a_sentence_with_its_size(written, run):
    """Losses that differ by 0.02 nats on each document, in the mean and without noise."""
    first, second = pair(seed=0, added=0.02)
    exact = second | {
        "nll_quantized": [
            x + 0.02 * n for x, n in zip(first["nll_quantized"], first["tokens"], strict=True)
        ]
    }
    directories = written(content(first), content(exact))
    _, printed, _ = run(*directories, "--figure", "cross_entropy_quantized")
    verdict = " ".join(" ".join(printed[: printed.index("")]).split())
    assert re.search(
        r" has a higher loss once quantized than .*, by 20\.0 \[20\.0, 20\.0\] 10\^-3 nats/token"
        r" \(p < 0\.001\)$",
        verdict,
    )
    _, printed, _ = run(*reversed(directories), "--figure", "cross_entropy_quantized")
    assert "has a lower loss once quantized than" in " ".join(" ".join(printed).split())


SUMS = pair()[0]
FEW = {name: values[:19] for name, values in SUMS.items()}


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ([content(SUMS, sha256="cd")], "differ in the text ('ab', 'cd')"),
        ([content(SUMS, sequence_length=32)], "differ in sequence_length (64, 32)"),
        ([content(SUMS, documents="joined")], "differ in documents ('separate', 'joined')"),
        ([content(SUMS, bos_token_ids=[1])], "differ in bos_token_ids"),
        ([content(SUMS, dtype="bf16")], "differ in dtype ('fp32', 'bf16')"),
        ([content(pair(count=59)[0])], "differ in the documents"),
        ([content({"document": [0, 1]})], "differ in the documents"),
        ([content(pair(seed=1)[0])], "differ in the documents' numbers of tokens"),
        ([content(SUMS, values=[0.1, 0.2])], "the number of calibration draws (1, 2)"),
        ([content(SUMS | {"nll": [math.nan] * 60})], "NaN is no number of JSON; run the study"),
        ([content(SUMS | {"kl": SUMS["kl"][:5]})], "'kl' is not finite, or missing, of a document"),
        (["{"], "is not valid JSON ("),
        (["{}"], "has no sha256 of its values"),
        ([{}], "is not a result of a measurement"),
        ([], "give two results or more"),
    ],
)
def test_what_cannot_be_compared_with_a_result_is_refused(written, refused, contents, reason):
    assert reason in refused(*written(content(SUMS), *contents), "--figure", "absolute_error")


def test_few_documents_no_loss_and_other_figures_are_refused(written, refused, tmp_path):
    few = written(content(FEW), content(FEW))
    assert "was evaluated on 19 documents, which decide nothing" in refused(*few)
    nothing = content(SUMS | {"nll": [0.0] * 60})
    assert "nothing to divide by" in refused(*written(nothing, nothing))
    first, second = written(content(SUMS), content(SUMS))
    assert "no figure is called 'loss'" in refused(first, second, "--figure", "loss")
    assert "is given twice" in refused(first, first / "result.json")
    assert "does not exist; measure it" in refused(first, tmp_path / "absent")


def test_results_of_several_studies_have_different_labels(written, run):
    models = ["runs/a/lr3e-3/hf/step00000640", "runs/b/lr3e-3/hf/step00000640"]
    _, printed, _ = run(*written(*(content(SUMS, model=model) for model in models)))
    assert all(model.removeprefix("runs/") in "\n".join(printed) for model in models)
    _, printed, _ = run(*written(content(SUMS), content(SUMS)))  # of one model and one spec
    assert "test_results_of_several" in "\n".join(printed)
