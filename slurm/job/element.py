"""One element of an array: its steps, each recorded when complete, and what comes after it.

The batch script starts this on the first node of the job. Steps are started with srun; a file,
which the script's trap makes when SLURM sends a signal, asks to stop. Training stops at a
checkpoint, what measures is ended and starts anew. At its end an element submits what can start
then: what reads its files, or itself again.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from base.cli import line_of
from base.errors import UserError
from slurm import cluster
from slurm.job import health
from slurm.job.rendezvous import torchrun_of_nodes
from slurm.job.supervision import (
    POLL_SECONDS,
    Advancing,
    HangWatch,
    advance_at_end,
    ask_to_stop,
    end,
    forget_earlier_stops,
    say,
    show_life,
    stopped_by,
    wait_for,
)
from slurm.submission.advance import adopt
from slurm.submission.arrays import FINAL
from slurm.submission.record import (
    FAULTS,
    SLURM,
    Element,
    Ending,
    ending_of,
    exclude,
    existing_submission,
    log_of,
    position_of,
    record_end,
    record_killed,
    record_start,
    restarts,
    starts_of,
    submitting,
)
from slurm.submission.script import STOPS, allocation_options, on_every_node, srun_prefix
from study.definition import load_study
from study.machine.needs import Needs
from study.pipeline.ledger import Ledger
from study.step import (
    COMMAND_PROMPT,
    Machine,
    Step,
    batches,
    resolve,
    shared,
    shown,
    torchrun,
)
from study.steps import ONLINE, steps_of
from train.run.directory import RunDirectory
from train.run.environment import OWNER

RESTART_SECONDS = 30.0  # before a second restart in place: what failed may recover
# SLURM's signal before the time limit may come so much earlier than it was told (sbatch, --signal).
EARLY_SECONDS = 60
PAUSE_SECONDS = 30.0  # after a failure: a full disk or a lost mount may recover
CACHED_SECONDS = 90.0  # a node of NFS knows for a minute that a name is not there


class UnfitNodesError(Exception):
    """Nodes of this job are not fit; the element has to start on others."""


class ElementStart:
    """One start of one element, on the nodes of this job."""

    def __init__(self, study_dir: Path, array: str, index: int, stop_file: Path, job: str) -> None:
        self.study_dir, self.stop_file, self.job = study_dir, stop_file, job
        submission = existing_submission(study_dir)
        arrays = submission.job_arrays
        if array not in arrays or index >= len(arrays[array].elements):
            raise UserError(f"{study_dir} has no element {array}/{index}; submit it again")
        self.key, self.array, self.site = (array, index), arrays[array], submission.site
        self.resources = self.site.resources_of(self.array.kind)
        self.study = load_study(study_dir)
        self.ledger = Ledger(study_dir, steps_of(self.study))
        self.needs = Needs(self.study, self.resources.hardware)
        self.start = f"{job}.{restarts()}"
        names = self.array.elements[index]
        if unknown := [name for name in names if name not in self.ledger.steps]:
            raise UserError(f"{study_dir} has no step {unknown[0]!r:.80}; submit it again")
        self.steps = [self.ledger.steps[name] for name in names]
        self.nodes = cluster.expand(os.environ["SLURM_JOB_NODELIST"])
        self.everywhere = on_every_node(len(self.nodes))

    def position(self) -> int:
        """Return how far the element's work has come."""
        return position_of(self.study_dir, self.steps)

    def outputs(self, step: Step) -> list[str]:
        """Return the names of what a step has made, by one listing of a directory if it trains."""
        if step.kind != "train":
            return [name for name in step.outputs if (self.study_dir / name).is_file()]
        checkpoints = RunDirectory(self.study_dir / step.run).checkpoints
        return sorted(path.name for path in checkpoints.iterdir()) if checkpoints.exists() else []

    def run(self) -> Ending:
        """Run what is not complete; return how that ended."""
        open_steps = self.open_steps()
        if not open_steps:
            say("complete already")
            return "complete"
        forget_earlier_stops(self.study_dir, self.steps)
        began_at = self.position()
        self.record_earlier()
        record_start(self.study_dir, self.key, self.job, len(self.nodes), began_at)
        # Holds where an exception passes through: the record then says that this start failed.
        ending: Ending = "failed"
        try:
            self.unpack_image()
            self.await_inputs(open_steps)
            run_steps = self.run_final if self.key[0] == FINAL else self.run_all
            ending = run_steps(open_steps)
            if ending == "asked" and self.met_time_limit() and self.position() <= began_at:
                ending = "time limit"
                say(f"error: {self.time_limit_in_words()}")
        except UnfitNodesError as error:
            say(str(error))
            ending = "unfit"
        finally:
            record_end(self.study_dir, self.key, self.job, ending)
        return ending

    def record_earlier(self) -> None:
        """Record of the job before this one, if it was killed, how it ended."""
        starts = starts_of(self.study_dir, self.key)
        if not starts or "ended" in starts[-1] or starts[-1]["job"] == self.job:
            return
        job, state = starts[-1]["job"], None
        with contextlib.suppress(UserError):  # SLURM does not answer, or not to this node
            state = cluster.states([job]).get(job)
        record_killed(self.study_dir, self.key, job, ending_of(state) or "failed")

    def met_time_limit(self) -> bool:
        """Return whether SLURM asked this start to stop because of its time limit."""
        if not self.stop_file.exists():
            return False
        notice = self.site.notice_seconds(self.array.kind) + EARLY_SECONDS
        # By time, not by signal: at some sites USR1 announces a preemption, too, and a limit below
        # the notice sends TERM. The file of a full disk is empty.
        ran_seconds = int(self.stop_file.read_text() or 0)
        return ran_seconds >= self.resources.time_seconds - notice

    def time_limit_in_words(self) -> str:
        """Return what the time limit ended, and what to do."""
        return (
            f"{self.open_steps()[0].name} made nothing within the time limit of"
            f" {self.resources.time}; raise resources.{self.array.kind}.time in the site file, then"
            f" 'python -m slurm retry {self.study.name} --site FILE'"
        )

    def open_steps(self) -> list[Step]:
        """Return the steps that are not complete, less those that are left out for good."""
        return [
            step
            for step in self.steps
            if not self.ledger.left_out(step) and not self.ledger.is_complete(step)
        ]

    def await_inputs(self, steps: Sequence[Step]) -> None:
        """Wait until this node sees what other nodes have made."""
        deadline = time.monotonic() + CACHED_SECONDS
        while self.unseen(steps) and not self.stop_file.exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def unseen(self, steps: Sequence[Step]) -> set[str]:
        """Return what steps read, other elements have made, and this node does not see."""
        made_here = {name for step in steps for name in step.outputs}
        missing = {name for step in steps for name in self.ledger.missing(step)} - made_here
        # Inputs of any other array were there when it was submitted.
        if self.key[0] != FINAL or not missing:
            return missing
        made = {name for name, step in self.ledger.steps.items() if missing & {*step.outputs}}
        for array in existing_submission(self.study_dir).arrays:
            for index, names in enumerate(array.elements):
                starts = starts_of(self.study_dir, (array.name, index)) if made & {*names} else []
                if starts and starts[-1].get("ended") == "complete":
                    return missing
        return set()

    def run_all(self, open_steps: list[Step]) -> Ending:
        """Run steps in batches, those that need a failed one left out."""
        limits = self.site.limits
        for batch in batches(open_steps, limits.checkpoints_per_job, limits.specs_per_job):
            missing = [name for step in batch for name in self.ledger.missing(step)]
            if missing:
                say(f"{batch[0].name} needs {missing[0]}, which is not there")
            else:
                self.run_batch(batch)
            # Another batch would be started only to be interrupted.
            if self.stop_file.exists():
                break
        if not self.open_steps():
            return "complete"
        # The stop of a user is final; after one by the job itself the element is submitted again.
        asked_by = [stopped_by(self.study_dir, step) for step in open_steps]
        if "user" in asked_by:
            say(f"stopped by a STOP file; 'python -m slurm retry {self.study.name}' resumes")
            return "stopped"
        return "asked" if self.stop_file.exists() or any(asked_by) else "failed"

    def run_final(self, steps: Sequence[Step]) -> Ending:
        """Make table, report and mirror of what there is; complete only if nothing is missing."""
        ending: Ending = "complete"
        for step in steps:
            missing = self.ledger.missing(step)
            if missing:
                say(f"{step.name}: {len(missing)} results are missing, such as {missing[0]}")
                ending = "partial"
            # With results missing it is executed but not recorded, so it stays open.
            status = self.execute([step]) if missing else self.run_batch([step])
            if status:
                return "asked" if self.stop_file.exists() else "failed"
        return ending

    def run_batch(self, batch: list[Step]) -> int:
        """Run one command and record its steps; return its exit status, not 0 if one is open."""
        # Before the command starts: if an input changes meanwhile, the record does not fit it.
        fingerprints = {step.name: self.ledger.fingerprint(step) for step in batch}
        for step in batch:
            self.ledger.prepare(step)
        began_at = time.monotonic()
        status = self.train(batch) if batch[0].kind == "train" else self.execute(batch)
        seconds = (time.monotonic() - began_at) / len(batch)
        # Outputs of a step that does not resume were removed before: those there now are new.
        complete = [
            step
            for step in batch
            if status == 0 or self.ledger.divergence(step) or not step.resumes
        ]
        complete = [step for step in complete if not self.ledger.fault(step)]
        for step in complete:
            self.ledger.finish(step, fingerprints[step.name], seconds)
        if len(complete) == len(batch):
            return 0
        left = next(step for step in batch if step not in complete)
        fault = self.ledger.fault(left)
        say(f"{left.name} is not complete, its command ended with status {status}: {fault}")
        # A command that ends with 0 and leaves an output out has failed, too.
        return status or 1

    def train(self, batch: list[Step]) -> int:
        """Train; resume on the same nodes after a failure, so often without a new checkpoint."""
        position, vain = self.position(), 0
        while True:
            # What an earlier attempt ended with says nothing of this one.
            RunDirectory(self.study_dir / batch[0].run).status_json.unlink(missing_ok=True)
            status = self.execute(batch)
            # The ledger caches which outputs never come, and this attempt may have diverged.
            self.ledger.look_again()
            diverged = self.ledger.divergence(batch[0])
            if diverged:
                say(diverged.words)
                return status
            if status == 0 or self.stop_file.exists() or stopped_by(self.study_dir, batch[0]):
                return status
            before, position = position, self.position()
            # A new checkpoint starts the count anew: only restarts without progress are limited.
            vain = 0 if position > before else vain + 1
            if vain > self.site.limits.restarts_in_place:
                return status
            say(f"training ended with status {status}; it is resumed on the same nodes")
            time.sleep(RESTART_SECONDS if vain > 1 else 0.0)

    def execute(self, batch: list[Step]) -> int:
        """Return the exit status of the command of these steps."""
        first = batch[0]
        train = first.kind == "train"
        # At every attempt, since restarts in place come here as well and a node may have failed.
        if train and len(self.nodes) > 1:
            self.check_health()
        machine = self.machine(first)
        command = shared(batch)
        if train:
            command += ("--hang-seconds", str(self.site.limits.hang_seconds))
        say(f"{COMMAND_PROMPT}{shown(command, machine)}")
        prefix = srun_prefix(self.site, self.array.kind, self.everywhere)
        # Of all jobs of an element only the newest runs: `is_recorded` sees to that.
        environment = os.environ | {OWNER: f"{self.study_dir}:{self.array.name}/{self.key[1]}"}
        if first.kind in ONLINE and "HF_HUB_OFFLINE" not in self.site.environment:
            # The job script sets it for all steps; these have to reach the hub, unless the site
            # says that what they ask for is cached.
            environment.pop("HF_HUB_OFFLINE", None)
        # A follower for MLflow and a watch for silence go with a training alone.
        follower = self.follow(first) if train else None
        silent_seconds = self.site.limits.silent_seconds
        watch = HangWatch(self.study_dir, first.run, silent_seconds) if train else None
        try:
            return wait_for(
                [*prefix, *resolve(command, self.study_dir, machine)],
                environment,
                Path(self.site.project),
                asked=self.stop_file.exists,
                # Only training looks for a STOP file; False has any other command interrupted.
                stop=lambda: train and ask_to_stop(self.study_dir, first, self.start),
                recurring=Advancing(self.study_dir, lambda: self.outputs(first)).look,
                hung=watch.hung if watch else lambda: None,
            )
        finally:
            if follower:
                end(follower)

    def unpack_image(self) -> None:
        """Unpack the image on every node, once for all steps of the job, without their limits."""
        if self.site.container and self.site.container.kind == "pyxis":
            # A failure is left to the srun of the steps, which needs the same image.
            self.beside(["true"], *self.everywhere).wait()

    def machine(self, step: Step) -> Machine:
        """Return the placeholders of commands here: torchrun on every node, or one process."""
        ranks = self.needs.ranks(step, self.resources.ranks)
        # Over nodes by the ranks of SLURM, on one by torchrun alone, else without torchrun.
        launch: tuple[str, ...] = ("{python}",)
        if step.kind == "train" and len(self.nodes) > 1:
            launch = torchrun_of_nodes(self.site.nccl.address, len(self.nodes), ranks, self.start)
        elif step.kind == "train" or ranks > 1:
            launch = torchrun(ranks)
        return Machine(
            launch,
            self.needs.hardware.device,
            self.resources.gpus_per_node,
            self.needs.sharding(step),
            self.resources.cpus_per_node or 1,
            self.site.measuring_python,
        )

    def beside(self, command: Sequence[str], *options: str) -> subprocess.Popen:
        """Start a command that is not the job's work."""
        # Overrides the option of the prefix: a check that fails must not end those of other nodes.
        prefix = srun_prefix(self.site, self.array.kind, ("--kill-on-bad-exit=0", *options))
        return subprocess.Popen(
            [*prefix, *command], stdin=subprocess.DEVNULL, cwd=self.site.project
        )

    def follow(self, step: Step) -> subprocess.Popen:
        """Start the mirroring of a training's metrics to MLflow; training does not wait for it."""
        command = ["{python}", "-m", "study", "mirror", self.study.name, "--root", "{root}"]
        command += ["--run", step.run, "--follow", str(self.site.mlflow.every_seconds)]
        machine = Machine(python=self.site.measuring_python)
        # --overlap and --mem=0: it runs beside the step of the training, on what that step holds.
        one_task = ("--nodes=1", "--ntasks=1", "--overlap", "--mem=0")
        return self.beside(resolve(command, self.study_dir, machine), *one_task)

    def check_health(self) -> None:
        """Check every node before a training over several.

        Raises:
            UnfitNodesError: some are not fit, and excluded from now on; or all are.
        """
        out = self.study_dir / SLURM / "health" / self.start
        health.write_clock(out)
        check = [self.site.measuring_python, "-m", "slurm.job.health", str(out)]
        check += ["--gpus", str(self.resources.gpus_per_node)]
        process = self.beside(check, *self.everywhere)
        try:
            process.wait(self.site.limits.health_seconds)
        except subprocess.TimeoutExpired:
            end(process)
        bad = health.read_reports(out, self.nodes)
        if not bad:
            return
        for node, reason in bad.items():
            say(f"{node} is not fit: {reason}")
        # Then excluding would leave no node; the cause is what they have in common.
        if len(bad) == len(self.nodes):
            raise UserError(f"no node is fit: what they share is at fault, see {out}")
        # The file is read, extended and written: two elements at once would lose entries.
        with submitting(self.study_dir):
            exclude(self.study_dir, bad)
        raise UnfitNodesError(f"{self.array.name} continues without {', '.join(sorted(bad))}")


def is_recorded(study_dir: Path, array: str, index: int, job: str) -> bool:
    """Return whether this job is the newest of the element, and nobody cancelled that.

    The command that submitted it may still be at it, or may have been killed before it recorded
    the answer of sbatch. Of another user's element only the record can be cancelled. A job that
    left has run it: it was requeued to submit alone.
    """

    def is_wanted() -> bool:
        submission, element = existing_submission(study_dir), (array, index)
        is_newest = submission.element_ids.get(element) == job and job not in submission.left
        return is_newest and element not in submission.cancelled

    # The usual case needs no lock, which whoever submits may hold for a minute.
    if is_wanted():
        return True
    with submitting(study_dir):
        adopt(study_dir)
    return is_wanted()


def run_element(study_dir: Path, array: str, index: int, stop_file: Path) -> None:
    """Run one element and submit what comes after it, as `python -m slurm job` does.

    Raises:
        typer.Exit: a command failed.
    """
    parent, task = os.environ["SLURM_ARRAY_JOB_ID"], os.environ["SLURM_ARRAY_TASK_ID"]
    job = f"{parent}_{task}"  # the plain id of the last element would be the whole array's
    show_life(log_of(study_dir, array, job))
    ending: Ending = "failed"
    try:
        if is_recorded(study_dir, array, index, job):
            ending = ElementStart(study_dir, array, index, stop_file, job).run()
        else:
            ending = "complete"
            say(f"another job runs {array}/{index}, or it has ended: this one, {job}, leaves")
    except (UserError, OSError) as error:
        say(f"error: {line_of(error)}")
    finally:  # whatever it was, others may start now, and this element again
        if ending == "failed" and not stop_file.exists():
            time.sleep(PAUSE_SECONDS)
        advance_at_end(study_dir, job)
    if ending in (*FAULTS, "unfit"):
        raise typer.Exit(1)


def _element_of_step(study_dir: Path, step: str) -> Element:
    """Return the element that runs a step, which the user typed."""
    submission = existing_submission(study_dir)
    for array in submission.arrays:
        for index, steps in enumerate(array.elements):
            if step in steps:
                return array.name, index
    raise UserError(
        f"{step!r:.120} is not a step of {study_dir}; 'python -m slurm status {study_dir.name}'"
        " lists what there is"
    )


def allocate(study_dir: Path, step: str) -> None:
    """Become salloc for one node of the step's kind, which runs this command there."""
    submission = existing_submission(study_dir)
    array, _ = _element_of_step(study_dir, step)
    options = allocation_options(submission.site, submission.job_arrays[array].kind, nodes=1)
    command = [str(submission.site.python), "-m", "slurm", "run", study_dir.name, step]
    words = ["salloc", *options, *command, "--root", str(study_dir.parent.resolve())]
    try:
        os.execvp(words[0], words)  # noqa: S606  this process has nothing else to do
    except FileNotFoundError:
        raise UserError("salloc is not on PATH; run this on a login node of a cluster") from None


def run_here(study_dir: Path, step: str) -> None:
    """Run the element of a step on this node.

    Raises:
        UserError: this is not a shell of salloc, or there is no such step.
        typer.Exit: the step failed.
    """
    array, index = _element_of_step(study_dir, step)
    if "SLURM_JOB_NODELIST" not in os.environ:
        raise UserError("this is not a job; give --interactive, or run it in the shell of salloc")
    job = os.environ["SLURM_JOB_ID"]
    # Nothing makes this file: no job script runs here whose trap would.
    never = study_dir / STOPS / f"{job}.interactive"
    if ElementStart(study_dir, array, index, never, job).run() != "complete":
        raise typer.Exit(1)
