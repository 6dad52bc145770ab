"""Types of text for a job script or a command: all else is refused with its reason."""

import datetime
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from base.frozen import MOST_SECONDS

MAX_SIGNAL_SECONDS = 65_535  # SLURM's largest time between a signal and the limit
# Options of sbatch that the job script and the project's own calls depend on.
OWNED = """
    array chdir clusters comment dependency error exclude export export-file get-user-env hold
    input job-name kill-on-invalid-dep no-requeue nodes ntasks ntasks-per-node open-mode output
    parsable quiet requeue signal test-only time wait wrap
"""
# Options of srun that place and connect the tasks of a step, or that the job's end depends on.
OWNED_BY_STEPS = """
    chdir container-env container-image container-mounts container-name container-workdir error
    exclude export export-file help input jobid kill-on-bad-exit multi-prog nodefile nodelist nodes
    ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket output overlap pty
    quit-on-interrupt relative test-only time usage version wait
"""
# Names that bash keeps for itself, or that the job script itself sets and reads.
SHELL_NAMES = """
    _ BASHOPTS BASHPID BASH_ALIASES BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS BASH_COMMAND BASH_ENV
    BASH_LINENO BASH_SOURCE BASH_SUBSHELL BASH_VERSINFO COMP_WORDBREAKS DIRSTACK ENV EPOCHREALTIME
    EPOCHSECONDS EUID FUNCNAME GROUPS HISTCMD IFS LINENO OLDPWD OPTIND PIPESTATUS POSIXLY_CORRECT
    PPID PWD RANDOM SECONDS SHELLOPTS SHLVL SRANDOM UID
    SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_RESTART_COUNT child rc self stop
"""
# In names of variables that usually hold a secret; HF_TOKEN_PATH does not.
SECRET = re.compile(
    r"(^|_)((credential|secret|token)s?|pwd|pass|key|auth)(_|$)|passw(or)?d|api_?key", re.IGNORECASE
)
# Tokens that say whose they are, and `NAME=value` in a line of shell; $NAME is not a secret.
TOKEN = re.compile(
    r"\b((hf|gh[pousr])_[A-Za-z0-9]{16,}|(glpat|sk|nvapi|xox[bp])-[\w-]{16,}|AKIA[A-Z0-9]{12,})"
)
ASSIGNED = re.compile(r"\b([A-Za-z_][A-Za-z0-9_]*)=[\"']?([^\s\"'$])")
NO_SECRETS = ("_path", "_file", "_dir")
# An address with a password, before the host or after a '?'.
PASSWORD = re.compile(r"://[^\s/@]*:[^\s@]*@|[?&]password=")
LINE_END = re.compile(r"[\n\r\0]")
NAME = r"[A-Za-z0-9_/][A-Za-z0-9_.,:=+@/\[\]-]*"
PATH = r"[A-Za-z0-9_.=+@/-]"


def _matching(pattern: str, may: str) -> AfterValidator:
    """Refuse text that `pattern` does not match as a whole, or that steps up a directory."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value, re.ASCII) or ".." in value.split("/"):
            raise ValueError(f"{value!r:.80} cannot be used in a job script; it may hold {may}")
        return value

    return AfterValidator(check)


def checked_path(path: Path) -> Path:
    """Return a path fit for a #SBATCH line; ValueError if a character has a meaning there."""
    if not re.fullmatch(f"/{PATH}*", str(path), re.ASCII) or ".." in path.parts:
        raise ValueError(
            f"{str(path)!r:.120} must be an absolute path of letters, digits and _ . = + @ -"
            " without '..': #SBATCH lines and lists of mounts hold it"
        )
    return path


def seconds_of(time: str) -> int:
    """Return the seconds of a limit of sbatch, rounded up to minutes; 0 for any other text."""
    pattern = r"(?:(\d{1,3})-)?(\d{1,7})(?::([0-5]?\d))?(?::([0-5]?\d))?"
    match = re.fullmatch(pattern, time, re.ASCII)
    if not match:
        return 0
    days, *clock = match.groups()
    counts = [int(part) for part in clock if part]
    if days is None and len(counts) < 3:  # minutes, or minutes and seconds
        counts.insert(0, 0)
    # By now the first count is of hours; those left out at the end are 0.
    hours, minutes, seconds = (*counts, 0, 0)[:3]
    if days and hours > 23:
        return 0
    return 60 * (1440 * int(days or 0) + 60 * hours + minutes + (seconds > 0))


def _checked_time(value: object) -> str:
    if isinstance(value, datetime.time):
        raise ValueError(f'TOML reads {value} as a time of day; put it in quotes: "{value}"')
    text = str(value) if type(value) is int else value
    if not isinstance(text, str) or not seconds_of(text):
        raise ValueError(
            f'{text!r:.40} is not a time limit; write minutes, "24:00:00" or "2-00:00:00", one'
            " minute at least"
        )
    return text


def _option(command: str, owned: str) -> AfterValidator:
    """Refuse text that is no long option of a command, or one of those that this project sets."""

    def check(value: str) -> str:
        pattern = r"--[a-z][a-z-]*(=[A-Za-z0-9_.,:=+@/&|*()\[\]!%^~-]*)?"
        if not re.fullmatch(pattern, value, re.ASCII):
            raise ValueError(
                f"{value!r:.80} is not an option of {command}: write --name or --name=value without"
                " spaces and quotes"
            )
        name = value.removeprefix("--").partition("=")[0]
        for option in owned.split():
            if option.startswith(name):  # the options of SLURM may be abbreviated
                raise ValueError(
                    f"{value!r:.80} would change --{option}, which this project sets itself; leave"
                    " it out"
                )
        return value

    return AfterValidator(check)


def secret_in(name: str, value: object) -> str | None:
    """Return what looks like a secret in a value of a site file, by its name alone."""
    text = str(value)
    assigned = [name, *(match[1] for match in ASSIGNED.finditer(text))]
    for candidate in assigned:
        if SECRET.search(candidate) and not candidate.lower().endswith(NO_SECRETS):
            return candidate
    return name if PASSWORD.search(text) or TOKEN.search(text) else None


def _checked_line(value: str) -> str:
    if LINE_END.search(value):
        raise ValueError(f"{value!r:.80} is more than one line; list each on its own")
    return value


def _checked_environment(values: object) -> object:
    """Before the types are: an error of type would show the value."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            raise ValueError(f"{name!r:.80} is not a variable's name; use letters, digits and _")
        if name == "MLFLOW_TRACKING_URI":
            raise ValueError("give MLflow's address as tracking_uri in [mlflow]")
        if name in SHELL_NAMES.split():
            raise ValueError(f"{name} belongs to bash or to the job script; leave it out")
        if not isinstance(value, str) or LINE_END.search(value):
            raise ValueError(f"the value of {name} must be text of one line; put it in quotes")
    return values


def _checked_uri(value: str) -> str:
    if PASSWORD.search(value):
        raise ValueError(
            "the address holds a password; leave it out and give it by MLFLOW_TRACKING_PASSWORD,"
            " PGPASSWORD or ~/.netrc"
        )
    # A relative path of SQLite's would be elsewhere for every process.
    pattern = r"(?!sqlite:///[^/])[a-z][a-z0-9+]*://[A-Za-z0-9_.,:=+@/?&%~\[\]-]*"
    if not re.fullmatch(pattern, value, re.ASCII):
        raise ValueError(
            f"{value!r:.120} is not an address; write https://HOST:PORT, postgresql+psycopg2:// or"
            " sqlite:////ABSOLUTE/PATH"
        )
    return value


Count = Annotated[int, Field(strict=True, ge=1)]
Seconds = Annotated[int, Field(strict=True, ge=1, le=MOST_SECONDS)]
Name = Annotated[str, _matching(NAME, "letters, digits and _ . , : = + @ / [ ] -")]
Pattern = Annotated[
    str, _matching(r"[A-Za-z0-9.-]*\{node\}[A-Za-z0-9.-]*", "{node}, letters, digits and . -")
]
Image = Annotated[str, _matching(rf"{NAME}(#{NAME})?", "a path, or REGISTRY#NAME")]
Constraint = Annotated[
    str, _matching(r"[A-Za-z0-9_.,:=+@/&|*()\[\]!-]+", "names of features and & | * ( ) [ ] , !")
]
Memory = Annotated[
    str,
    _matching(r"[0-9]{1,9}[KMGT]?", 'a number with K, M, G or T such as "500G", or "0" for all'),
]
Mount = Annotated[str, _matching(rf"/{PATH}*(:{PATH}+){{0,2}}", "SOURCE[:TARGET[:FLAGS]]")]
TimeLimit = Annotated[str, BeforeValidator(_checked_time)]
SafePath = Annotated[Path, AfterValidator(checked_path)]
Extra = Annotated[str, _option("sbatch", OWNED)]
SrunOption = Annotated[str, _option("srun", OWNED_BY_STEPS)]
Line = Annotated[str, AfterValidator(_checked_line)]
Environment = Annotated[dict[str, str], BeforeValidator(_checked_environment)]
Address = Annotated[str, AfterValidator(_checked_uri)]
