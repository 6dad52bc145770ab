"""SLURM's commands as sites wrap them: programs of the same names, to be put first on PATH.

A wrapper is lines of bash for a command: `slurm` is the real one, `$n` the number of this call.
"""

import shlex
import shutil
from pathlib import Path

from tests.runs import write_program

PROGRAM = """#!/bin/bash
slurm() {{ {real} "$@"; }}
echo >> {calls}
n=$(wc -l < {calls})
{lines}
"""
LISTS = ("squeue", "sacct")
NOTED = """
echo '*** Welcome to the cluster, 3 nodes are down ***'; echo '| 2 notes |'; echo 'note: x' >&2
slurm "$@"; code=$?
echo; printf 'bye'; exit $code
"""
GLUED = """printf 'cluster 4'; slurm "$@" """
TORN = """
answer=$(slurm "$@") || exit
[ $((n % 2)) = 0 ] && echo "$answer" || printf '%s' "${answer:0:${#answer}*2/3}"
"""
SILENT = """[ $n -gt 3 ] && [ $n -le 15 ] || slurm "$@" """
DROPPED = """
answer=$(slurm "$@") || exit
[ $((n % 2)) = 0 ] && echo "$answer" || echo "$answer" | sed 1d
"""
# The exit code and the message are lost.
SWALLOWED = """slurm "$@" 2>/dev/null; exit 0"""
PLUGIN = """
echo 'cli_filter: Contact hpc@site about your database connection' >&2
slurm "$@"; code=$?; echo 'Invalid license ignored' >&2; exit $code
"""
WITHOUT_ID = """slurm "$@" > /dev/null && echo 'Your job was taken.'"""
OF_SEVERAL = """answer=$(slurm "$@") && echo "$answer;lab" """
WRAPPERS: dict[str, dict[str, str]] = {
    "notes": dict.fromkeys(("sbatch", *LISTS, "scontrol"), NOTED),
    "notes, and a squeue that is empty for a while": {
        **dict.fromkeys(("sbatch", "sacct", "scontrol"), NOTED),
        "squeue": SILENT,
    },
    "notes without a line end": {**dict.fromkeys(LISTS, GLUED), "sbatch": NOTED},
    "torn lists": dict.fromkeys(LISTS, TORN),
    "lists that are empty for a while": dict.fromkeys(LISTS, SILENT),
    "lists without an element": dict.fromkeys(LISTS, DROPPED),
    "errors that are swallowed": dict.fromkeys(LISTS, SWALLOWED),
    "plugins on stderr": dict.fromkeys(("sbatch", *LISTS, "scontrol", "scancel"), PLUGIN),
    "no id": {"sbatch": WITHOUT_ID},
    "one of several clusters": {"sbatch": OF_SEVERAL},
}


def wrap(directory: Path, lines: dict[str, str]) -> Path:
    """Write a program for each command and return their directory."""
    for name, text in lines.items():
        calls = shlex.quote(str(directory / f"{name}.calls"))
        program = PROGRAM.format(real=shutil.which(name), calls=calls, lines=text)
        write_program(directory / name, program)
    return directory


def without_commands(directory: Path) -> Path:
    """Return a directory with all programs of this system but SLURM's, of which srun is there."""
    directory.mkdir()
    for place in ("/usr/bin", "/bin", "/usr/sbin"):
        for program in Path(place).iterdir():
            link = directory / program.name
            if not link.is_symlink() and program.name not in ("scancel", "scontrol", "sinfo"):
                link.symlink_to(program)
    for name in ("sbatch", "squeue", "sacct", "salloc"):
        (directory / name).unlink()
    return directory
