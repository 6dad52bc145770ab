"""make bench: what our code costs against a peer on the same model, batch and machine, in one run.

Figures are medians of ratios of neighbouring runs (A B A B ...), so they hold on a machine whose speed drifts. One
thread. Nothing here is asserted: performance is looked at, not tested.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers import Olmo2ForCausalLM

from ckpt_tools.export import hf_config
from curvature.olmo2 import DualOlmo2
from study.recipes import resolve
from train.config import RunConfig
from train.engine import Batch, StepResult
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
    config = hf_config(run, eos_token_id=0)
    config._attn_implementation = "sdpa"
    model = Olmo2ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(initial_parameter(name, run.model, run.seed))
    return model


def plain_training_step(run: RunConfig, model: Olmo2ForCausalLM, tokens: torch.Tensor) -> Callable[[], None]:
    """One update by transformers and torch's AdamW: what the engine's step is compared with."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def step() -> None:
        logits = model(tokens[:, :-1], use_cache=False).logits
        log_z = logits.logsumexp(-1)
        cross_entropy = (log_z - logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)).mean()
        (cross_entropy + 1e-5 * log_z.square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Prints one line per comparison."""
    torch.set_num_threads(1)
    run = resolve("tiny", "full").runs[0]
    generator = torch.Generator().manual_seed(0)
    shape = (run.micro_batch_size, run.data.sequence_length + 1)
    tokens = torch.randint(run.model.vocab_size, shape, generator=generator)
    run = run.model_copy(update={"batch_size": run.micro_batch_size})

    model = plain_model(run)
    product, direction = DualOlmo2(model), torch.randn(model.num_parameters(), generator=generator)

    def gradient() -> None:
        logits = model(tokens[:2, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:2, 1:].flatten()).backward()
        model.zero_grad()

    report = "{:<58} {:>6.2f}   ({:.1f} ms / {:.1f} ms)"
    figures = ratio(lambda: product(tokens[:2], direction), gradient)
    lines = [report.format("Hessian-vector product / forward and backward (HF)", *_milliseconds(figures))]

    from train.distributed import start
    from train.megatron.engine import MegatronEngine

    engine = MegatronEngine(run, start())
    figures = ratio(
        lambda: engine.train_step(Batch.of(tokens), 1e-4, StepResult.is_finite),
        plain_training_step(run, plain_model(run), tokens),
    )
    lines.append(report.format("training step: megatron engine / HF and torch.optim.AdamW", *_milliseconds(figures)))
    engine.close()
    sys.stdout.write("\n".join(lines) + "\n")


def _milliseconds(figures: tuple[float, float, float]) -> tuple[float, float, float]:
    return figures[0], figures[1] * 1e3, figures[2] * 1e3


if __name__ == "__main__":
    main()
