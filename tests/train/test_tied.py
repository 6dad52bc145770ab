"""Models whose head is the embedding: both engines at every layout against transformers and AdamW.

Every layout continues at step 10 from the checkpoint of the one before it.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from base.environment import is_rank_zero
from base.files import write_json
from ckpt_tools.formats.hf_weights import HFWeights
from tests.ckpt_tools.checkpoints import all_of, read_shards
from tests.conftest import widths
from tests.runs import draw_weights, leave_layout, make_run, on_ranks, save
from tests.train.plain import adamw, figures_of, model_of_family, update
from train.data.batches import Batch
from train.distributed import start
from train.model.config import Llama3Scaling, ModelConfig
from train.observing import observed_step
from train.optimizers.adamw import AdamW
from train.run.config import RunConfig, load_run
from train.run.optimization import Lawa
from train.run.parallel import ZeroConfig

STEPS, FORK, RATE = 20, 10, 1e-3
# Of a head's four frequencies one is kept, one is interpolated and two are slowed down.
SCALING = Llama3Scaling(
    factor=4.0, low_freq_factor=0.5, high_freq_factor=2.0, original_max_position_embeddings=16
)
MODELS = {
    family: ModelConfig(
        **widths(32, 48, 4, 2, vocab_size=64, num_hidden_layers=2),
        family=family,
        tie_word_embeddings=True,
        initializer_range=0.1,
        rope_theta=30.0,
        rope_scaling=SCALING,
    )
    for family in ("olmo2", "llama", "qwen2")
}
# The fourth layer has no rotary embedding, and heads are wide.
MODELS["smollm3"] = MODELS["llama"].model_copy(update={"family": "smollm3", "num_hidden_layers": 4})
MODELS["llama"] = MODELS["llama"].model_copy(update={"head_dim": 12})
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "sp2": {"tensor": 2, "sequence": True, "recompute": "selective"},
    "pp2": {"pipeline": 2},
    "tp2pp2": {"tensor": 2, "pipeline": 2, "recompute": "layers"},
    "zero1": {"engine": "deepspeed", "zero": ZeroConfig(stage=1)},
    "zero2": {"engine": "deepspeed", "zero": ZeroConfig(stage=2)},
}


def batch_of(step: int) -> Batch:
    """Return sequences in which every token leaves its successor two choices."""
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(64, (8,), generator=generator)]
    for _ in range(32):
        tokens.append((3 * tokens[-1] + torch.randint(2, (8,), generator=generator)) % 64)
    return Batch.of(torch.stack(tokens, 1))


def train_all(root: str, names_json: str) -> None:
    """Worker, on every rank: train the layouts one after another, and save what they did."""
    from train.engines import build_engine

    device, forks = start(), dict[str, Path]()
    for name in json.loads(names_json):
        directory = Path(root) / name
        run = load_run(directory / "run.json")
        engine = build_engine(run, device)
        draw_weights(engine, run)
        rows, norms = [], dict[str, float]()
        for step in range(1, STEPS + 1):
            result, norms = observed_step(
                engine,
                engine.train_step,
                batch_of(step).of_replica(engine.replica),
                RATE,
                lambda _: True,
            )
            rows.append([result.loss, result.metrics["z_loss"], result.grad_norm])
            if step == FORK:
                save(engine, directory / "fork")
                engine.load(forks.get(run.engine, directory / "fork"))
        save(engine, directory / "end")
        forks[run.engine] = directory / "fork"
        if is_rank_zero():
            write_json(directory / "report.json", {"rows": rows, "norms": norms})
        leave_layout(run)
    engine.close()


def run_of(directory: Path, inputs: dict[str, Path], **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "micro_batch_size": 2,
        "optimizer": AdamW(peak_lr=RATE),
        "averages": (Lawa(interval_steps=10, window=2),),
    }
    return make_run(directory, **(settings | inputs | changes))


def read(directory: Path, run: RunConfig) -> dict[str, Tensor]:
    if run.engine == "deepspeed":
        return all_of(HFWeights(directory))
    return read_shards(directory, run.model)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, inputs) -> Callable[[str], tuple[list[list[float]], dict[str, Tensor]]]:
    """The same steps in one process, with transformers' tied model and torch's AdamW, by family."""
    return cache(lambda family: by_hand(tmp_path_factory.mktemp("plain"), inputs, family))


def by_hand(
    directory: Path, inputs: dict[str, Path], family: str
) -> tuple[list[list[float]], dict[str, Tensor]]:
    model = model_of_family(run_of(directory, inputs, model=MODELS[family]))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    named = dict(model.named_parameters())
    optimizer, rows = adamw(named), []
    for step in range(1, STEPS + 1):
        batch = batch_of(step)
        optimizer.zero_grad()
        figures = figures_of(model, model(batch.tokens_BS[:, :-1]).logits, batch)
        rows.append([figures[name] for name in ("loss", "z_loss", "grad_norm")])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update(optimizer, RATE)
    assert sum(norm > 1 for *_, norm in rows) > 5  # clipping is active
    assert rows[-1][0] < rows[0][0] - 0.02
    return rows, {name: weight.detach() for name, weight in named.items()}


@pytest.mark.parametrize(
    ("family", "processes", "layouts"),
    [
        ("olmo2", 2, ("sp2", "pp2", "zero2")),
        ("llama", 2, ("sp2", "pp2")),
        ("olmo2", 4, ("pp2",)),
        *(
            pytest.param(family, processes, layouts, marks=pytest.mark.stress)
            for family in MODELS
            for processes, layouts in (
                (1, ("dp", "zero1")),
                (2, ("dp", "sp2", "pp2", "zero1", "zero2")),
                (4, ("pp2", "dp", "sp2", "tp2pp2", "pp2")),
            )
        ),
    ],
)
def test_twenty_steps_equal_transformers_at_every_layout(
    tmp_path, inputs, plain, family, processes, layouts
):
    """Losses, gradient norms and weights; the embedding is counted, saved and updated once."""
    rows, weights = plain(family)
    runs = {
        f"{index}-{name}": run_of(
            tmp_path / f"{index}-{name}", inputs, model=MODELS[family], **LAYOUTS[name]
        )
        for index, name in enumerate(layouts)
    }
    on_ranks(processes, train_all, tmp_path, json.dumps(list(runs)))
    for name, run in runs.items():
        report = json.loads((tmp_path / name / "report.json").read_text())
        torch.testing.assert_close(
            torch.tensor(report["rows"]), torch.tensor(rows), atol=1e-5, rtol=1e-5
        )
        end = read(tmp_path / name / "end", run)
        assert end.keys() == weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(end[key], weight, atol=1e-5, rtol=0)
        kinds = {key.rpartition("/")[2] for key in report["norms"]}
        layers = {f"layers.{layer}" for layer in range(run.model.num_hidden_layers)}
        assert kinds == {"embed_tokens", "norm"} | layers
        norm = weights["model.embed_tokens.weight"].norm().item()
        assert report["norms"]["weight_norm/embed_tokens"] == pytest.approx(norm, rel=1e-5)
