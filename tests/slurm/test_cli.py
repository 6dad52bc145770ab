"""`python -m slurm` as a user meets it, without SLURM and on a real one."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slurm import cluster
from slurm.__main__ import app
from slurm.site import KINDS, load_site
from slurm.submission.record import existing_submission
from slurm.submission.submit import submit
from slurm.submission.survey import survey
from study.definition import load_study, save_study
from study.text_kinds import USES
from tests.interpreter import interpreter
from tests.runs import PROJECT, called, execute, succeed, write_program
from tests.slurm.studies import in_state, make, submitted, watched_study, write_log, write_site
from tests.waiting import wait_until

HOSTILE = ["../x", "small/../small", "a b", "$(touch X)", "`touch X`", "x; touch X"]
HOSTILE += ["small\n", "small\ntouch X", "", "*", "-"]


@pytest.fixture
def command(capsys):
    """`command(words...)`: exit code, standard output and error of one command line."""

    def run(*words: str) -> tuple[int, str, str]:
        code = called(app, "slurm", *words)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def no_slurm(tmp_path, monkeypatch):
    """SLURM's commands are programs that leave a trace; the file that they leave it in."""
    programs, trace = tmp_path / "bin", tmp_path / "trace"
    for name in ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo", "touch"):
        write_program(programs / name, f"#!/bin/bash\necho $0 >> {trace}\nexit 1\n")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return trace


def site_file(
    path: Path, root: Path, python: Path | str = sys.executable, time: str = "10"
) -> Path:
    """A site whose jobs run `python`."""
    content = {"root": str(root), "python": str(python), "disk": {"reserve_gb": 0}}
    job = {"ranks_per_node": 1, "mem": "100M", "time": time}
    content |= {"resources": dict.fromkeys(KINDS, job)}
    return write_site(path, content | {"limits": {"stop_seconds_before_limit": 60}})


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused_in_one_line_and_nothing_runs(tmp_path, name, command, no_slurm):
    root = tmp_path / "root"
    submitted(root / "small", watched_study())
    site = str(site_file(tmp_path / "site.toml", root))
    before = sorted(tmp_path.rglob("*"))
    below = ("--root", str(root), "--")
    lines = [
        *((verb, *below, name) for verb in ("status", "logs", "cancel", "retry")),
        *(("submit", "--site", site, *options, "--", name) for options in ((), ("--dry-run",))),
        *((verb, *below, "small", name) for verb in ("logs", "cancel")),
        ("logs", *below, "small", f"train/{name}"),
    ]
    for words in lines:
        code, out, err = command(*words)
        assert (code, out, err.count("\n"), err[:7]) == (2, "", 1, "error: "), words
    assert not no_slurm.exists()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["status", "absent"], "nothing of runs/absent was submitted"),
        (["retry", "small", "--site", "absent.toml"], "absent.toml does not exist"),
        (["retry", "absent"], "nothing of runs/absent was submitted"),
        (["submit", "tinny", "--site", "SITE"], "no recipe 'tinny'"),
        (["submit", "trajectory", "--site", "SITE", "--set", "every=2"], "give --set source="),
    ],
)
def test_bad_input_ends_with_one_line_and_code_2(tmp_path, words, message, command, no_slurm):
    site = str(site_file(tmp_path / "site.toml", tmp_path / "root"))
    code, out, err = command(*(site if word == "SITE" else word for word in words))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not no_slurm.exists()


def test_help_has_an_example_of_every_command(command):
    assert " job " not in command("--help")[1]  # for job scripts alone
    for verb in ("submit", "status", "logs", "cancel", "retry", "unexclude", "run", "job"):
        assert f"Example: python -m slurm {verb} " in " ".join(command(verb, "--help")[1].split())


def test_a_dry_run_prints_every_script_asks_nothing_and_leaves_nothing(tmp_path, command, no_slurm):
    site = str(site_file(tmp_path / "site.toml", tmp_path / "root"))
    code, out, err = command("submit", "tiny", "--profile", "smoke", "--site", site, "--dry-run")
    assert code == 0
    assert not (tmp_path / "root").exists()
    assert not no_slurm.exists()
    sizes = [int(last) + 1 for last in re.findall(r"--array=0(?:-(\d+))?", out) if last]
    assert err == (
        "SLURM was not asked whether it takes these scripts, nor its MaxArraySize: submit cuts"
        f" arrays there; the largest array has {max(sizes)} elements\n"
    )
    scripts = [part for part in out.split("### sbatch ") if part]
    assert {"train", "quantize-1", "final"} <= {
        Path(part.splitlines()[0].split()[-1]).stem for part in scripts
    }
    for part in scripts:  # whole: a shell accepts each
        script = part.split("\n", 1)[1]
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """ROOT of a submitted study: one training failed, one runs, by a SLURM that is not there."""
    submission = submitted(tmp_path / "small", watched_study())
    names = submission.element_ids
    states = dict.fromkeys(names.values(), in_state("PENDING", "Priority"))
    states |= {
        names["train", 0]: in_state("FAILED", "None", code="1:0"),
        names["train", 1]: in_state("RUNNING"),
    }
    monkeypatch.setattr(cluster, "states", lambda _ids: states)
    lines = [f"line {number}" for number in range(300)]
    write_log(tmp_path / "small", submission, "train", 0, *lines, "error: no")
    write_log(tmp_path / "small", submission, "train", 1, "fine")
    return tmp_path


def test_logs(watched, command):
    root, logs = ("--root", str(watched)), watched / "small/slurm/logs"
    listed = f"failed train/0 {logs}/train-13_0.log\nrunning train/1 {logs}/train-13_1.log\n"
    assert command("logs", "small", *root) == (0, listed, "")
    by_array = listed.replace("failed ", "").replace("running ", "")
    assert command("logs", "small", "train", *root)[1] == by_array
    code, out, err = command("logs", "small", "train/0", *root)
    assert (code, err) == (0, f"==> {logs}/train-13_0.log <==\n")
    assert out.splitlines() == [*(f"line {number}" for number in range(101, 300)), "error: no"]
    by_step = command("logs", "small", "train-lr3e-3", *root)[1]
    assert by_step == out
    code, out, err = command("logs", "small", "train-lr3e3", *root)
    assert (code, out) == (2, "")
    assert "did you mean train-lr3e-3?" in err
    assert "has no log, nothing of it has started" in command("logs", "small", "final", *root)[2]
    (logs / "train-13_0.log").write_bytes(b"\xff" + b"x" * 300_000 + b"\nlast")
    shown = command("logs", "small", "train/0", *root)[1]
    assert shown == "\ufffd" + "x" * 300_000 + "\nlast"


def test_a_study_of_another_place_is_not_retried_there(watched, command, tmp_path):
    (watched / "moved").mkdir()
    (watched / "small").rename(watched / "moved/small")
    code, _, err = command("retry", "small", "--root", str(watched / "moved"))
    assert (code, err.count("\n")) == (2, 1)
    assert "is not small below the site's root" in err


def in_queue(study_dir: Path) -> list[str]:
    """The arrays whose elements SLURM has, one name for each."""
    now = survey(study_dir, existing_submission(study_dir), load_study(study_dir))
    return sorted(array for array, _ in now.active)


def test_submit_status_cancel_and_retry_on_a_real_slurm(lab, tmp_path, command):
    root, study = tmp_path / "root", watched_study()
    study_dir = root / study.name
    save_study(study_dir, study)
    # Stands for the interpreter of jobs: every one fails before it could record that it started.
    out_of_luck = "#!/bin/bash\necho 'error: out of luck; add memory'\nexit 3\n"
    python = write_program(tmp_path / "python", out_of_luck)
    site = site_file(tmp_path / "site.toml", root, python)
    for _ in range(3):
        code, out, err = command("submit", "small", "--site", str(site))
        assert (code, err) == (0, "")
        assert "text  1 element\n" in out
        wait_until(lambda: not in_queue(study_dir), "the corpus failed")
    watch = out.splitlines()[0].partition("watch with '")[2].rstrip("'")
    assert shlex.split(watch)[3:] == ["status", "small", "--root", str(root)]
    code, out, err = command("submit", "small", "--site", str(site))
    assert (code, err) == (0, "")
    assert "text" not in out, "three starts without progress are enough"
    wait_until(lambda: not in_queue(study_dir), "what needs no text failed")
    out = command(*shlex.split(watch)[3:])[1]
    log = study_dir / f"slurm/logs/text-{existing_submission(study_dir).element_ids['text', 0]}.log"
    assert ": FAILED, NonZeroExitCode, exit code 3:0 on node" in out
    assert f"  log {log}\n  error: out of luck; add memory\n" in out
    assert "lr3e-2     export     0/2   ..           2 waiting" in out
    assert command("logs", "small", "text", "--root", str(root))[1].endswith(
        "error: out of luck; add memory\n"
    )

    texts = [f"prepare-{use}" for use in USES]
    make(study_dir, study, ["corpus", *texts, "train-lr3e-2"])
    python.write_text("#!/bin/bash\nexec sleep 300\n")  # the next jobs last
    site_file(site, root, python, time="20")
    code, out, err = command("retry", "small", "--site", str(site))
    assert (code, err) == (0, "")
    assert out.splitlines()[1:3] == ["train   1 element", "export  2 elements"]
    ids = existing_submission(study_dir).element_ids
    assert "TimeLimit=00:20:00" in lab.command("scontrol", "show", "job", ids["train", 0])

    train = ids["train", 0]
    wait_until(lambda: cluster.states([train])[train].state == "RUNNING", "training runs")
    assert command("cancel", "small", "export", "--root", str(root))[1] == "2 elements cancelled\n"
    wait_until(lambda: in_queue(study_dir) == ["train"], "exports cancelled")
    out = command("cancel", "small", "lr3e-3", "--root", str(root), "--after-checkpoint")[1]
    assert out == "0 elements cancelled\nlr3e-3 stops after its next step, with a checkpoint\n"
    assert (study_dir / "lr3e-3/STOP").read_bytes() == b""
    assert cluster.states([train])[train].state == "RUNNING"
    files = sorted(path for path in study_dir.rglob("*.json") if path.parent.name != "slurm")
    assert command("cancel", "small", "--root", str(root))[1] == "1 element cancelled\n"
    wait_until(lambda: not in_queue(study_dir), "all cancelled")
    assert command("cancel", "small", "--root", str(root))[1] == "0 elements cancelled\n"
    assert command("submit", "small", "--site", str(site))[1].startswith("nothing to submit")
    kept = sorted(path for path in study_dir.rglob("*.json") if path.parent.name != "slurm")
    assert kept == files
    assert load_study(study_dir) == study


def test_a_step_in_front_of_its_user_runs_on_one_node_of_salloc(lab, tmp_path, command):
    root, study = tmp_path / "root", watched_study()
    site = load_site(site_file(tmp_path / "site.toml", root, interpreter()))
    root.mkdir()
    lab.command("scontrol", "update", "PartitionName=train", "State=DOWN")
    try:
        submit(study, site)
    finally:
        lab.command("scancel", "--user=root")
        lab.command("scontrol", "update", "PartitionName=train", "State=UP")
    code, _, err = command("run", "small", "corpus", "--root", str(root))
    assert (code, "this is not a job; give --interactive" in err) == (2, True)
    assert "is not a step of" in command("run", "small", "corpse", "--root", str(root))[2]
    words = [interpreter(), "-m", "slurm", "run", "small", "corpus", "--root", str(root)]
    done = succeed(execute([*words, "--interactive"], cwd=PROJECT))
    assert "salloc: Granted job allocation" in done.stderr
    assert (root / "small/steps/corpus.json").exists()
