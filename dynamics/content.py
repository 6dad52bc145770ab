"""The content of arXiv 2510.06213, by place: what `python -m study` finds here, in this order.

The first figures of a report are the first ones here that the study has.
"""

from study.content import Content


def _in(package: str, *names: str) -> tuple[str, ...]:
    return tuple(f"dynamics.{package}.{name}" for name in names)


CONTENT = Content(
    paper="arXiv 2510.06213",
    recipes=_in(
        "recipes",
        "demo:tiny",
        "tiny_paper:tiny_paper",
        "olmo2:olmo2_7b_lr",
        "olmo2:olmo2_7b_lr_cosine300b",
        "olmo2:olmo2_1b_lr",
        "olmo2:olmo2_190m_lr",
        "olmo2:olmo2_30m_lr",
        "optimizers:olmo2_30m_optimizers",
        "pythia:pythia_160m_lr",
        "pythia:pythia_160m_schedules",
        "pythia:pythia_160m_weight_decay",
        "pythia:pythia_160m_budgets",
        "pythia:pythia_160m_decay",
        "pythia:pythia_160m_lawa",
        "pythia:pythia_70m_kumar",
        "trajectory:trajectory",
    ),
    presets=_in("recipes", "measuring:paper"),
    figures=_in(
        "figures",
        "ends:anneal_against_control",
        "interventions:interventions",
        "quantization:kl_divergence",
        "quantization:quantization_error",
        "quantization:absolute_error",
        "ends:ends",
        "losses:losses",
        "probe:probe",
        "averages:averages",
        "losses:full_against_quantized",
        "curvature:curvature",
        "curvature:error_against_curvature",
        "sharpness:sharpness",
        "outliers:outliers",
        "quantization:methods",
        "quantization:tasks",
        "quantization:accuracy_degradation",
        "quantization:methods_along_training",
        "prediction:blocks",
        "curvature:formula",
        "prediction:prediction",
        "slices:slices",
        "planes:planes",
        "planes:trajectory_plane",
    ),
    claims=_in(
        "claims",
        "schedule:flat",
        "schedule:surge",
        "data:tokens",
        "schedule:divergence",
        "sweep:peaks",
        "sweep:matched",
        "sweep:averages",
        "data:budgets",
        "data:schedules",
        "flatness:over_checkpoints",
        "flatness:in_the_decay",
        "flatness:of_averages",
        "flatness:by_formula",
        "sweep:methods",
        "sweep:bits",
        "interventions:interventions",
        "interventions:widths",
        "interventions:qat_averages",
        "convergence:convergence",
        "outliers:outliers",
    ),
    sentences=(
        "dynamics.choices.learning_rate:learning_rate_line",
        "dynamics.choices.optimizers:optimizers_line",
        "dynamics.figures.sharpness:sharpness_line",
    ),
    tables=("dynamics.forecast.page:back_test_tables",),
    commands=_in("commands", "forecast", "choose", "choose_average", "cooldowns", "compare"),
)
