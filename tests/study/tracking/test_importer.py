"""The importer on real stores: every row once, whatever is killed, repeated, resumed or done
twice at a time.
"""

import os
import random
import signal

import pytest

from study.tracking.importer import mirror_run
from study.tracking.store import create_store, store_uri
from tests.study.tracking.stores import FIGURES, Database, append_steps, expected, write_small_study
from tests.waiting import HANG_SECONDS

STORES = ("sqlite", "postgres", "server")


def import_all(directory, study, uri: str, names: list[str]) -> None:
    for name in names:
        mirror_run(directory, study, name, uri)


def run_to_end(children) -> None:
    for child in children:
        child.join(HANG_SECONDS)
    assert [child.exitcode for child in children] == [0] * len(children)


def check(database: Database, study, steps: int, since: dict[int, int]) -> None:
    """Every row once, and one MLflow run for the study and for each of its runs."""
    points = database.points(study.name)
    for run in study.runs:
        assert points[run.name] == expected(steps, since)
    ids = database.runs(study.name)
    assert {name: len(run_ids) for name, run_ids in ids.items()} == dict.fromkeys(
        [study.name, *points], 1
    )


WRITES = (
    *("create_experiment", "create_run", "delete_run", "log_batch"),
    *("set_tag", "update_run", "set_terminated"),
)


def mirror_until(write: str, number: int, seconds: float, *arguments) -> None:
    """Mirrors a run, and dies so many seconds after it begins the write of that name and number,
    if it comes to that.

    A write named "rows" is a log_batch that holds metrics. The kernel ends the process: nothing of
    Python's is asked.
    """
    from mlflow import MlflowClient

    begun = 0

    def dying(name, call):
        def wrapped(client, *args, **kwargs):
            nonlocal begun
            if write in ("any", "rows" if name == "log_batch" and len(args) > 1 else name):
                begun += 1
                if begun == number and seconds == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                if begun == number:
                    signal.setitimer(signal.ITIMER_REAL, seconds)
            return call(client, *args, **kwargs)

        return wrapped

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for name in WRITES:
        setattr(MlflowClient, name, dying(name, getattr(MlflowClient, name)))
    mirror_run(*arguments)


def kill_and_repeat(database, forked, root, name: str, runs: int, kills: int) -> None:
    """Rows are added, an importer per run starts and is killed at a write; now and then a run is
    resumed.

    The first of each round dies between its first and its second request of rows, the others
    anywhere.
    """
    run_to_end([forked(create_store, database.uri)])  # a connection of ours would be every child's
    directory, study = write_small_study(root, name, runs)
    names = [run.name for run in study.runs]
    chance, steps, since = random.Random(name), 0, {1: 1}
    killed = rounds = 0
    while killed < kills:
        if rounds and chance.random() < 0.25:  # resumed from a checkpoint before the last rows
            steps -= chance.randrange(steps // 2)
            since = {attempt: first for attempt, first in since.items() if first <= steps} | {
                max(since) + 1: steps + 1
            }
        added = range(steps + 1, steps + 1 + chance.randrange(200, 500))  # two requests or three
        steps = added.stop - 1
        for run in names:
            append_steps(directory / run, added, max(since))
        moments = [("rows", 2, 0.0)]
        moments += [
            ("any", chance.randint(1, 8), chance.choice((0.0, 0.3 * chance.random())))
            for _ in names[1:]
        ]
        children = [
            forked(mirror_until, *moment, directory, study, run, database.uri)
            for run, moment in zip(names, moments, strict=True)
        ]
        for child in children:
            child.join(HANG_SECONDS)
            killed += child.exitcode in (-signal.SIGKILL, -signal.SIGALRM)
        assert {child.exitcode for child in children} <= {0, -signal.SIGKILL, -signal.SIGALRM}
        assert children[0].exitcode == -signal.SIGKILL
        assert 0 < len(database.points(name)[names[0]]) < steps * len(FIGURES), (
            "some rows, and not all"
        )
        rounds += 1
    run_to_end([forked(mirror_run, directory, study, run, database.uri) for run in names])
    check(database, study, steps, since)
    before = database.runs(name)
    run_to_end([forked(import_all, directory, study, database.uri, names)])
    check(database, study, steps, since)
    assert database.runs(name) == before


@pytest.mark.parametrize(
    "kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.stress), "server"]
)
def test_an_importer_that_is_killed_leaves_every_row_once(database, forked, tmp_path, kind):
    kill_and_repeat(database(kind), forked, tmp_path, f"kills-{kind}", runs=2, kills=1)


@pytest.mark.stress
@pytest.mark.parametrize("kind", STORES)
def test_eight_importers_that_are_killed_fifty_times_leave_every_row_once(
    database, forked, tmp_path, kind
):
    kill_and_repeat(database(kind), forked, tmp_path, f"many-kills-{kind}", runs=8, kills=50)


@pytest.mark.parametrize("kind", [*STORES[:-1], pytest.param(STORES[-1], marks=pytest.mark.stress)])
def test_eight_at_once_of_other_runs_and_of_the_same_one(database, forked, tmp_path, kind):
    there = database(kind)
    run_to_end([forked(create_store, there.uri)])
    directory, study = write_small_study(tmp_path, f"eight-{kind}", 4)
    for run in study.runs:
        append_steps(directory / run.name, range(1, 201), 1)
    run_to_end(
        [
            forked(mirror_run, directory, study, run.name, there.uri)
            for run in study.runs
            for _ in range(2)
        ]
    )
    check(there, study, 200, {1: 1})


def test_eight_that_find_no_store_create_it_once(forked, tmp_path):
    there = Database(store_uri(tmp_path), store_uri(tmp_path))
    directory, study = write_small_study(tmp_path, "cold", 8)
    for run in study.runs:
        append_steps(directory / run.name, range(1, 11), 1)
    run_to_end([forked(mirror_run, directory, study, run.name, there.uri) for run in study.runs])
    check(there, study, 10, {1: 1})


def test_rows_that_a_resumed_run_replaced_are_not_shown(database, tmp_path):
    """Live import, then a kill, then training resumes from an older checkpoint: other values, at
    other times.
    """
    there = database("sqlite")
    directory, study = write_small_study(tmp_path, "resumed", 1)
    run = directory / study.runs[0].name
    append_steps(run, range(1, 301), 1)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 301, "tokens": 616448, "atte')
    assert mirror_run(directory, study, run.name, there.uri) == 300 * 6
    assert mirror_run(directory, study, run.name, there.uri) == 0
    first = there.runs("resumed")[run.name]
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole[: whole.rindex("\n") + 1])
    append_steps(run, range(201, 251), 2)
    mirror_run(directory, study, run.name, there.uri)
    check(there, study, 250, {1: 1, 2: 201})  # not those after step 250 either, which come again
    second = there.runs("resumed")[run.name]
    assert second != first
    append_steps(run, range(251, 301), 2)
    mirror_run(directory, study, run.name, there.uri)
    check(there, study, 300, {1: 1, 2: 201})
    assert there.runs("resumed")[run.name] == second, "made anew once"
