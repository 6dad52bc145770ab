"""The table against numbers read from the result files by hand."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from base.digests import sealed
from base.environment import version
from base.errors import UserError
from base.files import sha256_of
from base.frozen import fingerprint
from dynamics.choices.arms import answers
from dynamics.claims.flatness import over_checkpoints
from dynamics.figures.curvature import curvature
from study.claims.page import claims_table, judge_all
from study.claims.verdict import Evidence
from study.figures.canvas import Canvas
from study.paths import REPORT, MeasuredModel, curvature_result, quantization_result, step_result
from study.pipeline.ledger import Ledger, status_lines
from study.pipeline.runner import StepError
from study.recipes.resolve import resolve
from study.report.report import write_report
from study.results.collect import collect_rows, diverged_runs, left_out_lines, phase_of
from study.results.paired import Paired
from study.results.table import read_table, write_table
from study.step import Step
from study.steps import steps_of
from study.tracking import described
from study.tracking.importer import mirror
from study.tracking.store import store_uri
from tests.sealing import edited, measured_in, write_ending
from tests.study.ablation import tiny
from tests.study.running import command, noting, order, run_steps
from tests.study.synthetic import row_at, table_of
from train.run.directory import RunDirectory

METHODS = [[spec] for spec in tiny().quantization.methods]


def test_every_checkpoint_is_one_row_with_its_own_numbers(study_dir, study):
    collected = collect_rows(study_dir, study)
    # of a checkpoint: itself, two quantizations, curvature; of three averages and two soups all but
    # curvature; of the last checkpoint eight more methods and three steps
    assert collected.num_found == collected.expected == 4 * (7 * 4 + (3 + 2) * 3 + 8 + 3)
    write_table(study_dir, study, collected.rows)
    rows = read_table(study_dir, study)
    trained = [(row["run"], row["step"]) for row in rows if row["average"] is None]
    assert trained == [(run.name, step) for run in study.runs for step in run.save_steps]
    row = row_at(rows, "lr1e-2", 512)
    checkpoint = json.loads(
        (study_dir / "lr1e-2/checkpoints/step00000512/checkpoint.json").read_text()
    )
    assert (row["tokens"], row["held_out_loss"]) == (512 * 2048, checkpoint["held_out_loss"])
    folder = study_dir / "lr1e-2/hf/step00000512"
    quant = measured_in(folder / "quant/gptq-b4-g32")
    assert row["quant/gptq-b4-g32/relative_error"] == quant["relative_error"]
    assert row["quant/gptq-b4-g32/kl_divergence_high"] == quant["intervals"]["kl_divergence"][1]
    curvature = measured_in(folder / "curvature/hutchinson")
    trace, fisher = curvature["trace"], curvature["fisher_trace"]
    assert row["curvature/trace_standard_error"] == trace["standard_error"]
    assert [row["curvature/trace_low"], row["curvature/trace_high"]] == trace["interval"]
    assert row["curvature/gauss_newton_trace"] == curvature["gauss_newton_trace"]["mean"]
    assert row["curvature/fisher_trace_standard_error"] == fisher["standard_error"]
    assert row["curvature/lambda_max"] == curvature["lambda_max"]["value"]
    assert row["curvature/lambda_max_converged"] is True


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("lr3e-3/hf/step00000512/quant/gptq-b3-g32", "gptq-b3-g32 of .*lr3e-3/hf/step00000512"),
        ("lr1e-2/hf/step00000320/quant/gptq-b3-g32", "gptq-b3-g32 of .*lr1e-2/hf/step00000320"),
        ("lr1e-2/hf/step00000512/quant/gptq-b4-g32", "gptq-b4-g32 of .*lr1e-2/hf/step00000512"),
    ],
)
def test_a_result_that_was_copied_to_another_place_is_refused(study_dir, study, source, words):
    """The result of another run, checkpoint or spec: whole, and yet not what it seems."""
    copy = study_dir / "lr1e-2/hf/step00000512/quant/gptq-b3-g32/result.json"
    copy.write_bytes((study_dir / source / "result.json").read_bytes())
    with pytest.raises(
        UserError, match=rf"{copy} is a result of {words}, and was copied there; run the"
    ):
        collect_rows(study_dir, study)


def test_an_average_is_a_row_of_its_own_after_the_weights_of_its_step(study_dir, study):
    rows = collect_rows(study_dir, study).rows
    averages = [row for row in rows if row["average"]]
    assert [(row["run"], row["average"], row["step"], row["phase"]) for row in averages] == [
        (run.name, *average)
        for run in study.runs
        for average in (
            *(("lawa5x16", 192, "stable"), ("lawa5x16", 448, "stable")),
            *(("soup-stable", 448, "stable"), ("lawa5x16", 640, "anneal")),
            ("soup-anneal", 640, "anneal"),
        )
    ]
    weights, lawa, soup = rows[rows.index(averages[1]) - 1 :][:3]
    assert (weights["step"], weights["average"]) == (448, None)
    for row in (lawa, soup):
        for key in ("tokens", "learning_rate"):
            assert row[key] == weights[key]
        hf = study_dir / f"lr1e-3/hf/{row['average']}-step00000448"
        quant, column = measured_in(hf / "quant/gptq-b3-g32"), "quant/gptq-b3-g32"
        assert row[f"{column}/cross_entropy_quantized"] == quant["cross_entropy_quantized"]
        assert row[f"{column}/kl_divergence_low"] == quant["intervals"]["kl_divergence"][0]
        assert row["train_loss"] is row["curvature/trace"] is None
    path = study_dir / "lr1e-3/checkpoints/lawa5x16-step00000448/checkpoint.json"
    expected = json.loads(path.read_text())["held_out_loss"]
    assert lawa["held_out_loss"] == expected != weights["held_out_loss"]
    assert soup["held_out_loss"] is None


def models_with(rows, column: str) -> list[tuple]:
    """The models of which a column is measured."""
    return [(row["run"], row["step"], row["average"]) for row in rows if row[column] is not None]


def test_further_methods_have_columns_of_their_own_and_values_at_the_end_alone(study_dir, study):
    rows = table_of(study_dir, study)
    for spec in study.quantization.methods:
        measured = models_with(rows, f"quant/{spec}/relative_error")
        assert measured == [(run.name, 640, None) for run in study.runs]
    last = row_at(rows, "lr1e-2", 640)
    result = measured_in(study_dir / "lr1e-2/hf/step00000640/quant/awq-b3-g32")
    assert last["quant/awq-b3-g32/kl_divergence"] == result["kl_divergence"]
    assert last["quant/awq-b3-g32/top1_agreement_low"] == result["intervals"]["top1_agreement"][0]
    assert last["quant/int8-t6/documents"] == 28
    quantization = study.quantization.model_copy(update={"methods": ()})
    fewer = table_of(study_dir, study.model_copy(update={"quantization": quantization}))
    assert fewer == [{key: value for key, value in row.items() if key in fewer[0]} for row in rows]
    assert rows[0].keys() - fewer[0].keys() == {
        key for key in rows[0] if key.split("/")[1:2] in METHODS
    }


def test_steps_are_measured_of_the_last_checkpoints_and_a_ratio_to_nothing_is_null(
    study_dir, study
):
    with edited(study_dir / step_result(study.runs[1], "gptq-b8-g32")) as content:
        whole = content["measured"]["whole"]
        whole["relative_difference"] = None
    rows = table_of(study_dir, study)
    for spec in study.quantization.by_block:
        measured = models_with(rows, f"curvature/step-{spec}/predicted")
        assert measured == [(run.name, 640, None) for run in study.runs]
    row = row_at(rows, "lr3e-3", 640)
    column = "curvature/step-gptq-b8-g32"
    assert row[f"{column}/measured"] == whole["measured"]["mean"]
    assert row[f"{column}/second_order_standard_error"] == whole["second_order"]["standard_error"]
    assert [row[f"{column}/step_to_mean_{end}"] for end in ("low", "high")] == whole["ratios"][
        "step_to_mean"
    ]["interval"]
    assert row[f"{column}/relative_difference"] is row[f"{column}/relative_difference_low"] is None
    assert row["curvature/step-gptq-b4-g32/relative_difference"] is not None


def test_phases(study):
    run = study.runs[0]  # warm-up to 32, anneal from 448
    assert [phase_of(run, step) for step in (0, 32, 33, 448, 449, 640)] == [
        "warmup", "warmup", "stable", "stable", "anneal", "anneal",
    ]  # fmt: skip


def test_the_table_is_the_same_bytes_wherever_and_whenever_it_is_made(study_dir, study, tmp_path):
    first = sha256_of(write_table(study_dir, study, collect_rows(study_dir, study).rows))
    moved = study_dir.rename(tmp_path / "elsewhere")
    for path in moved.glob("*/metrics.jsonl"):
        path.unlink()  # times live there
    assert sha256_of(write_table(moved, study, collect_rows(moved, study).rows)) == first


def test_what_is_not_measured_is_null_and_counted(study_dir, study):
    (study_dir / quantization_result("lr1e-3", MeasuredModel(64), "gptq-b3-g32")).unlink()
    (study_dir / curvature_result("lr1e-3", MeasuredModel(192))).unlink()
    (RunDirectory(study_dir / "lr3e-2").checkpoint(640) / "checkpoint.json").unlink()
    (study_dir / "lr3e-2/hf/soup-anneal-step00000640/lineage.json").unlink()
    collected = collect_rows(study_dir, study)
    assert collected.expected - collected.num_found == 1 + 1 + (4 + 8 + 3) + 3
    path = write_table(study_dir, study, collected.rows)
    table = pq.read_table(path)
    assert table.schema.metadata[b"quantdyn"] == version().encode()
    assert table.num_rows == 27 + 4 * 3 + 7
    assert table["quant/gptq-b3-g32/relative_error"].null_count == 1
    assert table["quant/gptq-b4-g32/relative_error"].null_count == 0
    assert table["curvature/lambda_max_converged"].null_count == 1 + 4 * 3 + 7


@pytest.mark.parametrize("content", ["{", "[1]", '{"measured": 1}', '{"spec": {}}'])
def test_a_broken_result_is_named(study_dir, study, content):
    for relative in (
        quantization_result("lr1e-3", MeasuredModel(64), "gptq-b3-g32"),
        quantization_result("lr1e-3", MeasuredModel(448, "lawa5x16"), "gptq-b3-g32"),
        curvature_result("lr1e-3", MeasuredModel(64)),
        step_result(study.runs[0], "gptq-b4-g32"),
    ):
        path = study_dir / relative
        whole = path.read_text()
        path.write_text(content)
        with pytest.raises(UserError, match=r"result\.json"):
            collect_rows(study_dir, study)
        path.write_text(whole)


def test_an_eigenvalue_that_is_not_measured_is_null(study_dir, study):
    alone = study.model_copy(
        update={"curvature": study.curvature.model_copy(update={"lambda_max": False})}
    )
    for path in study_dir.glob("*/hf/*/curvature/hutchinson/result.json"):
        with edited(path) as content:
            del content["measured"]["lambda_max"]
    rows = table_of(study_dir, alone)
    measured = [row for row in rows if row["curvature/trace"] is not None]
    assert len(measured) == len([row for row in rows if row["average"] is None])
    for figure in ("", "_residual", "_converged", "_iterations"):
        assert all(row[f"curvature/lambda_max{figure}"] is None for row in rows)
    drawn = curvature.draw(Canvas(alone, rows, study_dir))
    assert drawn is not None
    assert {row["panel"] for row in drawn.rows} == {
        "Trace of the Hessian",
        "GPTQ, 3 bits, groups of 32",
        "",
    }
    evidence = Evidence(alone, rows, Paired(study_dir))
    judged = [verdict.measure for verdict in over_checkpoints.judge(evidence)]
    assert not [measure for measure in judged if "eigenvalue" in measure]


IDENTITY = "ab" * 8  # of the run that diverges


def step(name: str, kind: str, outputs: list[str], count: int | None = None, **fields) -> Step:
    """Leaves its outputs, or the first of them and fails."""
    content = json.dumps(sealed({"of": name}))
    code = f"for output in map(study.joinpath, {outputs[:count]}):\n"
    code += "    output.parent.mkdir(parents=True, exist_ok=True)\n"
    code += f"    output.write_text({content!r})\n"
    code += "" if count in (None, len(outputs)) else "sys.exit(2)"
    return Step(name, kind, command(noting(name, code)), tuple(outputs), **fields)


def checkpoint(run: str, number: int) -> str:
    return f"{run}/checkpoints/step{number:08d}/checkpoint.json"


def chain(*, count: int = 1, identity: str = IDENTITY) -> list[Step]:
    """Two runs, of which `hot` ends after its checkpoint of step 2; a branch of its step 4; what is
    exported and measured of each checkpoint; and a table of what there is.
    """
    steps = [
        step(
            "train-hot",
            "train",
            [checkpoint("hot", number) for number in (2, 4)],
            count,
            run="hot",
            settings=identity,
            resumes=True,
        ),
        step("train-well", "train", [checkpoint("well", 4)], run="well", settings="cd" * 8),
        step(
            "train-branch",
            "train",
            [checkpoint("branch", 6)],
            run="branch",
            after=("train-hot",),
            reads=(checkpoint("hot", 4),),
        ),
    ]
    for run, number in (("hot", 2), ("hot", 4), ("well", 4), ("branch", 6)):
        name = f"{run}-{number}"
        read = (checkpoint(run, number),)
        made_by = (f"train-{run}",)
        steps.append(step(f"export-{name}", "test", [f"{name}.x"], after=made_by, reads=read))
        steps.append(step(f"measure-{name}", "test", [f"{name}.y"], after=(f"export-{name}",)))
    before = tuple(each.name for each in steps)
    return [*steps, step("collect", "collect", ["table"], after=before, tolerant=True)]


LEFT_OUT = {"train-branch", "export-hot-4", "measure-hot-4", "export-branch-6", "measure-branch-6"}
MADE = {"train-hot", "train-well", "export-hot-2", "measure-hot-2", "export-well-4"}
MADE |= {"measure-well-4", "collect"}


@pytest.fixture
def hot(tmp_path) -> Path:
    """A study whose run `hot` says that it diverged at step 3."""
    directory = RunDirectory(tmp_path / "study" / "hot")
    directory.path.mkdir(parents=True)
    words = "hot diverged at step 3: not finite: loss nan; the last good checkpoint is step 2"
    write_ending(directory, "diverged", 3, fingerprint=IDENTITY, reason=words)
    return tmp_path / "study"


def test_a_diverged_run_stops_nothing_else_and_is_not_trained_again(hot, capsys):
    runner = run_steps(hot, chain())
    assert set(order(hot)) == MADE
    assert order(hot)[-1] == "collect", "of what there is"
    assert runner.left_out == dict.fromkeys(LEFT_OUT, "hot diverged at step 3")
    assert "hot diverged at step 3: not finite: loss nan\n" in capsys.readouterr().err

    # resumed, nothing is open; status says why the rest is not there
    assert run_steps(hot, chain()).complete == MADE
    assert len(order(hot)) == len(MADE)
    lines = list(status_lines(Ledger(hot, chain())))
    assert lines == [
        f"7/12 steps complete in {hot}",
        "complete: collect 1",
        "train      2/3  1 left out: hot diverged at step 3",
        "test       4/8  4 left out: hot diverged at step 3",
        "hot diverged at step 3: not finite: loss nan; that is a result, it is not trained again",
    ]
    assert "collect    1/1" in list(status_lines(Ledger(hot, chain()), whole=True))

    # another configuration is another run
    steps = chain(count=2, identity="ef" * 8)
    assert run_steps(hot, steps).left_out == {}
    assert set(order(hot)) == MADE | LEFT_OUT
    assert order(hot).count("collect") == 2, "of more than before"


def test_a_checkpoint_before_the_divergence_that_is_removed_is_missing(hot):
    run_steps(hot, chain())
    (hot / checkpoint("hot", 2)).unlink()
    ledger = Ledger(hot, chain())
    reason = ledger.reason(ledger.steps["train-hot"])
    missing = hot / checkpoint("hot", 2)
    assert reason == f"{missing} is missing; copy it from where the study was made, or run"


def test_a_training_that_failed_otherwise_is_a_failure_and_tried_again(hot):
    """All that does not depend on it is done; the table waits."""
    write_ending(RunDirectory(hot / "hot"), "failed", 3, fingerprint=IDENTITY)
    for count in (1, 2):
        with pytest.raises(StepError, match="train-hot failed"):
            run_steps(hot, chain())
        assert order(hot).count("train-hot") == count
    done = {"train-hot", "train-well", "export-well-4", "measure-well-4"}
    assert set(order(hot)) == done


@pytest.fixture
def diverged(study_dir, study, store):
    """The synthetic study, whose run at the largest peak diverged after its first checkpoint."""
    run = study.runs[-1]
    directory = RunDirectory(study_dir / run.name)
    first, *others = run.save_steps
    for step in others:
        for path in (directory.checkpoints, directory.hf):
            for late in path.glob(f"*step{step:08d}"):
                for file in late.rglob("*.json"):
                    file.unlink()
    words = f"{run.name} diverged at step {first + 3}: not finite: loss nan; lower the rate"
    write_ending(directory, "diverged", first + 3, fingerprint=fingerprint(run), reason=words)
    return study_dir


@pytest.mark.usefixtures("without_pictures")
def test_claims_choices_report_and_mirror_are_of_the_other_runs(diverged, study):
    run = study.runs[-1]
    words = f"{run.name} diverged at step {run.save_steps[0] + 3}: not finite: loss nan"
    rows = table_of(diverged, study)
    assert [row["step"] for row in rows if row["run"] == run.name] == [run.save_steps[0]]

    # every claim that the others can test is tested, and the choice is among them
    others = study.model_copy(update={"runs": study.runs[:-1]})
    paired = Paired(diverged)
    expected = claims_table(
        judge_all(others, [row for row in rows if row["run"] != run.name], paired)
    )
    lines = claims_table(judge_all(study, rows, paired))
    assert [line.cells for line in lines] == [line.cells for line in expected]
    ranking = next(iter(answers(Evidence(study, rows, paired), None))).ranking
    assert len(ranking) == len(study.runs) - 1
    assert left_out_lines(diverged, study) == [f"left out: {words}"]

    # the page and MLflow say so
    write_report(diverged, study)
    assert f"{words}." in (diverged / REPORT).read_text()
    mirror(diverged, study, store_uri(diverged.parent))
    directory = RunDirectory(diverged / run.name)
    assert described.status_of(directory, run) == "FAILED"
    assert described.run_tags(directory, run, "parent")["quantdyn.diverged"] == words
    assert described.has_ended(directory, run)


def test_a_branch_of_a_checkpoint_that_never_came_is_left_out_too(tmp_path):
    study = resolve("tiny", "smoke")
    branch = next(run for run in study.trained if run.branch_from)
    parent, origin = study.parent_of(branch), branch.branch_from
    assert origin
    directory = RunDirectory(tmp_path / parent.name)
    directory.path.mkdir()
    for step, others in ((origin.step, [branch.name]), (parent.total_steps, [])):
        reason = f"{parent.name} diverged at step {step}: a spike; lower it"
        identity = fingerprint(parent)
        write_ending(directory, "diverged", step, fingerprint=identity, reason=reason)
        words = diverged_runs(tmp_path, study)
        assert [*words] == [run.name for run in study.trained if run.name in (parent.name, *others)]
        for name in others:
            assert words[name] == f"{name} cannot start, since {reason.removesuffix('; lower it')}"


def test_the_steps_of_a_study_that_diverged_are_those_of_the_ledger(diverged, study):
    ledger = Ledger(diverged, steps_of(study))
    run = study.runs[-1]
    left_out = ledger.steps_left_out()
    assert all(run.name in name for name in left_out)
    first = f"step{run.save_steps[0]:08d}"
    assert f"export-{run.name}-{first}" not in left_out
    assert f"export-{run.name}-step{run.save_steps[1]:08d}" in left_out
    assert diverged_runs(diverged, study).keys() == {run.name}
    collect = ledger.steps["collect"]
    assert not any(name in ledger.lost for name in ledger.reads(collect))
