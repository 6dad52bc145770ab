"""The check of a branch, a run that starts from another one's checkpoint, such as a cooldown.

Updates keep their numbers, and data and learning rate are functions of them: a branch sees what
its parent would have. `study.recipes.parts` makes branches; `train.checkpoints.resuming` begins
them.
"""

from typing import Any

from base.errors import UserError
from base.frozen import fingerprint
from train.run.config import RunConfig, load_run
from train.run.directory import RunDirectory, read_checkpoint_record

# All that decides an update but the learning rate. Kernels and layout may differ, as in resuming.
MUST_AGREE = (
    *("seed", "engine", "precision", "model", "data", "optimizer"),
    *("parametrization", "base_width", "base_depth", "batch_size", "batch_warmup"),
)
# Of the data: the tokens themselves are compared by hash.
PATHS = ("train", "held_out", "more_held_out", "tokenizer")


def _compared(run: RunConfig, key: str) -> Any:
    content = run.model_dump(mode="json")[key]
    if key == "data":
        return {name: content[name] for name in content if name not in PATHS}
    if key == "optimizer":
        kind = {"matrices": content["matrices"]}  # first: it decides which others there are
        return kind | {name: content[name] for name in content if name != "peak_lr"}
    return content


def check_parent(run: RunConfig, parent: RunDirectory) -> None:
    """Raise UserError unless `run` may start from the checkpoint of `parent` that it names."""
    assert run.branch_from
    step = run.branch_from.step
    origin = load_run(parent.run_json)
    if fingerprint(origin) != run.branch_from.fingerprint:
        raise UserError(
            f"{parent.path} has fingerprint {fingerprint(origin)}; name the run that was meant"
        )
    for key in MUST_AGREE:
        # Compared key by key, so that a refusal names what differs.
        settings, parents = _compared(run, key), _compared(origin, key)
        if settings == parents:
            continue
        if isinstance(settings, dict):
            key = next(f"{key}.{name}" for name in settings if settings[name] != parents[name])
        raise UserError(f"a branch has the {key} of its parent {parent.path}; set it as there")
    if step not in parent.complete_steps():
        steps = ", ".join(map(str, parent.complete_steps())) or "none"
        raise UserError(f"{parent.path} has no checkpoint of step {step}; it has {steps}")
    if not read_checkpoint_record(parent.checkpoint(step)).is_full:
        raise UserError(
            f"{parent.checkpoint(step)} holds weights only, and a branch continues the optimizer"
            f" state; train a parent with {step} in saving.full_steps"
        )
