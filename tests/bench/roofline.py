"""`python -m tests.bench.roofline`: seconds of a step of olmo2-7b-lr by cause, on 64 H100 and H200.

Computed from shapes, FLOPs, bytes and the rates printed below the tables; nothing was run on a GPU.
`train.planning.speed` has the arithmetic, by which the planner ranks layouts. Beside it the engine
of commit ebb3161, which had no fused kernel and no overlap.
"""

import re
from inspect import getdoc
from typing import Any
from unittest import mock

import torch
from torch._inductor import compile_fx, metrics

from study.recipes import resolve
from train.model import elementwise
from train.model.rotary import rotations
from train.planning.flops import GPUS
from train.planning.plan import fit
from train.planning.speed import EXPECTED, PESSIMISTIC, Kernels, Passes, Rates, Roofline
from train.run.config import RunConfig
from train.run.parallel import ParallelConfig

GPUS_OF_STUDY, GPUS_PER_NODE = 64, 8

# Reads and writes of commit ebb3161, kernel by kernel, in bf16; an fp32 tensor counts twice.
EBB3161 = Kernels(
    forward=Passes(
        # joined 2; to fp32 3, square 4, sum 2, times root 4, times weight 4, to bf16 3; halves
        # turned 3, times cos 2, times sin 2, sum 3
        heads=2 + 20 + 10,
        joined=0,
        gate=2 + 3,  # silu; times up
        stream=2 * (2 + 3),  # norm; sum
    ),
    backward=Passes(
        # cos 2, sin 2, halves 5, sums 6; to fp32 3, weight 4 and 8, root 4 and 8, square 8, sum 6,
        # to bf16 3
        heads=15 + 44,
        joined=2,
        gate=2 + 6 + 3 + 2,  # silu, two products, silu's gradient, copy
        stream=2 * (5 + 3),
    ),
    again=Passes(0, 0, 0, 0),
    # to fp32 6, maximum 4, difference 8, exp 8, sum 4; backward difference 8, exp 8, product 8,
    # zeros 4, sum 12, to bf16 6
    logit=76,
    head=10,  # read in bf16, added in fp32
    starts=108,
)
RATES_EBB3161 = EXPECTED._replace(
    # FlashAttention-2, which torch takes by itself
    attention_forward=PESSIMISTIC.attention_forward,
    attention_backward=PESSIMISTIC.attention_backward,
    hidden=0.0,
    host=EXPECTED.host + 0.15,  # every rank read the whole batch, in so long on a CPU
)


def recipe_run() -> RunConfig:
    """The first run of the recipe, as it is before a planner."""
    return resolve("olmo2-7b-lr", "full").trained[0]


def before() -> Roofline:
    """Commit ebb3161 in the layout that it had: tensor 2 with sequence parallelism."""
    layout = {"parallel": ParallelConfig(tensor=2, sequence=True)}
    run = recipe_run().model_copy(update=layout)
    return Roofline(run, GPUS_OF_STUDY, GPUS_PER_NODE, GPUS["h100"], RATES_EBB3161, EBB3161)


def planned(kind: str, rates: Rates) -> Roofline:
    """Today's kernels in the layout that the planner gives the recipe."""
    run = fit(recipe_run(), GPUS_OF_STUDY, gpus_per_node=GPUS_PER_NODE, gpu=GPUS[kind])
    assert run
    return Roofline(run, GPUS_OF_STUDY, GPUS_PER_NODE, GPUS[kind], rates)


def compiled_passes() -> dict[str, float]:
    """Reads and writes of an element that torch's compiler counts in `train.model.elementwise`.

    On a CPU, whose kernels it fuses as those of a GPU but for how sums are split.
    """
    tokens, heads, width, gate = 256, 32, 128, 11_008
    x = torch.randn(tokens, 1, heads * width).bfloat16()
    weight, inverse = torch.ones(heads * width).bfloat16(), torch.ones(tokens, 1, 1)
    qk, by_qk = (
        [torch.randn(tokens, 1, heads, width).bfloat16() for _ in range(2)] for _ in range(2)
    )
    weights = [torch.ones(heads, width).bfloat16() for _ in range(2)]
    turns = rotations(tokens, width, 5e5, x.device)
    halves, half = (torch.randn(tokens, 1, size).bfloat16() for size in (2 * gate, gate))
    group = None

    def passes(elements: int, function: Any, *arguments: Any) -> float:
        metrics.reset()
        torch.compile(function)(*arguments)
        return float(metrics.num_bytes_accessed / (2 * tokens * elements))

    log = mock.Mock(wraps=compile_fx.inductor_metrics_log)  # it counts for this log alone
    log.isEnabledFor.return_value, log.info = True, mock.Mock()
    both, inverses = 2 * heads * width, [inverse[..., None], inverse[..., None] + 1]
    back = elementwise._heads_gradients
    with mock.patch.object(compile_fx, "inductor_metrics_log", log):
        return {
            "heads": passes(both, elementwise._heads, qk, weights, *turns, 1e-6, group),
            "heads, backward": passes(both, back, qk, weights, inverses, by_qk, *turns, group),
            "gate": passes(gate, elementwise._swiglu, halves),
            "gate, backward": passes(gate, elementwise._swiglu_gradient, halves, half),
            "norm": passes(both // 2, elementwise._normed, x, weight, x + 1, 1e-6),
            "norm, backward": passes(
                both // 2, elementwise._normed_gradients, x, weight, inverse, x + 1
            ),
        }


def _layout(run: RunConfig) -> str:
    return f"TP{run.parallel.tensor} PP{run.parallel.pipeline}, micro batch {run.micro_batch_size}"


def main() -> None:
    """Print the table and the rates."""
    same = before().run
    columns = {
        "ebb3161": before(),
        "its layout": Roofline(same, GPUS_OF_STUDY, GPUS_PER_NODE, GPUS["h100"]),
        "h100": planned("h100", EXPECTED),
        "h100, bad": planned("h100", PESSIMISTIC),
        "h200": planned("h200", EXPECTED),
        "h200, bad": planned("h200", PESSIMISTIC),
    }
    seconds = {name: roofline.causes() for name, roofline in columns.items()}
    print(f"olmo2-7b-lr on {GPUS_OF_STUDY} GPUs: seconds of a step; 'bad' at pessimistic rates")
    print(f"{'':26}" + "".join(f"{name:>12}" for name in columns))
    for cause in dict.fromkeys(cause for causes in seconds.values() for cause in causes):
        shown = (causes.get(cause) for causes in seconds.values())
        print(f"{cause:26}" + "".join(f"{'' if x is None else f'{x:.3f}':>12}" for x in shown))
    print(f"{'sum':26}" + "".join(f"{line.seconds:>12.2f}" for line in columns.values()))
    print(f"{'MFU':26}" + "".join(f"{line.mfu:>12.1%}" for line in columns.values()))
    for name in ("ebb3161", "h100", "h200"):
        print(f"{name}: {_layout(columns[name].run)}")
    for name, found in compiled_passes().items():
        print(f"compiled {name}: {found:.2f} reads and writes of an element")
    documented = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", getdoc(Rates) or "", re.M)
    print("rates, expected and pessimistic:")
    for name, text in documented:
        values = f"{getattr(EXPECTED, name):g}, {getattr(PESSIMISTIC, name):g}"
        print(f"  {name} {values}: {' '.join(text.split())}")


if __name__ == "__main__":
    main()
