"""Methods side by side: what the figure holds, and whether they are said to agree only where documents bear it out."""

import json

from study.canvas import Canvas
from study.methods import method_findings, methods_plot, order_clause, shown_methods
from study.paired import Order, Paired, Verdict
from study.summary import summarize
from tests.study.synthetic import change_losses, table_of

LABELS = ("0.001", "0.003", "0.01", "0.03")
HEAD = "keeps the order by peak learning rate that GPTQ, 3 bits, groups of 32, shows at the end of training"


def losses_of(directory, run: str, spec: str) -> dict[str, list]:
    path = directory / run / "hf/step00000640/quant" / spec / "result.json"
    return json.loads(path.read_text())["measured"]["per_document"]


def said_of(directory, study) -> dict[str, str]:
    summaries = summarize(study, table_of(directory, study))
    sentences = method_findings(study, summaries, Paired(directory))
    return dict(sentence.removesuffix(".").split(f", {HEAD} ") for sentence in sentences)


def test_every_method_is_held_against_the_order_that_gptq_finds(study_dir, study):
    """AWQ: two runs alternate around each other; RTN: the outer two runs change places."""
    awq = losses_of(study_dir, "lr3e-3", "awq-b3-g32")
    change_losses(
        study_dir, "lr1e-2", "awq-b3-g32", kl=[kl * (0.7, 1.3)[place % 2] for place, kl in enumerate(awq["kl"])]
    )
    outer = {run: losses_of(study_dir, run, "rtn-b3-g32")["kl"] for run in ("lr1e-3", "lr3e-2")}
    change_losses(study_dir, "lr1e-3", "rtn-b3-g32", kl=outer["lr3e-2"])
    change_losses(study_dir, "lr3e-2", "rtn-b3-g32", kl=outer["lr1e-3"])
    error = "for all 6 pairs told apart by relative error"
    whole = f"for all 6 pairs told apart by KL divergence and {error}"
    assert said_of(study_dir, study) == {
        "RTN, 3 bits, groups of 32": "for 1 of 6 pairs told apart by KL divergence (reversed: 0.001 vs 0.003, "
        f"0.001 vs 0.01, 0.001 vs 0.03, 0.003 vs 0.03, 0.01 vs 0.03) and {error}",
        "GPTQ by gptqmodel, 3 bits, groups of 32": whole,
        "AWQ, 3 bits, groups of 32": "for 5 of 6 pairs told apart by KL divergence (not told apart here: "
        f"0.003 vs 0.01) and {error}",
        "LLM.int8(), threshold 6": whole,
    }


def test_a_pair_that_gptq_does_not_tell_apart_belongs_to_no_order(study_dir, study):
    alike = losses_of(study_dir, "lr1e-2", "gptq-b3-g32")
    kl = [value * (0.7, 1.3)[place % 2] for place, value in enumerate(alike["kl"])]
    change_losses(study_dir, "lr3e-2", "gptq-b3-g32", kl=kl)
    for clauses in said_of(study_dir, study).values():
        assert clauses.startswith(
            "for all 5 pairs told apart by KL divergence (told apart here alone: 0.01 vs 0.03) and for all 6 pairs"
        )


def test_where_gptq_finds_no_order_nothing_is_said_of_it(study_dir, study):
    base = losses_of(study_dir, "lr1e-3", "gptq-b3-g32")
    for run, changes in (("lr3e-3", (0.7, 1.3)), ("lr1e-2", (1.3, 0.7)), ("lr3e-2", (0.6, 1.4))):
        kl = [value * changes[place % 2] for place, value in enumerate(base["kl"])]
        change_losses(study_dir, run, "gptq-b3-g32", kl=kl)
    for clauses in said_of(study_dir, study).values():
        assert clauses == "for all 6 pairs told apart by relative error"


def test_nothing_is_said_of_a_method_that_a_run_lacks(study_dir, study):
    (study_dir / "lr3e-2/hf/step00000640/quant/awq-b3-g32/result.json").unlink()
    assert [title.split(",")[0] for title in said_of(study_dir, study)] == [
        "RTN", "GPTQ by gptqmodel", "LLM.int8()",
    ]  # fmt: skip


def test_pairs_are_counted_by_what_both_methods_say():
    verdicts: tuple[Verdict, ...] = ("higher", "lower", "not told apart")
    pairs = [(known, own) for known in verdicts for own in verdicts]
    known: Order = {(str(index), "x"): pair[0] for index, pair in enumerate(pairs)}
    own: Order = {(str(index), "x"): pair[1] for index, pair in enumerate(pairs)}
    assert order_clause(known, own, "it") == (
        "for 2 of 6 pairs told apart by it (not told apart here: 2 vs x, 5 vs x; reversed: 1 vs x, 3 vs x; "
        "told apart here alone: 6 vs x, 7 vs x)"
    )
    assert order_clause(known, dict.fromkeys(known, verdicts[2]), "it").startswith("for 0 of 6 pairs told apart")


def test_the_figure_holds_every_method_of_every_run_in_its_look(study_dir, study):
    (study_dir / "lr3e-2/hf/step00000640/quant/awq-b3-g32/result.json").unlink()
    rows = table_of(study_dir, study)
    canvas = Canvas(study, rows)
    looks = {(look.colour, look.marker): run for run, look in canvas.looks.items()}
    specs = shown_methods(study)
    assert len(specs) == 6
    (_, left), (_, right) = methods_plot(canvas).shown
    assert left.x.is_log
    for panel, figure in ((left, "kl_divergence"), (right, "relative_error")):
        found = [(series.mark, point) for series in panel.series for point in series.points]
        assert len(found) == 6 * 4 - 1
        for mark, point in found:
            spec, run = specs[round(point.y)], looks[mark.colour, mark.marker]
            row = next(row for row in rows if (row["run"], row["step"], row["average"]) == (run, 640, None))
            assert abs(point.y - round(point.y)) < 0.5, "it lies on another method's line"
            assert point.x == row[f"quant/{spec}/{figure}"]
            assert point.x_interval == tuple(row[f"quant/{spec}/{figure}_{end}"] for end in ("low", "high"))
