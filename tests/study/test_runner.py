"""The runner against real processes: order, skipping, failures, slots, and what SIGKILL leaves
behind.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from base.errors import UserError
from study.machine.hardware import Hardware
from study.pipeline import warm
from study.pipeline.ledger import Ledger
from study.pipeline.processes import Processes
from study.pipeline.runner import HANGS, Runner, StepError, child_environment, locked
from study.step import Machine, Step
from tests.interpreter import interpreter, real_interpreter
from tests.runs import PROJECT
from tests.study.running import noting, order, python_step, run_steps
from tests.waiting import HANG_SECONDS, interruptible, wait_until


def chain(**settings: str) -> list[Step]:
    """first -> second -> third, and one beside them; keyword arguments set a step's settings."""
    after = {"first": (), "second": ("first",), "third": ("second",), "beside": ()}
    return [
        python_step(name, noting(name), after=before, settings=settings.get(name, ""))
        for name, before in after.items()
    ]


def test_steps_run_after_what_they_read_and_only_once(tmp_path):
    run_steps(tmp_path, chain(), 2)
    ran = order(tmp_path)
    assert sorted(ran) == ["beside", "first", "second", "third"]
    assert ran.index("first") < ran.index("second") < ran.index("third")
    run_steps(tmp_path, chain(), 2)
    assert order(tmp_path) == ran


def test_a_changed_setting_reruns_its_step_and_what_reads_a_changed_output(tmp_path):
    def steps(text: str) -> list[Step]:
        code = noting("first", f"(study / 'first.txt').write_text({text})")
        return [python_step("first", code, ("first.txt", "first.json")), *chain()[1:]]

    run_steps(tmp_path, steps("'a'"))
    # the same outputs from another command: what reads them has nothing new to read
    run_steps(tmp_path, steps("'' + 'a'"))
    assert order(tmp_path)[4:] == ["first"]
    run_steps(tmp_path, steps("'b'"))
    # second's output is the same as before: third reads nothing new
    assert order(tmp_path)[5:] == ["first", "second"]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("torn")])
def test_an_output_that_is_missing_or_edited_is_made_again(tmp_path, damage):
    run_steps(tmp_path, chain())
    damage(tmp_path / "second.json")
    run_steps(tmp_path, chain())
    assert order(tmp_path)[4:] == ["second"], "what third reads is again what it was"
    assert (tmp_path / "second.json").read_text() == "{}"


def test_an_unfinished_or_outdated_output_cannot_pass_for_a_new_one(tmp_path):
    run_steps(tmp_path, chain())
    broken = [*chain()[:3], python_step("beside", "raise SystemExit(3)")]
    with pytest.raises(StepError, match="beside"):
        run_steps(tmp_path, broken)
    assert not (tmp_path / "beside.json").exists()
    (tmp_path / "beside.json").write_text("{}")  # by a step that died before it was recorded
    run_steps(tmp_path, chain())
    assert order(tmp_path)[4:] == ["beside"]


def test_a_moved_study_is_complete_where_it_lies_now(tmp_path):
    run_steps(tmp_path / "here" / "study", chain())
    (tmp_path / "there").mkdir()
    shutil.move(tmp_path / "here" / "study", tmp_path / "there" / "study")
    moved = tmp_path / "there" / "study"
    run_steps(moved, chain())
    assert len(order(moved)) == 4
    assert Ledger(moved, chain()).complete_steps() == {"first", "second", "third", "beside"}
    assert not [file for file in moved.glob("steps/*") if str(tmp_path) in file.read_text()]


def test_slots_are_never_exceeded_and_all_are_used(tmp_path):
    """The first of the small steps continues when a second one is at work, too."""
    inside = (
        "started = time.monotonic()\n"
        "open(study / f'small-{os.getpid()}', 'w').close() if SLOTS == 1 else None\n"
        "while SLOTS == 1 and len(list(study.glob('small-*'))) < 2: time.sleep(0.01)\n"
        "open(study / f'span-{os.getpid()}', 'w').write(f'{started} {time.monotonic()} {SLOTS}')"
    )
    steps = [
        python_step(
            f"s{index}", noting(f"s{index}", inside.replace("SLOTS", str(slots))), slots=slots
        )
        for index, slots in enumerate((1, 2, 1, 1, 2, 9))
    ]
    run_steps(tmp_path, steps, 2)
    spans = [list(map(float, path.read_text().split())) for path in tmp_path.glob("span-*")]
    assert len(spans) == 6
    used = [
        sum(min(slots, 2) for start, end, slots in spans if start <= moment < end)
        for moment, _, _ in spans
    ]  # usage can only rise where a step starts
    assert max(used) == 2
    assert sum(slots == 1 for _, _, slots in spans) == 3


def test_no_gpu_is_given_to_two_steps_at_once_and_each_sees_its_own_alone(tmp_path):
    """Every step takes its GPUs' files for itself; one that is taken already would be shared."""
    inside = (
        "mine = [study / f'gpu{name}' for name in os.environ['CUDA_VISIBLE_DEVICES'].split(',') if"
        " name]\nfor gpu in mine: gpu.open('x').close()\ntime.sleep(0.2)\nfor gpu in mine:"
        " gpu.unlink()\n(study / f'seen-{os.getpid()}').write_text(f\"{len(mine)}"
        " {os.environ['CUDA_DEVICE_ORDER']}\")"
    )
    gpus = {f"s{index}": count for index, count in enumerate((1, 2, 0, 3, 1, 1, 2))}
    steps = [python_step(name, noting(name, inside)) for name in gpus]
    hardware = Hardware(8, ("0", "4", "5"), "h100", 1)
    with locked(tmp_path) as lock_fd:
        machine_of = lambda step: Machine(device="cuda", gpus=gpus[step.name])  # noqa: E731
        Runner(tmp_path, steps, hardware, lock_fd, machine_of).run()
    seen = sorted(path.read_text() for path in tmp_path.glob("seen-*"))
    assert seen == sorted(f"{count} PCI_BUS_ID" for count in gpus.values())
    assert not list(tmp_path.glob("gpu*"))


def test_a_failed_step_is_named_with_its_log_and_its_own_words(tmp_path):
    code = """
import sys
print('error: first words', flush=True)
print('error: the file is torn; make it again', file=sys.stderr, flush=True)
print('bye')
sys.exit(2)
"""
    steps = [
        python_step("bad", code),
        python_step("reads-bad", noting("reads-bad"), after=("bad",)),
        python_step("good", noting("good")),
    ]
    with pytest.raises(UserError) as caught:
        run_steps(tmp_path, steps)
    message = str(caught.value)
    assert "bad" in message
    assert message.endswith("error: the file is torn; make it again")
    assert str(tmp_path / "logs" / "bad.log") in message
    assert "\n" not in message
    assert order(tmp_path) == ["good"]  # what does not depend on it still ran, what does did not


def test_an_error_of_an_earlier_attempt_is_not_reported_again(tmp_path):
    with pytest.raises(UserError):
        run_steps(
            tmp_path, [python_step("bad", "print('error: old'); raise SystemExit(2)")], workers=1
        )
    with pytest.raises(StepError, match="status 7"):
        run_steps(tmp_path, [python_step("bad", "raise SystemExit(7)")])


def test_a_refusal_whose_line_the_log_did_not_take_is_said(tmp_path):
    with pytest.raises(StepError, match="its error is not in the log; look at space and quota"):
        run_steps(tmp_path, [python_step("first", "raise SystemExit(2)")])


def test_success_without_the_outputs_is_a_failure(tmp_path):
    with pytest.raises(StepError, match=r"ended without lazy\.json"):
        run_steps(tmp_path, [python_step("lazy", "pass")])


def test_a_resuming_step_keeps_its_own_unfinished_outputs(tmp_path):
    code = (
        "import sys, pathlib; p = pathlib.Path(sys.argv[1]) / 'one'; p.write_text(p.read_text() +"
        " 'x')"
    )
    (tmp_path / "one").write_text("x")
    run_steps(tmp_path, [python_step("train", code, ("one",), resumes=True)])
    assert (tmp_path / "one").read_text() == "xx"


HANGING = """
import sys, pathlib
starts = pathlib.Path(sys.argv[1]) / 'starts'
starts.write_text((starts.read_text() if starts.exists() else '') + 'x')
if len(starts.read_text()) <= {hangs}:
    print('error: hung: no step for 600 s; rank 1')
    sys.exit(1)
(pathlib.Path(sys.argv[1]) / 'last').write_text('')
"""


@pytest.mark.parametrize(("hangs", "starts"), [(HANGS, HANGS + 1), (HANGS + 5, HANGS + 1)])
def test_a_training_that_hung_is_resumed_so_many_times(tmp_path, hangs, starts):
    step = python_step("train", HANGING.format(hangs=hangs), ("last",), resumes=True)
    if hangs <= HANGS:
        run_steps(tmp_path, [step])
    else:
        with pytest.raises(UserError, match="hung: no step for 600 s; rank 1"):
            run_steps(tmp_path, [step])
    assert len((tmp_path / "starts").read_text()) == starts


# The grandchild lives in a session of its own, as torchrun's workers do, and shows by a growing
# file that it works.
STUBBORN = """
import subprocess, sys, pathlib, time, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
study = pathlib.Path(sys.argv[1])
beat = "import time\\nwhile True: open(%r, 'a').write('.'); time.sleep(0.02)" % str(study / "beats")
if not (study / "beats").exists():
    subprocess.Popen([sys.executable, "-I", "-S", "-c", beat], start_new_session=True)
    time.sleep(600)
(study / "stubborn.json").write_text("{}")
"""


def stubborn() -> list[Step]:
    """One step that ends, and one whose grandchild is at work."""
    return [*chain()[:1], python_step("stubborn", STUBBORN, after=("first",))]


def beats(directory: Path) -> int:
    path = directory / "beats"
    return path.stat().st_size if path.exists() else 0


def at_work(directory: Path) -> list[str]:
    """Command lines of processes that write beats."""
    lines = (
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    )
    return [line for line in lines if str(directory / "beats") in line]


def start_runner(directory: Path) -> subprocess.Popen:
    """A runner of the stubborn steps, in a process group of its own, when both have begun."""
    code = (
        "from pathlib import Path\nfrom tests.study.test_runner import run_steps, stubborn\n"
        f"run_steps(Path({str(directory)!r}), stubborn())\n"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=PROJECT,
        start_new_session=True,
        stderr=subprocess.PIPE,
        preexec_fn=interruptible,
    )
    wait_until(lambda: beats(directory) >= 5, "a grandchild at work", runner)
    assert len(at_work(directory)) == 1
    return runner


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_killed_runner_leaves_nothing_at_work_and_is_continued(tmp_path, whole_group):
    runner = start_runner(tmp_path)
    if whole_group:
        os.killpg(runner.pid, signal.SIGKILL)
    else:
        runner.kill()
    runner.wait()
    steps = stubborn()
    run_steps(tmp_path, steps)  # waits for the orphans' end, then continues
    assert not at_work(tmp_path)
    assert order(tmp_path) == ["first"]
    assert Ledger(tmp_path, steps).complete_steps() == {"first", "stubborn"}


def test_two_runners_do_not_share_a_study_and_an_interrupt_ends_its_steps(tmp_path):
    runner = start_runner(tmp_path)
    with pytest.raises(UserError, match="another 'study run'"):
        run_steps(tmp_path, chain())
    runner.send_signal(signal.SIGINT)
    runner.wait(HANG_SECONDS)
    assert not at_work(tmp_path)  # it returned only when all was over
    assert not (tmp_path / "steps" / "stubborn.json").exists()


def test_a_step_that_is_not_complete_says_why(tmp_path):
    def reasons(directory: Path, **settings: str) -> dict[str, str]:
        ledger = Ledger(directory, chain(**settings))
        by_name = {name: ledger.reason(step) for name, step in ledger.steps.items()}
        return {name: reason for name, reason in by_name.items() if reason}

    study = tmp_path / "study"
    assert set(reasons(study).values()) == {"not run yet"}
    run_steps(study, chain())
    assert reasons(study) == {}
    assert reasons(study, second="other") == {"second": "its settings changed"}
    (study / "first.json").write_text("torn")
    assert reasons(study) == {
        "first": f"{study}/first.json is not what the step left; 'python -m study run' makes it again",
        "second": "first.json, which it reads, has changed",
    }
    (study / "first.json").write_text("{}")
    moved = shutil.copytree(study, tmp_path / "moved")
    (moved / "beside.json").unlink()
    assert reasons(moved) == {
        "beside": f"{moved}/beside.json is missing; copy it from where the study was made, or run"
    }


SLEEPING = "import subprocess; subprocess.run(['sleep', '600.25'])"  # with a child of its own


def environment() -> dict[str, str]:
    """That of the steps, the same throughout a test: pytest names its phase there."""
    return {
        name: value
        for name, value in child_environment("").items()
        if name != "PYTEST_CURRENT_TEST"
    }


def sleeping() -> list[psutil.Process]:
    candidates = psutil.process_iter(["cmdline"])
    return [process for process in candidates if "600.25" in (process.info["cmdline"] or ())]


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """Processes of this test; `timeit` is a command that runs a line of Python."""
    monkeypatch.setattr(sys, "executable", interpreter())
    monkeypatch.setattr(warm, "COMMANDS", {"ckpt_tools", "timeit"})
    with (tmp_path / "lock").open("a") as lock, Processes(PROJECT, lock.fileno()) as processes:
        processes.warm_up(environment())
        wait_until(processes.is_warm, "the imports")
        yield processes


def outcome(
    processes: Processes, log: Path, variables: dict[str, str], *, is_fork: bool
) -> tuple[int, str]:
    command = [sys.executable, "-m", "ckpt_tools", "inspect", "nowhere"]
    with log.open("wb") as output:
        process = processes.start(command, output, variables)
    assert (process._process is None) == is_fork
    return process.wait(), log.read_text()


def test_a_fork_ends_as_a_new_interpreter_does(processes, tmp_path):
    forked = outcome(processes, tmp_path / "forked.log", environment(), is_fork=True)
    other = environment() | {"ANOTHER": "environment"}  # which no fork can have
    assert forked == outcome(processes, tmp_path / "new.log", other, is_fork=False)
    assert forked[0] == 2
    assert forked[1].startswith("error: nowhere is not a directory")


@pytest.mark.parametrize("how", ["end", "kill"])
def test_a_fork_leaves_nothing_when_its_runner_ends_it_or_is_gone(processes, tmp_path, how):
    with (tmp_path / "log").open("wb") as output:
        command = [sys.executable, "-m", "timeit", SLEEPING]
        process = processes.start(command, output, environment())
    assert process._process is None, "a fork"
    wait_until(sleeping, "a child of the fork at work")
    if how == "end":
        process.end()
        assert process.wait()
    else:
        process.leash.close()  # as the end of the runner's process does
    wait_until(lambda: not sleeping(), "the end of all that the fork started")


@pytest.mark.stress
def test_the_process_that_forks_has_no_thread_but_an_allocators():
    program = (
        "import pathlib; from study.pipeline import warm; warm.import_all();"
        "tasks = pathlib.Path('/proc/self/task').iterdir();"
        "print(*((task / 'comm').read_text().strip() for task in list(tasks)))"
    )
    done = subprocess.run(
        [real_interpreter(), "-c", program],
        env=environment(),
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.split()) == ["jemalloc_bg_thd", "python"]
