"""The measuring settings of arXiv 2510.06213, which `--set settings=paper` gives to any study.

They are those of the authors' code, aldakata/TrainingDynamicsQuantizationRobustness at b2f3b49:
gptqmodel_quantize.py, evaluation.py and hf_tasks.py.
"""

from typing import Any

from dynamics.recipes import captions
from dynamics.recipes.web import WEB_QUANTIZATION
from quant_eval.specs import parse_spec
from study.definition import Study
from study.measurements.tasks import TasksSettings
from study.planes import NamedPlane
from study.recipes.presets import preset

BITS, GROUP_SIZE = (3, 4), 128
THRESHOLD = 6  # of LLM.int8() in transformers
# The first texts of C4's second file, each for itself.
CALIBRATION: dict[str, Any] = {"calibration_documents": "separate", "calibration_sequences": 1024}


@preset
def paper(study: Study) -> Study:
    """The measuring settings of arXiv 2510.06213.

    GPTQ as gptqmodel was then, AWQ, LLM.int8() and the twelve tasks at every checkpoint; calibrated
    once, on documents as they are, and measured on concatenated text. A model in small is too
    narrow for groups of 128, its text has few documents, and it answers by chance: it keeps the
    groups, the kind of calibration and the amounts of its recipe, and is asked nothing.
    """
    recipe = study.quantization
    size = parse_spec(recipe.specs[0]).settings().get("group_size") or GROUP_SIZE
    is_small = size < GROUP_SIZE
    # -paper is short for groups of 128 in activation order, with the damping of then.
    order = "actorder" if is_small else "paper"
    specs = tuple(f"gptqmodel-b{bits}-g{size}-{order}" for bits in BITS)
    quantization = recipe.model_copy(
        update={
            "specs": specs,
            "along": (*(f"awq-b{bits}-g{size}" for bits in BITS), f"int8-t{THRESHOLD}"),
            "methods": (),
            "by_block": specs[: len(recipe.by_block)],
            "measure": "relative_error",
            "documents": "concatenated",
            "calibration_seeds": 1,
        }
    )
    planes = _requantized(study.planes, dict(zip(recipe.specs, specs, strict=False)))
    study = study.model_copy(update={"planes": planes})
    of_methods = study.captions | captions.FURTHER_METHODS
    if is_small:
        return study.model_copy(update={"quantization": quantization, "captions": of_methods})
    evaluated = {"eval_tokens": WEB_QUANTIZATION.eval_tokens}
    return study.model_copy(
        update={
            "quantization": quantization.model_copy(update=CALIBRATION | evaluated),
            "tasks": TasksSettings(specs=specs, along=True, dtype=recipe.dtype, **CALIBRATION),
            "captions": of_methods | captions.ACCURACY,
        }
    )


def _requantized(planes: tuple[NamedPlane, ...], specs: dict[str, str]) -> tuple[NamedPlane, ...]:
    """Return planes whose quantized points are by these specs in place of the recipe's."""

    def replaced(point: str) -> str:
        model, _, spec = point.rpartition("/")
        return f"{model}/{specs[spec]}" if spec in specs else point

    return tuple(
        plane.model_copy(
            update={"points": {name: replaced(point) for name, point in plane.points.items()}}
        )
        for plane in planes
    )
