"""The progress of trainings by the files that they write."""

import json
import random

import pytest

from study.trainings import progress_lines, straggler_of, training_of
from tests.present import present
from tests.slurm.studies import watched_study, write_metrics, write_ranks
from train.run.directory import RunDirectory
from train.run.metrics import tail_rows


def test_a_table_of_what_has_begun(tmp_path):
    study = watched_study()
    assert progress_lines(tmp_path, study) == []
    write_metrics(tmp_path, study.trained[1].name, range(1, 31), attempt=1)
    assert progress_lines(tmp_path, study) == [
        "",
        "training  step   tokens  loss    tokens/s  left     saved",
        "lr3e-2    30/72  60K     4.7000  1K        0:00:14  -",
    ]


def test_the_newest_attempt_counts_and_no_clock(tmp_path):
    study = watched_study()
    run = study.trained[1]
    write_metrics(tmp_path, run.name, range(1, 30), attempt=1)
    write_metrics(tmp_path, run.name, range(10, 21), attempt=2, tokens_per_second=500.0)
    write_metrics(tmp_path, run.name, range(30, 33), attempt=1)  # an orphan
    training = training_of(tmp_path, run)
    assert (training.step, training.tokens) == (20, 40_000)
    assert (training.loss, training.tokens_per_second) == (5 - 20 / 100, 500.0)
    assert training.left_seconds == (run.total_steps * run.tokens_per_step - 40_000) / 500
    write_metrics(tmp_path, run.name, range(21, 71), attempt=2, tokens_per_second=-3.0, time=-1e12)
    training = training_of(tmp_path, run)
    assert (training.step, training.tokens_per_second, training.left_seconds) == (70, None, None)
    assert training_of(tmp_path, study.trained[0]).step is None


def test_the_end_of_a_file_is_read_as_its_lines_are(tmp_path):
    rng, path = random.Random(1), tmp_path / "rows.jsonl"
    rows = [{"step": step, "text": "x" * rng.randrange(60)} for step in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 200, "te')
    length = path.stat().st_size
    for size in (1, 20, 100, 1000, length - 1, length, 2 * length):
        # by the obvious way: lines that begin at or after this byte
        begins = length - min(size, length)
        offsets = [sum(len(json.dumps(row)) + 1 for row in rows[:number]) for number in range(200)]
        assert tail_rows(path, size) == [
            row for row, at in zip(rows, offsets, strict=True) if at >= begins
        ]
    path.write_text('{"step": 1}\n{"step"\n[]\n{"step": "one"}\n\xff\n{"step": 2}\n')
    assert tail_rows(path, 1000) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize(
    ("busy", "slowest"),
    [
        ([1.0, 1.0, 1.0, 1.31], "rank 3 on node2 computes 1.31 times as long as the median of 4"),
        ([1.0, 1.0, 1.0, 1.29], None),
        ([1.0, 4.0], "rank 1 on node1 computes 1.60 times as long as the median of 2"),
        ([1.0, 2.0, 1.0, 1.0, 3.0, 1.0], "rank 4 on node3 computes 3.00 times as long as the"),
        ([9.0], None),
        ([0.0, -1.0, 0.0], None),
    ],
)
def test_stragglers(tmp_path, busy, slowest):
    write_ranks(tmp_path, "run", 50, 1, [1.0, 9.0, 1.0, 1.0])  # an earlier report
    write_ranks(tmp_path, "run", 40, 2, busy)
    write_ranks(tmp_path, "run", 60, 1, [1.0, 9.0, 1.0, 1.0])  # of an orphan
    message = straggler_of(RunDirectory(tmp_path / "run").ranks)
    assert message is None if slowest is None else present(message).startswith(slowest)


def test_a_slow_gpu_is_a_straggler(tmp_path):
    """By the product that each times: their processes are all as busy."""
    write_ranks(tmp_path, "run", 50, 1, [2e-4, 2e-4, 3e-4, 2e-4], figure="product_seconds")
    message = straggler_of(RunDirectory(tmp_path / "run").ranks)
    assert message == "rank 2 on node2 computes 1.50 times as long as the median of 4 ranks"
