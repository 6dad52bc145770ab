"""Model cards: README.md of every published revision, and of the trajectory."""

import json
import math
from collections.abc import Iterator
from typing import Any

from ckpt_tools.publishing.exports import Exported
from ckpt_tools.publishing.index import INDEX_CSV
from ckpt_tools.publishing.results import Curvature, LambdaMax, Quantization, Result
from train.config import RunConfig
from train.families import parameter_shapes
from train.frozen import fingerprint

README = "README.md"
NATS = "nats per token"
LEVELS = ("attention", "layer", "logits")
WEIGHTS = {"trained": "as the model computed with them", "main": "the optimizer's fp32 weights"}
UNCHOSEN_LICENSE = "other"


def revision_card(run: RunConfig, one: Exported, lineage: dict[str, Any], all_names: set[str], license: str) -> str:
    """README.md of one revision.

    Args:
        run: that it is of.
        one: the export.
        lineage: as it is published.
        all_names: `measurement/name` of every result of the trajectory.
        license: its identifier on the hub.
    """
    average = f"`{one.average}`, an average of weights" if one.average else "Weights"
    sections = {
        f"{run.name} {one.revision}": [
            f"{average} of the pretraining run `{run.name}` after update {one.step:,} ({one.tokens:,} tokens)."
        ],
        "Use": [_loading(one.revision)],
        "Recipe": _recipe(run, lineage),
        "Lineage": [*_lineage(run, one, lineage)],
        "Parity with the training engine": _parity(lineage),
        "Measured": [*_measured(one.results)] or ["Nothing."],
        "Not measured": [*_not_measured(one, all_names)],
        "License": _license(license),
    }
    return _front_matter(run, license) + _text(sections)


def trajectory_card(run: RunConfig, exports: list[Exported], lineages: dict[str, dict[str, Any]], license: str) -> str:
    """README.md of a whole trajectory; `lineages` are the published ones by revision."""
    # An average of files tells neither text nor layout: the last weights that training left speak for the run.
    last = next((one for one in reversed(exports) if not one.average), exports[-1])
    specs = sorted({result.name for one in exports for result in one.results if result.measurement == "quant"})
    header = ["revision", "step", "tokens", "learning rate", "held-out loss"]
    rows = []
    for one in exports:
        errors = {
            result.name: _bounded(result.measured.relative_error, result.measured.intervals.relative_error)
            for result in one.results
            if isinstance(result.measured, Quantization)
        }
        told = [_number(one.lineage.get(key)) for key in ("learning_rate", "held_out_loss")]
        link = f"[{one.revision}]({one.revision})"
        rows.append([link, f"{one.step:,}", f"{one.tokens:,}", *told, *(errors.get(spec, "-") for spec in specs)])
    note = f"Losses are in {NATS}; `-` was not measured. All figures, with units: [{INDEX_CSV}]({INDEX_CSV})."
    if specs:
        note = f"Columns {', '.join(f'`{spec}`' for spec in specs)}: relative error of the loss, [interval]. {note}"
    sections = {
        f"{run.name}: the trajectory of a pretraining run": [
            f"{len(exports)} revisions, each an HF directory with a model card of its own."
        ],
        "Use": [_loading(last.revision)],
        "Revisions": [_table([*header, *(f"`{spec}`" for spec in specs)], rows), note],
        "Recipe": _recipe(run, lineages[last.revision]),
        "License": _license(license),
    }
    return _front_matter(run, license) + _text(sections)


def _front_matter(run: RunConfig, license: str) -> str:
    """YAML, of which JSON's scalars and lists are a part."""
    fields = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": license,
        "tags": [run.model.family, "pretraining", "training-dynamics", "quantization"],
    }
    return "---\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in fields.items()) + "---\n\n"


def _text(sections: dict[str, list[str]]) -> str:
    parts = []
    for number, (title, paragraphs) in enumerate(sections.items()):
        parts += [f"{'##' if number else '#'} {title}", *paragraphs]
    return "\n\n".join(parts) + "\n"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _loading(revision: str) -> str:
    return "\n".join(
        [
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'model = AutoModelForCausalLM.from_pretrained("{revision}")  # the path of this directory',
            f'tokenizer = AutoTokenizer.from_pretrained("{revision}")',
            "```",
        ]
    )


def _license(license: str) -> list[str]:
    if license == UNCHOSEN_LICENSE:
        return ["The publisher has not named a license yet."]
    return [f"`{license}`"]


def _recipe(run: RunConfig, lineage: dict[str, Any]) -> list[str]:
    parameters = sum(math.prod(shape) for shape in parameter_shapes(run.model).values())
    data = run.data.model_dump(exclude={"train", "held_out", "tokenizer"})  # where text lies on this machine
    sha256 = lineage.get("data_sha256") or {"the text": "see the ingredients"}
    hashes = {f"SHA-256 of {name}": value for name, value in sha256.items()}
    start = f"drawn with seed {run.seed}"
    if run.branch_from:
        start = f"step {run.branch_from.step:,} of the run with fingerprint `{run.branch_from.fingerprint}`"
    if run.start_from:
        start = f"an imported checkpoint, SHA-256 `{run.start_from.sha256}`"
    rows = {
        "model": f"{parameters:,} parameters; {_listed(run.model.model_dump())}",
        "first weights": start,
        "data": _listed(data | hashes),
        "batch": f"{run.batch_size:,} sequences, {run.tokens_per_step:,} tokens a step",
        "length": f"{run.total_steps:,} steps, {run.total_steps * run.tokens_per_step:,} tokens",
        "optimizer": f"AdamW; {_listed(run.optimizer.model_dump())}",
        "schedule": _listed(run.schedule.model_dump()),
        "engine": f"{run.engine}, kernels {run.kernels}, precision {run.precision}",
        "layout": _listed(lineage.get("layout") or {}) or "see the ingredients",
        "processes": str(lineage.get("world_size") or "see the ingredients"),
        "fingerprint": f"`{fingerprint(run)}`",
    }
    return [_table(["", ""], [[name, value] for name, value in rows.items()])]


def _listed(value: Any) -> str:
    """Settings in words, nested ones in brackets."""
    if isinstance(value, dict):
        inner = {key: f"({_listed(one)})" if isinstance(one, dict) else _listed(one) for key, one in value.items()}
        return ", ".join(f"{key} {text}" for key, text in inner.items())
    if isinstance(value, list | tuple):
        return " ".join(_listed(one) for one in value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _lineage(run: RunConfig, one: Exported, lineage: dict[str, Any]) -> Iterator[str]:
    rows = {
        "run": f"`{run.name}`",
        "step": f"{one.step:,}",
        "tokens": f"{one.tokens:,}",
        "learning rate": _number(lineage.get("learning_rate")),
        "training loss": _with_unit(lineage.get("train_loss")),
        "held-out loss": _with_unit(lineage.get("held_out_loss")),
        "weights": ", ".join(filter(None, [lineage.get("dtype"), WEIGHTS.get(lineage.get("weights", ""))])),
    }
    if lineage.get("checkpoint_sha256"):
        rows["checkpoint"] = f"`{lineage['checkpoint']}`, SHA-256 of its record `{lineage['checkpoint_sha256']}`"
    rows |= {f"SHA-256 of {name}": f"`{sha256}`" for name, sha256 in one.weights.items()}
    rows["commit"] = f"`{lineage['environment'].get('commit') or 'unknown'}`"
    yield _table(["", ""], [[name, value] for name, value in rows.items()])
    if lineage.get("average"):
        yield f"Averaged while training: {_listed(lineage['average'])}."
    if lineage.get("ingredients"):
        coefficients = lineage.get("coefficients") or ["-"] * len(lineage["ingredients"])
        yield f"Averaged from files, {lineage.get('method', 'by the coefficients')}:"
        pairs = zip(lineage["ingredients"], coefficients, strict=True)
        yield _table(["ingredient", "coefficient"], [[f"`{held['path']}`", str(weight)] for held, weight in pairs])
    yield "`lineage.json` holds all of it, with size and SHA-256 of every file."


def _parity(lineage: dict[str, Any]) -> list[str]:
    parity = lineage.get("parity")
    if not parity:
        return ["Made from files: no training engine computed with these weights, so there is nothing to compare with."]
    rows = [[level, f"{parity[level]:.2g}"] for level in LEVELS]
    return [
        "What transformers computes in fp32 from these files, against what the training engine computed for the same "
        "tokens:",
        _table(["output", "largest difference over the largest value"], rows),
        f"Allowed behind the last layer: {parity['tolerance']:.2g} ({parity['precision']}), less behind earlier ones. "
        f"Logits differ by at most {parity['max_absolute_error']:.2g}; the largest is {parity['max_logit']:.4g}.",
    ]


def _measured(results: list[Result]) -> Iterator[str]:
    quantized = [(one.name, one.measured) for one in results if isinstance(one.measured, Quantization)]
    curved = [(one.name, one.measured) for one in results if isinstance(one.measured, Curvature)]
    for name, measured in quantized[:1]:
        yield (
            f"Quantization, {measured.interval.level:.0%} intervals ({measured.interval.method}, "
            f"{measured.documents:,} documents, {measured.tokens:,} tokens for `{name}`); cross-entropy and KL "
            f"divergence in {NATS}:"
        )
        figures = ("relative_error", "kl_divergence", "cross_entropy", "cross_entropy_quantized")
        rows = [
            [f"`{spec}`", *(_bounded(getattr(held, key), getattr(held.intervals, key)) for key in figures)]
            for spec, held in quantized
        ]
        yield _table(["spec", *(key.replace("_", " ") for key in figures)], rows)
    if curved:
        yield f"Curvature of the loss, in {NATS} per squared parameter unit:"
        rows = []
        for name, one in curved:
            trace = f"{one.trace.mean:.4g} +- {one.trace.standard_error:.2g} ({one.trace.probes} probes)"
            rows.append([f"`{name}`", trace, _eigenvalue(one.lambda_max)])
        yield _table(["spec", "trace, mean +- standard error", "largest eigenvalue"], rows)
    if results:
        yield "\n".join(f"- `{one.measurement}/{one.name}`: {_listed(_without_places(one.spec))}" for one in results)


def _eigenvalue(top: LambdaMax | None) -> str:
    if top is None:
        return "not measured"
    residual = "no relative residual" if top.residual is None else f"relative residual {top.residual:.2g}"
    return f"{top.value:.4g}, {residual}, {'converged' if top.converged else 'NOT converged'}"


def _without_places(spec: dict[str, Any]) -> dict[str, Any]:
    inner = {key: _without_places(value) if isinstance(value, dict) else value for key, value in spec.items()}
    return {key: value for key, value in inner.items() if key != "prefix"}


def _not_measured(one: Exported, all_names: set[str]) -> Iterator[str]:
    here = {f"{result.measurement}/{result.name}" for result in one.results}
    lines = [f"`{name}`, which other revisions have" for name in sorted(all_names - here)]
    for measurement, words in (("quant", "quantization error"), ("curvature", "curvature")):
        if not any(name.startswith(f"{measurement}/") for name in all_names):
            lines.append(f"{words}, at any revision")
    lines += [key.replace("_", " ") for key in ("train_loss", "held_out_loss") if one.lineage.get(key) is None]
    lines.append("downstream tasks, and text other than that of the hashes above")
    yield "\n".join(f"- {line}" for line in lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _with_unit(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f} {NATS}"


def _bounded(value: float, bounds: tuple[float, float]) -> str:
    return f"{value:.4g} [{bounds[0]:.4g}, {bounds[1]:.4g}]"
