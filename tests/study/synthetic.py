"""Result files of a study as its commands write them, with made-up but plausible numbers, for
tests and for looking.
"""

import json
import math
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from base.frozen import fingerprint
from base.outlier_names import FIGURES
from ckpt_tools.hf.directory import LINEAGE_JSON, RESULT_JSON
from study.definition import Study, save_study
from study.figures import figure
from study.machine.needs import write_run_configurations
from study.paths import (
    MeasuredModel,
    blocks_result,
    checkpoint_directory,
    curvature_result,
    hf_directory,
    last_model,
    quantization_result,
    result,
    slice_result,
    step_result,
)
from study.results.collect import collect_rows
from study.results.table import Row, read_table, write_table
from study.text_kinds import PreparedText, TokenFile
from tests.sealing import json_lines, reseal
from tests.study.curved import critical_content, curvature_content, slice_content, step_content
from train.run.config import RunConfig
from train.run.directory import CHECKPOINT_JSON, CheckpointRecord, RunDirectory
from train.run.schedules import learning_rate


def _picture() -> bytes:
    out = BytesIO()
    Image.radial_gradient("L").save(out, "png")
    return out.getvalue()


PICTURE = _picture()  # in place of each that is left out
ATTEMPT = {  # an entry of environment.json; versions that no release has
    "quantdyn": "7.8.9",
    "commit": "c0ffee" * 6 + "c0ff",
    "python": "3.99.1",
    "packages": {"torch": "2.99.2", "megatron-core": "0.99.3", "deepspeed": "0.99.4"},
    "differs_from_tested": {"torch": {"tested": "2.14.0", "here": "2.99.2"}},
}


def text_in_place(
    *, held_out: Path, calibration: Path, tokenizer: Path, train: Path | None = None
) -> PreparedText:
    """Token files that are there, as a study reads those of another."""
    return PreparedText(
        train=TokenFile(name=str(train)) if train else None,
        held_out=TokenFile(name=str(held_out)),
        calibration=TokenFile(name=str(calibration)),
        tokenizer=str(tokenizer),
        sha256="0" * 64,
    )


def held_out_loss(run: RunConfig, step: int) -> float:
    """Falls from ln(vocabulary), slower at extreme peaks, and again in the anneal."""
    peak = run.optimizer.peak_lr
    distance = abs(math.log10(peak) + 2.2)
    rate = learning_rate(run, step) / peak if step else 1.0
    return (
        3.0
        + 0.3 * distance
        + 4.6 * math.exp(-9 * step / run.total_steps)
        + 0.18 * rate * (1 + 0.3 * distance)
    )


# By how much a method costs more than GPTQ at 3 bits.
COST = {"gptq-b3-g32": 1.0, "gptq-b4-g32": 0.18, "rtn-b3-g32": 2.2, "gptqmodel-b3-g32": 1.02}
COST |= {"awq-b3-g32": 1.8, "int8-t6": 0.004, "gptq-b8-g32": 0.001, "gptq-b3-g32-had": 0.9}
COST |= {"w4a4-g32": 2.6, "w4a4-g32-quarot": 1.6, "nvfp4": 1.3}
# One evaluation text for all models: documents of other lengths, some harder than others for every
# model alike.
TOKENS = [600 + 41 * ((7 * document) % 29) for document in range(28)]
_EFFECTS = [math.sin(3 * document) for document in range(28)]
_MEAN = sum(effect * tokens for effect, tokens in zip(_EFFECTS, TOKENS, strict=True)) / sum(TOKENS)
HARDNESS = [effect - _MEAN for effect in _EFFECTS]  # of mean 0 over the tokens


def relative_error(run: RunConfig, step: int, spec: str) -> float:
    """Grows with the peak and as the rate falls."""
    rate = learning_rate(run, step) / run.optimizer.peak_lr
    size: float = (
        0.02
        * (run.optimizer.peak_lr / 1e-3) ** 0.3
        * (1.6 - 0.6 * rate)
        * (0.5 + 0.5 * step / run.total_steps)
    )
    return size * COST[spec]


def per_document(loss: float, increase: float, divergence: float) -> dict[str, list]:
    """Sums of documents that have these means over all tokens; quantization costs more where the
    text is harder.
    """
    columns: dict[str, list] = {"document": list(range(len(TOKENS))), "tokens": TOKENS}
    columns |= {name: [] for name in ("nll", "nll_quantized", "kl", "agreements")}
    for tokens, hardness in zip(TOKENS, HARDNESS, strict=True):
        columns["nll"].append(tokens * (loss + 0.5 * hardness))
        columns["nll_quantized"].append(
            columns["nll"][-1] + tokens * increase * (1 + 0.4 * hardness)
        )
        columns["kl"].append(tokens * divergence * (1 + 0.4 * hardness))
        columns["agreements"].append(tokens * (1 - 4 * increase))
    return columns


def result_of(path: Path, spec: str, losses: dict[str, list]) -> dict:
    """A result.json of quant_eval with these losses by document; the intervals are made up."""
    tokens, nll, quantized, kl, agreements = (
        sum(losses[name]) for name in ("tokens", "nll", "nll_quantized", "kl", "agreements")
    )
    figures = {
        "cross_entropy": nll / tokens,
        "cross_entropy_quantized": quantized / tokens,
        "absolute_error": (quantized - nll) / tokens,
        "relative_error": quantized / nll - 1,
        "kl_divergence": kl / tokens,
        "top1_agreement": agreements / tokens,
        "r_l": 3 * kl / tokens,
    }
    intervals = {name: [0.93 * value, 1.08 * value] for name, value in figures.items()}
    intervals["cross_entropy"] = [figures["cross_entropy"] - 0.11, figures["cross_entropy"] + 0.12]
    counts = {"tokens": tokens, "documents": len(losses["tokens"]), "calibration": None}
    evaluation = {"sha256": "0" * 64, "sequence_length": 128, "documents": "separate"}
    described = {"name": spec, "method": spec.partition("-")[0], "evaluation": evaluation}
    described |= {"dtype": "fp32"}
    measured = {**figures, **counts, "intervals": intervals, "per_document": losses, "layers": []}
    return {"model": {"path": str(path)}, "spec": described, "measured": measured}


def write_blocks(path: Path, result: dict, blocks: int = 4) -> None:
    """The same result as --per-block leaves it: the outer blocks cost twice as much as those
    between.
    """
    total = result["measured"]["absolute_error"]
    costs = [2 if block in (0, blocks - 1) else 1 for block in range(blocks)]

    def increase(value: float) -> dict:
        ends = [value - 0.02 * total, value + 0.03 * total]
        return {"absolute_error": value, "intervals": {"absolute_error": ends}}

    measured = result["measured"] | {
        "blocks": [
            {
                "block": block,
                "alone": increase(0.9 * total * cost / sum(costs)),
                "all_but_it": increase(total * (1 - 1.2 * cost / sum(costs))),
            }
            for block, cost in enumerate(costs)
        ],
        "layers": [
            {
                "name": f"model.layers.{block}.{linear}",
                "relative_output_error": error * (1 + 0.1 * block),
            }
            for block in range(blocks)
            for linear, error in (
                ("self_attn.q_proj", 0.05),
                ("self_attn.o_proj", 0.01),
                ("mlp.down_proj", 0.03),
            )
        ],
    }
    write_result(path, result | {"measured": measured})


def change_losses(directory: Path, run: str, spec: str, **columns: list[float]) -> None:
    """Gives the last result of a run other sums of documents, and what follows from them."""
    path = directory / run / "hf/step00000640/quant" / spec / "result.json"
    result = json.loads(path.read_text())
    losses = result["measured"]["per_document"] | columns
    reseal(path, result_of(path.parents[2], spec, losses))


def table_of(directory: Path, study: Study) -> list[Row]:
    """The rows of the table, made from the results that are there now."""
    write_table(directory, study, collect_rows(directory, study).rows)
    return read_table(directory, study)


def row_at(rows: list[Row], run: str, step: int, average: str | None = None) -> Row:
    """The row of one model."""
    at = (run, step, average)
    return next(row for row in rows if (row["run"], row["step"], row["average"]) == at)


def write_result(path: Path, content: dict) -> None:
    """Writes a record; a result.json says which model and spec it is of."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name == RESULT_JSON:
        identity = {"model": {"path": str(path.parents[2])}, "spec": {"name": path.parent.name}}
        content = identity | content
    reseal(path, content)


def linears_result(run: str, model: MeasuredModel) -> str:
    """The place of a model's outlier statistics."""
    return result(run, model, "outliers", "linears")


def outliers_content(path: Path, step: int) -> dict:
    """A result.json of 'quant_eval outliers', whose kurtosis rises with the step."""
    figures = {}
    for name in FIGURES:
        mean = step / 100 if name.endswith("kurtosis") else 0.04
        figures[name] = {"mean": mean, "max": 2 * mean, "linear": "model.layers.0.mlp.down_proj"}
        if name.startswith("input"):
            figures[name] |= {"standard_error": mean / 10, "interval": [0.8 * mean, 1.2 * mean]}
    spec = {"name": "linears", "outliers": {}}
    return {"model": {"path": str(path)}, "spec": spec, "measured": {"figures": figures}}


def specs_of(study: Study, run: RunConfig, model: MeasuredModel) -> tuple[str, ...]:
    """Quantizations of a model: the last weights of a run have every method."""
    settings = study.quantization
    return settings.at_the_end if model == last_model(run) else settings.everywhere


def _write_results(
    directory: Path, study: Study, run: RunConfig, model: MeasuredModel, loss: float
) -> None:
    step = model.step
    for spec in specs_of(study, run, model):
        increase = loss * relative_error(run, step, spec) * (0.6 if model.average else 1)
        losses = per_document(loss, increase, 1.1 * increase)
        content = result_of(directory / hf_directory(run.name, model), spec, losses)
        write_result(directory / quantization_result(run.name, model, spec), content)
    if study.outliers:
        content = outliers_content(directory / hf_directory(run.name, model), step)
        write_result(directory / linears_result(run.name, model), content)
    if model.average:
        return
    trace = (
        900
        * (run.optimizer.peak_lr / 1e-3) ** -0.4
        * (1.8 - learning_rate(run, step) / run.optimizer.peak_lr)
    )
    hf = directory / hf_directory(run.name, model)
    assert study.curvature
    content = curvature_content(
        hf, trace, loss + 0.01, study.curvature.pairs, is_converged=step % 120 != 0
    )
    write_result(directory / curvature_result(run.name, model), content)
    if study.critical and study.before(run, model):
        is_last = step == run.total_steps
        specs = study.quantization.by_block if is_last else ()
        # Back towards the checkpoint before, and none where training ends.
        content = critical_content(hf, trace, None if is_last else -0.5, specs)
        write_result(directory / curvature_result(run.name, model, "critical"), content)
    if step == run.total_steps:
        _write_end(directory, study, run, loss)


def _write_end(directory: Path, study: Study, run: RunConfig, loss: float) -> None:
    """Results block by block, and the slice."""
    hf = directory / hf_directory(run.name, MeasuredModel(run.total_steps))
    for spec in study.quantization.by_block:
        increase = loss * relative_error(run, run.total_steps, spec)
        content = result_of(hf, spec, per_document(loss, increase, 1.1 * increase))
        write_blocks(directory / blocks_result(run, spec), content)
        write_result(directory / step_result(run, spec), step_content(increase))
    for spec in study.quantization.by_block[:1]:
        write_result(directory / slice_result(run, spec), slice_content(loss))


def _write_metrics(directory: RunDirectory, run: RunConfig) -> None:
    rows = []
    for step in range(1, run.total_steps + 1):
        row: dict[str, float] = {"step": step, "tokens": step * run.tokens_per_step, "attempt": 1}
        row["time"] = 1_700_000_000.0 + step
        loss = held_out_loss(run, step) - 0.05 + 0.02 * math.sin(step)
        train = {"loss": loss, "z_loss": 0.1, "grad_norm": 0.9, "tokens_per_second": 2e4}
        rows.append(row | train | {"learning_rate": learning_rate(run, step)})
        if step in run.save_steps or step % run.evaluate_every_steps == 0:
            averaged = {
                f"held_out_loss/{average.name}": held_out_loss(run, step) - 0.08
                for average in run.averages
            }
            rows.append(row | {"held_out_loss": held_out_loss(run, step)} | averaged)
    directory.metrics.write_text(json_lines(rows))


def _told(run: RunConfig, model: MeasuredModel) -> dict | None:
    """Content of checkpoint.json for an average."""
    kept = {average.name: average for average in run.averages}
    if model.average is None or model.members:
        return None
    average = kept[model.average].model_dump(mode="json")
    steps = [model.step - back * average["interval_steps"] for back in range(5)]
    return average | {"steps": sorted(steps)}


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Leaves figures their rows and charts alone: pictures take most of a report's time."""
    patch.setattr(figure, "pictures_of", lambda _: dict.fromkeys(("png", "svg", "pdf"), PICTURE))


def write_study(directory: Path, study: Study) -> Path:
    """A study directory with every file that collect, the report and MLflow read."""
    save_study(directory, study)
    write_run_configurations(directory, study)
    for run in study.trained:
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
            if model.members:
                write_result(
                    directory / hf_directory(run.name, model) / LINEAGE_JSON, {"kind": "average"}
                )
            else:
                checkpoint = directory / checkpoint_directory(run.name, model)
                write_result(checkpoint / CHECKPOINT_JSON, record.model_dump(mode="json"))
            _write_results(directory, study, run, model, loss)
        _write_metrics(run_directory, run)
        run_directory.environment_json.write_text(json.dumps({"attempts": [ATTEMPT]}))
    return directory
