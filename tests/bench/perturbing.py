"""The perturbation part of make bench: updates at changed weights against those at exact ones.

    python -m tests.bench.perturbing

One engine, in one process, makes them in turns: the ratios hold on a machine whose speed drifts.
They fall with the tokens of an update, 2,048 here, since a weight is changed once in each.
"""

import statistics

import torch

from tests.bench import line
from tests.bench.training import LEARNING_RATE, MODEL, bench_run, build, seconds
from train.data.batches import Batch
from train.distributed import start
from train.perturbing import train_step_of
from train.run.perturbation import Noise, Perturbation, Qat

ROUNDS = 5
LAYERS = 2  # a ratio hardly depends on their number
PERTURBATIONS: dict[str, Perturbation | None] = {
    "none": None,
    "qat": Qat(spec="rtn-b3-g128", from_step=1),
    "noise": Noise(spec="rtn-b3-g128", from_step=1),
}


def main() -> None:
    """Print one line per perturbation."""
    torch.set_num_threads(1)
    model = MODEL.model_copy(update={"num_hidden_layers": LAYERS})
    run = bench_run("megatron").model_copy(update={"model": model})
    engine = build(run, start())
    shape = (run.batch_size, run.data.sequence_length + 1)
    tokens_BS = torch.randint(model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch = Batch.of(tokens_BS).of_replica(engine.replica)
    steps = {
        name: train_step_of(run.model_copy(update={"perturbation": perturbation}), engine, 1)
        for name, perturbation in PERTURBATIONS.items()
    }

    def make(name: str) -> float:
        return seconds(lambda: steps[name](batch, LEARNING_RATE, lambda _: True))

    for name in steps:
        make(name)
    rounds = [{name: make(name) for name in steps} for _ in range(ROUNDS)]
    for name in ("qat", "noise"):
        ratio = statistics.median(each[name] / each["none"] for each in rounds)
        ours, plain = (statistics.median(each[key] for each in rounds) for key in (name, "none"))
        what = f"seconds of an update of {run.tokens_per_step:,} tokens: {name} / none"
        print(line(what, ratio, f"{ours:.2f} / {plain:.2f} s"), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
