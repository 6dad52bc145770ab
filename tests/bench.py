"""make bench: what our code costs against a peer on the same model, batch and machine, in one run.

Figures are medians of ratios of neighbouring runs (A B A B ...), so they hold on a machine whose speed drifts. One
thread. Nothing here is asserted: performance is looked at, not tested.
"""

import statistics
import time
from collections.abc import Callable

import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

from curvature.olmo2 import DualOlmo2
from study.recipes import resolve
from tests.bench_average import average_lines
from tests.bench_export import export_lines
from tests.bench_loader import loader_lines
from tests.bench_quantization import quantization_lines
from tests.runs import execute, torchrun
from train.config import RunConfig
from train.families import hf_settings
from train.initialization import initial_parameter

REPETITIONS = 15


def ratio(ours: Callable[[], object], peer: Callable[[], object]) -> tuple[float, float, float]:
    """Median ratio of wall-clock times ours / peer, and both medians in seconds."""

    def seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    ours(), peer()
    pairs = [(seconds(ours), seconds(peer)) for _ in range(REPETITIONS)]
    times = [statistics.median(column) for column in zip(*pairs, strict=True)]
    return statistics.median(a / b for a, b in pairs), times[0], times[1]


def plain_model(run: RunConfig) -> Olmo2ForCausalLM:
    """The same OLMo2 in transformers, with the same initial weights."""
    config = Olmo2Config(**hf_settings(run.model, run.data.sequence_length, eos_token_id=0))
    config._attn_implementation = "sdpa"
    model = Olmo2ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(initial_parameter(name, run.model, run.seed))
    return model


def curvature_lines() -> list[str]:
    """The exact Hessian-vector product against one forward and backward pass of transformers."""
    run = resolve("tiny", "full").runs[0]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(run.model.vocab_size, (2, run.data.sequence_length + 1), generator=generator)
    model = plain_model(run)
    product, direction = DualOlmo2(model), torch.randn(model.num_parameters(), generator=generator)

    def gradient() -> None:
        logits = model(tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        model.zero_grad()

    times, ours, peer = ratio(lambda: product(tokens, direction), gradient)
    what = "Hessian-vector product / forward and backward (HF)"
    return [f"{what:<70} {times:>6.2f}   ({ours * 1e3:.1f} ms / {peer * 1e3:.1f} ms)"]


def training_lines() -> list[str]:
    """Both engines against plain transformers, in two processes of their own."""
    done = execute(torchrun(2, "tests.bench_training"), timeout_seconds=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def main() -> None:
    """Prints one line per comparison, as each is measured."""
    torch.set_num_threads(1)
    for lines in (
        curvature_lines,
        training_lines,
        loader_lines,
        export_lines,
        average_lines,
        quantization_lines,
    ):
        for line in lines():
            print(line, flush=True)


if __name__ == "__main__":
    main()
