"""Command lines for pyxis and enroot, each argument checked by a stand-in that refuses as they do."""

import itertools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm.site import KINDS, Site, load_site
from slurm.submission.script import forget, job_environment, on_every_node, srun_prefix
from slurm.submission.submit import submit
from study.pipeline.ledger import Ledger
from study.steps import ONLINE, steps_of
from tests.interpreter import interpreter
from tests.runs import PROJECT, write_program
from tests.slurm import pyxis
from tests.slurm.lab import Lab, running
from tests.slurm.studies import changed, site_of, watched_study
from tests.waiting import HANG_SECONDS, wait_until

H200 = Path(__file__).parent / "golden/h200.toml"
IMAGES = [
    *("/shared/a=b+c/quantdyn@1.sqsh", "ubuntu", "docker://ubuntu:24.04"),
    *("nvcr.io#nvidia/pytorch:26.07-py3", "nvcr.io/nvidia/pytorch:26.07-py3"),
    "registry.example.org:5005#llm/quantdyn",
]
MOUNTS: list[tuple[str, ...]] = [
    (),
    ("/shared",),
    ("/shared:/shared:ro",),
    ("/shared:/data", "/scratch:/tmp:rw"),
    ("/a=b+c@d", "/shared/quantdyn:/shared/quantdyn:rw+rprivate"),
    ("/elsewhere:/shared",),
]
OPTIONS = tuple(on_every_node(2)), ("--nodes=1", "--ntasks=1", "--overlap", "--mem=0")


def site_with(**container: Any) -> Site:
    return changed(load_site(H200), container=container)


@pytest.mark.parametrize("image", IMAGES)
def test_every_command_line_is_one_that_pyxis_takes(image):
    for mounts, kind, options in itertools.product(MOUNTS, KINDS, OPTIONS):
        site = site_with(image=image, mounts=mounts)
        command = [*srun_prefix(site, kind, options), "python", "--container-name=not/srun's"]
        container, others, words = pyxis.read(command[1:])
        assert (container.image, container.workdir) == (image, str(site.project))
        assert others == ["--kill-on-bad-exit=1", *options]
        assert words[-2:] == ["python", "--container-name=not/srun's"]
        assert set(container.env) == {"PYTHONPATH", *job_environment(site, kind)}
        for path in (site.root / "study/step", site.project):
            assert pyxis.is_writable(container, path), mounts


def test_what_the_site_mounts_read_only_stays_so():
    site = site_with(mounts=("/shared:/shared:ro", "/shared/src/quantdyn:/shared/src/quantdyn:ro"))
    container, _, _ = pyxis.read([*srun_prefix(site, "train")[1:], "true"])
    assert pyxis.is_writable(container, site.root)
    assert not pyxis.is_writable(container, site.project)


def test_pyxis_has_to_be_0_15():
    arguments = [*srun_prefix(load_site(H200), "train")[1:], "true"]
    pyxis.read(arguments, minor=15)
    with pytest.raises(pyxis.RefusedError, match="unrecognized option '--container-env="):
        pyxis.read(arguments, minor=14)


def test_each_start_of_a_job_unpacks_its_own(monkeypatch):
    """The start before may have been killed while it unpacked."""
    names = set()
    for variables in ({"SLURM_JOB_ID": "70"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "71"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        container, _, _ = pyxis.read([*srun_prefix(load_site(H200), "train")[1:], "true"])
        names.add(container.name)
    assert len(names) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--container-image=", "argument required"),
        ("--container-image=x --container-image=y", "multiple times"),
        ("--container-image=a#B/c", "Invalid image reference"),
        ("--container-image=quantdyn.sqsh", "failed to import docker image"),
        ("--container-mount=/a --container-image=x", "unrecognized option"),
        ("--container-mount-home=yes --container-image=x", "doesn't allow an argument"),
        ("--container-mounts=/a", "neither"),
        ("--container-image=x --container-mounts=/a:", "invalid format"),
        ("--container-image=x --container-mounts=/a,,/b", "invalid format"),
        ("--container-image=x --container-mounts=a:/b", "source must be"),
        ("--container-image=x --container-mounts=/a:b", "target must be"),
        ("--container-image=x --container-mounts=/a:/b:readonly", "readonly"),
        ("--container-image=x --container-name=a/b", "Invalid argument"),
        ("--container-image=x --container-name=a:b", "bad name or flag"),
        ("--container-image=x --container-env=A,,B", "invalid format"),
        ("--container-image=x --container-env=A-B", "invalid format"),
        ("-N 2 --container-image=x", "short option"),
    ],
)
def test_the_stand_in_refuses_as_pyxis_does(options, words):
    with pytest.raises(pyxis.RefusedError, match=words):
        pyxis.read([*options.split(), "true"])


# What measures notes its environment, and leaves what the step would.
PYTHON = """#!/bin/bash
env -0 >{noted}/$SLURM_JOB_ID.$SLURM_STEP_ID
exec {python} -m tests.slurm.stand_in "$0" "$@"
"""
INSIDE = {
    **{"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONNOUSERSITE": "1"},
    **{"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"},
    **{"RANK": "0", "WORLD_SIZE": "1", "HOME": "/nowhere/home", "NVIDIA_PYTORCH_VERSION": "25.10"},
}


@pytest.fixture
def site(tmp_path, monkeypatch) -> Site:
    """A site with an image, and with programs that jobs find first: srun and enroot."""
    programs, noted, image = (tmp_path / name for name in ("bin", "noted", "image+1.sqsh"))
    noted.mkdir()
    image.write_bytes(pyxis.SQUASHFS)
    for name in ("srun", "enroot"):
        words = shlex.join([sys.executable, "-I", str(pyxis.__file__), name])
        write_program(programs / name, f'#!/bin/sh\nexec {words} "$@"\n')
    write_program(programs / "python", PYTHON.format(noted=noted, python=interpreter()))
    monkeypatch.setenv("REAL_SRUN", shutil.which("srun") or "")
    monkeypatch.setenv("NODES", str(tmp_path / "nodes"))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    outside = site_of(tmp_path / "a=b+c", train_nodes=1)
    container = {"kind": "pyxis", "image": str(image), "python": str(programs / "python")}
    environment = outside.environment | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
    return Site.model_validate(
        outside.model_dump() | {"container": container, "environment": environment}
    )


def unpacked(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "nodes").rglob("pyxis_*")}


# As on a node of a job.
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
export SLURMD_NODENAME=node1 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0
exec "$@"
"""


def test_what_a_start_has_unpacked_is_removed_at_its_end(site, tmp_path, monkeypatch):
    """By its name, whatever another start of the job has left."""
    monkeypatch.setenv("REAL_SRUN", str(write_program(tmp_path / "real/srun", SRUN)))
    monkeypatch.setenv("SLURM_JOB_ID", "70")
    site.root.mkdir()
    for start in ("0", "1"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", start)
        command = [*srun_prefix(site, "train"), "sh", "-c", "exit 7"]
        assert subprocess.run(command, timeout=HANG_SECONDS).returncode == 7
    assert unpacked(tmp_path) == {"pyxis_quantdyn_70_0", "pyxis_quantdyn_70_1"}
    subprocess.run(["bash", "-c", forget(site)], check=True, timeout=HANG_SECONDS)
    assert unpacked(tmp_path) == {"pyxis_quantdyn_70_0"}
    assert forget(site_of(tmp_path)) == ""


@pytest.mark.stress
def test_a_study_in_an_image_that_each_job_unpacks_once_and_removes(
    site, tmp_path, lab_directory, slurm_installed, monkeypatch
):
    """And whose first job is killed while it unpacks, and queued again."""
    study = watched_study()
    study_dir = site.root / study.name
    monkeypatch.setenv("STUDY_DIR", str(study_dir))
    nodes = tmp_path / "nodes"
    (nodes / "node1").mkdir(parents=True)
    (nodes / "node1/die-while-unpacking").touch()
    with running(Lab(lab_directory, nodes=1, cpus=4)) as lab:
        monkeypatch.setenv("SLURM_CONF", str(lab.conf))
        submit(study, site)
        wait_until(lambda: unpacked(tmp_path), "the first image, in pieces")
        (first,) = lab.command("squeue", "--noheader", "--format=%F_%K").split()
        lab.command("scontrol", "requeue", first)
        wait_until((study_dir / "steps/mirror.json").exists, "the study's end")
        wait_until(lambda: not lab.command("squeue", "--noheader"), "no job left")
    assert Ledger(study_dir, steps_of(study)).complete_steps() == {
        step.name for step in steps_of(study)
    }
    assert len(unpacked(tmp_path)) <= 1, "what was killed"
    used = [line.split() for line in (nodes / "node1/used.txt").read_text().splitlines()]
    unpacking = [name for name, *words in used if words[-1] == "true"]
    assert len(unpacking) == len(set(unpacking)) == len({name for name, *_ in used})

    online = 0
    for noted in (tmp_path / "noted").iterdir():
        variables = dict(text.split("=", 1) for text in noted.read_text().split("\0")[:-1])
        inside = {name: variables.get(name) for name in INSIDE}
        assert inside == INSIDE, noted.name
        online += variables.get("HF_HUB_OFFLINE") != "1"
        assert variables["PYTHONPATH"].split(":")[0] == str(PROJECT)
        assert variables["QUANTDYN_IMAGE"] == str(tmp_path / "image+1.sqsh")
        assert variables["PWD"] == str(PROJECT)
    assert online == sum(step.kind in ONLINE for step in steps_of(study)), "may ask the hub"
