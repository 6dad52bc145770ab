"""run_job against a stand-in for the library's process: what it is told, what it leaves, how it
fails.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from base.errors import UserError
from quant_eval.libraries.job import REPORT, WEIGHTS, Job, run_job, write_report
from quant_eval.specs import parse_spec
from tests.interpreter import interpreter

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def process(tmp_path, monkeypatch):
    """`process(script)`: run_job starts that shell script, with arguments -m MODULE JOB.json."""

    def becomes(script: str) -> None:
        path = tmp_path / "process.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return becomes


def job_in(out: Path) -> Job:
    return Job(
        hf_dir=Path("model"),
        spec=parse_spec("gptqmodel-b4-g128"),
        calibration=Path("calibration.safetensors"),
        dtype="fp32",
        device="cpu",
        batch_size=2,
        threads=3,
        out=out,
    )


def test_the_process_gets_the_job_and_its_report_comes_back(tmp_path, monkeypatch, process):
    report = {"library": "stand-in", "version": "1", "settings": {"bits": 4}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    monkeypatch.chdir(tmp_path)
    process(
        f"echo noise; echo noise >&2; env > {tmp_path}/env; pwd > {tmp_path}/cwd;\n"
        f'cp {tmp_path}/report.json "$(dirname "$3")"'
    )
    returned = run_job(job_in(Path("out")))
    assert returned.model_dump(mode="json") == report
    job = Job.model_validate_json((tmp_path / "out" / "job.json").read_text())
    assert job.spec == parse_spec("gptqmodel-b4-g128")
    # relative paths are the caller's, and the process works elsewhere
    assert job.hf_dir == tmp_path / "model"
    assert job.calibration == tmp_path / "calibration.safetensors"
    directory = Path((tmp_path / "cwd").read_text().strip())
    assert directory != tmp_path
    assert not directory.exists()
    assert "OMP_NUM_THREADS=3\n" in (tmp_path / "env").read_text()


@pytest.mark.parametrize(("device", "visible"), [("cpu", ""), ("cuda", "2,3")])
def test_the_process_sees_gpus_only_where_it_is_to_use_one(
    tmp_path, monkeypatch, process, device, visible
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    process(f"env > {tmp_path}/env; exit 1")
    with pytest.raises(UserError):
        run_job(job_in(tmp_path / "out").model_copy(update={"device": device}))
    assert f"\nCUDA_VISIBLE_DEVICES={visible}\n" in (tmp_path / "env").read_text()


def test_a_library_that_computed_elsewhere_is_refused(tmp_path):
    job = job_in(tmp_path).model_copy(update={"device": "cuda"})
    with pytest.raises(UserError, match="other computed on cpu, not on cuda; give --device cpu"):
        write_report(job, {}, "other", "1", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("echo warning >&2; echo 'error: use a larger damp' >&2; exit 2", ": use a larger damp"),
        ("echo Traceback >&2; echo 'ValueError: x' >&2; exit 1", "exit code 1: ValueError: x"),
        ("exit 1", "ended with exit code 1: no message"),
        ("kill -9 $$", "was killed, most likely for memory"),
    ],
)
def test_a_failure_is_one_line_and_leaves_no_result(tmp_path, process, script, line):
    for name in (WEIGHTS, REPORT):
        (tmp_path / name).write_text("of an earlier job")
    process(script)
    with pytest.raises(UserError) as refused:
        run_job(job_in(tmp_path))
    assert str(refused.value).startswith("spec gptqmodel-b4-g128: ")
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / WEIGHTS).exists()
    assert not (tmp_path / REPORT).exists()


LIBRARY = """
import os, sys, torch
from quant_eval.libraries.job import run_process, write_report

def quantize(job):
    sys.left_behind = True
    told = {"parent": os.getppid(), "gradients": torch.is_grad_enabled(), "place": os.getcwd()}
    write_report(job, {}, "stand-in", "1", told)
    if job.batch_size > 2:
        raise ValueError("too large")

run_process(quantize)
"""
STUDY = """
import os, sys, torch
from pathlib import Path
from base.errors import UserError
from quant_eval import libraries
from quant_eval.libraries import job
from quant_eval.quantizers.libraries import GPTQModel
libraries.__path__.append(sys.argv[1])
GPTQModel.module = "stand_in"
task = job.Job.model_validate_json(Path(sys.argv[1], "task.json").read_text())
with torch.no_grad():
    told = job.run_job(task).settings
    assert told["parent"] == os.getpid() and told["gradients"]
    assert told["place"] != os.getcwd() and not hasattr(sys, "left_behind")
    try:
        job.run_job(task.model_copy(update={"batch_size": 3}))
    except UserError as error:
        print(error)
"""


def test_a_job_is_a_fork_in_a_process_of_one_thread_with_its_environment(tmp_path):
    (tmp_path / "stand_in.py").write_text(LIBRARY)
    task = job_in(tmp_path / "out").model_copy(update={"threads": 1})
    (tmp_path / "task.json").write_text(task.model_dump_json())
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    # a new interpreter would not find the stand-in
    done = subprocess.run(
        [interpreter(), "-c", STUDY, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.endswith("stand_in ended with exit code 1: ValueError: too large\n")
