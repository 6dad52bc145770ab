"""Faults that strike a study on a cluster, on purpose: each once, when a training is at work.

A fault strikes when its training has come far enough since the fault before; what has to be undone
later is undone.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slurm import cluster
from slurm.cluster import JobState
from slurm.submission.record import existing_submission
from slurm.submission.submit import submit
from study.definition import load_study
from tests.slurm.lab import Lab
from tests.slurm.studies import changed
from tests.waiting import HANG_SECONDS

NODE_IS_GONE_SECONDS, DISK_IS_FULL_SECONDS, ACCOUNTS_ARE_DOWN_SECONDS = 40.0, 20.0, 30.0
STEPS_BETWEEN_FAULTS = 15


@dataclass
class Storm:
    """Faults that strike a study while it runs in a lab.

    Attributes:
        disk: a filesystem of its own, on which the study is.
        struck: what has happened, in order, with the number of steps that the training had logged.
    """

    lab: Lab
    study_dir: Path
    runs: list[str]
    disk: Path
    struck: list[tuple[str, int]] = field(default_factory=list)
    undo_at: list[tuple[float, Callable[[], object]]] = field(default_factory=list)

    def steps(self, run: str) -> int:
        """Updates that a run has logged, repeated ones included."""
        path = self.study_dir / run / "metrics.jsonl"
        return path.read_text().count('"grad_norm"') if path.exists() else 0

    def training(self, index: int) -> JobState | None:
        """The state of a training in SLURM; None while it has none."""
        name = existing_submission(self.study_dir).element_ids.get(("train", index))
        return cluster.states([name]).get(name) if name else None

    def rank_killed(self, index: int, nodes: list[str]) -> bool:
        """SIGKILL to one worker of a training."""
        marker = f"train run {self.study_dir / self.runs[index]}"
        others = ("torch.distributed.run", "slurm.job.rendezvous", "srun", "bash")
        return self.killed(nodes, marker, lambda command: not any(o in command for o in others))

    def agent_killed(self, index: int, nodes: list[str]) -> bool:
        """SIGKILL to torchrun on the last node of a training."""
        marker = f"train run {self.study_dir / self.runs[index]}"
        return self.killed(nodes[::-1], marker, lambda command: " torch.distributed.run" in command)

    def supervisor_killed(self, index: int, nodes: list[str]) -> bool:
        """SIGKILL to what the job script has started."""
        marker = f"slurm job {self.study_dir} train {index}"
        return self.killed(nodes, marker, lambda command: "bash" not in command)

    def killed(self, nodes: list[str], marker: str, wanted: Callable[[str], bool]) -> bool:
        """Kill a process whose command line has the marker; return whether there was one."""
        for node in nodes:
            number = int(node.removeprefix("node"))
            with contextlib.suppress(RuntimeError):  # pgrep finds none
                for line in self.lab.inside(number, "pgrep", "-a", "-f", marker).splitlines():
                    pid, _, command = line.partition(" ")
                    if wanted(command):
                        self.lab.inside(number, "kill", "-KILL", pid)
                        return True
        return False

    def controller_restarted(self, index: int, nodes: list[str]) -> bool:
        """slurmctld is away for a moment, and knows what it knew before."""
        self.lab.restart_controller()
        return True

    def accounts_down(self, index: int, nodes: list[str]) -> bool:
        """slurmdbd is down for a while."""
        self.lab.stop_accounting()
        self.undo_at.append(
            (time.monotonic() + ACCOUNTS_ARE_DOWN_SECONDS, self.lab.start_accounting)
        )
        return True

    def site_edited(self, index: int, nodes: list[str]) -> bool:
        """The user submits again with another site file."""
        site = existing_submission(self.study_dir).site
        submit(load_study(self.study_dir), changed(site, resources={"train": {"time": "2"}}))
        return True

    def node_lost(self, index: int, nodes: list[str]) -> bool:
        """The last node of a training is not heard of any more, and continues training."""
        node = int(nodes[-1].removeprefix("node"))
        self.lab.kill_node(node, orphans=True)
        self.undo_at.append((time.monotonic() + NODE_IS_GONE_SECONDS, lambda: self.back(node)))
        return True

    def back(self, node: int) -> None:
        """The node is started anew: its orphans end with it."""
        self.lab.kill_node(node)
        self.lab.start_node(node)

    def preempted(self, index: int, nodes: list[str]) -> bool:
        """A job with more priority takes all nodes for some seconds."""
        script = self.lab.directory / "urgent.sh"
        script.write_text(
            "#!/bin/bash\n#SBATCH -p urgent -N4 --exclusive --time=1 -o /dev/null\nsleep 5\n"
        )
        self.lab.command("sbatch", str(script))
        return True

    def disk_full(self, index: int, nodes: list[str]) -> bool:
        """Not a byte is left where the study is."""
        filler = self.disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**20))
        self.undo_at.append((time.monotonic() + DISK_IS_FULL_SECONDS, filler.unlink))
        return True

    def go_on(self, faults: list[str], seconds: float = HANG_SECONDS) -> None:
        """Until the last job of the study has ended; each fault strikes a training that has come
        some steps further.

        Raises:
            TimeoutError: it has not ended after so many seconds.
        """
        waiting, since = list(faults), dict.fromkeys(self.runs, 0)
        deadline = time.monotonic() + seconds
        while True:
            for moment, undo in list(self.undo_at):
                if time.monotonic() >= moment:
                    undo()
                    self.undo_at.remove((moment, undo))
            for index, run in enumerate(self.runs):
                far_enough = self.steps(run) >= since[run] + STEPS_BETWEEN_FAULTS
                if not waiting or self.undo_at or not far_enough:
                    continue
                state = self.training(index)
                if not state or state.state != "RUNNING":
                    continue
                if getattr(self, waiting[0])(index, cluster.expand(state.nodes)):
                    self.struck.append((waiting.pop(0), self.steps(run)))
                    since = {name: self.steps(name) for name in self.runs}
            if self.is_complete() and not self.undo_at:
                return  # whether all have struck is for the test to see
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {self.struck}")
            time.sleep(0.2)

    def is_complete(self) -> bool:
        """Return whether the last step, of the last job, is recorded."""
        return (self.study_dir / "steps" / "mirror.json").exists()
