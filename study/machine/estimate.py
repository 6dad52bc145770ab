"""The needs of a study in words: layouts, memory, time and disk, all of them estimates.

Apart from `study.recipes.shown`, since what plans memory imports torch, which `list` need not wait
for.
"""

from collections.abc import Iterable, Iterator, Sequence

from base.aligned import aligned, wrapped
from base.grouping import grouped
from study.machine.disk import GB, gigabytes, needed_bytes, restart_bytes
from study.machine.needs import HESSIAN, Needs, TrainingLayout
from study.machine.prices import HOUR, Price, Prices
from study.released import ReleasedRun
from study.step import Step
from study.steps import steps_of
from train.planning.communication import communication_words
from train.planning.flops import GPUS_PER_NODE
from train.planning.memory import rank_memory
from train.planning.plan import in_words
from train.planning.speed import GpuHours

UNKNOWN = "no config.json states the size"  # of a released model


LAYOUTS_SHOWN = 2  # on one screen


def estimate_lines(needs: Needs, *, whole: bool = True) -> Iterator[str]:
    """Yield what the study takes of `needs.hardware`, of a kind in `train.planning.flops.GPUS`.

    Of many layouts of trainings the first ones, unless it is the `whole`.

    Raises:
        UserError: a run fits no layout there.
    """
    study, hardware = needs.study, needs.hardware
    yield f"on {hardware}:"
    layouts: dict[tuple[str, str | None], list[str]] = {}
    for name, training in needs.trainings.items():
        communication = communication_words(training.run, training.ranks)
        layouts.setdefault((_in_words(training), communication), []).append(name)
    shown = list(layouts.items())[: None if whole else LAYOUTS_SHOWN]
    for (layout, communication), names in shown:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"  training of {names[0]}{more}: {layout}"
        if communication:
            yield f"    communication: {communication}"
    if len(shown) < len(layouts):
        yield f"  and {len(layouts) - len(shown)} more layouts of trainings"
    for kind in sorted(HESSIAN):
        step = next((step for step in steps_of(study) if step.kind == kind), None)
        if step:
            memory = needs.hessian_memory(step)
            size = f"{memory / GB:.1f} GB of each" if memory else UNKNOWN
            verdict = ": DOES NOT FIT" if memory and memory > hardware.gpu_bytes else ""
            words = f"{_gpus(needs.gpus(step))}, sharding {needs.sharding(step)}"
            yield f"  {kind}: {words}; {size}{verdict}"
    if len(hardware.gpus) > GPUS_PER_NODE:
        yield "  several nodes: start it with python -m slurm; the commands are for one"


def price_lines(prices: Prices, *, whole: bool = True) -> Iterator[str]:
    """Yield the GPU-hours of all steps and the longest chain; `whole` with a table by kind."""
    by_kind = list(prices.by_kind())
    known = [price.hours for price in by_kind if price.hours]
    on_gpus = [price for price in by_kind if price.gpus[1]]
    is_whole = all(price.hours for price in on_gpus)

    total = GpuHours(*map(sum, zip(*known, strict=True))) if is_whole else None
    unit = f"{prices.gpu.upper()}-hours"
    if not whole:
        training = next((price.hours for price in on_gpus if price.kind == "train"), None)
        of_it = f", {training.expected:,.3g} of them training" if training else ""
        hours = f"{total} {unit}{of_it}" if total else f"unknown {unit}: {UNKNOWN}"
        yield f"takes {hours} (estimate)"
        if total and prices.needs.hardware.gpus:
            yield from _wall_clock(prices, total)
        return

    rows = [("steps", "", "GPUs each", unit)]
    for price in on_gpus:
        hours = UNKNOWN if price.hours is None else str(price.hours)
        gpus = "-".join(map(str, dict.fromkeys(price.gpus)))
        rows.append((price.kind, str(price.steps), gpus, hours))
    rows.append(("in all", "", "", str(total or UNKNOWN)))
    yield from aligned(rows, right={1, 2})
    yield from wrapped(_without_gpus(by_kind))
    yield "estimates: training by its roofline; measuring within a factor of two"
    if total and prices.needs.hardware.gpus:
        yield from _wall_clock(prices, total)


def _without_gpus(by_kind: Iterable[Price]) -> str:
    counts = [f"{price.steps} {price.kind}" for price in by_kind if not price.gpus[1]]
    return f"without GPUs: {', '.join(counts)}"


def _wall_clock(prices: Prices, total: GpuHours) -> Iterator[str]:
    """Yield the least time of all GPUs together, and that of steps that wait for each other."""
    count = len(prices.needs.hardware.gpus)
    yield f"if no GPU idles: {GpuHours(*(each / count for each in total))} hours"
    hours, chain = prices.longest_chain()
    names = " -> ".join(step.name for step in chain if prices.gpus(step))
    yield from wrapped(f"longest chain: {hours:,.3g} hours: {names}")


def core_lines(steps: Sequence[Step], *, whole: bool = True) -> Iterator[str]:
    """Yield the time of two cores that such steps are expected to take.

    It is what the small models of the demo took, which a study corrects as it runs; `whole` is a
    table of core-hours by kind.
    """
    by_demo = "what the demo's models took of two cores"
    if not whole:
        minutes = sum(step.expected_seconds * step.slots for step in steps) / 60 / 2
        time = f"{minutes:.2g} minutes" if minutes < 100 else f"{minutes / 60:.2g} hours"
        yield f"takes {time} of two cores (estimate: {by_demo})"
        return
    rows, total = [("steps", "", "core-hours")], 0.0
    for kind, alike in grouped(steps, lambda step: step.kind).items():
        taken = sum(step.expected_seconds * step.slots for step in alike) / HOUR
        rows.append((kind, f"{len(alike)}", f"{taken:.2g}"))
        total += taken
    yield from aligned([*rows, ("in all", f"{len(steps)}", f"{total:.2g}")], right={1, 2})
    yield f"estimates: {by_demo}"


def disk_line(needs: Needs) -> str:
    """Return the bytes that the study leaves on disk, and what more it takes while runs train."""
    needed, at_once = needed_bytes(needs.study), needs.at_once
    disk = ", ".join(f"{kind} {gigabytes(size)}" for kind, size in needed.items() if size)
    restarts = restart_bytes(needs.study, at_once)
    has_unknown = any(isinstance(run, ReleasedRun) and not run.config for run in needs.study.runs)
    unknown = ", and released models without a config.json," if has_unknown else ""
    more = f", and {gigabytes(restarts)} GB of restart checkpoints with {at_once} in training"
    return (
        f"disk: {gigabytes(sum(needed.values()))} GB ({disk or 'nothing'}) at the end"
        f"{more if restarts else ''}; texts{unknown} are not counted"
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
