"""`python -m tests.bench.roofline`: seconds of a step of olmo2-7b-lr by cause, on 64 H100 and H200.

Computed from shapes, FLOPs, bytes and the rates printed below the tables; nothing was run on a GPU.
`train.planning.speed` has the arithmetic, by which the planner ranks layouts. Beside it the engine
of commit ebb3161, which had no fused kernel and no overlap.
"""

import re
from inspect import getdoc

from dynamics.recipes import resolve
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
    documented = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", getdoc(Rates) or "", re.M)
    print("rates, expected and pessimistic:")
    for name, text in documented:
        values = f"{getattr(EXPECTED, name):g}, {getattr(PESSIMISTIC, name):g}"
        print(f"  {name} {values}: {' '.join(text.split())}")


if __name__ == "__main__":
    main()
