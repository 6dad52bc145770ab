"""Beginnings of captions: which figure of arXiv 2510.06213 a figure is, and what is ours.

Numbers are those of the version for ICLR 2026. A figure whose number is not known is named by what
it shows. A study has them by the names of its figures (`Study.captions`).
"""

import re
from collections.abc import Collection

from ckpt_tools.released.revisions import final_repo

PAPER = "arXiv:2510.06213"
CURVATURE = {
    "curvature": (
        f"Figure 6 of {PAPER}, of the runs of this study; the eigenvalue by Lanczos in place of"
        " power iteration, the text of the losses in place of held-out FineWeb-Edu, and the"
        " intervals are ours"
    ),
}

SLICES = {
    "slices": f"Figure 8 of {PAPER}, of the runs of this study",
}

PLANE = {
    "trajectory_plane": f"The plane of a trajectory in the repository of the authors of {PAPER}, of"
    " the runs of this study",
}
# The authors' README has 3a beside 3b. At the ends of its curves it has 6.3, 5.0, 3.6 and 2.9e-2,
# which are the differences of the losses there (6.4, 5.1, 3.7 and 3.2e-2 nats), not their ratios
# less one (1.9, 1.5, 1.1 and 0.9e-2).
SWEEP = CURVATURE | {
    "quantization_error": (
        f"Figure 3a of {PAPER}, which has 4 bits and, by the ends of its curves, the absolute"
        " error; 3 bits, the relative error and the runs without anneal are ours"
    ),
    "absolute_error": (
        f"Figure 3a of {PAPER}, which has 4 bits; 3 bits and the runs without anneal are ours"
    ),
    "full_against_quantized": (
        f"Figures 3b (4 bits) and 3c (3 bits) of {PAPER}; the runs without anneal are ours"
    ),
}
SCHEDULES = CURVATURE | {
    "quantization_error": f"The comparison of cosine and WSD in section 4.2 of {PAPER}; peaks and"
    " floor are ours",
}
WEIGHT_DECAYS = {
    figure: f"Figure 19 of {PAPER}, {where}; the weight decays are ours"
    for figure, where in (("quantization_error", "along training"), ("ends", "at its end"))
}
DECAY_RULES = {
    "quantization_error": f"Figure 20 of {PAPER}; the runs without anneal are ours",
}
BUDGETS = CURVATURE | PLANE
BUDGETS |= {
    "quantization_error": f"The figure of token budgets of {PAPER}, which has 4 bits; 3 bits are"
    " ours",
    "losses": f"The figure of token budgets of {PAPER}, which has full precision; the quantized"
    " losses are ours",
}
AVERAGES = {
    "averages": f"Figures 4a (full precision), 4b (3 bits) and 4c (relative error) of {PAPER}; the"
    " KL divergence, and how dense the checkpoints are, are ours",
}
LAWA = PLANE | AVERAGES
KUMAR = {
    "ends": f"Figure 5 of {PAPER}; the budgets, and the run without anneal, are ours",
}


def of_peaks(at: str = "") -> dict[str, str]:
    """Return captions of the learning-rate ablation of OLMo2-7B, or of the same at another size."""
    small = f", {at}" if at else ""
    return {
        "quantization_error": f"Figure 23a of {PAPER}{small}; the runs without anneal are ours",
        "full_against_quantized": f"Figures 23b (4 bits) and 23c (3 bits) of {PAPER}{small}; the"
        " runs without anneal are ours",
    }


COSINE_300B = dict.fromkeys(
    ("quantization_error", "full_against_quantized"),
    f"The OLMo2-7B ablation of the workshop version of {PAPER}; the runs without anneal are ours",
)

OLMO2, OLMO2_SIZES = r"allenai/OLMo-2-.*", ("1B", "7B", "13B", "32B")
# Of the repository of a released model. SmolLM3 with its figure 1 is more than its checkpoints.
RELEASED = {
    r"HuggingFaceTB/SmolLM3-3B.*": {
        "losses": f"Figure 1a of {PAPER}",
        "quantization_error": f"Figures 1b (3 bits) and 1c (4 bits) of {PAPER}",
    },
    OLMO2: {"quantization_error": f"Figure 2 of {PAPER}, which has one width"},
    r"LLM360/Amber": {"quantization_error": f"Figure 12 of {PAPER}"},
    r"swiss-ai/Apertus-8B-2509": {"quantization_error": f"Figure 13 of {PAPER}"},
}


# Of the models in that figure, where a study averages.
AVERAGED = {
    "full_against_quantized": f"The figure of averages of released models of {PAPER}, which has one"
    " width",
}
OF_AVERAGES = r"allenai/OLMo-(1B(-hf)?|2-0425-1B|2-1124-7B)"

# What the paper's measuring settings add.
FURTHER_METHODS = {
    "methods_along_training": f"AWQ and LLM.int8() as in appendix A of {PAPER}, of the runs of this"
    " study",
}
ACCURACY = {
    "accuracy_degradation": f"The figure of loss and accuracy of section 3.2 of {PAPER}, of the"
    " runs of this study",
}


def of_released(repositories: Collection[str], *, averaged: bool = False) -> dict[str, str]:
    """Return captions of the trajectories of released models in one study.

    None where the paper has no such figure, or not these models in one.
    """

    def are(pattern: str) -> bool:
        return all(re.fullmatch(pattern, repository) for repository in repositories)

    captions: dict[str, str] = {}
    for pattern, those in RELEASED.items():
        if are(pattern):
            captions |= those
    models = len(set(map(final_repo, repositories)))
    if are(OLMO2) and models < len(OLMO2_SIZES):
        captions["quantization_error"] += f" and {len(OLMO2_SIZES)} models, here {models}"
    return captions | AVERAGED if averaged and are(OF_AVERAGES) else captions
