"""Each way that the project writes to a shared root, with every operation failed once.

A write that returned is whole in another mount; one that raised left the old content or the new,
and is made again by the same call. Nothing else is ever read.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from base.errors import UserError
from base.files import (
    committed_directory,
    first_damage,
    locked,
    record_file,
    record_files,
    replaced_file,
    write_json,
)
from base.reading import read_json
from slurm.submission.record import append, read_submission, write_plan
from study.pipeline.ledger import Ledger
from study.step import Step
from tests.faulty_filesystem import Behaviour, Mount, missing, mounted
from tests.lacking import skip
from tests.slurm.studies import watched_site
from train.run.metrics import MetricsWriter, surviving_rows

OLD, NEW = 1, 2
CACHING = Behaviour(cache_seconds=60)
WEIGHTS = np.arange(40_000, dtype=np.float32)  # more than one write


@pytest.fixture(scope="module")
def mounts(tmp_path_factory) -> Iterator[tuple[Mount, Mount]]:
    """Two mounts of a directory: one whose operations fail, and one that reads."""
    if reason := missing():
        skip(f"no filesystem of the tests here: {reason}")
    directory = tmp_path_factory.mktemp("shared")
    backing = directory / "backing"
    with (
        mounted(backing, directory / "a", CACHING) as writer,
        mounted(backing, directory / "b") as reader,
    ):
        yield writer, reader


def write_record(directory: Path, value: int) -> None:
    write_json(directory / "record.json", {"value": value})


def read_record(directory: Path) -> int:
    return read_json(directory / "record.json")["value"]


def write_weights(directory: Path, value: int) -> None:
    with replaced_file(directory / "weights.safetensors") as unfinished:
        save_file({"weights": WEIGHTS * value}, unfinished)


def read_weights(directory: Path) -> int:
    weights = load_file(directory / "weights.safetensors")["weights"]
    value = int(weights[1])
    assert np.array_equal(weights, WEIGHTS * value)
    return value


def write_directory(directory: Path, value: int) -> None:
    with committed_directory(directory / "model") as unfinished:
        (unfinished / "part").mkdir()
        save_file({"weights": WEIGHTS * value}, unfinished / "part" / "weights.safetensors")
        (unfinished / "config.json").write_text(json.dumps({"value": value}))
        files = record_files(unfinished)
        content = {name: record.model_dump() for name, record in files.items()}
        write_json(unfinished / "files.json", content)


def read_directory(directory: Path) -> int | None:
    """Return None where it was moved away and not replaced yet: the next call makes it."""
    model = directory / "model"
    if not model.exists():
        return None
    records = {name: record_file(model / name) for name in read_json(model / "files.json")}
    stated = read_json(model / "files.json")
    assert {name: record.model_dump() for name, record in records.items()} == stated
    assert first_damage(model, records) is None
    return read_json(model / "config.json")["value"]


def write_row(directory: Path, value: int) -> None:
    writer = MetricsWriter(directory / "metrics.jsonl", attempt=value)
    for step in range(5 * value, 5 * value + 5):
        writer.append(step, step, loss=float(value))
    writer.close()


def read_rows(directory: Path) -> int:
    rows = surviving_rows(directory / "metrics.jsonl")
    values = [row["loss"] for row in rows]
    steps = [row["step"] for row in rows]
    # A row that could not be written ends the attempt: a part of the newest rows may be there.
    assert steps == list(range(5, 5 + len(steps))), "in order, and none of the old lost"
    assert values[:5] == [float(OLD)] * 5
    return NEW if len(values) == 10 else OLD


def write_call(directory: Path, value: int) -> None:
    (directory / "slurm").mkdir(exist_ok=True)
    if value == OLD:
        write_plan(directory, watched_site(directory), [], anew=False)
    append(directory, "cancelled", elements=[("train", value)])


def read_calls(directory: Path) -> int:
    submission = read_submission(directory)
    assert submission
    assert ("train", OLD) in submission.cancelled
    return NEW if ("train", NEW) in submission.cancelled else OLD


def ledger_of(directory: Path, value: int) -> tuple[Ledger, Step]:
    words = ("measure", str(value))
    step = Step(name="measure", kind="quantize", head=words, outputs=("result.txt",))
    return Ledger(directory, [step]), step


def write_step(directory: Path, value: int) -> None:
    ledger, step = ledger_of(directory, value)
    fingerprint = ledger.fingerprint(step)
    ledger.prepare(step)
    with replaced_file(directory / "result.txt") as unfinished:
        unfinished.write_text(f"{value}" * 5000)
    ledger.finish(step, fingerprint, seconds=1.0)


def read_step(directory: Path) -> int | None:
    """Return None where it is open: it is run again."""
    for value in (OLD, NEW):
        ledger, step = ledger_of(directory, value)
        if ledger.is_complete(step):
            assert (directory / "result.txt").read_text() == f"{value}" * 5000
            return value
    return None


def write_counted(directory: Path, value: int) -> None:
    with locked(directory / ".lock"):
        (directory / "count").write_text(str(value))


def read_counted(directory: Path) -> int:
    """Read a file that may be torn, as it is written in place: its lock has to be free."""
    with locked(directory / ".lock"):
        text = (directory / "count").read_text()
    return NEW if text == str(NEW) else OLD


WAYS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], int | None]]] = {
    "record": (write_record, read_record),
    "weights": (write_weights, read_weights),
    "directory": (write_directory, read_directory),
    "rows": (write_row, read_rows),
    "calls": (write_call, read_calls),
    "step": (write_step, read_step),
    "lock": (write_counted, read_counted),
}


ERRORS = (("EIO", False), ("EIO", True), ("ENOSPC", False), ("ESTALE", False))
QUICK = ("record", "weights", "rows", "calls")  # in the suite, with the first error
CASES = [
    pytest.param(
        *(way, error, after),
        marks=() if way in QUICK and (error, after) == ERRORS[0] else pytest.mark.stress,
    )
    for way in WAYS
    for error, after in ERRORS
]


@pytest.mark.parametrize(("way", "error", "after"), CASES)
def test_a_write_is_whole_or_said_to_have_failed(mounts, way, error, after):
    """The n-th operation fails, for every n; `after` it was done all the same."""
    writer, reader = mounts
    write, read = WAYS[way]
    said = Counter[str]()
    struck = 0
    while True:
        name = f"{way}-{error}-{after}-{struck}"
        here, there = writer.path / name, reader.path / name
        here.mkdir()
        write(here, OLD)
        before = sum(writer.injected().values())
        strike = {"strike": struck + 1, "strike_error": error, "strike_after": after}
        writer.behave(replace(CACHING, **strike))
        try:
            write(here, NEW)
        except (OSError, UserError) as failure:
            said[type(failure).__name__] += 1
            failed, named = True, isinstance(failure, UserError) or failure.filename
        else:
            failed, named = False, True
        writer.behave(CACHING)
        assert named or way not in QUICK, f"no file is named, operation {struck + 1}"
        value = read(there)
        assert value in ((OLD, NEW, None) if failed else (NEW,)), f"operation {struck + 1}"
        if sum(writer.injected().values()) == before:
            break  # there is no such operation any more
        struck += 1
        write(here, NEW)
        assert read(there) == NEW
    print(f"{way}: {struck} operations failed by {error}, {said.total()} were said")
    assert struck > 5
    assert said.total() <= struck
