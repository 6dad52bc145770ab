"""One element of an array: its steps, each recorded when complete, and its requeueing.

The batch script starts this on the first node of the job. Steps are started with srun; a file,
which the script's trap makes when SLURM sends a signal, asks to stop. Training stops at a
checkpoint, what measures is ended and starts anew.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer

from base.errors import UserError
from slurm import cluster
from slurm.job import health
from slurm.job.excluding import mend, send_for_mending
from slurm.job.starts import check_progress, last_restart, record_start, restarts
from slurm.job.stop_files import ask_to_stop, forget_stale_stops, stopped_by_user
from slurm.job.supervision import again, end, say, wait_for
from slurm.submission.arrays import FINAL, MEND, SETTLE
from slurm.submission.holding import release_ready, settle
from slurm.submission.record import SLURM, existing_submission
from slurm.submission.script import srun_prefix
from study.definition import load_study
from study.machine.needs import Needs
from study.pipeline.ledger import Ledger
from study.pipeline.step import (
    COMMAND_PROMPT,
    TORCHRUN,
    Machine,
    Step,
    batches,
    resolve,
    shared,
    shown,
)
from study.pipeline.steps import ONLINE, steps_of
from train.run.directory import RunDirectory

RELEASE_EVERY_SECONDS = 10.0
# Before a failed element is queued again: a full disk or a lost mount may recover.
PAUSE_SECONDS = 30.0
HEALTH_SECONDS = 180
STARTS_UNRECORDED = 20  # in a row, of an element that cannot even write down that it started


class _Element:
    """One start of one element."""

    def __init__(self, study_dir: Path, array: str, index: int, stop_file: Path, name: str) -> None:
        self.study_dir, self.index, self.stop_file, self.name = study_dir, index, stop_file, name
        submission = existing_submission(study_dir)
        arrays = submission.job_arrays
        if array not in arrays or index >= len(arrays[array].elements):
            raise UserError(f"{study_dir} has no element {array}/{index}; submit it again")
        self.array, self.site = arrays[array], submission.site
        self.resources = self.site.resources_of(self.array.kind)
        self.study = load_study(study_dir)
        self.ledger = Ledger(study_dir, steps_of(self.study))
        self.needs = Needs(self.study, self.resources.hardware, study_dir)
        self.start = f"{name}.{restarts()}"
        self.steps = [self.ledger.steps[name] for name in self.array.elements[index]]
        nodes = self.resources.nodes
        # Of srun, for one task on every node of the job.
        self.everywhere = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        self._released_at = 0.0

    def position(self) -> int:
        """Return the progress: the newest checkpoint of training, or the number of files made."""
        found = sum(
            (self.study_dir / output).is_file() for step in self.steps for output in step.outputs
        )
        for step in self.steps:
            if step.kind == "train":
                run = RunDirectory(self.study_dir / step.run)
                found += max([0, *run.complete_steps(), *run.complete_restarts()])
        return found

    def run(self) -> None:
        """Run what is not complete; end by SLURM's requeueing, or with the code of what failed."""
        forget_stale_stops(self.study_dir, self.steps)
        open_steps = [step for step in self.steps if not self.ledger.is_complete(step)]
        if not open_steps:
            say("complete already")
            return
        element, position = (self.study_dir, self.array.name, self.index), self.position()
        limits = self.site.limits
        check_progress(*element, position, limits.starts_without_progress)
        record_start(*element, position)
        if self.array.name == FINAL:
            self.run_final(open_steps)
            return
        for batch in batches(open_steps, limits.checkpoints_per_job, limits.specs_per_job):
            missing = [name for step in batch for name in self.ledger.missing(step)]
            if missing and batch[0] is open_steps[0]:
                raise UserError(
                    f"{self.study_dir / missing[0]} is not there; what makes it failed, retry that"
                    " first"
                )
            if not missing:  # else a step before it failed; the others need not wait for that
                self.run_batch(batch)
            if self.stop_file.exists():
                break
        self.release(now=True)
        unfinished = [step for step in open_steps if not self.ledger.is_complete(step)]
        if unfinished:
            self.failed(unfinished[0])

    def run_final(self, steps: Sequence[Step]) -> None:
        """Table, report and mirror of what there is; complete only if nothing is missing."""
        for step in steps:
            missing = self.ledger.missing(step)
            if missing:
                say(f"{step.name}: {len(missing)} results are missing, such as {missing[0]}")
            status = self.execute([step]) if missing else self.run_batch([step])
            if status:
                self.failed(step)

    def run_batch(self, batch: list[Step]) -> int:
        """Run one command and record its steps; return its exit status, not 0 if one is open."""
        fingerprints = {step.name: self.ledger.fingerprint(step) for step in batch}
        for step in batch:
            self.ledger.prepare(step)
        began_at = time.monotonic()
        status = self.execute(batch)
        seconds = (time.monotonic() - began_at) / len(batch)
        made = [
            step
            for step in batch
            if not self.ledger.missing_outputs(step) and (status == 0 or not step.resumes)
        ]
        for step in made:
            self.ledger.finish(step, fingerprints[step.name], seconds)
        if len(made) == len(batch):
            return 0
        left = next(step for step in batch if step not in made)
        say(f"{left.name} is not complete, its command ended with status {status}")
        return status or 1

    def execute(self, batch: list[Step]) -> int:
        """Return the exit status of the command of these steps."""
        first = batch[0]
        train = first.kind == "train"
        if train and self.resources.nodes > 1:
            self.check_health()
        machine = self.machine(first)
        say(f"{COMMAND_PROMPT}{shown(shared(batch), machine)}")
        prefix = srun_prefix(self.site, self.array.kind, self.everywhere)
        environment = dict(os.environ)
        if first.kind in ONLINE:
            environment.pop("HF_HUB_OFFLINE", None)
        follower = self.follow(first) if train else None
        try:
            return wait_for(
                [*prefix, *resolve(shared(batch), self.study_dir, machine)],
                environment,
                Path(self.site.project),
                asked=self.stop_file.exists,
                stop=lambda: train and ask_to_stop(self.study_dir, first, self.start),
                recurring=self.release,
            )
        finally:
            if follower:
                end(follower)

    def machine(self, step: Step) -> Machine:
        """Return the placeholders of commands here: torchrun on every node, or one process."""
        nodes, ranks = self.resources.nodes, self.needs.ranks(step, self.resources.ranks)
        launch: tuple[str, ...] = ("{python}",)
        if step.kind == "train" or ranks > 1:
            launch = (*TORCHRUN, "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d")
            endpoint = "localhost:0"
            if nodes > 1:
                head = cluster.hostnames(os.environ["SLURM_JOB_NODELIST"])[0]
                endpoint = f"{head}:{20_000 + int(os.environ['SLURM_JOB_ID']) % 20_000}"
                launch += ("--nnodes", str(nodes), "--rdzv-id", self.start)
            launch += ("--rdzv-endpoint", endpoint)
        return Machine(
            launch,
            self.needs.hardware.device,
            self.resources.gpus_per_node,
            self.needs.sharding(step),
            self.resources.cpus_per_node or 1,
            self.site.measuring_python,
        )

    def beside(self, command: Sequence[str], *options: str) -> subprocess.Popen:
        """Start a command that is not the job's work on each of its nodes."""
        options = (*self.everywhere, "--kill-on-bad-exit=0", *options)
        prefix = srun_prefix(self.site, self.array.kind, options)
        return subprocess.Popen(
            [*prefix, *command], stdin=subprocess.DEVNULL, cwd=self.site.project
        )

    def follow(self, step: Step) -> subprocess.Popen:
        """Start the mirroring of a training's metrics to MLflow; training does not wait for it."""
        command = ["{python}", "-m", "study", "mirror", self.study.name, "--root", "{root}"]
        command += ["--run", step.run, "--follow", str(self.site.mlflow.every_seconds)]
        machine = Machine(python=self.site.measuring_python)
        return self.beside(resolve(command, self.study_dir, machine), "--overlap", "--mem=0")

    def failed(self, step: Step) -> NoReturn:
        """Requeue this element, or end it where the user stopped the run."""
        stopped = self.stop_file.exists()
        if step.kind == "train" and not stopped and stopped_by_user(self.study_dir, step.run):
            say(
                f"{step.run} was stopped by a STOP file; 'python -m slurm retry {self.study.name}'"
                " goes on"
            )
            raise typer.Exit(1)
        again(self.name, 0.0 if stopped else PAUSE_SECONDS)

    def release(self, now: bool = False) -> None:
        """Let elements start whose files have appeared."""
        moment = time.monotonic()
        if now or moment - self._released_at >= RELEASE_EVERY_SECONDS:
            self._released_at = moment
            with contextlib.suppress(OSError):  # what cannot be released now is tried again
                release_ready(self.study_dir, self.ledger)

    def check_health(self) -> None:
        """Check every node before a training over several; requeue without a bad one."""
        out = self.study_dir / SLURM / "health" / self.start
        health.write_clock(out)
        nodes = cluster.hostnames(os.environ["SLURM_JOB_NODELIST"])
        check = [self.site.measuring_python, "-m", "slurm.job.health", str(out)]
        process = self.beside([*check, "--gpus", str(self.resources.gpus_per_node)])
        try:
            process.wait(HEALTH_SECONDS)
        except subprocess.TimeoutExpired:
            end(process)
        bad = health.read_reports(out, nodes)
        if not bad:
            return
        for node, reason in bad.items():
            say(f"{node} is not fit: {reason}")
        if len(bad) == len(nodes):
            say(f"no node is fit: what they share is at fault, see {out}")
            again(self.name, PAUSE_SECONDS)
        send_for_mending(self.study_dir, self.site, self.name, bad)
        again(self.name, held=True)


def run_element(study_dir: Path, array: str, index: int, stop_file: Path) -> None:
    """Run one element, as `python -m slurm job` does.

    Raises:
        UserError: something it reads is missing, or its starts come no further.
        typer.Exit: a command failed; the exit code is the command's.
    """
    job, task = os.environ["SLURM_ARRAY_JOB_ID"], os.environ["SLURM_ARRAY_TASK_ID"]
    name = f"{job}_{task}"  # the plain id of the last element would be the whole array's
    try:
        if array == MEND:
            mend(study_dir)
        elif array.startswith(f"{SETTLE}-"):
            settle(study_dir)
        else:
            _Element(study_dir, array, index, stop_file, name).run()
    # No room for a file of ours, or the filesystem is away: no reason to give up for ever.
    except OSError as error:
        say(str(error))
        if restarts() - last_restart(study_dir, array, index) > STARTS_UNRECORDED:
            raise
        again(name, PAUSE_SECONDS)
