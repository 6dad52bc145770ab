"""The needs of a study in words: layouts, memory, time and disk, all of them estimates.

Apart from `study.recipes.shown`, since what plans memory imports torch, which `list` need not wait
for.
"""

from collections.abc import Iterator

from study.machine.disk import GB, gigabytes, needed_bytes, restart_bytes
from study.machine.needs import HESSIAN, Needs, TrainingLayout
from study.steps import steps_of
from train.planning.communication import communication_words
from train.planning.flops import GPUS_PER_NODE
from train.planning.memory import rank_memory
from train.planning.plan import in_words
from train.planning.speed import GpuHours, gpu_hours


def estimate_lines(needs: Needs) -> Iterator[str]:
    """Yield what the study takes of `needs.hardware`, of a kind in `train.planning.flops.GPUS`.

    Raises:
        UserError: a run fits no layout there.
    """
    study, hardware = needs.study, needs.hardware
    yield f"  on {hardware} (estimates, not measured):"
    layouts: dict[tuple[str, str | None], list[str]] = {}
    for name, training in needs.trainings.items():
        communication = communication_words(training.run, training.ranks)
        layouts.setdefault((_in_words(training), communication), []).append(name)
    for (layout, communication), names in layouts.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"    training of {names[0]}{more}: {layout}"
        if communication:
            yield f"      communication: {communication}"
    for kind in sorted(HESSIAN):
        step = next((step for step in steps_of(study) if step.kind == kind), None)
        if step:
            memory = needs.hessian_memory(step)
            size = f"{memory / GB:.1f} GB of each" if memory else "size known once it is there"
            verdict = ": DOES NOT FIT" if memory and memory > hardware.gpu_bytes else ""
            words = f"{_gpus(needs.gpus(step))}, sharding {needs.sharding(step)}"
            yield f"    {kind}: {words}; {size}{verdict}"
    hours = gpu_hours(
        needs.trainings.values(),
        gpus_per_node=min(len(hardware.gpus), GPUS_PER_NODE),
        gpu=hardware.gpu,
    )
    if_none_idles = GpuHours(*(each / len(hardware.gpus) for each in hours))
    yield f"    training: {if_none_idles} hours if no GPU idles, {hours} GPU-hours"
    if len(hardware.gpus) > GPUS_PER_NODE:
        yield "    several nodes: start it with python -m slurm; these commands are for one"


def disk_line(needs: Needs) -> str:
    """Return the bytes that the study leaves on disk, and what more it takes while runs train."""
    needed, at_once = needed_bytes(needs.study), needs.at_once
    disk = ", ".join(f"{kind} {gigabytes(size)}" for kind, size in needed.items() if size)
    restarts = restart_bytes(needs.study, at_once)
    more = f", and {gigabytes(restarts)} GB of restart checkpoints with {at_once} in training"
    return (
        f"  disk: {gigabytes(sum(needed.values()))} GB ({disk or 'nothing'}) at the end"
        f"{more if restarts else ''}; text is not counted"
    )


def _gpus(count: int) -> str:
    return f"{count} GPU" + "s" * (count > 1)


def _in_words(training: TrainingLayout) -> str:
    run, ranks = training
    recomputed = {
        "none": "",
        "selective": ", norms and SwiGLU recomputed",
        "layers": ", layers recomputed",
    }[run.recompute]
    return (
        f"{_gpus(ranks)}, {in_words(run)}, micro batch {run.micro_batch_size}{recomputed};"
        f" {rank_memory(run, ranks).bytes / GB:.1f} GB of each"
    )
