"""Types of text for a job script or a command: all else is refused with its reason."""

import datetime
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

MAX_SIGNAL_SECONDS = 65_535  # SLURM's largest time between a signal and the limit
# Options of sbatch that the job script and the project's own calls depend on.
OWNED = (
    *(
        "array",
        "chdir",
        "dependency",
        "error",
        "export",
        "export-file",
        "get-user-env",
        "hold",
        "input",
        "job-name",
    ),
    *(
        "kill-on-invalid-dep",
        "no-requeue",
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "open-mode",
        "output",
        "parsable",
    ),
    *("quiet", "requeue", "signal", "test-only", "time", "wait", "wrap"),
)
# Names that bash keeps for itself, or that the job script itself sets and reads.
SHELL_NAMES = {
    *(
        "_",
        "BASHOPTS",
        "BASHPID",
        "BASH_ARGC",
        "BASH_ARGV",
        "BASH_ARGV0",
        "BASH_ENV",
        "BASH_LINENO",
        "BASH_SOURCE",
    ),
    *(
        "BASH_VERSINFO",
        "COMP_WORDBREAKS",
        "DIRSTACK",
        "ENV",
        "EPOCHREALTIME",
        "EPOCHSECONDS",
        "EUID",
        "FUNCNAME",
    ),
    *(
        "GROUPS",
        "HISTCMD",
        "IFS",
        "LINENO",
        "OLDPWD",
        "OPTIND",
        "PIPESTATUS",
        "POSIXLY_CORRECT",
        "PPID",
        "PWD",
    ),
    *("RANDOM", "SECONDS", "SHELLOPTS", "SHLVL", "SRANDOM", "UID"),
    *("BASH_ALIASES", "BASH_CMDS", "BASH_COMMAND", "BASH_SUBSHELL"),
    *(
        "SLURM_ARRAY_JOB_ID",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_RESTART_COUNT",
        "child",
        "rc",
        "self",
        "stop",
    ),
}
SECRET_WORDS = {"credential", "credentials", "pwd", "secret", "secrets", "token", "tokens"}
SECRET_PARTS = ("password", "passwd", "apikey", "api_key", "access_key", "private_key")


def _matching(pattern: str, may: str) -> AfterValidator:
    """Refuse text that `pattern` does not match as a whole, or that steps up a directory."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value, re.ASCII) or ".." in value.split("/"):
            raise ValueError(f"{value!r:.80} cannot be used in a job script; it may hold {may}")
        return value

    return AfterValidator(check)


def checked_path(path: Path) -> Path:
    """Return a path fit for a #SBATCH line; ValueError if a character has a meaning there."""
    if not re.fullmatch(r"/[A-Za-z0-9_.=+@/-]*", str(path), re.ASCII) or ".." in path.parts:
        raise ValueError(
            f"{str(path)!r:.120} must be an absolute path of letters, digits and _ . = + @ -"
            " without '..': it stands in #SBATCH lines and in lists of mounts"
        )
    return path


def seconds_of(time: str) -> int | None:
    """Return the seconds of a limit of sbatch, rounded up to minutes; None if it is none."""
    patterns = (
        r"(?P<minutes>\d{1,7})(:(?P<seconds>[0-5]?\d))?",
        r"(?P<hours>\d{1,5}):(?P<minutes>[0-5]?\d):(?P<seconds>[0-5]?\d)",
        r"(?P<days>\d{1,3})-(?P<hours>[01]?\d|2[0-3])(:(?P<minutes>[0-5]?\d)(:(?P<seconds>[0-5]?\d))?)?",
    )
    found = next(
        (match for pattern in patterns if (match := re.fullmatch(pattern, time, re.ASCII))), None
    )
    if found is None:
        return None
    parts = {unit: int(count) for unit, count in found.groupdict(default="0").items()}
    minutes = 1440 * parts.get("days", 0) + 60 * parts.get("hours", 0) + parts["minutes"]
    return 60 * (minutes + (parts["seconds"] > 0))


def _time_text(value: object) -> object:
    if isinstance(value, datetime.time):
        raise ValueError(f'TOML reads {value} as a time of day; put it in quotes: "{value}"')
    return str(value) if type(value) is int else value


def _checked_time(value: str) -> str:
    if not seconds_of(value):
        raise ValueError(
            f'{value!r:.40} is no time limit; write minutes, "24:00:00" or "2-00:00:00", one minute'
            " at least"
        )
    return value


def _checked_extra(value: str) -> str:
    if not re.fullmatch(r"--[a-z][a-z-]*(=[A-Za-z0-9_.,:=+@/&|*()\[\]!%^~-]*)?", value, re.ASCII):
        raise ValueError(
            f"{value!r:.80} is no sbatch argument: write --name or --name=value without spaces and"
            " quotes"
        )
    name = value.removeprefix("--").partition("=")[0]
    owned = next(
        (option for option in OWNED if option.startswith(name)), None
    )  # sbatch takes abbreviations
    if owned:
        raise ValueError(
            f"{value!r:.80} would change --{owned}, which this project sets itself; leave it out"
        )
    return value


def _checked_line(value: str) -> str:
    if re.search(r"[\n\r\0]", value):
        raise ValueError(f"{value!r:.80} is more than one line; list each on its own")
    return value


def _looks_secret(name: str) -> bool:
    """Return whether a variable of that name usually holds a secret; HF_TOKEN_PATH does not."""
    lower = name.lower()
    if lower.endswith(("_path", "_file", "_dir")):
        return False
    return bool(SECRET_WORDS & set(lower.split("_"))) or any(part in lower for part in SECRET_PARTS)


def _has_password(value: str) -> bool:
    """Return whether text holds an address with a password, before the host or after a '?'."""
    return bool(re.search(r"://[^\s/@]*:[^\s@]*@|[?&]password=", value))


def _checked_environment(values: object) -> object:
    """Before the types are: an error of type would show the value."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            raise ValueError(f"{name!r:.80} is no name of a variable; use letters, digits and _")
        if _looks_secret(name) or _has_password(str(value)):
            raise ValueError(
                f"{name} looks like a secret, and this file is copied beside the study; export it"
                " in the shell that submits, or use ~/.netrc or MLflow's own variables there"
            )
        if name == "MLFLOW_TRACKING_URI":
            raise ValueError("give MLflow's address as tracking_uri in [mlflow]")
        if name in SHELL_NAMES:
            raise ValueError(f"{name} belongs to bash or to the job script; leave it out")
        if not isinstance(value, str) or re.search(r"[\n\r\0]", value):
            raise ValueError(f"the value of {name} must be text of one line; put it in quotes")
    return values


def _checked_uri(value: str) -> str:
    if _has_password(value):
        raise ValueError(
            "the address holds a password; leave it out and give it by MLFLOW_TRACKING_PASSWORD,"
            " PGPASSWORD or ~/.netrc"
        )
    if re.match(r"sqlite:///[^/]", value):
        raise ValueError(
            f"{value!r:.120} lies elsewhere for every process; write sqlite:////ABSOLUTE/PATH"
        )
    if not re.fullmatch(r"[a-z][a-z0-9+]*://[A-Za-z0-9_.,:=+@/?&%~\[\]-]*", value, re.ASCII):
        raise ValueError(
            f"{value!r:.120} is no address; write https://HOST:PORT, postgresql+psycopg2:// or"
            " sqlite:///"
        )
    return value


Count = Annotated[int, Field(strict=True, ge=1)]
Name = Annotated[
    str, _matching(r"[A-Za-z0-9_][A-Za-z0-9_.,:=+@/-]*", "letters, digits and _ . , : = + @ / -")
]
Nodes = Annotated[
    str, _matching(r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*", "names of nodes such as gpu[01-04],gpu07")
]
Constraint = Annotated[
    str, _matching(r"[A-Za-z0-9_.,:=+@/&|*()\[\]!-]+", "names of features and & | * ( ) [ ] , !")
]
Memory = Annotated[
    str,
    _matching(r"[0-9]{1,9}[KMGT]?", 'a number with K, M, G or T such as "500G", or "0" for all'),
]
Image = Annotated[
    str, _matching(r"[A-Za-z0-9/][A-Za-z0-9_.,:=+@/#-]*", "letters, digits and _ . , : = + @ / # -")
]
Program = Annotated[str, _matching(r"[A-Za-z0-9_/][A-Za-z0-9_.=+@/-]*", "a name or a path")]
Mount = Annotated[
    str, _matching(r"/[A-Za-z0-9_.=+@/-]*(:[A-Za-z0-9_.=+@/-]+){0,2}", "SOURCE[:TARGET[:FLAGS]]")
]
TimeLimit = Annotated[str, BeforeValidator(_time_text), AfterValidator(_checked_time)]
SafePath = Annotated[Path, AfterValidator(checked_path)]
Extra = Annotated[str, AfterValidator(_checked_extra)]
Line = Annotated[str, AfterValidator(_checked_line)]
Interface = Annotated[
    str, _matching(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", "the name of one network interface")
]
Environment = Annotated[dict[str, str], BeforeValidator(_checked_environment)]
Address = Annotated[str, AfterValidator(_checked_uri)]
