"""Settings of measurements that the model of a run cannot have, before it is trained."""

from collections.abc import Iterator

from base.errors import UserError
from quant_eval.model.families import FAMILIES
from quant_eval.sizes import Linears, check_fused, check_linears, check_rotation
from quant_eval.specs import parse_spec
from study.measurements.curvature import CurvatureSettings
from study.measurements.quantization import QuantizationSettings
from study.measurements.tasks import TasksSettings
from train.model.config import ModelConfig
from train.model.families import parameter_shapes
from train.run.config import RunConfig

FIRST_LAYER = ".layers.0."  # all have the same linears


def misfits(
    run: RunConfig,
    quantization: QuantizationSettings,
    tasks: TasksSettings | None,
    curvature: CurvatureSettings | None,
) -> Iterator[str]:
    """Yield what does not fit the model of a run: a spec its sizes, a length its context."""
    linears, of_tasks = _linears(run.model), tasks.specs if tasks else ()
    for spec in dict.fromkeys((*quantization.at_the_end, *quantization.by_block, *of_tasks)):
        try:
            _check(spec, run.model, linears)
        except UserError as error:
            yield f"run {run.name} cannot be measured with spec {spec}: {error}"
    length, context = curvature and curvature.sequence_length, run.data.sequence_length
    if length and length > context:
        yield (
            f"curvature.sequence_length {length} is beyond the context of {context} tokens of run"
            f" {run.name}; shorten it"
        )


def _linears(model: ModelConfig) -> Linears:
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in parameter_shapes(model).items()
        if FIRST_LAYER in name and len(shape) == 2
    }


def _check(spec: str, model: ModelConfig, linears: Linears) -> None:
    parsed, family = parse_spec(spec), FAMILIES[model.family]
    check_linears(parsed, linears)
    check_rotation(parsed, model)
    rounds = parsed.method != "none" or parsed.activations  # else the cache alone is rotated
    if parsed.rotation == "quarot-fused" and rounds:
        check_fused(family, model.family)
