"""The job script: golden files, what bash makes of it, and the exit code under signals.

`python -m tests.slurm.test_script` writes the golden files anew, to be read like code before they
are committed.
"""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from base.errors import UserError
from slurm.site import Site, load_site
from slurm.submission.arrays import JobArray
from slurm.submission.script import ONCE, render, srun_prefix
from tests.runs import write_program
from tests.slurm.studies import changed
from tests.waiting import HANG_SECONDS, wait_until

GOLDEN = Path(__file__).parent / "golden"
SITES = ("cpu", "h200", "apptainer")
ARRAYS = {
    "train": JobArray(
        "train", "train", tuple((f"train-lr{rate}",) for rate in ("1e-3", "3e-3", "1e-2", "3e-2"))
    ),
    "quantize": JobArray(
        "quantize-gptq-b3-g128.1", "quantize", tuple((f"quantize-{n}",) for n in range(28))
    ),
}
CASES = [(site, kind) for site in SITES for kind in ARRAYS]
# A job that ends well with code 7 soon after it sees the stop file; a stand-in for `python -m slurm
# job`.
POLITE = 'until [ -e "$stop" ]; do sleep 0.01; done; exit 7'


def golden_script(site: str, kind: str) -> str:
    loaded = load_site(GOLDEN / f"{site}.toml")
    return render(ARRAYS[kind], loaded, loaded.root / "olmo2-7b-lr")


@pytest.mark.parametrize(("site", "kind"), CASES)
def test_script_is_the_reviewed_one_and_bash_reads_it(site, kind):
    path = GOLDEN / f"{site}-{kind}.sh"
    assert golden_script(site, kind) == path.read_text(), (
        "read the difference; `python -m tests.slurm.test_script`"
    )
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""


class ScriptStage:
    """A site below a temporary directory whose interpreter is a shell script."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.study = directory / "root" / "tiny"
        self.stub = directory / "python"
        self.site = self._site()

    def _site(self, **changes) -> Site:
        base = load_site(GOLDEN / "cpu.toml").model_dump(exclude_unset=True)
        (self.directory / "project").mkdir(exist_ok=True)
        paths = {"root": self.study.parent, "python": self.stub}
        paths |= {"project": self.directory / "project"}
        return Site.model_validate(base | paths | changes)

    def start(self, job: str, restarts: int = 0, **changes) -> subprocess.Popen:
        """The script of element 3 of array 70, in its own session; its job id is the array's."""
        head = '#!/bin/bash\nfor a; do stop=$a; done\n: >"$stop.ready"\n'
        noted = f"printf '%s\\n' \"$@\" >{shlex.quote(str(self.directory / 'arguments'))}\n"
        write_program(self.stub, f"{head}{noted}{job}\n")
        script = self.directory / "script.sh"
        script.write_text(render(ARRAYS["train"], self._site(**changes), self.study))
        slurm = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "70"}
        slurm |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        return subprocess.Popen(
            ["bash", str(script)],
            env=os.environ | slurm,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def stop_file(self, restarts: int = 0) -> Path:
        return self.study / "slurm" / "stop" / f"70_3.{restarts}"

    def wait_for_job(self, restarts: int = 0) -> None:
        wait_until(Path(f"{self.stop_file(restarts)}.ready").exists, "the job")


@pytest.fixture
def stage(tmp_path) -> ScriptStage:
    return ScriptStage(tmp_path)


@pytest.mark.parametrize("code", [0, 1, 37, 127])
def test_exit_code_is_the_jobs(stage, code):
    assert stage.start(f"exit {code}").wait(HANG_SECONDS) == code
    assert (stage.directory / "arguments").read_text().split() == [
        *("-m", "slurm", "job", str(stage.study), "train", "3", str(stage.stop_file()))
    ]
    assert not stage.stop_file().exists()


def test_killed_job_is_no_success(stage):
    """And others may start: the killed job could not say so."""
    stub = '[ "$3" = job ] && kill -KILL $$; echo "$@" > "$(dirname "$0")/called"'
    assert stage.start(stub).wait(HANG_SECONDS) == 137
    called = (stage.directory / "called").read_text().split()
    assert called == ["-m", "slurm", "advance", str(stage.study), "--ending", "70_3"]


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM])
def test_signal_to_the_batch_shell_becomes_the_stop_file_of_this_start(stage, sent):
    began = time.monotonic()
    process = stage.start(POLITE, restarts=2)
    stage.wait_for_job(restarts=2)
    process.send_signal(sent)
    assert process.wait(HANG_SECONDS) == 7
    ran_seconds = int(stage.stop_file(restarts=2).read_text())
    assert 0 <= ran_seconds <= time.monotonic() - began + 1
    assert not stage.stop_file().exists()


def test_term_to_all_processes_leaves_the_job_to_end_itself(stage):
    """As at the time limit: the job starts without the shell's trap and handles it itself."""
    trapped = stage.directory / "trapped"
    process = stage.start(f"trap 'exit 9' TERM; :>{trapped}; while :; do sleep 0.05; done")
    wait_until(trapped.exists, "the job's trap", process)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(HANG_SECONDS) == 9


def test_job_starts_with_default_handlers(stage):
    """An ignored signal would be inherited by everything the job starts."""
    process = stage.start("sed -n 's/SigIgn:\\t//p' /proc/$$/status")
    ignored = int(process.communicate(timeout=HANG_SECONDS)[0].splitlines()[-1], 16)
    assert not ignored & (1 << (signal.SIGUSR1 - 1) | 1 << (signal.SIGTERM - 1))


@pytest.mark.parametrize("runs", [60, pytest.param(500, marks=pytest.mark.stress)])
def test_exit_code_is_the_jobs_when_signals_come_as_it_ends(stage, runs):
    """One to three signals within 2 ms of the end of a job that ends by itself.

    Loops around bash's wait made 138 or 255 of one signal in 46 of 250 such runs.
    """
    generator, ending = random.Random(1), stage.directory / "ending"
    for _ in range(runs):
        process = stage.start(f": >{ending}; exit 7")
        while not ending.exists() and process.poll() is None:
            pass
        for _ in range(generator.randint(1, 3)):
            deadline = time.perf_counter() + generator.random() * 0.002
            while time.perf_counter() < deadline:
                pass
            process.send_signal(generator.choice([signal.SIGUSR1, signal.SIGTERM]))
        assert process.wait(HANG_SECONDS) == 7, process.communicate()[1]
        process.communicate()
        ending.unlink()
        for path in stage.stop_file().parent.iterdir():
            path.unlink()


def test_job_does_not_start_without_its_modules(stage):
    process = stage.start(
        "exit 0", setup={"modules": ("cuda/12.8",), "lines": ("module() { return 1; }",)}
    )
    assert process.wait(HANG_SECONDS) == 1
    assert not (stage.directory / "arguments").exists()


def test_site_code_may_read_variables_that_are_not_set_and_reaches_the_job(stage):
    lines = ('echo "$NOT_SET_BY_ANYONE"', "export FROM_SITE=here")
    job = 'echo "$FROM_SITE $OMP_NUM_THREADS $PWD"'
    process = stage.start(job, setup={"lines": lines}, environment={})
    shown = process.communicate(timeout=HANG_SECONDS)[0].splitlines()[-1]
    assert shown == f"here 1 {stage.directory / 'project'}"


def test_containers_see_root_and_project():
    h200, apptainer = (load_site(GOLDEN / f"{name}.toml") for name in ("h200", "apptainer"))
    pyxis = srun_prefix(h200, "train", ["--nodes=1"])
    assert pyxis[:3] == ["srun", "--kill-on-bad-exit=1", "--nodes=1"]
    assert "--container-name=quantdyn_0_0" in pyxis, "unpacked once on each node of a job"
    # which holds root and project
    assert "--container-mounts=/shared:/shared,/scratch:/tmp:rw" in pyxis
    assert "--container-image=registry.example.org#llm/quantdyn:25.06" in pyxis
    (variables,) = (option for option in pyxis if option.startswith("--container-env="))
    names = variables.partition("=")[2].split(",")
    assert {"HF_HOME", "GREETING", "NCCL_NET", "PYTHONPATH"} <= set(names)
    assert srun_prefix(apptainer, "train")[: -len(ONCE)] == [
        *("srun", "--kill-on-bad-exit=1", "apptainer", "exec"),
        *("--containall=false", "--cleanenv=false", "--nv"),
        *("--bind", "/project/p123:/project/p123", "--pwd", "/project/p123/src"),
        "/project/p123/quantdyn.sif",
    ]
    assert "--nv" not in srun_prefix(apptainer, "export")
    assert srun_prefix(apptainer, "export")[-2:] == ["env", "CUDA_VISIBLE_DEVICES="]
    # Mounted somewhere else, a directory is not at its own path.
    moved = changed(h200, container={"mounts": ("/shared:/data",)})
    expected = (
        "/shared:/data,/shared/quantdyn:/shared/quantdyn,/shared/src/quantdyn:/shared/src/quantdyn"
    )
    assert f"--container-mounts={expected}" in srun_prefix(moved, "train")


@pytest.mark.parametrize("name", ["a b", "%j", "x\ny", "a'b", "$(touch x)", ".."])
def test_study_whose_path_cannot_stand_in_a_directive_is_refused(stage, name):
    with pytest.raises(UserError, match="root in the site file"):
        render(ARRAYS["train"], stage.site, stage.study.parent / name)


def shown(job: str) -> dict[str, str]:
    command = ["scontrol", "show", "job", job]
    words = subprocess.check_output(command, text=True, timeout=HANG_SECONDS).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


@pytest.mark.parametrize("kind", ["train", "export"])
def test_slurm_reads_the_directives_as_they_are_meant(stage, lab, kind):
    """Every character of an extra argument, limits in all spellings, GPUs in both ways."""
    times = {"train": "1:30", "export": "1-2:03:04"}
    content = load_site(GOLDEN / "cpu.toml").model_dump(exclude_none=True)
    content["slurm"] |= {
        "exclude": "node[3-4]",
        "extra": ["--network=a+b@c^d!e(f)|g&h*i~[k]%j", "--nice=7"],
    }
    content["resources"]["train"] |= {"gpus_per_node": 2, "time": times["train"], "gpus": "gres"}
    content["resources"]["export"] |= {"gpus_per_node": 2, "time": times["export"]}
    site = Site.model_validate(content | {"root": stage.study.parent, "project": stage.directory})
    script = stage.directory / "script.sh"
    script.write_text(
        render(JobArray("some-b3.1", kind, (("a",), ("b",), ("c",))), site, stage.study)
    )
    submitted = subprocess.run(
        ["sbatch", "--parsable", "--hold", "--array=0-2", script],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert submitted.returncode == 0, submitted.stderr
    array = submitted.stdout.strip()
    try:
        job = shown(f"{array}_2")
    finally:
        subprocess.run(["scancel", array], check=True, timeout=HANG_SECONDS)
    assert job["JobName"] == "tiny.some-b3.1"
    assert (job["ArrayTaskId"], job["Nice"]) == ("2", "7")
    assert job["Network"] == "a+b@c^d!e(f)|g&h*i~[k]%j"
    assert (job["Requeue"], job["Partition"], job["ExcNodeList"]) == ("1", "train", "node[3-4]")
    assert job["TresPerNode"] in ("gres:gpu:2", "gres/gpu:2")  # SLURM 22.05, 24.11
    assert job["TimeLimit"] == {"train": "00:02:00", "export": "1-02:04:00"}[kind]
    days, _, clock = f"0-{job['TimeLimit']}".rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    limit = 86400 * int(days.rpartition("-")[2]) + 3600 * hours + 60 * minutes + seconds
    assert site.resources_of(kind).time_seconds == limit


def test_a_step_without_gpus_sees_none(stage, lab):
    """SLURM takes an exported CUDA_VISIBLE_DEVICES out of it, where nodes have GPUs."""
    prefix = srun_prefix(load_site(GOLDEN / "cpu.toml"), "quantize", ["--ntasks=1"])
    shown = [*prefix, "bash", "-c", 'echo "${CUDA_VISIBLE_DEVICES-unset}."']
    command = ["sbatch", "--wait", "--output", stage.directory / "out", "--wrap", shlex.join(shown)]
    subprocess.run(command, check=True, timeout=HANG_SECONDS)
    assert (stage.directory / "out").read_text() == ".\n"


if __name__ == "__main__":
    for site, kind in CASES:
        (GOLDEN / f"{site}-{kind}.sh").write_text(golden_script(site, kind))
    sys.stdout.write(f"{len(CASES)} scripts written to {GOLDEN}\n")
