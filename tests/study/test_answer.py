"""The answer of a report, and its cells, from planted numbers."""

import pytest

from base.quantities import MILLINATS
from dynamics.figures.quantization import DIVERGENCE_AXIS, ERROR_AXIS
from study.claims.page import Line
from study.claims.verdict import Claim, Verdict
from study.content import loaded
from study.figures.charts import Quantity, in_words, thousandths, tooltip
from study.measurements.titles import shortened
from study.report.answer import answer
from study.report.cells import Bounded, cell


def test_axes_have_the_power_of_ten_in_their_title_and_plain_ticks():
    axis = DIVERGENCE_AXIS.encoding()
    assert axis["title"] == "KL divergence, 10^-3 nats/token"
    assert axis["axis"]["format"] == ".6~g"
    assert DIVERGENCE_AXIS.values(0.000659, (0.000363, 0.000957)) == {
        "KL divergence, 10^-3 nats/token": pytest.approx(0.659),
        "KL divergence, 10^-3 nats/token, low": pytest.approx(0.363),
        "KL divergence, 10^-3 nats/token, high": pytest.approx(0.957),
    }
    assert ERROR_AXIS.encoding()["title"] == "relative error of the loss, %"
    assert ERROR_AXIS.values(0.0025) == {"relative error of the loss, %": pytest.approx(0.25)}


def test_under_the_pointer_are_run_and_place_first_and_the_interval_beside_its_value():
    error = thousandths("error")
    row = {"panel": "a", "series": "weights", "run": "0.012", "step": 64, "tokens": 131072}
    rows = [row | error.values(0.0005, (0.0004, 0.0006)), row | error.values(0.0005)]
    names = [line["title"] for line in tooltip(rows)]
    assert names == ["run", "step", "tokens", "panel", "series", f"error, {MILLINATS}"]
    (words,) = in_words(rows)
    assert words["as"] == f"error, {MILLINATS} in words"
    assert f"isValid(datum['error, {MILLINATS}, low']) ? ' ['" in words["calculate"]
    assert in_words([{"run": "a"} | Quantity("loss").values(4.0)]) == []


def test_cells_have_as_many_digits_as_their_interval_allows_and_no_minus_zero():
    shown = cell(Bounded(0.000659, 0.000363, 0.000957), 1000.0)
    assert (shown.text, shown.interval) == ("0.66", "[0.36, 0.96]")
    assert cell(Bounded(-1e-9, -2.0, 2.0)).text == "0.0"
    loss = cell(Bounded(4.12345, 3.9, 4.3), digits=3)
    assert (loss.text, loss.interval) == ("4.123", "[3.900, 4.300]")


def test_titles_of_one_method_are_shortened():
    assert shortened(["gptq-b3-g32"]) == (
        "GPTQ, 3 bits, groups of 32",
        {"GPTQ, 3 bits, groups of 32": ""},
    )


def line(name: str, outcome: str, effect: str) -> Line:
    claim = Claim(name, f"The {name} rises", "", "", "", lambda _: [], lambda _: True)
    verdict = Verdict("supported", "", holds_seeds=True)
    return Line(claim, outcome, effect, None, "", "", [verdict])


def test_the_answer_names_a_supported_claim_with_its_unit(study):
    claims = [
        line("first", "contradicted", "0.1 [0, 0.2]"),
        line("second", "not decided", "0 [-1, 1]"),
        line("third", "supported", "0.66 [0.36, 0.96]"),
    ]
    assert answer(study, {}, claims) == (
        "The third rises: supported, 0.66 [0.36, 0.96] 10^-3 nats/token."
    )
    in_log = [line("fourth", "supported", "0.22 [0.1, 0.3] in log")]
    assert answer(study, {}, in_log) == "The fourth rises: supported, 0.22 [0.1, 0.3] in log."
    assert answer(study, {}, claims[1:2]) == ""


def test_every_claim_names_a_figure_that_there_is():
    figures = {figure.name for figure in loaded("figures")}
    assert {claim.figure for claim in loaded("claims")} <= figures
