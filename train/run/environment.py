"""environment.json: an entry for every attempt of a run."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from base.environment import environment
from base.errors import UserError
from base.files import write_json
from base.grouping import grouped
from base.processor import Processor, kind_of
from base.reading import as_model, read_object

# Variable: whose jobs train a run, of which only the newest may. Set by who makes sure of that.
OWNER = "QUANTDYN_OWNER"


class _Node(BaseModel):
    """Hosts with equal hardware."""

    hosts: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    processor: Processor | None = None


class _Attempt(BaseModel):
    """The part of an entry that is read again."""

    began: float | None = None
    nodes: tuple[_Node, ...] = ()


def attempts(environment_json: Path) -> list[dict[str, Any]]:
    """Return the entries of environment.json, one per attempt; FileNotFoundError for none."""
    again = "restore it, or move it away: it only records earlier attempts"
    recorded = read_object(environment_json, again).get("attempts")
    if not recorded or not isinstance(recorded, list):
        raise UserError(f"{environment_json} lists no attempts; {again}")
    if not all(isinstance(attempt, dict) for attempt in recorded):
        raise UserError(f"{environment_json} lists what is no attempt; {again}")
    for attempt in recorded:
        as_model(_Attempt, attempt, environment_json)
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


def nodes_of(ranks: Iterable[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the `nodes` of an attempt from host and hardware of every rank: alike ones together.

    >>> nodes_of([("a", {"gpus": ["H100"]}), ("b", {"gpus": ["H200"]}), ("a", {"gpus": ["H100"]})])
    [{'hosts': ['a'], 'gpus': ['H100']}, {'hosts': ['b'], 'gpus': ['H200']}]
    """
    alike = grouped(ranks, lambda rank: json.dumps(rank[1], sort_keys=True)).values()
    return [{"hosts": sorted({host for host, _ in same}), **same[0][1]} for same in alike]


def kinds_of(attempt: dict[str, Any]) -> list[str]:
    """Return the kinds of processor of an attempt's nodes; empty where none are recorded."""
    kinds = (kind_of(node) for node in attempt.get("nodes", ()))
    return list(dict.fromkeys(kind for kind in kinds if kind))


def node_count(attempt: dict[str, Any]) -> int:
    """Return how many nodes trained in an attempt; 1 where none are recorded."""
    return len({host for node in attempt.get("nodes", ()) for host in node["hosts"]}) or 1
