"""environment.json: an entry for every attempt of a run."""

import json
from pathlib import Path
from typing import Any

from base.environment import environment
from base.errors import UserError
from base.files import write_json

# Variable: whose jobs train a run, of which only the newest may. Set by who makes sure of that.
OWNER = "QUANTDYN_OWNER"


def attempts(environment_json: Path) -> list[dict[str, Any]]:
    """Return the entries of environment.json, one per attempt; FileNotFoundError for none."""
    try:
        recorded: list[dict[str, Any]] = json.loads(environment_json.read_text())["attempts"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise UserError(
            f"{environment_json} is damaged; move it away, it only records earlier attempts"
        ) from None
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
