"""The needs of a study on given GPUs in words: layouts, memory, time and disk, all estimates."""

from collections.abc import Iterator

from study.machine.disk import GB, needed_bytes
from study.machine.needs import HESSIAN, Needs, TrainingLayout
from study.pipeline.steps import steps_of
from study.recipes.cost import gpu_hours
from train.planning.memory import rank_memory


def estimate_lines(needs: Needs) -> Iterator[str]:
    """Yield what the study takes of `needs.hardware`, of a kind in `train.planning.flops.GPUS`.

    Raises:
        UserError: a run fits no layout there.
    """
    study, hardware = needs.study, needs.hardware
    yield f"  on {hardware} (estimates, not measured):"
    yield from _layouts(needs)
    yield from _measuring(needs)
    training = gpu_hours(study, hardware.kind)
    yield (
        f"    training: {training / len(hardware.gpus):,.3g} hours if no GPU idles,"
        f" {training:,.3g} GPU-hours"
    )
    needed = needed_bytes(study)
    disk = ", ".join(f"{kind} {size / GB:,.1f}" for kind, size in needed.items() if size)
    yield (
        f"    disk: {sum(needed.values()) / GB:,.1f} GB ({disk or 'nothing'}); text is not counted"
    )


def _layouts(needs: Needs) -> Iterator[str]:
    """Yield a line for each layout of trainings."""
    runs: dict[str, list[str]] = {}
    for name, training in needs.trainings.items():
        runs.setdefault(_layout_words(training), []).append(name)
    for words, names in runs.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"    training of {names[0]}{more}: {words}"


def _layout_words(training: TrainingLayout) -> str:
    run, ranks = training
    memory = rank_memory(run, ranks).bytes / GB
    split = f"ZeRO stage {run.zero.stage}"
    if run.engine == "megatron":
        split = f"tensor {run.parallel.tensor}, pipeline {run.parallel.pipeline}"
    recomputed = ", layers recomputed" if run.recompute == "layers" else ""
    gpus = f"{ranks} GPU" + "s" * (ranks > 1)
    return (
        f"{gpus}, {split}, micro batch {run.micro_batch_size}{recomputed}; {memory:.1f} GB of each"
    )


def _measuring(needs: Needs) -> Iterator[str]:
    """Yield a line for each kind of measurement that computes Hessian products."""
    for kind in sorted(HESSIAN):
        steps = [step for step in steps_of(needs.study) if step.kind == kind]
        if not steps:
            continue
        gpus, memory = needs.gpus(steps[0]), needs.hessian_memory(steps[0])
        size = "size known once it is there" if memory is None else f"{memory / GB:.1f} GB of each"
        verdict = "" if memory is None or memory <= needs.hardware.gpu_bytes else ": DOES NOT FIT"
        yield (
            f"    {kind}: {gpus} GPU{'s' * (gpus > 1)}, sharding {needs.sharding(steps[0])};"
            f" {size}{verdict}"
        )
