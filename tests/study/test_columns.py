"""Columns of the table: declared where they are measured, named and typed as they always were."""

import re
from pathlib import Path

from study.measurements import curvature, quantization, step, tasks
from study.results.table import schema_of
from tests.study.ablation import tiny

PROJECT = Path(__file__).parents[2]
DECLARED = (*quantization.COLUMNS, *curvature.COLUMNS, *step.COLUMNS, *tasks.COLUMNS)
# In quotes, after {spec}/ or as a whole: what a Column says. Names of figures have words of theirs.
TYPED = re.compile(
    r"""["'](quant|curvature|tasks)/|/(kl_divergence|relative_error|cross_entropy)"""
)
NATS = "nats per token"
CURVED = "nats per token / (unit of the parameters)^2"
EXPECTED = {
    "held_out_loss": ("double", NATS),
    "tokens": ("int64", "tokens"),
    "training_flops": ("double", "FLOP"),
    "quant/gptq-b3-g32/kl_divergence": ("double", NATS),
    "quant/gptq-b3-g32/kl_divergence_high": ("double", NATS),
    "quant/gptq-b3-g32/kl_divergence_se_draws": ("double", ""),
    "quant/gptq-b3-g32/relative_error": ("double", "1"),
    "quant/gptq-b3-g32/top1_agreement_low": ("double", "1"),
    "quant/gptq-b3-g32/r_l": ("double", "1"),
    "quant/nvfp4/absolute_error": ("double", NATS),
    "quant/nvfp4/tokens": ("int64", "tokens"),
    "quant/nvfp4/documents": ("int64", ""),
    "curvature/trace": ("double", CURVED),
    "curvature/trace_standard_error": ("double", ""),
    "curvature/trace_probes": ("int64", ""),
    "curvature/relative_trace": ("double", ""),
    "curvature/lambda_max": ("double", CURVED),
    "curvature/lambda_max_residual": ("double", "1"),
    "curvature/lambda_max_converged": ("bool", ""),
    "curvature/step-gptq-b3-g32/predicted": ("double", NATS),
    "curvature/step-gptq-b3-g32/step_to_mean_low": ("double", ""),
    "weight_decay": ("double", "1"),
    "batch_size": ("int64", "sequences"),
}


def test_names_types_and_units_stay():
    schema = schema_of(tiny())
    found = {
        name: (str(schema.field(name).type), schema.field(name).metadata[b"unit"].decode())
        for name in EXPECTED
    }
    assert found == EXPECTED
    assert len(schema) == 563


def test_every_declared_column_is_in_the_table_of_a_study_that_measures_it():
    settings = tasks.TasksSettings(specs=("gptq-b3-g32",), tasks="piqa")
    names = set(schema_of(tiny().model_copy(update={"tasks": settings})).names)
    assert {column.of("gptq-b3-g32") for column in DECLARED} <= names
    assert tasks.DEGRADATION.of("gptq-b3-g32", "piqa") in names
    assert len({column.name for column in DECLARED}) == len(DECLARED)


def test_no_other_module_spells_a_column():
    places = [
        f"{path.relative_to(PROJECT)}:{number}: {line.strip()}"
        for folder in ("study", "dynamics")
        for path in sorted((PROJECT / folder).rglob("*.py"))
        if path.parent.name != "measurements"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if TYPED.search(line) and "`" not in line  # of a docstring
    ]
    assert not places
