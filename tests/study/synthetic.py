"""Result files of a study as its commands write them, with made-up but plausible numbers, for tests and for looking."""

import json
import math
from pathlib import Path

from ckpt_tools.hf_directory import LINEAGE_JSON
from study.settings import MeasuredModel, Study, save_study
from study.steps import (
    checkpoint_directory,
    curvature_result,
    hf_directory,
    quantization_result,
    write_run_configurations,
)
from train.config import RunConfig
from train.frozen import fingerprint
from train.run_directory import CHECKPOINT_JSON, CheckpointRecord, RunDirectory, write_json
from train.schedules import learning_rate


def held_out_loss(run: RunConfig, step: int) -> float:
    """Falls from ln(vocabulary), slower at extreme peaks, and again in the anneal."""
    peak = run.optimizer.peak_lr
    distance = abs(math.log10(peak) + 2.2)
    rate = learning_rate(run, step) / peak if step else 1.0
    return 3.0 + 0.3 * distance + 4.6 * math.exp(-9 * step / run.total_steps) + 0.18 * rate * (1 + 0.3 * distance)


def relative_error(run: RunConfig, step: int, bits: int) -> float:
    """Grows with the peak and as the rate falls."""
    rate = learning_rate(run, step) / run.optimizer.peak_lr
    size: float = (
        0.02 * (run.optimizer.peak_lr / 1e-3) ** 0.3 * (1.6 - 0.6 * rate) * (0.5 + 0.5 * step / run.total_steps)
    )
    return size * (1.0 if bits == 3 else 0.18)


def _write(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)


def _write_results(directory: Path, study: Study, run: RunConfig, model: MeasuredModel, loss: float) -> None:
    step = model.step
    for spec in study.quantization.specs:
        error = relative_error(run, step, 3 if "b3" in spec else 4) * (0.6 if model.average else 1)
        figures = {
            "cross_entropy": loss,
            "cross_entropy_quantized": loss * (1 + error),
            "absolute_error": loss * error,
            "relative_error": error,
            "kl_divergence": loss * error * 1.1,
        }
        intervals = {name: [0.93 * value, 1.08 * value] for name, value in figures.items()}
        intervals["cross_entropy"] = [loss - 0.11, loss + 0.12]
        counts = {"top1_agreement": 1 - 4 * error, "tokens": 32768, "documents": 28}
        measured = {**figures, **counts, "intervals": intervals}
        _write(directory / quantization_result(run.name, model, spec), {"measured": measured})
    if model.average:
        return
    trace = 900 * (run.optimizer.peak_lr / 1e-3) ** -0.4 * (1.8 - learning_rate(run, step) / run.optimizer.peak_lr)
    curved = {
        "trace": {"mean": trace, "standard_error": 0.05 * trace, "probes": study.curvature.pairs},
        "lambda_max": {"value": trace / 40, "residual": 0.008, "converged": step % 120 != 0, "iterations": 23},
        "loss": loss + 0.01,
    }
    _write(directory / curvature_result(run.name, model), {"measured": curved})


def _write_metrics(directory: RunDirectory, run: RunConfig) -> None:
    rows = []
    for step in range(1, run.total_steps + 1):
        row = {"step": step, "tokens": step * run.tokens_per_step, "attempt": 1, "time": 1_700_000_000.0 + step}
        loss = held_out_loss(run, step) - 0.05 + 0.02 * math.sin(step)
        train = {"loss": loss, "z_loss": 0.1, "grad_norm": 0.9, "tokens_per_second": 2e4}
        rows.append(row | train | {"learning_rate": learning_rate(run, step)})
        if step in run.save_steps or step % run.evaluate_every_steps == 0:
            averaged = {f"held_out_loss/{average.name}": held_out_loss(run, step) - 0.08 for average in run.averages}
            rows.append(row | {"held_out_loss": held_out_loss(run, step)} | averaged)
    directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _told(run: RunConfig, model: MeasuredModel) -> dict | None:
    """What checkpoint.json says of an average."""
    kept = {average.name: average for average in run.averages}
    if model.average is None or model.soup_of:
        return None
    average = kept[model.average].model_dump(mode="json")
    steps = [model.step - back * average["interval_steps"] for back in range(5)]
    return average | {"steps": sorted(steps)}


def write_study(directory: Path, study: Study) -> Path:
    """A study directory with every file that collect, the report and MLflow read."""
    save_study(directory, study)
    write_run_configurations(directory, study)
    for run in study.runs:
        run_directory = RunDirectory(directory / run.name)
        for model in study.models_of(run):
            step = model.step
            loss = held_out_loss(run, step) - (0.08 if model.average else 0)
            record = CheckpointRecord(
                run=run.name,
                fingerprint=fingerprint(run),
                step=step,
                tokens=step * run.tokens_per_step,
                learning_rate=learning_rate(run, step),
                train_loss=loss - 0.05,
                held_out_loss=loss,
                engine=run.engine,
                precision="fp32",
                world_size=2,
                layout={"tensor": 1, "pipeline": 1, "data": 2},
                average=_told(run, model),
                attempt=1,
                data_sha256={"train": "0" * 64, "held_out": "0" * 64},
                model=run.model.model_dump(mode="json"),
                files={},
            )
            if model.soup_of:
                _write(directory / hf_directory(run.name, model) / LINEAGE_JSON, {"kind": "average"})
            else:
                checkpoint = directory / checkpoint_directory(run.name, model)
                _write(checkpoint / CHECKPOINT_JSON, record.model_dump(mode="json"))
            _write_results(directory, study, run, model, loss)
        _write_metrics(run_directory, run)
        packages = {"torch": "2.13.0", "megatron-core": "0.16.1", "deepspeed": "0.19.8"}
        attempts = [{"commit": "c0ffee" * 6 + "c0ff", "python": "3.11.9", "packages": packages}]
        write_json(run_directory.environment_json, {"attempts": attempts})
    return directory
