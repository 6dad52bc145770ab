"""Settings of measurements that the model of a run cannot have, before it is trained."""

from collections.abc import Iterable, Iterator, Mapping

from base.errors import UserError
from quant_eval.sizes import Linears, check_fused, check_linears, check_rotation
from quant_eval.specs import parse_spec
from train.model.config import ModelConfig, parameter_shapes
from train.model.families import FAMILIES
from train.run.config import RunConfig

FIRST_LAYER = ".layers.0."  # all have the same linears


def misfits(
    run: RunConfig, specs: Iterable[str], lengths: Mapping[str, int | None]
) -> Iterator[str]:
    """Yield what does not fit the model of a run: a spec its sizes, a length its context.

    `lengths` are of sequences, in tokens, by the setting that states them.
    """
    linears = _linears(run.model)
    for spec in dict.fromkeys(specs):
        try:
            _check(spec, run.model, linears)
        except UserError as error:
            yield f"run {run.name} cannot be measured with spec {spec}: {error}"
    context = run.data.sequence_length
    for setting, length in lengths.items():
        if length and length > context:
            yield (
                f"{setting} {length} is beyond the context of {context} tokens of run {run.name};"
                " shorten it"
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
    if parsed.rotation == "quarot-fused" and parsed.rounds_linears:
        check_fused(family, model.family)
