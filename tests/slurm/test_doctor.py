"""The doctor on a real SLURM: what is right, and each thing that is wrong, named."""

import json
import os
import re
import shlex
from importlib import metadata

import pytest

from base import environment
from base.errors import UserError
from base.files import write_json
from base.processor import CPUINFO, cpu_model
from slurm import cluster, doctor
from slurm.doctor import ONE_KIND, Check, checks_here, lines_of, visit
from tests.slurm.studies import changed, site_of


@pytest.fixture
def root(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def test_problems_come_first_then_warnings_and_the_rest_on_demand():
    checks = [
        Check("SLURM's commands", None),
        Check("preemption", None, "CANCEL: preempted jobs need 'status --watch'", warns=True),
        Check("locks on node1", "a lock is not seen; mount root with flock"),
        Check("disk from node1", None, "2,000 GB free below root"),
    ]
    assert lines_of(checks, whole=False) == [
        "1 problem; correct before submitting a study",
        "FAIL locks on node1: a lock is not seen; mount root with flock",
        "warn preemption: CANCEL: preempted jobs need 'status --watch'",
        "ok   2 more checks; --all lists them, and what a site needs",
    ]
    whole = lines_of([checks[0], checks[3]], whole=True)
    assert whole[:3] == [
        "ready",
        "ok   SLURM's commands",
        "ok   disk from node1: 2,000 GB free below root",
    ]
    assert whole[3].startswith("what a site has to allow:")


def failures(site, wait: int = 300) -> dict[str, str]:
    return {check.name: check.problem for check in visit(site, wait) if check.problem}


def test_a_cluster_that_is_fit_and_has_two_kinds_of_cpus(lab, root):
    other = root.parent / "cpuinfo"
    other.write_text(re.sub("(model name.*: ).*", r"\1Another CPU", CPUINFO.read_text()))
    lab.inside(2, "mount", "--bind", str(other), str(CPUINFO))
    try:
        checks = list(visit(site_of(root), 300))
    finally:
        lab.inside(2, "umount", str(CPUINFO))
    assert [str(check) for check in checks if check.problem] == []
    assert [str(check) for check in checks if check.warns] == [
        f"warn kinds of processors: these nodes differ; {ONE_KIND}"
    ]
    by_name = {check.name: check.detail for check in checks}
    assert by_name["root on every node"] == "node1, node2"
    assert "GB/s a rank over 2 ranks by gloo" in by_name["all-reduce between all ranks"]
    assert {"locks on node1", "locks on node2", "imports on node2"} <= by_name.keys()
    assert "fp32 on node2" in by_name
    assert by_name["software on node2"].startswith("torch ")
    assert by_name["processor of node2"].startswith("Another CPU (")
    assert by_name["processor of node1"].startswith(cpu_model())
    assert list(root.iterdir()) == [], "nothing is left"


NO_FEATURES = ("AvailableFeatures=", "ActiveFeatures=")


def test_nodes_of_a_partition_that_differ_by_what_slurm_knows(lab, root):
    def warnings(**options: str) -> list[str]:
        checks = checks_here(changed(site_of(root), slurm=options))
        return [str(check) for check in checks if check.warns]

    assert warnings() == []
    cancels = "warn preemption: CANCEL: preempted jobs need 'status --watch'"
    assert warnings(partition="spot,urgent") == [cancels]
    lab.command("scontrol", "update", "NodeName=node[1-3]", "AvailableFeatures=ib,rome")
    lab.command("scontrol", "update", "NodeName=node4", "AvailableFeatures=ib,genoa")
    try:
        mixed = (
            "3 of x86_64 16 x 1 cores gpu:h200 ib rome; 1 of x86_64 16 x 1 cores gpu:h200 genoa ib;"
            f" {ONE_KIND}"
        )
        assert warnings() == [f"warn nodes of the default partition: {mixed}"]
        assert warnings(partition="train") == [f"warn nodes of train: {mixed}"]
        assert warnings(constraint="ib&rome") == []
        assert len(warnings(constraint="rome|genoa")) == 1
        assert len(warnings(constraint="ib")) == 1
    finally:
        lab.command("scontrol", "update", "NodeName=node[1-4]", *NO_FEATURES)


def test_a_node_that_does_not_see_the_root(lab, root):
    lab.inside(2, "mount", "-t", "tmpfs", "tmpfs", str(root))
    try:
        problems = failures(site_of(root))
    finally:
        lab.inside(2, "umount", str(root))
    assert "no report of node2: root is not there" in problems["root on every node"]


def test_an_srun_option_of_the_site_is_shown_and_tried(lab, root):
    site = changed(site_of(root), slurm={"srun_options": ("--mpi=nonsense",)})
    checks = {check.name: check for check in visit(site, 300)}
    assert checks["options of srun"].detail == "--mpi=nonsense"
    assert "--mpi" in (checks["srun, image unpacked"].problem or ""), "by the real srun"


@pytest.mark.parametrize(
    ("errors", "shown"),
    [
        ("slurmstepd-n1: error: execve(): apptainer: No such file or directory", None),
        ("ImportError: libffi.so.8: cannot open shared object file", None),
        ("srun: unrecognized option '--container-image=x'", None),
        ("", "srun: error: n1: task 0: Exited with exit code 2"),
    ],
)
def test_the_error_of_a_task_is_shown_not_that_srun_has_ended(errors, shown):
    """In the words of SLURM 22.05, which come last."""
    ends = """
        slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-29T21:22:40 ***
        srun: launch/slurm: _step_signal: Terminating StepId=1.2
        srun: error: n2: task 1: Terminated
        srun: Force Terminated StepId=1.2
        Try "srun --help" for more information
        srun: error: n1: task 0: Exited with exit code 2
    """
    text = "\n".join([errors, *(line.strip() for line in ends.splitlines())])
    _, problem = doctor._run(["bash", "-c", f"echo {shlex.quote(text)} >&2; exit 1"])
    assert problem == (shown or errors)


def test_an_interpreter_that_is_not_there(lab, root):
    problems = failures(changed(site_of(root), python=root / "python"))
    assert "is not a program; correct python" in problems["interpreter and project"]
    assert "it ended early" in problems["a job on nodes"]


def test_a_job_that_does_not_start_is_cancelled(lab, root):
    lab.command("scontrol", "update", "PartitionName=train", "State=DOWN")
    try:
        problems = failures(site_of(root), wait=1)
    finally:
        lab.command("scontrol", "update", "PartitionName=train", "State=UP")
    assert "PENDING, PartitionDown after 1 s; give --wait more" in problems["a job on nodes"]
    assert lab.command("squeue", "--noheader", "--name=quantdyn.doctor", "--states=pending") == ""


def test_without_slurm_the_first_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    first = next(checks_here(site_of(tmp_path)))
    assert str(first).startswith("FAIL SLURM's commands: sbatch, squeue, scontrol, scancel, srun")


@pytest.fixture
def node7(tmp_path, monkeypatch):
    """The directory of a check by the doctor, on a node of that name."""
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    (tmp_path / ".clock.json").write_text(json.dumps({"time": 0.0}))
    return tmp_path


def test_a_lock_of_another_node_that_is_not_seen(node7):
    """As on a Lustre whose locks are each node's own: here nobody holds it."""
    problems = {check.name: check.problem for check in doctor.node(node7)}
    assert "mount root with flock for all nodes" in (problems["locks on node7"] or "")


def test_the_software_of_a_node_and_what_is_not_as_tested(node7, tf32, monkeypatch):
    monkeypatch.setenv("APPTAINER_CONTAINER", "/shared/quantdyn.sif")
    monkeypatch.delenv("QUANTDYN_IMAGE", raising=False)
    versions, installed = environment._tested_versions, metadata.version
    older = {"torch": "2.13.0"}
    monkeypatch.setattr(environment, "_tested_versions", lambda build: versions(build) | older)
    checks = {check.name: check for check in doctor.node(node7)}
    words = checks["software on node7"].detail
    assert words.startswith(
        f"torch {installed('torch')}, megatron-core {installed('megatron-core')}"
    )
    assert words.endswith("in apptainer quantdyn.sif")
    differs = checks["versions on node7"].detail
    assert f"torch {installed('torch')} here, 2.13.0 tested" in differs
    assert "set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0" in (checks["fp32 on node7"].problem or "")


def test_nodes_without_a_report_are_named_in_the_order_of_the_job(tmp_path, monkeypatch):
    nodes = [f"node{number}" for number in range(1, 10)]
    write_json(tmp_path / "site.json", site_of(tmp_path).model_dump(mode="json"))
    write_json(tmp_path / "checks-node4.json", [])
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-9]")
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setattr(cluster, "expand", lambda _nodelist: nodes)
    monkeypatch.setattr(doctor, "_slurm_from_here", lambda _directory: Check("sbatch", None))
    monkeypatch.setattr(doctor, "_run", lambda _command: (0.0, "node1: no such file"))
    problems = {check.name: check.problem for check in doctor.first(tmp_path)}
    missing = "node1, node2, node3, node5, node6, node7, node8, node9"
    expected = f"no report of {missing}: root is not there, or node1: no such file"
    assert problems["root on every node"] == expected


def test_a_node_that_may_not_submit(tmp_path, monkeypatch):
    def refuse(_script):
        raise UserError("sbatch: Access denied")

    monkeypatch.setattr(cluster, "check", refuse)
    monkeypatch.setitem(os.environ, "SLURM_JOB_ID", "7")
    check = doctor._slurm_from_here(tmp_path)
    assert "Access denied: keep 'status --watch' running" in (check.problem or "")
