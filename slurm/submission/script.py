"""The job script of an array, to the byte.

The batch script passes SLURM's signals on to `python -m slurm job`, which it starts in the
background: bash runs a trap only between commands or while it waits, and whatever asks the element
to stop becomes a file that the job polls, with the seconds that the shell had run.
"""

import os
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from base.errors import UserError
from slurm.site import JobKind, Resources, Site
from slurm.submission.arrays import JobArray
from slurm.values import checked_path

# Below a study; sbatch does not make the first, and a job without it fails.
LOGS, STOPS = "slurm/logs", "slurm/stop"
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
# NCCL_DEBUG says which call failed; torch's message does not.
NCCL_PROFILES = {
    "default": {},
    # Without adapters it fails, where NCCL would fall back to TCP, many times slower.
    "infiniband": {"NCCL_NET": "IB", "NCCL_DEBUG": "WARN"},
    # Adapters that are there but not cabled are left alone.
    "ethernet": {"NCCL_NET": "Socket", "NCCL_DEBUG": "WARN"},
    # The plugin for libfabric takes no other, slower provider.
    "efa": {"FI_PROVIDER": "efa", "NCCL_DEBUG": "WARN"},
    "slingshot": {"FI_PROVIDER": "cxi", "NCCL_DEBUG": "WARN"},
}
SOCKET_FAMILIES = {"ipv4": "AF_INET", "ipv6": "AF_INET6"}
# The exit code comes through a pipe: where a signal arrives as the job ends, bash's `wait` gives
# the signal's or 255. With the trap the inner shell outlives a signal to all processes; unlike an
# ignored one, the job starts without it. One signal is enough: a second one would come in between.
# Variables must be set only after the site's own lines: those of profiles often are not.
SCRIPT = """\
#!/bin/bash
{options}

self=${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}  # a plain id may mean the whole array
stop={stops}/$self.${{SLURM_RESTART_COUNT:-0}}
mkdir -p {stops} || exit 1
trap 'echo "$SECONDS" >"$stop" && trap "" USR1 TERM' USR1 TERM
echo "== $(date -u +%FT%TZ) $self start ${{SLURM_RESTART_COUNT:-0}} on ${{SLURM_JOB_NODELIST:-}}"

{preamble}
exec 9<> <(:)
{{
    trap : USR1 TERM
    {job} "$SLURM_ARRAY_TASK_ID" "$stop" 9>&-
    echo "$?" >&9
}} &
child=$!
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
read -r -t 1 rc <&9 || rc=137  # nothing there: it was killed
# It ended without a word to others, which may start now, or to have itself submitted again.
[ "$rc" -lt 128 ] || {advance} --ending "$self"
{forget}exit "$rc"
"""
# The name of pyxis' container; another start may have been killed while it unpacked its own.
UNPACKED, START = "quantdyn_{}_{}", ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")
# SLURM signals every process of a step, and apptainer hands on what it gets: at a second SIGTERM
# torchrun would leave while its ranks save. This shell, the child of apptainer, takes that one.
ONCE = ("sh", "-c", 'trap : TERM USR1; "$@"; exit $?', "sh")


def preamble(site: Site, kind: JobKind) -> str:
    """Return the lines of a job script between its options and what it runs: setup, variables."""
    setup, modules = list(site.setup.lines), shlex.join(site.setup.modules)
    if modules:
        setup.append(f"module load {modules} || exit 1")
    variables = job_environment(site, kind).items()
    project = shlex.quote(str(site.project))
    return "\n".join(
        [
            *(["# The site's own.", *setup, ""] if setup else []),
            *(f"export {name}={shlex.quote(value)}" for name, value in variables),
            f'export PYTHONPATH={project}"${{PYTHONPATH:+:$PYTHONPATH}}"',
            "",
            "set -uo pipefail",
            f"cd {project} || exit 1",
        ]
    )


def ranges(indices: Iterable[int]) -> str:
    """Write indices as sbatch takes them.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    parts: list[list[int]] = []
    for index in sorted(indices):
        # A part is [first] or [first, last]: the next index replaces the last one.
        if parts and parts[-1][-1] == index - 1:
            parts[-1][1:] = [index]
        else:
            parts.append([index])
    return ",".join("-".join(map(str, part)) for part in parts)


def job_environment(site: Site, kind: JobKind) -> dict[str, str]:
    """Return the exports of a job script: ours, the network's, and over them the site's own."""
    resources, interface = site.resources_of(kind), site.nccl.interface
    variables = dict(FIXED)
    if resources.cpus_per_node:  # srun takes it from sbatch only up to 21.08
        variables["SRUN_CPUS_PER_TASK"] = str(resources.cpus_per_node)
    if resources.gpus_per_node:
        variables |= NCCL_PROFILES[site.nccl.profile]
    if interface:  # with '=' this one, not all whose names begin so
        variables |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
    if site.nccl.family:
        variables["NCCL_SOCKET_FAMILY"] = SOCKET_FAMILIES[site.nccl.family]
    if kind == "train":  # what torchrun leaves its ranks to save after a SIGTERM, 30 s by default
        seconds = site.limits.stop_seconds_before_limit
        variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(seconds)
    if site.container:
        variables["QUANTDYN_IMAGE"] = site.container.image
        variables["PYTHONNOUSERSITE"] = "1"  # the home's packages are not the image's
    if site.mlflow.tracking_uri:
        variables["MLFLOW_TRACKING_URI"] = site.mlflow.tracking_uri
    return variables | site.environment


def on_every_node(nodes: int) -> tuple[str, ...]:
    """Return the options of srun for one task on every node of a job."""
    return (f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1")


def srun_prefix(site: Site, kind: JobKind, options: Sequence[str] = ()) -> list[str]:
    """Return the command up to what runs on the nodes: srun, its options, the container.

    A task that fails ends the others; `options` come later and may say otherwise. Those of the site
    are before them: of an option that is given twice srun takes the last. Root and project are
    mounted at their own paths. pyxis (0.15 or newer) is told which variables win over the image.
    """
    resources, container = site.resources_of(kind), site.container
    command = ["srun", "--kill-on-bad-exit=1", *(resources.srun_options or ()), *options]
    # A node without cgroups shows the GPUs of other jobs, and SLURM takes an export out of steps.
    hidden = f"CUDA_VISIBLE_DEVICES={site.environment.get('CUDA_VISIBLE_DEVICES', '')}"
    inside = [] if resources.gpus_per_node else ["env", hidden]
    if container is None:
        return [*command, *inside]
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in container.mounts]
    for path in (site.root, site.project):
        # A path inside a mount that keeps its place is visible already, if no flag may say `ro`.
        if not any(
            at == to and path.is_relative_to(at) and (not flags or str(path) == at)
            for at, to, *flags in (mount.split(":") for mount in mounts)
        ):
            mounts.append(f"{path}:{path}")
    binds, project = ",".join(mounts), str(site.project)
    if container.kind == "pyxis":
        names = ",".join(("PYTHONPATH", *job_environment(site, kind)))
        # Named, the image is unpacked once on a node for all steps of this start of the job.
        name = UNPACKED.format(*(os.environ.get(name, "0") for name in START))
        command += [f"--container-name={name}", f"--container-image={container.image}"]
        command += [f"--container-mounts={binds}", f"--container-workdir={project}"]
        return [*command, f"--container-env={names}", *inside]
    gpus = ["--nv"] if resources.gpus_per_node else []
    # Whatever APPTAINER_CLEANENV and APPTAINER_CONTAINALL say, the job's variables get in.
    command += ["apptainer", "exec", "--containall=false", "--cleanenv=false", *gpus]
    return [*command, "--bind", binds, "--pwd", project, container.image, *ONCE, *inside]


def forget(site: Site) -> str:
    """Return the line of bash that removes what pyxis unpacked; empty where there is no pyxis.

    Otherwise it stays on the nodes, unless the site has set container_scope=job.
    """
    if not site.container or site.container.kind != "pyxis":
        return ""
    name = UNPACKED.format(*(f"${{{variable}:-0}}" for variable in START))
    return f"srun --ntasks-per-node=1 enroot remove --force pyxis_{name} >/dev/null 2>&1\n"


def _gpu_options(resources: Resources) -> list[str]:
    """Return the option that asks for the GPUs of a node, if a job has any."""
    if not resources.gpus_per_node:
        return []
    option = "--gres=gpu:" if resources.gpus == "gres" else "--gpus-per-node="
    kind = f"{resources.gres_type}:" if resources.gres_type else ""
    return [f"{option}{kind}{resources.gpus_per_node}"]


def allocation_options(
    site: Site, kind: JobKind, *, nodes: int | None = None, excluded: Collection[str] = ()
) -> list[str]:
    """Return the options of sbatch or salloc for what a job of the kind runs on.

    Without `nodes` there are as many as the site says; `excluded` ones come on top of the
    site's.
    """
    resources = site.resources_of(kind)
    options = [f"--nodes={nodes or resources.nodes}", "--ntasks-per-node=1"]
    options += [f"--cpus-per-task={resources.cpus_per_node}"] if resources.cpus_per_node else []
    options += [f"--mem={resources.mem}"] if resources.mem else []
    options += [f"--time={resources.time}", *_gpu_options(resources)]
    for name in ("partition", "account", "qos", "constraint", "reservation"):
        value = getattr(resources, name)
        options += [f"--{name}={value}"] if value else []
    # One --exclude holds both lists: of an option that is given twice the last one counts.
    unwanted = [*([resources.exclude] if resources.exclude else []), *sorted(excluded)]
    options += [f"--exclude={','.join(unwanted)}"] if unwanted else []
    return [*options, *(resources.extra or ())]


def _options(array: JobArray, site: Site, study_dir: Path, excluded: Collection[str]) -> list[str]:
    """Return the options of sbatch; the site's raw arguments come last, and win."""
    # A requeued job keeps its id, so all its starts append to one log.
    options = [
        f"--job-name={study_dir.name}.{array.name}",
        f"--output={study_dir}/{LOGS}/{array.name}-%A_%a.log",
        "--open-mode=append",
        "--requeue",
    ]
    if notice := site.notice_seconds(array.kind):
        options.append(f"--signal=B:USR1@{notice}")  # B: to the batch shell alone
    return [*options, *allocation_options(site, array.kind, excluded=excluded)]


def render(array: JobArray, site: Site, study_dir: Path, excluded: Collection[str] = ()) -> str:
    """Return the script of an array; the same arguments give the same bytes.

    Raises:
        UserError: if the study's path cannot be used in a #SBATCH line.
    """
    try:
        checked_path(study_dir)
    except ValueError as error:
        raise UserError(
            f"{error}; rename the study or choose another root in the site file"
        ) from None
    return SCRIPT.format(
        options="\n".join(map("#SBATCH {}".format, _options(array, site, study_dir, excluded))),
        stops=shlex.quote(f"{study_dir}/{STOPS}"),
        preamble=preamble(site, array.kind),
        job=shlex.join([str(site.python), "-m", "slurm", "job", str(study_dir), array.name]),
        advance=shlex.join([str(site.python), "-m", "slurm", "advance", str(study_dir)]),
        forget=forget(site),
    )
