"""Taking an element off nodes that are not fit.

A running job cannot change which nodes it may have, and ends when it is requeued. So it is requeued
held, and a small job of its own, which was submitted before, excludes the nodes and releases it.
"""

import json
import time
from pathlib import Path

from base.files import replaced_file, write_json
from slurm import cluster
from slurm.job.supervision import say
from slurm.site import Site
from slurm.submission.arrays import MEND, JobArray
from slurm.submission.record import SLURM, script_path
from slurm.submission.script import render

WAIT_SECONDS = 300.0
EXCLUDED_JSON = "excluded.json"  # node -> reason, of all health checks of the study


def excluded_nodes(study_dir: Path) -> dict[str, str]:
    """Node -> reason, of those that a health check has found unfit."""
    try:
        return dict(json.loads((study_dir / SLURM / EXCLUDED_JSON).read_text()))
    except FileNotFoundError:
        return {}


def send_for_mending(study_dir: Path, site: Site, element: str, bad: dict[str, str]) -> None:
    """Add to the excluded nodes and submit the job that takes `element` off them."""
    write_json(study_dir / SLURM / EXCLUDED_JSON, excluded_nodes(study_dir) | bad)
    requests = study_dir / SLURM / MEND
    requests.mkdir(exist_ok=True)
    (requests / element).touch()
    script = script_path(study_dir, MEND)
    with replaced_file(script) as aside:
        aside.write_text(render(JobArray(MEND, "light", ((MEND,),)), site, study_dir))
    cluster.submit(script)


def mend(study_dir: Path) -> None:
    """Exclude unfit nodes from every element that asked, once it is pending, and release it."""
    waiting = sorted(path.name for path in (study_dir / SLURM / MEND).iterdir())
    deadline = time.monotonic() + WAIT_SECONDS
    while waiting and time.monotonic() < deadline:
        known = cluster.states({int(name.partition("_")[0]) for name in waiting})
        for name in list(waiting):
            state = known.get(name)
            if state and state.state == "PENDING":
                cluster.exclude(name, sorted(excluded_nodes(study_dir)))
                cluster.release([name])
                say(f"{name} goes on without {', '.join(sorted(excluded_nodes(study_dir)))}")
            elif state and state.exit_code is None:
                continue  # it has still to end; others were cancelled meanwhile
            (study_dir / SLURM / MEND / name).unlink(missing_ok=True)
            waiting.remove(name)
        time.sleep(2)
