"""The cost of training a recipe in hours of one GPU, an estimate: none was measured on a GPU."""

from study.definition import Study
from train.planning.flops import GPUS, assumed_mfu, flops_per_token
from train.run.config import RunConfig
from train.run.schedules import first_step


def _tokens(run: RunConfig) -> int:
    return (run.total_steps - first_step(run)) * run.tokens_per_step


def trained_tokens(study: Study) -> int:
    """Return the tokens that all runs of a study are trained on; a branch counts from its start."""
    return sum(map(_tokens, study.trained))


def gpu_hours(study: Study, gpu: str = "h100") -> float:
    """Return the hours of one GPU that training takes at `assumed_mfu`."""
    return sum(
        _tokens(run)
        * flops_per_token(run.model, run.data.sequence_length)
        / (assumed_mfu(run.model) * GPUS[gpu].peak_flops)
        / 3600
        for run in study.trained
    )
