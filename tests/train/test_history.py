"""The work of attempts, read from the ends of large files, against all of their rows."""

import json
import random

import pytest

from tests.sealing import json_lines
from train.run.directory import RunDirectory
from train.run.history import history


def test_a_run_that_was_never_started_has_none(tmp_path):
    assert history(RunDirectory(tmp_path)) == []


@pytest.mark.parametrize("seed", range(4))
def test_first_and_last_updates_are_those_of_the_whole_file(tmp_path, seed):
    """With rows of saves and evaluations, long ones, an orphan's, damaged lines and a torn end."""
    rng, directory, rows = random.Random(seed), RunDirectory(tmp_path), list[dict]()
    attempts = rng.randint(1, 6)
    for attempt in range(1, attempts + 1):
        if rng.random() < 0.3:
            continue
        for step in range(first := rng.randint(1, 400), first + rng.randint(1, 300)):
            row = {"step": step, "tokens": step, "attempt": attempt, "time": rng.random()}
            if step % 7 == 0 or step == first:
                rows.append(row | {"held_out_loss": 3.0})
            rows.append(
                row | {"learning_rate": 1e-3, "note": "x" * (90_000 if rng.random() < 0.02 else 50)}
            )
            if step % 50 == 49:
                rows.append(row | {"step": step - 3, "save_stall_seconds": 1.0})
    lines = json_lines(rows).splitlines(keepends=True)
    for _ in range(rng.randint(0, 3) if lines else 0):
        lines.insert(rng.randrange(len(lines)), '{"step"\n')
    directory.metrics.write_text("".join(lines) + '{"step": 3, "le')
    directory.environment_json.write_text(json.dumps({"attempts": [{"host": "a"}] * attempts}))

    works = history(directory)
    assert len(works) == attempts
    for attempt, work in enumerate(works, 1):
        own = [row for row in rows if row["attempt"] == attempt and "learning_rate" in row]
        if not own:
            assert work.updates == 0
            continue
        assert (work.first_step, work.last_step) == (own[0]["step"], own[-1]["step"])
        assert (work.first_time, work.last_time) == (own[0]["time"], own[-1]["time"])
