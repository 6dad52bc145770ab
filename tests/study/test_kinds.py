"""Kinds of processors in the report: silent for one, said as loudly as a claim for several."""

import json

from study.claims.page import HEAD, NOTE, claims_table
from study.claims.verdict import Claim, Verdict
from study.figures.canvas import Canvas
from study.report.page import Section, write_page
from study.report.text import claims_lines
from study.results.kinds import AGAINST, kinds_of_study, mixed_in_words
from tests.sealing import edited, json_lines
from tests.study.synthetic import ATTEMPT
from train.run.directory import RunDirectory

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
EPYC = {"architecture": "x86_64", "cpu": "AMD EPYC 7763", "limits": {}, "kernels": "AVX2"}
EPYC_IN_WORDS = "AMD EPYC 7763 (x86_64, kernels AVX2)"


def on(*gpus: str) -> dict:
    """An attempt on a node with each of these GPUs, or on a CPU."""
    nodes = [
        {"hosts": [f"node{number}"], "gpus": [gpu, gpu], "processor": EPYC}
        for number, gpu in enumerate(gpus)
    ]
    return ATTEMPT | {"nodes": nodes or [{"hosts": ["node9"], "processor": EPYC}]}


def set_attempts(directory, run: str, *attempts: dict) -> None:
    """Gives a run these attempts, all updates of which were made by the first ones."""
    path = RunDirectory(directory / run).environment_json
    path.write_text(json.dumps({"attempts": attempts}))


def sentences(directory, study) -> list[str]:
    return mixed_in_words(kinds_of_study(directory, study), [run.name for run in study.runs])


def test_nothing_is_said_of_one_kind_or_of_none(study_dir, study):
    assert sentences(study_dir, study) == [], "records of before have none"
    for run in study.trained:
        set_attempts(study_dir, run.name, on(H200))
    for path in study_dir.glob("*/hf/step*/quant/gptq-b3-g32/result.json"):
        with edited(path) as content:
            content["environment"] = {"processor": EPYC}  # measured elsewhere than trained
    assert sentences(study_dir, study) == []


def test_every_run_and_result_is_named_with_its_kind(study_dir, study):
    first, second, third, *_ = (run.name for run in study.trained)
    set_attempts(study_dir, first, on(H200))
    # A node of another kind in an attempt, and a later attempt on a CPU, which redid its half.
    set_attempts(study_dir, second, on(H200, H100), on())
    metrics = RunDirectory(study_dir / second).metrics
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    again = [row | {"attempt": 2} for row in rows if row["step"] > 300]
    metrics.write_text(json_lines(rows + again))
    # A start in vain on another kind is in no weights.
    set_attempts(study_dir, third, on(H200), on(H100))
    trained, meaning = sentences(study_dir, study)
    assert trained == (
        f"Trained on processors of different kinds: {first} and {third} on {H200}; {second} on"
        f" {H200}, {H100} and {EPYC_IN_WORDS}."
    )
    assert meaning.startswith("Processors of another kind round sums in another order")

    for number, path in enumerate(sorted(study_dir.glob(f"{first}/hf/step*/quant/*/result.json"))):
        with edited(path) as content:
            content["environment"] = {"gpus": [H100 if number < 2 else H200]}
    _, measured, _ = sentences(study_dir, study)
    assert measured.startswith("Measured on processors of different kinds (quantize): ")
    assert f"2 results of {first} on {H100}." in measured
    # other runs are compared without these
    kinds = kinds_of_study(study_dir, study)
    assert mixed_in_words(kinds, [third]) == []


def test_the_page_says_so_below_the_claims(tmp_path, study):
    claim = Claim(
        "rates", "Rates matter", "page 1", "rates", "losses", lambda _: [], lambda _: True
    )
    lines = claims_table([(claim, [Verdict("supported", "by eye", p=0.001)])])
    runs = Canvas(study, [], tmp_path).runs
    given = {"study": study, "newest": "", "facts": "", "claims_head": HEAD, "note": NOTE}
    given |= {"settings": {}, "commands": {}, "server": ""}
    for against in (AGAINST, ""):
        section = Section("", "", "", "", "", {}, runs, [], [], lines, against, "", [], [], "")
        write_page(tmp_path / "page.html", [section], **given)
        text = (tmp_path / "page.html").read_text()
        assert (f'<td colspan="6">against all: {AGAINST}</td></tr>' in text) == bool(against)


def test_it_is_printed_with_what_speaks_against_single_claims():
    claim = Claim(
        "rates", "Rates matter", "page 1", "rates", "losses", lambda _: [], lambda _: True
    )
    judged = [(claim, [Verdict("supported", "by eye", p=0.001, against="lr3e-3: lower")])]
    table = claims_table(judged)
    lines = list(claims_lines(table, "Trained on processors of different kinds: a on b."))
    assert lines[-3:] == [
        "What speaks against:",
        "  rates: lr3e-3: lower",
        "  all: Trained on processors of different kinds: a on b.",
    ]
    assert not any("all:" in line for line in claims_lines(table))
