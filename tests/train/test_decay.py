"""The rules of weight decay in both engines against AdamW written out, one tensor at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from base.errors import UserError
from tests.ckpt_tools.checkpoints import read_shards
from tests.runs import draw_weights, leave_layout, make_run, on_ranks, save
from tests.train.plain import differentiate, plain_model
from train.data.batches import Batch
from train.distributed import start
from train.engines import build_engine
from train.optimizers.adamw import AdamW
from train.run.config import RunConfig, load_run, with_settings
from train.run.schedules import learning_rate

DRAWN = torch.Generator().manual_seed(5)
BATCHES = [torch.randint(0, 320, (8, 33), generator=DRAWN) for _ in range(6)]
SETTINGS = {"adamc": 2.0, "independent": 0.02}  # rule and a decay that shows


def train_all(out: str, *turns: str) -> None:
    """Worker, on every rank: make one update for each batch; write the weights at the end.

    Runs joined by a comma take turns, each with its share of the batches, and hand over by a
    checkpoint; the weights are written by the last one's name.
    """
    device = start()
    for turn in turns:
        run_dirs = [Path(run_dir) for run_dir in turn.split(",")]
        share = len(BATCHES) // len(run_dirs)
        checkpoint = None
        for index, run_dir in enumerate(run_dirs):
            engine = engine_of(run_dir, device, checkpoint)
            train(engine, range(share * index + 1, share * (index + 1) + 1))
            checkpoint = Path(out) / run_dir.name
            save(engine, checkpoint, weights_only=run_dir == run_dirs[-1])
            leave_layout(engine.run)
    engine.close()


def engine_of(run_dir: Path, device: torch.device, checkpoint: Path | None) -> Any:
    run = load_run(run_dir / "run.json")
    engine = build_engine(run, device)
    if checkpoint:
        engine.load(checkpoint)
    else:
        draw_weights(engine, run)
    return engine


def train(engine: Any, steps: range) -> None:
    for step in steps:
        batch = Batch.of(BATCHES[step - 1]).of_replica(engine.replica)
        engine.train_step(batch, learning_rate(engine.run, step), lambda _: True)


def read(run: RunConfig, directory: Path) -> dict[str, Tensor]:
    """The whole weights that a run wrote, by HF name."""
    if run.engine == "megatron":
        return read_shards(directory, run.model)
    return load_file(directory / "model.safetensors")


def decay_by_hand(rule: str, name: str, rate: float, peak: float, strength: float) -> float:
    """The share of a weight that one step takes away."""
    if "embed_tokens" in name:
        return 0.0
    if rule == "independent":
        return strength * rate / peak
    return strength * rate * (rate / peak if "_proj" in name else 1.0)


def weights_by_hand(run: RunConfig) -> dict[str, Tensor]:
    """The weights after the batches, on one process."""
    model, settings = plain_model(run), run.optimizer
    named = dict(model.named_parameters())
    first = {name: torch.zeros_like(weight) for name, weight in named.items()}
    second = {name: torch.zeros_like(weight) for name, weight in named.items()}
    for step, tokens_BS in enumerate(BATCHES, 1):
        differentiate(model, tokens_BS)
        rate = learning_rate(run, step)
        for name, weight in named.items():
            assert weight.grad is not None
            first[name] = 0.9 * first[name] + 0.1 * weight.grad
            second[name] = 0.95 * second[name] + 0.05 * weight.grad**2
            update = first[name] / (1 - 0.9**step)
            update /= (second[name] / (1 - 0.95**step)).sqrt() + 1e-8
            lost = decay_by_hand(settings.decay, name, rate, 1e-2, settings.weight_decay)
            weight.data = weight.data * (1 - lost) - rate * update
    return {name: weight.detach() for name, weight in named.items()}


def test_rules_of_decay_equal_a_plain_loop(tmp_path, inputs):
    """Warm-up over 4 steps, then a falling cosine: the rate differs from its peak at most steps."""
    expected = {}
    for engine in ("megatron", "deepspeed"):
        tensor = 2 if engine == "megatron" else 1
        directories = []
        for rule, strength in SETTINGS.items():
            settings = {"peak_lr": 1e-2, "decay": rule, "weight_decay": strength}
            optimizer = AdamW.model_validate(settings)
            directory = tmp_path / f"{engine}-{rule}"
            run = make_run(directory, **inputs, tensor=tensor, engine=engine, optimizer=optimizer)
            expected[directory.name] = run
            directories.append(directory)
        on_ranks(2, train_all, tmp_path / "out", *directories)
    by_rule = {rule: weights_by_hand(expected[f"megatron-{rule}"]) for rule in SETTINGS}
    start = dict(plain_model(run).named_parameters())
    for name, run in expected.items():
        weights = read(run, tmp_path / "out" / name)
        reference = by_rule[run.optimizer.decay]
        assert weights.keys() == reference.keys()
        for key, weight in weights.items():
            # A gradient near zero moves a weight by the sign of its rounding at first.
            moved = (reference[key] - start[key]).norm()
            assert (weight - reference[key]).norm() < 2e-3 * moved, (name, key)


def test_a_peak_of_zero_is_refused(tmp_path, inputs):
    run = make_run(tmp_path / "run", **inputs, peak_lr=0.0)
    with pytest.raises(UserError, match="set a peak_lr above 0"):
        with_settings(run, ["optimizer.decay=adamc"])
