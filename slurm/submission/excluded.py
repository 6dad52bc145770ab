"""The nodes that no training of a study goes to: those that a health check found unfit."""

from collections.abc import Iterable
from pathlib import Path

from base.errors import UserError
from base.files import write_json
from base.names import take_one_of
from base.reading import read_model
from slurm.submission.record import SLURM

EXCLUDED_JSON = "excluded.json"  # node -> reason


def excluded_nodes(study_dir: Path) -> dict[str, str]:
    """Return the reason by node."""
    try:
        return read_model(dict[str, str], study_dir / SLURM / EXCLUDED_JSON)
    except FileNotFoundError:
        return {}


def exclude(study_dir: Path, bad: dict[str, str]) -> None:
    """Add nodes with their reasons."""
    write_json(study_dir / SLURM / EXCLUDED_JSON, excluded_nodes(study_dir) | bad)


def unexclude(study_dir: Path, nodes: Iterable[str]) -> None:
    """Let jobs go to nodes again; UserError for one that is not excluded."""
    excluded = excluded_nodes(study_dir)
    for node in nodes:
        if node not in excluded:
            raise UserError(f"node {node!r:.80} is not excluded; {take_one_of(node, excluded)}")
        del excluded[node]
    write_json(study_dir / SLURM / EXCLUDED_JSON, excluded)
