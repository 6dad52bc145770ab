"""The site file: a cluster in TOML, every value checked before a script holds it."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator

from base.errors import UserError, explain_validation
from base.frozen import Frozen
from slurm.values import (
    MAX_SIGNAL_SECONDS,
    Address,
    Constraint,
    Count,
    Environment,
    Extra,
    Image,
    Line,
    Memory,
    Mount,
    Name,
    Pattern,
    SafePath,
    Seconds,
    SrunOption,
    TimeLimit,
    seconds_of,
    secret_in,
)
from study.machine.hardware import UNKNOWN_BYTES, Hardware

EXAMPLE = Path(__file__).resolve().parent / "sites" / "example.toml"
JobKind = Literal["train", "export", "quantize", "curvature", "light"]
KINDS: tuple[JobKind, ...] = get_args(JobKind)


class Options(Frozen):
    """Options of SLURM. None in the table of a kind: as in [slurm]; None there: not given."""

    partition: Name | None = None
    account: Name | None = None
    qos: Name | None = None
    constraint: Constraint | None = None
    exclude: Name | None = None
    reservation: Name | None = None
    gpus: Literal["gpus-per-node", "gres"] | None = None  # option of sbatch that asks for GPUs
    gres_type: Name | None = None  # of the GPUs, such as h200
    # Of one GPU, by which layouts are chosen; None: as the recipe has them, unchecked.
    gpu_memory_gb: Annotated[float, Field(gt=0)] | None = None
    extra: tuple[Extra, ...] | None = None  # further arguments of sbatch, as they are
    srun_options: tuple[SrunOption, ...] | None = None  # of every srun, such as --mpi=pmix


class Resources(Options):
    """Resources of one job of a kind."""

    nodes: Count = 1
    gpus_per_node: Annotated[int, Field(strict=True, ge=0)] = 0
    ranks_per_node: Count | None = None  # by default one for each GPU
    cpus_per_node: Count | None = None
    mem: Memory | None = None  # of a node
    time: TimeLimit

    @property
    def ranks(self) -> int:
        """Return the processes on each node."""
        return self.ranks_per_node or max(1, self.gpus_per_node)

    @property
    def time_seconds(self) -> int:
        """Return the time limit."""
        return seconds_of(self.time)

    @property
    def hardware(self) -> Hardware:
        """One node of the job."""
        memory = UNKNOWN_BYTES if self.gpu_memory_gb is None else round(self.gpu_memory_gb * 1e9)
        return Hardware(self.ranks, tuple(map(str, range(self.gpus_per_node))), "GPU", memory)

    @model_validator(mode="after")
    def _ranks_have_gpus(self) -> Self:
        if self.gpus_per_node and (self.ranks_per_node or 1) > self.gpus_per_node:
            raise ValueError(
                f"{self.ranks_per_node} ranks would share {self.gpus_per_node} GPUs; one each at"
                " most"
            )
        return self

    @model_validator(mode="after")
    def _memory_is_given_once(self) -> Self:
        for argument in self.extra or () if self.mem else ():
            if argument.startswith("--mem-per"):
                raise ValueError(f"mem is given beside {argument}; leave one of them out")
        return self


class ResourcesByKind(Frozen):
    """Resources of every kind of job; `light` prepares, collects and reports."""

    train: Resources
    export: Resources
    quantize: Resources
    curvature: Resources
    light: Resources

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        for kind in KINDS:
            resources: Resources = getattr(self, kind)
            if kind != "train" and resources.nodes != 1:
                raise ValueError(
                    f"a job of {kind} runs on one node, not {resources.nodes}; leave nodes out"
                )
            if kind != "light" and not resources.gpus_per_node and resources.ranks_per_node is None:
                raise ValueError(f"{kind} has no GPUs to count its ranks by; state ranks_per_node")
        return self


class JobLimits(Frozen):
    """Limits by which work is cut into jobs and a job gives up."""

    max_queued: Count = 100  # elements of a study in the queue at once, running ones included
    throttle: dict[JobKind, Count] = Field(default={})  # of them, those of a kind
    max_array_size: Count | None = None  # by default SLURM is asked
    stop_seconds_before_limit: Annotated[int, Field(strict=True, ge=1, le=MAX_SIGNAL_SECONDS)] = 300
    restarts_in_place: Annotated[int, Field(strict=True, ge=0)] = (
        3  # of a training, without progress
    )
    starts_without_progress: Count = 3
    # A training that logs nothing for so long is ended and resumed: start, evaluation and saves
    # included. Its ranks see a step that does not end for themselves, within `hang_seconds`.
    silent_seconds: Seconds = 3600
    hang_seconds: Seconds = 600
    health_seconds: Seconds = 300  # in which every node of a training has to show that it is fit
    checkpoints_per_job: Count = 1
    specs_per_job: Count = 4


class Setup(Frozen):
    """Code of the site, run in the job's shell before anything else: lines, then `module load`."""

    lines: tuple[Line, ...] = ()
    modules: tuple[Name, ...] = ()


class Container(Frozen):
    """The container of everything that srun starts."""

    kind: Literal["pyxis", "apptainer"]
    image: Image
    mounts: tuple[Mount, ...] = ()  # beside root and project
    python: Name = "python"  # interpreter in the container


class Nccl(Frozen):
    """The network between GPUs."""

    profile: Literal["default", "infiniband", "ethernet", "efa", "slingshot"] = "default"
    interface: Name | None = None
    family: Literal["ipv4", "ipv6"] | None = None  # of addresses; None: as the library chooses
    address: Pattern = "{node}"  # of a node, for the rendezvous; such as "{node}-ib"


class Mlflow(Frozen):
    """The store that figures are mirrored to."""

    tracking_uri: Address | None = None  # by default SQLite below root
    every_seconds: Annotated[Seconds, Field(ge=10)] = 300


class Disk(Frozen):
    """The room that is left free on root's filesystem, and its speed."""

    reserve_gb: Annotated[float, Field(ge=0)] = 10.0
    # A node's share while all nodes of a training write: by it saves end before the time limit.
    write_gb_per_second: Annotated[float, Field(ge=0.001)] = 1.0


class Site(Frozen):
    """The content of a site file: where jobs of a cluster run, with which resources and limits."""

    root: SafePath  # directory of all studies, on a filesystem that every node sees
    group: Name | None = None  # of Unix, whose members all may work on the root's studies
    # The interpreter outside containers.
    python: SafePath = Field(default_factory=lambda: Path(sys.executable), validate_default=True)
    project: SafePath = Field(default=Path(__file__).resolve().parent.parent, validate_default=True)
    slurm: Options = Options()
    resources: ResourcesByKind
    limits: JobLimits = JobLimits()
    environment: Environment = Field(default={})
    setup: Setup = Setup()
    container: Container | None = None
    nccl: Nccl = Nccl()
    mlflow: Mlflow = Mlflow()
    disk: Disk = Disk()

    @model_validator(mode="after")
    def _time_to_stop(self) -> Self:
        limit, before = self.resources.train.time_seconds, self.limits.stop_seconds_before_limit
        if limit <= before:
            raise ValueError(
                f"training of {limit} s would be asked to stop {before} s before its end; raise"
                " resources.train.time or lower limits.stop_seconds_before_limit"
            )
        return self

    def resources_of(self, kind: JobKind) -> Resources:
        """Return the resources of a job of the kind: its own table over [slurm]."""
        resources: Resources = getattr(self.resources, kind)
        # None is "not given" here, so an empty tuple in the table of a kind overrides [slurm].
        inherited = [name for name in Options.model_fields if getattr(resources, name) is None]
        return resources.model_copy(update={name: getattr(self.slurm, name) for name in inherited})

    def notice_seconds(self, kind: JobKind) -> int:
        """Return the seconds before its time limit at which SLURM signals a job of the kind."""
        notice = self.limits.stop_seconds_before_limit
        # Below this limit the signal would come as soon as the job starts.
        return notice if self.resources_of(kind).time_seconds > notice else 0

    @property
    def measuring_python(self) -> str:
        """Return the interpreter of what srun starts."""
        return self.container.python if self.container else str(self.python)


def _texts(content: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value of a TOML document that is not a table or list, with its dotted key."""
    if isinstance(content, dict):
        for name, inner in content.items():
            yield from _texts(inner, f"{key}.{name}" if key else name)
    elif isinstance(content, list):
        for inner in content:
            yield from _texts(inner, key)
    else:
        yield key, content


def load_site(path: Path) -> Site:
    """Load a site; UserError, one line with file and key, for anything it cannot mean."""
    try:
        content = tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; copy {EXAMPLE} and fill in your cluster") from None
    except RecursionError:
        raise UserError(f"{path} is not TOML: it is nested too deeply; correct it") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number of too many digits
        reason = str(error).partition(";")[0]
        raise UserError(
            f"{path} is not TOML: {reason}; correct it (text and times need quotes)"
        ) from None
    # Before validation, whose errors would show the value.
    for key, value in _texts(content):
        secret = secret_in(key.rpartition(".")[2], value)
        if secret and key != "mlflow.tracking_uri":  # of which the address is told
            raise UserError(
                f"{path}: '{key}': {secret} looks like a secret, and this file is copied beside the"
                " study; export it in the shell that submits, or use ~/.netrc or MLflow's own"
                " variables there"
            )
    try:
        return Site.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] != "value_error":
            raise explain_validation(str(path), error, Site) from None
        # Ours name what is wrong, and never show what may be secret.
        key = ".".join(str(part) for part in problem["loc"]) or "the whole file"
        reason = problem["msg"].removeprefix("Value error, ")
        raise UserError(f"{path}: '{key}': {reason}") from None
