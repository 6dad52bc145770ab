"""The job script of an array, to the byte.

The batch script stands between SLURM's signals and `python -m slurm job`, which it starts in the
background: bash runs a trap only between commands or while it waits, and whatever asks the element
to stop becomes a file that the job polls.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from base.errors import UserError
from slurm.site import Kinds, Resources, Site
from slurm.submission.arrays import JobArray
from slurm.values import checked_path

LOGS, STOPS = (
    "slurm/logs",
    "slurm/stop",
)  # below a study; sbatch does not make the first, and a job without it fails
FIXED = {
    "OMP_NUM_THREADS": "1",  # torchrun's ranks share the cores
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",  # a killed job's last lines are in its log
    "HF_HUB_OFFLINE": "1",  # nodes often have no network, and a lookup would wait for it
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}
# NCCL's environment variables as its user guide documents them; libfabric's as fi_efa(7) does.
NCCL_PROFILES = {
    "default": {},
    "infiniband": {
        "NCCL_NET": (
            "IB"
        ),  # without adapters it fails, where NCCL would go on over TCP many times slower
        "NCCL_DEBUG": "WARN",  # says which call failed; torch's message does not
    },
    "ethernet": {
        "NCCL_NET": "Socket",  # adapters that are there but not cabled are left alone
        "NCCL_DEBUG": "WARN",
    },
    "efa": {
        "FI_PROVIDER": "efa",  # the plugin for libfabric takes no other, slower provider
        "NCCL_DEBUG": "WARN",
    },
}
# The exit code comes through a pipe: where a signal arrives as the job ends, bash's `wait` gives
# the signal's or 255. With the trap the inner shell outlives a signal to all processes; unlike an
# ignored one, the job starts without it.
SUPERVISION = """\
exec 9<> <(:)
{{
    trap : USR1 TERM
    {job} 9>&-
    echo "$?" >&9
}} &
child=$!
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
read -r -t 1 rc <&9 || rc=137  # nothing there: it was killed
exit "$rc"
"""


def job_environment(site: Site, kind: str) -> dict[str, str]:
    """Return the exports of a job script: ours, the network's, and over them the site's own."""
    resources = site.resources_of(kind)
    variables = dict(FIXED)
    if resources.cpus_per_node:
        variables["SRUN_CPUS_PER_TASK"] = str(
            resources.cpus_per_node
        )  # srun takes it from sbatch only up to 21.08
    if resources.gpus_per_node:
        variables |= NCCL_PROFILES[site.nccl.profile]
    else:
        variables["CUDA_VISIBLE_DEVICES"] = (
            ""  # a node without cgroups shows the GPUs of other jobs
        )
    if site.nccl.interface:
        variables["NCCL_SOCKET_IFNAME"] = (
            f"={site.nccl.interface}"  # this one, not all whose names begin so
        )
        variables["GLOO_SOCKET_IFNAME"] = site.nccl.interface
    if site.mlflow.tracking_uri:
        variables["MLFLOW_TRACKING_URI"] = site.mlflow.tracking_uri
    return variables | site.environment


def srun_prefix(site: Site, kind: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command up to what runs on the nodes: srun, its `options`, the container.

    A task that fails ends the others; `options` come later and may say otherwise. Root and project
    are mounted at their own paths. pyxis (0.15 or newer) is told which variables count although the
    image sets them too.
    """
    command = ["srun", "--kill-on-bad-exit=1", *options]
    if site.container is None:
        return command
    container, project = site.container, str(site.project)
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in container.mounts]
    kept = [
        Path(source)
        for source, target in (mount.split(":")[:2] for mount in mounts)
        if source == target
    ]
    for path in (site.root, site.project):
        if not any(path.is_relative_to(mounted) for mounted in kept):
            mounts.append(f"{path}:{path}")
            kept.append(path)
    if container.kind == "pyxis":
        names = ",".join(("PYTHONPATH", *job_environment(site, kind)))
        command += [
            f"--container-image={container.image}",
            f"--container-mounts={','.join(mounts)}",
        ]
        return [*command, f"--container-workdir={project}", f"--container-env={names}"]
    gpus = ["--nv"] if site.resources_of(kind).gpus_per_node else []
    return [
        *command,
        "apptainer",
        "exec",
        *gpus,
        "--bind",
        ",".join(mounts),
        "--pwd",
        project,
        container.image,
    ]


def _gpu_options(resources: Resources) -> list[str]:
    if not resources.gpus_per_node:
        return []
    count = (
        f"{resources.gres_type}:{resources.gpus_per_node}"
        if resources.gres_type
        else resources.gpus_per_node
    )
    return [f"--gres=gpu:{count}" if resources.gpus == "gres" else f"--gpus-per-node={count}"]


def _options(array: JobArray, site: Site, study_dir: Path) -> list[str]:
    """Return the #SBATCH options; the site's raw arguments come last, and win."""
    resources, stop_seconds = site.resources_of(array.kind), site.limits.stop_seconds_before_limit
    throttle = getattr(site.limits.throttle, array.kind)
    options = [
        f"--job-name={study_dir.name}.{array.name}",
        f"--array=0-{len(array.elements) - 1}" + (f"%{throttle}" if throttle else ""),
        f"--output={study_dir}/{LOGS}/{array.name}-%A_%a.log",
        "--open-mode=append",
        "--requeue",
    ]
    if resources.time_seconds > stop_seconds:
        options.append(f"--signal=B:USR1@{stop_seconds}")
    options += [f"--nodes={resources.nodes}", "--ntasks-per-node=1"]
    options += [f"--cpus-per-task={resources.cpus_per_node}"] if resources.cpus_per_node else []
    options += [f"--mem={resources.mem}"] if resources.mem else []
    options += [f"--time={resources.time}", *_gpu_options(resources)]
    for name in ("partition", "account", "qos", "constraint", "exclude", "reservation"):
        value = getattr(resources, name)
        options += [f"--{name}={value}"] if value else []
    return [*options, *(resources.extra or ())]


def _checked(array: JobArray, study_dir: Path) -> None:
    try:
        checked_path(study_dir / array.name)
    except ValueError as error:
        raise UserError(
            f"{error}; rename the study or choose another root in the site file"
        ) from None
    if array.kind not in Kinds.model_fields or not array.elements:
        raise ValueError(
            f"{array.name}: {array.kind} is no kind of job, or there is nothing to run"
        )


def render(array: JobArray, site: Site, study_dir: Path) -> str:
    """Return the script of an array; the same arguments give the same bytes.

    Raises:
        UserError: if the study's path cannot stand in a #SBATCH line.
    """
    _checked(array, study_dir)
    stops, project = shlex.quote(f"{study_dir}/{STOPS}"), shlex.quote(str(site.project))
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(array, site, study_dir)),
        "",
        (
            "self=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}  # the plain id of the last element"
            " is the whole array's"
        ),
        f"stop={stops}/$self.${{SLURM_RESTART_COUNT:-0}}",
        f"mkdir -p {stops} || exit 1",
        (
            'trap \': >"$stop" && trap "" USR1 TERM\' USR1 TERM  # once is enough, and a second one'
            " would come in between"
        ),
        (
            'echo "== $(date -u +%FT%TZ) $self start ${SLURM_RESTART_COUNT:-0} on'
            ' ${SLURM_JOB_NODELIST:-}"'
        ),
        "",
    ]
    if site.setup.lines or site.setup.modules:
        lines += ["# The site's own.", *site.setup.lines]
        if site.setup.modules:
            lines.append(f"module load {shlex.join(site.setup.modules)} || exit 1")
        lines.append("")
    lines += [
        f"export {name}={shlex.quote(value)}"
        for name, value in job_environment(site, array.kind).items()
    ]
    lines += [f'export PYTHONPATH={project}"${{PYTHONPATH:+:$PYTHONPATH}}"', ""]
    job = shlex.join([str(site.python), "-m", "slurm", "job", str(study_dir), array.name])
    lines += [
        (
            "set -uo pipefail  # only now: what sites have in their profiles reads variables that"
            " are not set"
        ),
        f"cd {project} || exit 1",
    ]
    return "\n".join(lines) + "\n" + SUPERVISION.format(job=f'{job} "$SLURM_ARRAY_TASK_ID" "$stop"')
