"""A run's exports as publishing takes them in: of this run, under their published names, with what was measured."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tools.hf_directory import LINEAGE_JSON, read_lineage
from ckpt_tools.publishing.results import Result, check_comparable, read_results
from train.command import UserError
from train.config import RunConfig, load_run
from train.frozen import NAME_PATTERN, fingerprint
from train.run_directory import FileRecord, RunDirectory

UNITS = {"B": 10**9, "M": 10**6, "K": 10**3}
LEAST_UNITS = 100  # that a run of M or K ends with, so that rounding up adds at most 1% there
PARITY = ("max_absolute_error", "max_logit", "precision", "tolerance", "attention", "layer", "logits")
STEP_SUFFIX = re.compile(r"-step\d{8,}$")


def tokens_unit(total_tokens: int) -> str:
    """The unit in which all names of a run count its tokens.

    B (10^9) for a run that ends with at least 1B tokens, as OLMo's do. Counted so, every checkpoint of a smaller run
    would be `tokens1B`: it has the larger of M and K in which it ends with at least 100, or else K.
    """
    if total_tokens >= UNITS["B"]:
        return "B"
    return "M" if total_tokens >= LEAST_UNITS * UNITS["M"] else "K"


def published_name(step: int, tokens: int, *, unit: str, stage: int = 1, average: str | None = None) -> str:
    """What a checkpoint is called once published, such as stage1-step1000-tokens5B or ...-tokens5B-lawa5x16.

    As Ai2 names the revisions of allenai/OLMo-2-1124-7B: tokens are rounded up to whole units of `tokens_unit`.
    """
    name = f"stage{stage}-step{step}-tokens{-(-tokens // UNITS[unit])}{unit}"
    return f"{name}-{average}" if average else name


@dataclass(frozen=True)
class Exported:
    """One HF directory of a run.

    Attributes:
        directory: where it lies.
        revision: its published name.
        lineage: without the files.
        files: that lineage.json vouches for, by relative path.
        step: of the weights; of an average, of its newest ingredient.
        tokens: trained on until then.
        average: its name; None for weights as training left them.
        results: what was measured of it.
    """

    directory: Path
    revision: str
    lineage: dict[str, Any]
    files: dict[str, FileRecord]
    step: int
    tokens: int
    average: str | None
    results: list[Result]

    @property
    def weights(self) -> dict[str, str]:
        """SHA-256 of the weight files by name."""
        return weights_of(self.files)


def weights_of(files: dict[str, FileRecord]) -> dict[str, str]:
    """SHA-256 of the weight files of an HF directory by name."""
    return {name: files[name].sha256 for name in sorted(files) if re.fullmatch(r"[^/]+\.safetensors", name)}


def read_exports(run_dir: Path, stage: int) -> tuple[RunConfig, list[Exported]]:
    """The run and its exports RUN/hf/*, by step, averages behind the weights they are made from. Opens no weights.

    Raises:
        UserError: there are none, one of them is no export of this run or lacks its parity figures, two would have the
            same name, or their measurements do not compare.
    """
    directory = RunDirectory(run_dir)
    run = load_run(directory.run_json)
    paths = sorted(path for path in directory.hf.glob("[!.]*") if path.is_dir())
    if not paths:
        raise UserError(f"{directory.hf} holds no exports; make them with 'python -m ckpt_tools export'")
    exports = sorted((_read(path, run, stage) for path in paths), key=lambda one: (one.step, one.average or ""))
    by_name: dict[str, Exported] = {}
    for one in exports:
        other = by_name.setdefault(one.revision, one)
        if other is not one:
            raise UserError(f"{other.directory} and {one.directory} are both {one.revision}; move one out of hf/")
    check_comparable([result for one in exports for result in one.results])
    return run, exports


def _read(hf_dir: Path, run: RunConfig, stage: int) -> Exported:
    found = read_lineage(hf_dir)
    if found is None:
        raise UserError(f"{hf_dir} has no {LINEAGE_JSON}: it is no export; move it out of hf/")
    lineage, files = found
    _check_origin(hf_dir, lineage, run)
    average = None
    if lineage["kind"] == "average" or lineage.get("average"):
        average = STEP_SUFFIX.sub("", hf_dir.name)
        if not re.match(NAME_PATTERN, average):
            raise UserError(f"{hf_dir}: '{average}' is no name for an average; rename the directory")
    step = lineage["step"]
    tokens = step * run.tokens_per_step
    unit = tokens_unit(run.total_steps * run.tokens_per_step)
    revision = published_name(step, tokens, unit=unit, stage=stage, average=average)
    return Exported(hf_dir, revision, lineage, files, step, tokens, average, read_results(hf_dir, weights_of(files)))


def _check_origin(hf_dir: Path, lineage: dict[str, Any], run: RunConfig) -> None:
    """UserError unless it is an export of this run with its parity figures, or an average of this run's weights."""
    if lineage.get("kind") not in ("export", "average"):
        raise UserError(f"{hf_dir} is neither an export nor an average; move it out of hf/")
    if lineage.get("fingerprint") != fingerprint(run) or not isinstance(lineage.get("step"), int):
        raise UserError(f"{hf_dir} was not made from run {run.name} alone; move it out of hf/")
    parity = lineage.get("parity") or {}
    if lineage["kind"] == "export" and not parity.keys() >= set(PARITY):  # no engine computed with an average of files
        raise UserError(f"{hf_dir} lacks the figures of its check against the training engine; export it again")
