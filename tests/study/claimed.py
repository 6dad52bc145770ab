"""Studies whose truth is known: results by document and rows of the table, from functions of run
and step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from base.frozen import fingerprint
from study.definition import Study, save_study
from study.design import with_controls
from study.paths import (
    MeasuredModel,
    curvature_result,
    hf_directory,
    model_record,
    quantization_result,
    released_model,
)
from study.released import ReleasedRevision, ReleasedRun
from study.results.collect import collect_rows, flops_until, phase_of
from study.results.paired import Paired
from study.results.table import Row
from tests.sealing import write_ending
from tests.study.ablation import tiny
from tests.study.curved import curvature_content
from tests.study.synthetic import COST, TOKENS, per_document, result_of, specs_of, write_result
from train.run.config import BranchFrom, RunConfig
from train.run.directory import RunDirectory
from train.run.optimization import Anneal, ConstantPhase, CosinePhase, ScheduleConfig
from train.run.schedules import learning_rate

SPEC = "gptq-b3-g32"
Error = Callable[[RunConfig, MeasuredModel], float]  # relative error of a model


def run_of(
    name: str, peak: float = 1e-3, start: int = 320, total: int = 400, **changes
) -> RunConfig:
    """A constant rate from step 20 on, then an anneal, with checkpoints at 40, 80, 160, 320 and
    the end.
    """
    template = tiny().runs[0]
    assert isinstance(template, RunConfig)
    warmup = 20 * template.tokens_per_step
    anneal = Anneal(start_step=start)
    settings = {
        "name": name,
        "schedule": ScheduleConfig(warmup_tokens=warmup, phase=ConstantPhase(), anneal=anneal),
        "optimizer": template.optimizer.model_copy(update={"peak_lr": peak}),
        "total_steps": total,
        "save_steps": (*(step for step in (40, 80, 160, 320) if step <= start), total),
        "averages": (),
    }
    return RunConfig.model_validate(template.model_copy(update=settings | changes).model_dump())


def branched(parent: RunConfig, step: int, length: int) -> RunConfig:
    """A cooldown of the parent's checkpoint at `step`."""
    origin = BranchFrom(run=f"../{parent.name}", step=step, fingerprint=fingerprint(parent))
    name = f"{parent.name}-cooldown{step}"
    total = step + length
    return run_of(name, start=step, total=total, save_steps=(total,), branch_from=origin)


def cosine(name: str, total: int) -> RunConfig:
    """A cosine to a tenth of the peak at its end."""
    template = run_of(name)
    per_step = template.tokens_per_step
    schedule = ScheduleConfig(
        warmup_tokens=20 * per_step, phase=CosinePhase(horizon_tokens=total * per_step), anneal=None
    )
    return run_of(name, total=total, schedule=schedule, save_steps=(total // 2, total))


def study_of(
    *runs: RunConfig,
    methods: tuple[str, ...] = (),
    curvature: bool = False,
    controls: bool = True,
    **changes,
) -> Study:
    """A study of these runs, and their controls, at 3 bits."""
    whole = tiny()
    quantization = whole.quantization.model_copy(
        update={"specs": (SPEC,), "methods": methods, "by_block": ()}
    )
    content = whole.model_dump() | {
        "runs": [run.model_dump() for run in (with_controls(runs) if controls else runs)],
        "soups": (),
        "averaged_steps": (),
    }
    content |= {"quantization": quantization.model_dump()} | (
        {} if curvature else {"curvature": None}
    )
    return Study.model_validate(content | {"labels": {}} | changes)


def released(rates: dict[int, float | None]) -> ReleasedRun:
    """A stage with a checkpoint at each of these steps."""
    revisions = [
        ReleasedRevision(name=f"step{step}", step=step, tokens=1000 * step, learning_rate=rate)
        for step, rate in rates.items()
    ]
    return ReleasedRun(
        name="stage1", model="model", source="someone/model", revisions=tuple(revisions)
    )


def rows_of(
    directory: Path,
    study: Study,
    error: Error,
    *,
    noise: float = 0.02,
    loss: Error = lambda run, model: 4.0,
    cost: dict[str, float] | None = None,
    trace: Error | None = None,
) -> list[Any]:
    """Writes the results of every model and returns the table's rows.

    By document the error is that of the model times 1 + `noise` times a normal number of its own,
    which has mean 0 over the tokens: two models with the same error differ by document, and by
    nothing else.
    """
    save_study(directory, study)
    generator, rows = np.random.default_rng(0), []
    for run in study.trained:
        for model in study.models_of(run):
            row: dict[str, Any] = {
                "run": run.name,
                "average": model.average,
                "step": model.step,
                "phase": phase_of(run, model.step),
                "tokens": model.step * run.tokens_per_step,
                "training_flops": flops_until(study, run, model.step),
                "learning_rate": learning_rate(run, model.step),
            }
            for spec in specs_of(study, run, model):
                size = (cost or {}).get(spec, 1.0) * error(run, model) * loss(run, model)
                losses = noisy_losses(generator, loss(run, model), size, noise)
                result = result_of(directory / hf_directory(run.name, model), spec, losses)
                write_result(directory / quantization_result(run.name, model, spec), result)
                for figure, (low, high) in result["measured"]["intervals"].items():
                    column = f"quant/{spec}/{figure}"
                    row |= {column: result["measured"][figure]}
                    row |= {f"{column}_low": low, f"{column}_high": high}
            if trace and model.average is None:
                value = trace(run, model)
                content = curvature_content(
                    directory / hf_directory(run.name, model), value, 4.0, 16, True
                )
                write_result(directory / curvature_result(run.name, model), content)
                row |= {"curvature/trace": value, "curvature/lambda_max": value / 40}
                row |= {"curvature/lambda_max_converged": True}
            rows.append(row)
    return rows


def noisy_losses(
    generator: np.random.Generator, loss: float, increase: float, noise: float
) -> dict[str, list]:
    """Sums of documents of a model, whose increase differs by document by a share of it."""
    tokens_D = np.array(TOKENS, dtype=float)
    losses = per_document(loss, increase, 1.1 * increase)
    normal_D = generator.normal(size=len(TOKENS))
    centred_D = normal_D - (normal_D * tokens_D).sum() / tokens_D.sum()
    shift_D = noise * increase * tokens_D * centred_D
    for key in ("nll_quantized", "kl"):
        losses[key] = list(np.array(losses[key]) + shift_D)
    return losses


def plant(
    directory: Path,
    study: Study,
    error: Callable[[ReleasedRun, ReleasedRevision], float],
    *,
    loss: Callable[[ReleasedRun, ReleasedRevision], float] = lambda run, revision: 4.0,
    noise: float = 0.02,
) -> list[Row]:
    """Writes the results of every revision of released models as if they were downloaded and
    quantized, with these relative errors, and returns the rows that are collected.
    """
    save_study(directory, study)
    generator = np.random.default_rng(0)
    for run in study.runs:
        assert isinstance(run, ReleasedRun)
        for revision in run.revisions:
            model, nll = released_model(revision), loss(run, revision)
            record = directory / model_record(run.name, model)
            record.parent.mkdir(parents=True)
            record.touch()
            for spec in study.quantization.specs:
                increase = COST.get(spec, 1.0) * error(run, revision) * nll
                losses = noisy_losses(generator, nll, increase, noise)
                result = result_of(record.parent, spec, losses)
                write_result(directory / quantization_result(run.name, model, spec), result)
    return collect_rows(directory, study).rows


def diverge(directory: Path, run: RunConfig) -> None:
    """Leaves the word of a training that diverged at step 3."""
    of_run = RunDirectory(directory / run.name)
    of_run.path.mkdir(parents=True, exist_ok=True)
    write_ending(of_run, "diverged", 3, fingerprint=fingerprint(run))


def table(directory: Path, study: Study, rows: list[Any]) -> dict[str, Any]:
    """Claim -> its line of the table."""
    from study.claims.page import claims_table, judge_all

    lines = claims_table(judge_all(study, rows, Paired(directory)))
    return {line.claim.name: line for line in lines}


def outcomes(directory: Path, study: Study, rows: list[Any]) -> dict[str, str]:
    """Claim -> its verdict."""
    return {name: line.outcome for name, line in table(directory, study, rows).items()}
