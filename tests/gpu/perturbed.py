"""Updates at changed weights: losses against the CPU's, and seconds against a plain update's."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from tests.gpu.figures import CheckedFigure, apart
from tests.gpu.training import losses
from tests.gpu.workbench import Workbench, begin, make_run, random_tokens
from train.data.batches import Batch
from train.distributed import start
from train.engines import build_engine
from train.model.initialization import initial_parameter
from train.perturbing import train_step_of
from train.planning.flops import GPUS, kind_of
from train.planning.speed import FAST, SLOW, Roofline
from train.run.config import RunConfig
from train.run.perturbation import Noise, Perturbation, Qat, Sam

LEARNING_RATE = 1e-4
ROUNDS = 3
SHAPE = "190M"
PERTURBATIONS: dict[str, Perturbation] = {
    "QAT": Qat(kind="qat", spec="rtn-b3-g32", from_step=1),
    "noise": Noise(kind="noise", spec="rtn-b3-g32", from_step=1),
    "SAM": Sam(kind="sam", rho=0.05, from_step=1),
}
# A weight midway between two points may take the other one.
MOST_APART = {"QAT": 1e-2, "noise": 1e-3, "SAM": 1e-3}


def cpu_and_gpu(workbench: Workbench) -> list[CheckedFigure]:
    """The same runs in fp32 on the CPU and on the GPU, perturbed from the first update on."""
    sizes, trainings = workbench.sizes, []
    runs = {name: [workbench.work / f"{name}-{n}" for n in range(2)] for name in PERTURBATIONS}
    for name, perturbation in PERTURBATIONS.items():
        for run, device in zip(runs[name], ("cpu", workbench.device), strict=True):
            make_run(
                *(run, sizes.compared, sizes.compared_length),
                steps=sizes.compared_steps,
                perturbation=perturbation,
            )
            trainings.append(begin(run, device, "--deterministic"))
    for training in trainings:
        training.finish()
    return [
        CheckedFigure(
            f"losses of {sizes.compared_steps} steps with {name} in fp32, CPU against GPU",
            apart(*map(losses, runs[name])),
            "nats/token, largest difference",
            most=MOST_APART[name],
        )
        for name in PERTURBATIONS
    ]


def over_plain(workbench: Workbench) -> list[CheckedFigure]:
    """Seconds of a perturbed update in bf16 over a plain one's; one engine makes them in turns."""
    model, micro = workbench.sizes.timed[SHAPE]
    run = make_run(
        *(workbench.work / "run", model, workbench.sizes.timed_length),
        steps=2,
        precision="bf16",
        batch_size=micro * workbench.sizes.timed_micro,
        micro_batch_size=micro,
    )
    engine = build_engine(run, start())
    engine.start_from(lambda name: initial_parameter(name, model, run.seed))
    tokens_BS = random_tokens(run.batch_size, run.data.sequence_length + 1, model.vocab_size)
    batch = Batch.of(tokens_BS).of_replica(engine.replica)

    perturbed = {
        name: run.model_copy(update={"perturbation": perturbation})
        for name, perturbation in PERTURBATIONS.items()
    }
    steps: dict[str, Callable[[], object]] = {
        name: partial(train_step_of(each, engine, 1), batch, LEARNING_RATE, lambda _: True)
        for name, each in {"": run, **perturbed}.items()
    }
    for step in steps.values():
        step()
    rounds = [
        {name: _seconds(workbench, step) for name, step in steps.items()} for _ in range(ROUNDS)
    ]
    engine.close()
    return [
        _judged(workbench, name, each, statistics.median(one[name] / one[""] for one in rounds))
        for name, each in perturbed.items()
    ]


def _seconds(workbench: Workbench, step: Callable[[], object]) -> float:
    workbench.synchronize()
    began_at = time.perf_counter()
    step()
    workbench.synchronize()
    return time.perf_counter() - began_at


def _judged(workbench: Workbench, name: str, run: RunConfig, ratio: float) -> CheckedFigure:
    """Return the ratio, on a known GPU with the range of the roofline as its limits."""
    what = f"{SHAPE}, {run.batch_size} x {run.data.sequence_length} tokens: {name} over plain"
    kind = kind_of(torch.cuda.get_device_name()) if workbench.device == "cuda" else None
    if kind is None:
        return CheckedFigure(what, ratio, "x")
    fast, slow = (Roofline(run, 1, 1, GPUS[kind], rates) for rates in (FAST, SLOW))
    least, most = (
        1 + (extra.perturbed_seconds - extra.seconds) / plain.seconds
        for extra, plain in ((fast, slow), (slow, fast))
    )
    note = "train/planning/speed.py; the limits are its range"
    return CheckedFigure(what, ratio, "x", least=least, most=most, note=note)
