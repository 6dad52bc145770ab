"""environment.json: an entry for every attempt of a run."""

from pathlib import Path
from typing import Any

from base.environment import environment
from base.errors import UserError
from base.files import write_json
from base.reading import read_object

# Variable: whose jobs train a run, of which only the newest may. Set by who makes sure of that.
OWNER = "QUANTDYN_OWNER"


def attempts(environment_json: Path) -> list[dict[str, Any]]:
    """Return the entries of environment.json, one per attempt; FileNotFoundError for none."""
    again = "restore it, or move it away: it only records earlier attempts"
    recorded = read_object(environment_json, again).get("attempts")
    if not recorded or not isinstance(recorded, list):
        raise UserError(f"{environment_json} lists no attempts; {again}")
    if not all(isinstance(attempt, dict) for attempt in recorded):
        raise UserError(f"{environment_json} lists what is no attempt; {again}")
    return recorded


def record_attempt(environment_json: Path, **details: Any) -> int:
    """Append this attempt to environment.json; return its number, counted from 1."""
    recorded = attempts(environment_json) if environment_json.exists() else []
    recorded.append(environment() | details)
    write_json(environment_json, {"attempts": recorded})
    return len(recorded)


def amend_attempt(environment_json: Path, attempt: int, **details: Any) -> None:
    """Add details to the entry of an attempt."""
    recorded = attempts(environment_json)
    recorded[attempt - 1] |= details
    write_json(environment_json, {"attempts": recorded})
