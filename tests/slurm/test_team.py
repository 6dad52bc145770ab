"""Studies of several users below one root, in a lab that knows them."""

import json
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.site import Site
from slurm.submission.record import JOBS_JSONL, SLURM, existing_submission, log_of
from study.definition import Study, save_study
from tests.interpreter import interpreter
from tests.runs import write_program
from tests.slurm.lab import running
from tests.slurm.studies import changed, site_of, small_study, write_site
from tests.slurm.team import GROUP, GROUP_ID, MEMBERS, USERS, TeamLab
from tests.waiting import wait_until

# Jobs are the project's own; what they measure is not.
PYTHON = """#!/bin/sh
if [ "$2" = slurm ]; then exec {python} "$@"; fi
exec {python} -m tests.slurm.stand_in "$0" "$@"
"""
# Submit by nothing but a file of the study; `made` are steps that are there before.
SUBMIT = """
import json, sys
from pathlib import Path
from base.sharing import make_root
from slurm.site import load_site
from slurm.submission.submit import submit
from study.definition import load_study
from tests.slurm.studies import make
study, site = load_study(Path(sys.argv[1])), load_site(Path(sys.argv[2]))
make_root(site.root, site.group)
make(site.root / study.name, study, sys.argv[3:])
print(json.dumps(submit(study, site)))
"""


@pytest.fixture(scope="module")
def team(slurm_installed) -> Iterator[TeamLab]:
    """A lab with its users, in a directory that all of them see."""
    base = Path(tempfile.mkdtemp(prefix="lab"))
    lab = TeamLab(base / "cluster", nodes=2)
    with running(lab):
        yield lab
    shutil.rmtree(base)


@pytest.fixture
def base(team) -> Path:
    """A directory of alice's for a root and all else."""
    directory = Path(tempfile.mkdtemp(prefix="root", dir=team.directory.parent))
    shutil.chown(directory, MEMBERS["alice"])
    directory.chmod(0o755)
    write_program(directory / "python", PYTHON.format(python=interpreter()))
    return directory


def short_study(name: str, runs: int) -> Study:
    """Return a study of one checkpoint of each run."""
    study = small_study(name, steps=24, runs=runs, restart_every=None, curved=False)
    return changed(study, runs=tuple(changed(run, save_steps=(24,)) for run in study.trained))


def write_study(base: Path, study: Study, **fields: str) -> tuple[Path, Site]:
    """Write study and site for SUBMIT; return the site file and the site."""
    save_study(base / "study", study)
    here = {"STUDY_DIR": str(base / "root" / study.name)}
    site = site_of(base / "root", train_nodes=1)
    site = changed(site, python=base / "python", environment=here, **fields)
    content = json.loads(site.model_dump_json(exclude_none=True))
    return write_site(base / "site.toml", content), site


def jobs(team: TeamLab) -> dict[str, str]:
    """Users of the elements that wait or run."""
    names = {str(number): user for user, number in USERS.items()}
    lines = team.command("squeue", "--noheader", "--array", "-o", "%F_%K %U").splitlines()
    return {element: names[number] for element, number in map(str.split, lines)}


def switch(team: TeamLab, state: str) -> None:
    """UP: what waits starts; DOWN: nothing starts."""
    team.command("scontrol", "update", "PartitionName=train", f"State={state}")


def entries(root: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield all paths below a root and itself, with mode and group."""
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            status = path.stat()
            yield path, stat.S_IMODE(status.st_mode), status.st_gid


def closed_to_the_group(root: Path) -> list[str]:
    """Name what the group cannot read and write, or what is not the group's."""
    return [
        f"{mode:o} {group} {path}"
        for path, mode, group in entries(root)
        if group != GROUP_ID or mode & 0o060 != 0o060 or (path.is_dir() and mode & 0o2010 != 0o2010)
    ]


def open_to_others(root: Path) -> list[str]:
    """Name what anybody but its owner may write."""
    return [f"{mode:o} {path}" for path, mode, _ in entries(root) if mode & 0o022]


def steps_before(study: Study, kinds: tuple[str, ...]) -> list[str]:
    from study.steps import steps_of

    return [step.name for step in steps_of(study) if step.kind in kinds]


def test_a_study_that_two_members_submit_cancel_and_finish(team, base):
    """alice's umask closes nothing, bob's opens nothing to the world."""
    study = short_study("ours", runs=2)
    site_toml, site = write_study(base, study, group=GROUP)
    directory, root = site.root / study.name, ("--root", str(site.root))
    text = steps_before(study, ("corpus", "prepare", "tokenizer"))
    switch(team, "DOWN")

    def command(user: str, *words: str) -> str:
        done = team.python(user, "-m", "slurm", *words, umask=0o022 if user == "alice" else 0o077)
        return f"{done.returncode} {done.stdout}{done.stderr}"

    words = ("-c", SUBMIT, str(base / "study"), str(site_toml), *text)
    done = team.python("alice", *words)
    assert done.stdout == '{"train": 2}\n', done.stderr
    first = existing_submission(directory).jobs[0]
    assert (first.user, set(jobs(team).values())) == ("alice", {"alice"})
    assert closed_to_the_group(site.root) == []

    # carol is no member
    assert "2 error: carol is not in the group quantteam of " in command(
        "carol", "unexclude", "ours", "node9", *root
    )
    assert "2 error: carol is not in the group" in command(
        "carol", "submit", "ours", "--site", str(site_toml)
    )

    # alice's machine died before it heard of the job: bob finds it
    lines = (directory / SLURM / JOBS_JSONL).read_text().splitlines(keepends=True)
    (directory / SLURM / JOBS_JSONL).write_text("".join(lines[:-1]))
    assert "0 nothing to submit" in command("bob", "submit", "ours", "--site", str(site_toml))
    assert existing_submission(directory).jobs == [first]

    # what waits of others stays as it is
    slower = write_site(
        base / "slower.toml",
        json.loads(
            changed(site, resources={"train": {"time": "50"}}).model_dump_json(exclude_none=True)
        ),
    )
    said = command("bob", "submit", "ours", "--site", str(slower))
    assert "note: jobs of alice wait as they are; have alice submit" in said
    assert set(jobs(team)) == {f"{first.id}_0", f"{first.id}_1"}

    # a file that alice closed by hand, and the command that opens it
    closed = directory / SLURM / JOBS_JSONL
    closed.chmod(0o600)
    said = command("bob", "status", "ours", *root)
    assert said.startswith(f"2 error: {closed} is closed to the group {GROUP}; have alice run: ")
    assert team.as_user("alice", "bash", "-c", said.partition(" run: ")[2]).returncode == 0
    assert "0 ours: " in command("bob", "status", "ours", *root)

    # bob cancels: alice's jobs stay in the queue, and leave when they start
    said = command("bob", "cancel", "ours", *root)
    assert "0 elements cancelled\njobs of alice are left: what waits leaves when it starts" in said
    assert len(jobs(team)) == 2
    assert "2 elements cancelled" in command("alice", "cancel", "ours", *root)
    assert "0 elements cancelled\n" in command("bob", "cancel", "ours", *root)
    assert "train  2 elements" in command("alice", "retry", "ours", *root)
    run = study.runs[1].name
    assert "0 elements cancelled\njobs of alice are left" in command(
        "bob", "cancel", "ours", run, *root
    )
    second = existing_submission(directory).jobs[-1]
    switch(team, "UP")
    left = log_of(directory, "train", second.element_id(1))
    wait_until(lambda: left.exists() and "leaves" in left.read_text(), "alice's job leaves")
    said = command("bob", "retry", "ours", *root)
    assert "can start now" in said, said
    wait_until((directory / "steps/mirror.json").exists, "the last step")
    wait_until(lambda: not jobs(team), "the last job")
    users = {job.user for job in existing_submission(directory).jobs}
    owners = {path.stat().st_uid for path in directory.rglob("*")} - {0}
    assert (users, owners) == (set(MEMBERS), set(MEMBERS.values()))
    assert closed_to_the_group(site.root) == []
    for name in ("submission.json", "scripts/site.json", "scripts/train.sh"):
        assert (directory / SLURM / name).stat().st_mode & 0o777 == 0o660


def test_a_study_of_one_user_is_writable_for_nobody_else(team, base):
    """carol's umask would let everybody write."""
    study = short_study("mine", runs=1)
    site_toml, site = write_study(base, study)
    shutil.chown(base, USERS["carol"])
    base.chmod(0o2775)
    switch(team, "UP")
    kinds = ("corpus", "prepare", "tokenizer", "train", "export", "quantize")
    words = ("-c", SUBMIT, str(base / "study"), str(site_toml), *steps_before(study, kinds))
    done = team.python("carol", *words, umask=0)
    assert done.stdout == '{"final": 1}\n', done.stderr
    wait_until((site.root / "mine/steps/mirror.json").exists, "the last step")
    wait_until(lambda: not jobs(team), "the last job")
    assert open_to_others(site.root) == []
    private = site.root / "mine" / SLURM / "submission.json"
    assert private.stat().st_mode & 0o777 == 0o600


@pytest.mark.stress
def test_a_real_study_passes_from_member_to_member(team, base):
    """All files of training, measurements, report and store; and the same study of one user."""
    study = small_study("real", steps=40, runs=1, restart_every=4, curved=True)
    site_toml, site = write_study(base, study, group=GROUP)
    site = changed(site, python=Path(interpreter()))
    write_site(site_toml, json.loads(site.model_dump_json(exclude_none=True)))
    directory, root = site.root / study.name, ("--root", str(site.root))
    (run,) = study.runs
    switch(team, "UP")

    done = team.python("alice", "-c", SUBMIT, str(base / "study"), str(site_toml), umask=0o077)
    assert done.stdout == '{"text": 1}\n', done.stderr
    metrics = directory / run.name / "metrics.jsonl"

    def trains() -> bool:
        return metrics.exists() and metrics.read_text().count('"grad_norm"') > 12

    wait_until(trains, "alice's training")
    stop = ("slurm", "cancel", "real", run.name, "--after-checkpoint", *root)
    done = team.python("bob", "-m", *stop, umask=0o077)
    assert f"{run.name} stops after its next step" in done.stdout, done.stderr
    wait_until(lambda: not jobs(team), "alice's jobs")
    assert closed_to_the_group(site.root) == []

    done = team.python("bob", "-m", "slurm", "retry", "real", *root, umask=0o077)
    assert "can start now" in done.stdout, done.stderr
    wait_until((directory / "steps/mirror.json").exists, "the last step")
    wait_until(lambda: not jobs(team), "the last job")
    assert {job.user for job in existing_submission(directory).jobs} == set(MEMBERS)
    for name in ("collect", "report", "mirror"):
        done = team.python("alice", "-m", "study", name, "real", *root, umask=0o077)
        assert done.returncode == 0, done.stderr
    assert closed_to_the_group(site.root) == []
    owners = {path.stat().st_uid for path in site.root.rglob("*")}
    print(f"{sum(1 for _ in entries(site.root))} files and directories of {owners}")

    alone = base / "alone"
    save_study(alone / "real", study)
    for path in (alone, *alone.rglob("*")):
        shutil.chown(path, USERS["carol"])
    done = team.python("carol", "-m", "study", "run", "real", "--root", str(alone), umask=0)
    assert done.returncode == 0, done.stderr[-2000:]
    assert open_to_others(alone) == []
    print(f"{sum(1 for _ in entries(alone))} files and directories of one user")
