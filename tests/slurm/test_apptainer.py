"""Jobs in containers of the real apptainer, unprivileged: `tests/slurm/with_apptainer.sh`."""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurm.doctor import visit
from slurm.site import Site
from slurm.submission.record import starts_of
from slurm.submission.script import srun_prefix
from slurm.submission.submit import submit
from tests.interpreter import real_interpreter
from tests.lacking import skip
from tests.runs import PROJECT, write_program
from tests.slurm.faults import Storm
from tests.slurm.lab import Lab, running
from tests.slurm.studies import changed, run_here, site_of, small_study, text_of
from tests.slurm.test_study import check_complete
from tests.waiting import HANG_SECONDS, wait_until

pytestmark = pytest.mark.stress
# Starts what follows it in place of srun, which has options of its own before apptainer.
SRUN = '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'


@pytest.fixture
def image() -> str:
    """An unpacked Debian 13; skips where it or apptainer is not there."""
    if not shutil.which("apptainer") or "SANDBOX" not in os.environ:
        skip("no apptainer and image here: start with tests/slurm/with_apptainer.sh, as root")
    return os.environ["SANDBOX"]


def contained(site: Site, image: str, *mounts: str, **environment: str) -> Site:
    """The site with its measuring in a container, by this interpreter, which is mounted."""
    python = Path(real_interpreter())
    # A link in the checkout, as .venv may be one, shows the same at both of its ends.
    places = (str(python.parent.parent.resolve()), sys.base_prefix)
    container = {"kind": "apptainer", "image": image, "python": str(python)}
    changes: dict[str, Any] = {"container": container | {"mounts": (*places, *mounts)}}
    # Whoever may mount becomes somebody who may not.
    changes["environment"] = site.environment | {"APPTAINER_USERNS": "1"} | environment
    return Site.model_validate(site.model_dump() | changes)


@pytest.fixture
def inside(image, tmp_path, monkeypatch):
    """Return a function that starts shell in a container, with an srun that adds nothing."""
    write_program(tmp_path / "bin/srun", SRUN)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    def start(script: str, *mounts: str, **environment: str) -> subprocess.Popen:
        root = tmp_path / "a=b+c@d"
        root.mkdir(exist_ok=True)
        site = contained(site_of(root), image, *mounts)
        variables = os.environ | {"APPTAINER_USERNS": "1", "FROM_SITE": "it's"} | environment
        return subprocess.Popen(
            [*srun_prefix(site, "quantize"), "bash", "-c", script],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def words(process: subprocess.Popen) -> list[str]:
    """Return the lines that a process printed, once it has ended well."""
    output = process.communicate(timeout=HANG_SECONDS)[0]
    assert process.returncode == 0, output
    return output.splitlines()


SEEN = 'echo "$FROM_SITE" "${CUDA_VISIBLE_DEVICES-unset}" "$HOME"; pwd; ls -d /tmp/mine* "$HOME"/.[a-z]*'
FROM_OUTSIDE = [
    *({}, {"APPTAINER_CLEANENV": "1"}, {"APPTAINER_CONTAINALL": "1"}),
    {"APPTAINER_CLEANENV": "1", "APPTAINER_CONTAINALL": "1"},
]


@pytest.mark.parametrize("settings", FROM_OUTSIDE, ids=["none", "clean", "contained", "both"])
def test_variables_home_and_tmp_are_those_of_the_node(inside, settings):
    mine = Path("/tmp/mine57")
    mine.touch()
    try:
        first, directory, *files = words(inside(SEEN, **settings))
    finally:
        mine.unlink()
    assert first.split() == ["it's", os.environ["HOME"]], "and no GPU is visible"
    assert directory == str(PROJECT)
    assert str(mine) in files
    assert len(files) > 1, "what the home holds"


def test_the_user_of_apptainer_may_set_more(inside, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    environment = {"APPTAINER_BIND": str(other), "APPTAINERENV_FROM_SITE": "over it"}
    environment |= {"APPTAINER_NO_MOUNT": "tmp"}
    script = f'echo "$FROM_SITE"; [ -d {other} ] && [ -w {tmp_path}/a=b+c@d ] && echo there'
    assert words(inside(script, **environment)) == ["over it", "there"]


def test_the_root_is_writable_inside_a_mount_that_is_not(inside, tmp_path):
    root = tmp_path / "a=b+c@d"
    script = f"touch {root}/new && ! touch {tmp_path}/new 2>/dev/null && umask"
    before = os.umask(0o077)
    try:
        assert words(inside(script, f"{tmp_path}:{tmp_path}:ro")) == ["0077"]
    finally:
        os.umask(before)
    assert (root / "new").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -KILL $$", 137)])
def test_exit_codes_come_back(inside, script, code):
    assert inside(script).wait(HANG_SECONDS) == code


# Notes every signal, and leaves a while after the first SIGTERM, as torchrun does.
NOTING = """
for name in USR1 TERM; do trap "echo $name >>{out}" $name; done
echo ready >>{out}
until grep -q TERM {out}; do sleep 0.1; done
for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.2; done
echo end >>{out}
exit 9
"""


def test_a_step_hears_each_signal_once_and_its_exit_code_comes_back(
    image, lab_directory, slurm_installed, tmp_path, monkeypatch
):
    """SLURM signals every process, so the ranks as well: twice, torchrun would leave them."""
    out, root = tmp_path / "out", tmp_path / "a=b+c"
    root.mkdir()
    monkeypatch.setenv("APPTAINER_USERNS", "1")
    with running(Lab(lab_directory, nodes=1, cpus=2)) as lab:
        monkeypatch.setenv("SLURM_CONF", str(lab.conf))
        site = contained(site_of(root), image, str(tmp_path))
        step = [*srun_prefix(site, "quantize"), "bash", "-c", NOTING.format(out=out)]
        command = ["sbatch", "--parsable", "--output", str(tmp_path / "log")]
        job = lab.command(*command, "--wrap", f"{shlex.join(step)}; echo code $?").strip()

        def noted(line: str) -> bool:
            return out.exists() and line in out.read_text()

        for sent, line in (("USR1", "ready"), ("TERM", "USR1")):
            wait_until(partial(noted, line), line)
            lab.command("scancel", f"--signal={sent}", job)
        wait_until(lambda: not lab.command("squeue", "--noheader"), "the job's end")
    assert out.read_text().split() == ["ready", "USR1", "TERM", "end"]
    assert "code 9" in (tmp_path / "log").read_text()


def test_the_doctor_on_two_nodes(image, lab_directory, slurm_installed, tmp_path, monkeypatch):
    with running(Lab(lab_directory, nodes=2, cpus=2)) as lab:
        monkeypatch.setenv("SLURM_CONF", str(lab.conf))
        site = contained(site_of(tmp_path / "a=b+c"), image)
        checks = list(visit(site, 300))
        absent = contained(site_of(tmp_path / "a=b+c"), f"{tmp_path}/no.sif")
        problems = {check.name: check.problem for check in visit(absent, 300) if check.problem}
    print("\n".join(map(str, checks)), problems)
    assert [str(check) for check in checks if check.problem] == []
    details = {check.name: check.detail for check in checks}
    assert details["software on node2"].endswith(f"in apptainer {image}")
    assert "no.sif" in (problems["srun, image unpacked"] or "")


class ContainerStorm(Storm):
    """With a fault of containers."""

    def container_killed(self, index: int, nodes: list[str]) -> bool:
        """SIGKILL to the first process of a container, on the first node."""
        node = int(nodes[0].removeprefix("node"))
        marker = f"torch.distributed.run .*{self.study_dir / self.runs[index]}".replace("+", ".")
        with contextlib.suppress(RuntimeError):  # pgrep finds none
            torchrun = self.lab.inside(node, "pgrep", "--oldest", "--full", marker).split()[0]
            first = self.lab.inside(node, "ps", "-o", "ppid=", "-p", torchrun).strip()
            self.lab.inside(node, "kill", "-KILL", first)
            return True
        return False


def test_a_study_in_containers_has_the_table_of_the_local_runner(
    image, lab_directory, slurm_installed, tmp_path, inputs, monkeypatch
):
    """Preempted with time to save, its container killed, and without a home."""
    text = text_of(inputs)
    study = small_study("contained", steps=60, runs=1, restart_every=5, curved=False, text=text)
    local = run_here(tmp_path / "local", study)
    root, faults = tmp_path / "a=b+c", ["preempted", "container_killed"]
    study_dir, (run,) = root / study.name, (run.name for run in study.runs)
    places = {str(Path(path).parent) for path in inputs.values()}
    outside = changed(site_of(root), slurm={"partition": "spot"})  # with 15 s to save
    with running(Lab(lab_directory, nodes=4, cpus=2)) as lab:
        monkeypatch.setenv("SLURM_CONF", str(lab.conf))
        submit(study, contained(outside, image, *places, APPTAINER_NO_MOUNT="home"))
        storm = ContainerStorm(lab, study_dir, [run], tmp_path)
        storm.go_on(faults, 6 * HANG_SECONDS)
        wait_until(lambda: not lab.command("squeue", "--noheader"), "no job left")
        left = [
            line
            for node in range(1, 5)
            for line in lab.inside(node, "ps", "-eo", "args").splitlines()
            if "pptainer" in line or str(study_dir) in line
        ]
    starts = starts_of(study_dir, ("train", 0))
    print(f"struck {storm.struck}, starts {starts}")
    assert [name for name, _ in storm.struck] == faults
    check_complete(study, study_dir, local)
    assert left == [], "no orphan"
    attempts = json.loads((study_dir / run / "environment.json").read_text())["attempts"]
    assert len(attempts) >= 3
    containers = [attempt["container"] for attempt in attempts]
    assert containers == [{"kind": "apptainer", "image": image}] * len(attempts)
    assert starts[1]["position"] > starts[0]["position"], "it could save"
