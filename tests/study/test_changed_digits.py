"""A changed digit of whatever feeds a number into a study is named by everything that reads it."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from base.errors import UserError
from base.files import hash_file, write_json, write_sealed
from base.frozen import fingerprint
from ckpt_tools.hf.measured import Curvature
from ckpt_tools.hf.results import read_result
from dynamics.choices.arms import answers
from study.claims.page import judge_all
from study.claims.verdict import Evidence
from study.definition import Study, load_study
from study.paths import (
    MeasuredModel,
    blocks_result,
    checkpoint_directory,
    curvature_result,
    quantization_result,
    slice_result,
    step_result,
)
from study.pipeline.ledger import Ledger, status_lines
from study.report.report import write_report
from study.results.collect import collect_rows
from study.results.paired import Paired
from study.results.table import TABLE, read_table
from study.step import Step
from study.steps import steps_of
from study.tracking.importer import mirror
from study.tracking.store import store_uri
from tests.sealing import flip_digit, write_ending
from train.run.directory import CHECKPOINT_JSON, RunDirectory

SPEC = "gptq-b3-g32"
RUN, LAST = "lr1e-3", MeasuredModel(640)


def claims(directory: Path, study: Study) -> object:
    return judge_all(study, read_table(directory, study), Paired(directory))


def choose(directory: Path, study: Study) -> object:
    return list(answers(Evidence(study, read_table(directory, study), Paired(directory)), None))


def mirrored(directory: Path, study: Study) -> object:
    return mirror(directory, study, store_uri(directory.parent))


READERS: dict[str, Callable[[Path, Study], object]] = {
    "collect": collect_rows,
    "report": write_report,
    "claims": claims,
    "choose": choose,
    "mirror": mirrored,
}
CHANGED = (  # file, key of the number, and the readers that it feeds
    (quantization_result(RUN, LAST, SPEC), "relative_error", ("collect", "report", "claims")),
    (quantization_result(RUN, LAST, SPEC), "cross_entropy", ("choose",)),
    (quantization_result(RUN, MeasuredModel(448, "lawa5x16"), SPEC), "tokens", ("collect",)),
    (curvature_result(RUN, LAST), "mean", ("collect",)),
    ("step", "mean", ("collect",)),
    ("slice", "loss", ("report",)),
    ("blocks", "absolute_error", ("report",)),
    (f"{checkpoint_directory(RUN, LAST)}/{CHECKPOINT_JSON}", "held_out_loss", ("collect",)),
    (f"{RUN}/status.json", "step", ("report", "claims", "choose", "mirror")),
)


def place_of(study: Study, name: str) -> str:
    """Results of the end of a run have places of their own."""
    run = next(run for run in study.runs if run.name == RUN)
    ends = {"step": step_result, "slice": slice_result, "blocks": blocks_result}
    return ends[name](run, SPEC) if name in ends else name


@pytest.fixture
def whole(collected_dir, study, store, without_pictures):
    """The synthetic study with table, store, and a run whose status and attempts hold numbers."""
    directory = RunDirectory(collected_dir / RUN)
    write_ending(directory, "done", 640, fingerprint=fingerprint(study.runs[0]))
    return collected_dir


@pytest.mark.parametrize(
    ("name", "key", "readers"),
    CHANGED,
    ids=[f"{Path(name).name}-{key}" for name, key, _ in CHANGED],
)
def test_a_changed_digit_is_named(whole, study, name, key, readers):
    path = whole / place_of(study, name)
    flip_digit(path, key)
    for reader in readers:
        with pytest.raises(UserError) as refused:
            READERS[reader](whole, study)
        line = str(refused.value)
        assert str(path) in line, reader
        assert "was changed after it was written (its sha256 differs); " in line
        assert "\n" not in line


def test_a_record_without_a_seal_is_named(whole, study):
    path = whole / quantization_result(RUN, LAST, SPEC)
    content = json.loads(path.read_text())
    del content["sha256"]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"result\.json has no sha256 of its values: .*; run the"):
        collect_rows(whole, study)


def test_the_same_values_in_another_layout_are_no_change(whole):
    """As of a program that sorts keys or indents otherwise: the seal is of values, not of bytes."""
    path = whole / curvature_result(RUN, LAST)
    before = read_result(path, Curvature)
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True, indent=7))
    assert read_result(path, Curvature) == before


def test_a_changed_cell_of_the_table_is_named(whole, study):
    table = pq.read_table(whole / TABLE)
    losses = table["held_out_loss"].to_numpy(zero_copy_only=False).copy()
    losses[3] += 0.001
    index = table.column_names.index("held_out_loss")
    changed = table.set_column(index, table.schema.field(index), [losses])
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), whole / TABLE)
    for reader in ("report", "claims", "choose", "mirror"):
        with pytest.raises(UserError, match=r"table\.parquet was changed .*-m study collect"):
            READERS[reader](whole, study)


def test_a_changed_study_is_named(whole):
    flip_digit(whole / "study.json", "eval_tokens")
    with pytest.raises(UserError, match=r"study\.json was changed .*; run the recipe again"):
        load_study(whole)


def test_what_a_command_leaves_damaged_is_not_complete(whole, study):
    """As after `train run` where an earlier checkpoint.json was changed: it is left as it is."""
    ledger = Ledger(whole, steps_of(study))
    step = ledger.steps[f"train-{RUN}"]
    assert ledger.fault(step) is None
    flip_digit(whole / step.outputs[0], "tokens")
    assert f"{whole / step.outputs[0]} was changed" in str(ledger.fault(step))
    (whole / step.outputs[0]).unlink()
    words = f"it ended without {step.outputs[0]}: restore it, or move it and the checkpoints after"
    assert str(ledger.fault(step)).startswith(words)
    for later in step.outputs[1:]:
        (whole / later).unlink()
    assert ledger.fault(step) == f"it ended without {step.outputs[0]}", "it is where it resumes"


def steps_with_files() -> list[Step]:
    """An export, a token file and a mirror, as far as the files beside their records go."""
    return [
        Step("export-a", "export", ("true",), ("a/hf/step1/lineage.json",)),
        Step("prepare-train", "prepare", ("true",), ("data/train.json",)),
        Step("mirror", "mirror", ("true",), ("mlflow.json",)),
    ]


FILES = {
    "export-a": "a/hf/step1/model.safetensors",
    "prepare-train": "data/train.bin",
    "mirror": "../mlflow.db",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_beside_a_record_that_is_gone_or_cut_off_is_named(tmp_path, name):
    """A removed model, half a token file, and a study copied without its MLflow store."""
    directory = tmp_path / "runs" / "study"
    for file in (*FILES.values(), "data/train.idx"):
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_bytes(b"four")
    four = hash_file(directory / "data/train.idx").model_dump()
    write_sealed(directory / "a/hf/step1/lineage.json", {"files": {"model.safetensors": four}})
    write_sealed(directory / "data/train.json", {"kind": "bin", "bin": four, "idx": four})
    write_json(directory / "mlflow.json", {"store": f"sqlite:///{tmp_path}/elsewhere/mlflow.db"})
    ledger = Ledger(directory, steps_with_files())
    for step in ledger.steps.values():
        ledger.finish(step, ledger.fingerprint(step), 1.0)
    assert len(ledger.complete_steps()) == 3

    path = directory / FILES[name]
    path.unlink() if name != "prepare-train" else path.write_bytes(b"fou")
    words = f"{path.resolve()} is missing or cut off; 'python -m study run' makes it again"
    assert {step: ledger.reason(ledger.steps[step]) for step in FILES} == {
        **dict.fromkeys(FILES),
        name: words,
    }
    assert f"damaged: {words}" in list(status_lines(ledger))
