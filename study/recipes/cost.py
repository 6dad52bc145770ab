"""The cost of a recipe in hours of one GPU before anything starts: tokens, training, measuring.

Called by `python -m study list` and `show --gpus`. Every figure is an estimate, none was measured on a GPU.
"""

from study.commands import Step, batches
from study.settings import CurvatureSettings, Study
from study.steps import steps_of
from train.config import RunConfig
from train.flops import GPUS, flops_per_token
from train.schedules import first_step
from train.settings import ModelConfig

MFU = 0.4  # on H100; OLMo-core reports 0.47 to 0.48 for OLMo2-7B

# A model this narrow spends its time on moving logits: with 256 wide and 100,352 tokens the output
# layer is 7/8 of the products, and 14 bytes a logit (`train.memory`), written and read once each,
# bound it at 13% of the peak at 3.35 TB/s; each kernel of its blocks takes as long to launch as to run.
NARROW_HIDDEN_SIZE, NARROW_MFU = 512, 0.1

MEASURING_SHARE = 0.2  # of the peak of its precision: measuring is unfused and bound by memory
PRODUCT, GRADIENT = 3.4, 1.0  # in training FLOPs of the same tokens; 'python -m curvature run --dry-run'
LANCZOS_STEPS = 13  # at most, on the demo's checkpoints at a tolerance of 1e-2

START_SECONDS = 15.0  # imports and CUDA, per process
MODELS_PER_PROCESS = 12
# Files, and kernels launched one after another, per step: GPTQ's columns, other libraries' walks.
OTHER_SECONDS = {"export": 1.5, "average": 1.5, "quantize": 2.0, "methods": 10.0, "blocks": 6.0}
MEASURED_KINDS = ("quantize", "methods", "blocks", "curvature", "step", "slice", "export", "average")


def assumed_mfu(model: ModelConfig) -> float:
    """Return the share of the peak that training is assumed to reach."""
    return NARROW_MFU if model.hidden_size < NARROW_HIDDEN_SIZE else MFU


def trained_tokens(study: Study) -> int:
    """Return the tokens that all runs of a study are trained on; a branch counts from its start."""
    return sum((run.total_steps - first_step(run)) * run.tokens_per_step for run in study.trained)


def gpu_hours(study: Study, gpu: str = "h100") -> float:
    """Return the hours of one GPU that training takes at `assumed_mfu`, measuring left out."""
    return sum(_training_seconds(run, gpu) for run in study.trained) / 3600


def _training_seconds(run: RunConfig, gpu: str) -> float:
    tokens = (run.total_steps - first_step(run)) * run.tokens_per_step
    flops = tokens * flops_per_token(run.model, run.data.sequence_length)
    return flops / (assumed_mfu(run.model) * GPUS[gpu].peak_flops)


def measuring_hours(study: Study, gpu: str = "h100") -> float:
    """Return the hours of one GPU that everything after training takes; of released models they are not known.

    Counted are FLOPs of losses, Hessian products and gradients at `MEASURING_SHARE`, the start of
    every process, and what does not scale with FLOPs. Text, table, report and MLflow are left out.
    """
    trained = {run.name for run in study.trained}
    steps = [step for step in steps_of(study) if step.kind in MEASURED_KINDS and step.run in trained]
    processes = sum(
        len(batches([step for step in steps if step.kind == kind], MODELS_PER_PROCESS, len(steps)))
        for kind in MEASURED_KINDS
    )
    return (processes * START_SECONDS + sum(_seconds(study, step, gpu) for step in steps)) / 3600


def _seconds(study: Study, step: Step, gpu: str) -> float:
    run = next(run for run in study.trained if run.name == step.run)
    per_token = flops_per_token(run.model, run.data.sequence_length)
    flops = per_token * _training_tokens(study, step.kind, run)
    bf16 = _dtype(study, step.kind) == "bf16"
    peak = GPUS[gpu].peak_flops if bf16 else GPUS[gpu].fp32_flops
    return OTHER_SECONDS.get(step.kind, 5.0) + flops / (MEASURING_SHARE * peak)


def _dtype(study: Study, kind: str) -> str:
    """Return the precision of a kind of measurement; steps and slices are measured in fp32."""
    if kind == "curvature" and study.curvature:
        return study.curvature.dtype
    return study.quantization.dtype if kind in ("quantize", "methods", "blocks") else "fp32"


def _training_tokens(study: Study, kind: str, run: RunConfig) -> float:
    """Return the tokens whose training takes as many FLOPs as a measurement; a loss takes a third."""
    length, quantization = run.data.sequence_length, study.quantization
    if kind in ("quantize", "methods"):
        evaluated = 2 * quantization.eval_tokens  # before and after
        return (evaluated + quantization.calibration_sequences * length) / 3
    if kind == "blocks":
        losses = 2 * run.model.num_hidden_layers + 1
        return len(quantization.by_block) * losses * quantization.block_tokens / 3
    return _curvature_sequences(study, kind) * length if study.curvature else 0.0


def _curvature_sequences(study: Study, kind: str) -> float:
    settings = study.curvature
    assert settings
    if kind == "slice":
        return settings.slice_grid**2 * settings.slice_sequences / 3
    size = settings.microbatch_sequences
    if kind == "step":
        # a gradient, a product and two losses of every spec, and a product of a random step beside
        every = GRADIENT + 2 * PRODUCT + 2 / 3
        return len(study.quantization.by_block) * settings.step_microbatches * size * every
    return _traces(settings) if kind == "curvature" else 0.0


def _traces(settings: CurvatureSettings) -> float:
    pairs = settings.pairs + settings.norm_pairs
    steps = LANCZOS_STEPS if settings.lambda_max else 0
    products = pairs * settings.microbatch_sequences + steps * settings.fixed_sequences
    gradients = 2 * settings.companion_pairs * settings.microbatch_sequences  # Gauss-Newton, Fisher
    return PRODUCT * products + GRADIENT * gradients
