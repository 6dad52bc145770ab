"""The smoke study through every real command, killed on its way; and the long proof that kills
change nothing.
"""

import json
import random
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from study.figures.figure import FILES
from tests.sealing import measured_in
from tests.study.smoke import BEFORE_THE_KILL, LAST_CHECKPOINT, NAME, SAID, finish, kill, start

FIGURES = {
    *("quantization_error", "kl_divergence", "losses", "averages", "methods"),
    *("methods_along_training", "blocks", "anneal_against_control", "error_against_curvature"),
    *("ends", "full_against_quantized", "curvature", "prediction", "slices", "planes"),
    "sharpness",
}


def check_the_end(study: Path, table: list[dict]) -> None:
    """Further methods, and the view by block, are of the last checkpoints alone."""
    for row in table:
        is_last = (row["step"], row["average"]) == (72, None)
        if is_last and not row["run"].endswith("-control"):
            assert row["quant/rtn-b3-g32/kl_divergence"] > row["quant/gptq-b3-g32/kl_divergence"]
            assert 0 < row["quant/int8-t6/kl_divergence"] < row["quant/gptq-b4-g32/kl_divergence"]
        else:
            assert (
                row["quant/rtn-b3-g32/kl_divergence"] is row["quant/int8-t6/kl_divergence"] is None
            )
    # the same checkpoint, spec and text: --per-block adds to a result, nothing else
    for run in ("lr3e-3", "lr3e-2"):
        by_block, plain = (
            measured_in(study / run / "hf/step00000072" / folder / "gptq-b3-g32")
            for folder in ("blocks", "quant")
        )
        assert len(by_block["blocks"]) == 2
        # block by block there is one draw of the calibration text, the first of the other's
        drawn = plain["calibration"]["per_document"]
        assert {key: by_block["per_document"][key] for key in drawn} == {
            key: values[0] for key, values in drawn.items()
        }
        curvature = study / run / "hf/step00000072/curvature"
        along, plane = (
            json.loads((curvature / f"{kind}-gptq-b3-g32/result.json").read_text())
            for kind in ("step", "slice")
        )
        base, previous, quantized = (Path(point["path"]) for point in plane["spec"]["plane"])
        assert along["spec"]["quantized"]["path"] == str(quantized)
        assert (base.name, previous.name) == ("step00000072", "step00000048")
        check_the_step(along["measured"]["whole"], plane["measured"])


def check_the_step(whole: dict, plane: dict) -> None:
    """Two commands, one step: its length, and what the loss does at its end, sequence by sequence.

    How well the second order predicts that depends on the weights, and so on the CPU that trained
    them.
    """
    assert plane["directions"]["lengths"][1] == pytest.approx(whole["norm"], rel=1e-9)
    base, quantized = (
        next(point for point in plane["points"] if point["name"] == name)
        for name in ("base", "quantized")
    )
    increases = [
        after - before for before, after in zip(base["losses"], quantized["losses"], strict=True)
    ]
    measured = whole["per_microbatch"]["measured"]
    pairs = [sum(increases[2 * index : 2 * index + 2]) / 2 for index in range(len(measured))]
    assert measured == pytest.approx(pairs, abs=1e-5)  # each a difference of losses near 6 in fp32


def test_the_whole_study_survives_a_kill(smoke_root):
    """kill -9 while the first quantization runs; the second start skips what is complete and
    ends the study.
    """
    study = smoke_root / NAME
    written = str((study / LAST_CHECKPOINT).stat().st_mtime_ns)
    assert written == (smoke_root / BEFORE_THE_KILL).read_text()
    output = (smoke_root / SAID).read_text()
    assert f"report: {study / 'report.html'}" in output
    assert f"sqlite:///{smoke_root / 'mlflow.db'}" in output

    table = pq.read_table(study / "table.parquet").to_pylist()
    models = [(48, None), (72, None), (72, "lawa5x4")]
    soup = (72, "soup-anneal")
    assert [(row["run"], row["step"], row["average"]) for row in table] == [
        entry
        for run in ("lr3e-3", "lr3e-2")
        for entry in (
            *((run, *model) for model in (*models, soup)),
            *((f"{run}-control", *model) for model in models[1:]),
        )
    ]
    for row in table:
        assert row["quant/gptq-b3-g32/kl_divergence"] > row["quant/gptq-b4-g32/kl_divergence"] > 0
        if row["average"] is None:
            # for any weights; the Hessian's may be negative
            assert row["curvature/gauss_newton_trace"] > 0
            assert row["curvature/trace_standard_error"] > 0
            assert row["curvature/lambda_max_converged"] in (True, False)
        else:
            assert row["curvature/trace"] is None
        if row["average"] != "soup-anneal":  # the same held-out text, in other blocks
            assert row["quant/gptq-b3-g32/cross_entropy"] == pytest.approx(
                row["held_out_loss"], abs=0.3
            )
    check_the_end(study, table)
    for suffix in FILES:
        assert {path.stem for path in (study / "figures").glob(f"*.{suffix}")} == FIGURES

    client = MlflowClient(f"sqlite:///{smoke_root / 'mlflow.db'}")
    (experiment,) = [entry for entry in client.search_experiments() if entry.name != "Default"]
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {NAME, "lr3e-3", "lr3e-3-control", "lr3e-2", "lr3e-2-control"}
    child = runs["lr3e-3"]
    assert child.data.tags["mlflow.parentRunId"] == runs[NAME].info.run_id
    column, metric = "quant/gptq-b3-g32/relative_error", "relative error percent/gptq-b3-g32"
    for average in (None, "lawa5x4", "soup-anneal"):
        averaged = [row for row in table if (row["run"], row["average"]) == ("lr3e-3", average)]
        name = f"{average}/{metric}" if average else metric
        history = client.get_metric_history(child.info.run_id, name)
        assert {point.step: point.value for point in history} == {
            row["tokens"]: 100 * row[column] for row in averaged
        }

    for row in table:
        name = f"{row['average']}-" * bool(row["average"]) + f"step{row['step']:08d}"
        lineage = json.loads((study / row["run"] / "hf" / name / "lineage.json").read_text())
        assert (lineage["run"], lineage["step"]) == (row["run"], row["step"])
        if row["average"] == "soup-anneal":
            assert (lineage["kind"], lineage["method"]) == ("average", "uniform")
            assert lineage["steps"] == [48, 72]
            weights = [
                load_file(study / row["run"] / "hf" / hf_name / "model.safetensors")
                for hf_name in ("step00000048", "step00000072", name)
            ]
            for key, mean in weights[2].items():
                torch.testing.assert_close(mean, (weights[0][key] + weights[1][key]) / 2)
        else:
            steps = [row["step"] - 4 * back for back in (4, 3, 2, 1, 0)]
            lawa = {"kind": "lawa", "interval_steps": 4, "window": 5, "steps": steps}
            assert lineage["kind"] == "export"
            assert lineage["average"] == (lawa if row["average"] else None)


@pytest.mark.stress
def test_kills_at_random_moments_leave_the_table_unchanged(tmp_path):
    """Ten kills of the whole process group, up to 25 seconds after each start, against an
    uninterrupted study.
    """
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    finish(sys.executable, whole)
    moments = random.Random(0)
    for _ in range(10):
        started = start(sys.executable, killed)
        time.sleep(moments.uniform(1, 25))
        kill(started)
    finish(sys.executable, killed)
    tables = [root / NAME / "table.parquet" for root in (whole, killed)]
    assert tables[0].read_bytes() == tables[1].read_bytes()
