"""Memory and disk of the plan against built engines, tensor by tensor, and their files."""

import gc
import inspect
import itertools
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import widths
from tests.runs import draw_weights, leave_layout, make_run, on_ranks, save
from train.averages import slot_names
from train.data.batches import Batch
from train.distributed import start
from train.engine import Engine
from train.engines import build_engine
from train.model import recomputing
from train.model.accumulation import embedded
from train.model.config import ModelConfig, hf_settings
from train.model.losses import Targets, head_losses
from train.model.presets import OLMO2_7B
from train.planning.memory import checkpoint_bytes, layer_activation_bytes, rank_memory
from train.run.config import RunConfig, load_run
from train.run.directory import PROBE
from train.run.optimization import Ema, Lawa
from train.run.parallel import ParallelConfig, ZeroConfig

AVERAGES = (Lawa(interval_steps=1, window=2), Ema(decay=0.9))
STATE = (
    *("weights", "gradients, fp32", "main weights, fp32", "optimizer states, fp32"),
    "averages, fp32",
)
TENSOR_FILE_BYTES = 2500  # torch's archive takes just below 2 kB around every stored tensor
LENGTH = 64


def small_model(layers: int, family: str = "olmo2", kv_heads: int = 2) -> ModelConfig:
    """Width 128: every tensor has a multiple of 128 elements, so that no engine pads."""
    return ModelConfig(
        **widths(128, 384, 4, kv_heads, vocab_size=320, num_hidden_layers=layers),
        family=family,  # type: ignore[arg-type]
        rotary_fraction=0.25 if family == "gpt_neox" else 1.0,
        norm_eps=1e-5 if family == "olmo" else 1e-6,
        head_dim=48 if family == "qwen3" else None,
    )


def small_run(directory: Path, layers: int = 2, replicas: int = 2, **changes) -> RunConfig:
    """Every replica sees one microbatch of two sequences a step."""
    sizes: dict[str, Any] = {"batch_size": 2 * replicas, "micro_batch_size": 2}
    model = {"model": small_model(layers)}
    return make_run(directory, data={"sequence_length": LENGTH}, **(model | sizes | changes))


def storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def size_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def kept_for_backward(forward: Callable[[], object], parameters: list[Tensor]) -> int:
    """Bytes of all storages that autograd keeps in a forward pass, but the parameters'."""
    known, kept = storages(parameters), {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def within(pack: Callable[[Tensor], Any], unpack: Any) -> saved_tensors_hooks:
        """Hooks of a recomputation, which keeps what it computes from."""
        compute = inspect.getclosurevars(unpack).nonlocals["again"].__wrapped__
        for tensor in inspect.getclosurevars(compute).nonlocals.values():
            if isinstance(tensor, Tensor):
                keep(tensor)
        return saved_tensors_hooks(pack, unpack)

    with (
        mock.patch.object(recomputing, "saved_tensors_hooks", within),
        saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        forward()
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in known)


def living(kind: type) -> list[Any]:
    """All objects of a kind in this process: engines are measured without their help."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def bytes_held(
    engine: Engine, run: RunConfig, parameters: list[Tensor], optimizers: list[Any]
) -> dict[str, int]:
    """Bytes of what an engine holds after a step, in the plan's terms."""
    states = {id(state): state for optimizer in optimizers for state in optimizer.state.values()}
    updated = {id(tensor): tensor for optimizer in optimizers for tensor in optimizer.state}
    # ZeRO stage 3 leaves a rank's part of a parameter beside the parameter, which is empty.
    parameters = [getattr(parameter, "ds_tensor", parameter) for parameter in parameters]
    tensors_of = {
        "weights": parameters,
        "gradients, fp32": (
            [vars(parameter)["main_grad"] for parameter in parameters]
            if run.engine == "megatron"
            else []
        ),
        "main weights, fp32": [
            tensor for tensor in updated.values() if not storages([tensor]) & storages(parameters)
        ],
        "optimizer states, fp32": [
            state[name] for state in states.values() for name in run.optimizer.STATES
        ],
        "averages, fp32": [part for name in slot_names(run) for part in engine.slot(name)],
    }
    return {
        name: size_of(tensors)
        for name, tensors in tensors_of.items()
        if tensors and size_of(tensors)
    }


def build_and_measure(*run_dirs: str) -> None:
    """Worker, on every rank: build an engine for each run in turn, step once and measure."""
    device = start()
    for run_dir in map(Path, run_dirs):
        # Kept alive: their ids stay taken.
        older = living(torch.nn.Module) + living(torch.optim.Optimizer)
        known = set(map(id, older))
        run = load_run(run_dir / "run.json")
        with mock.patch("train.deepspeed.setup.ZERO_PREFETCH_ELEMENTS", 0):
            engine = build_engine(run, device)
        draw_weights(engine, run)
        modules = [module for module in living(torch.nn.Module) if id(module) not in known]
        optimizers = [
            optimizer for optimizer in living(torch.optim.Optimizer) if id(optimizer) not in known
        ]
        weights = {
            id(weight): weight for module in modules for weight in module.parameters(recurse=False)
        }
        batch = Batch.of(torch.randint(320, (run.batch_size, LENGTH + 1)))
        batch = batch.of_replica(engine.replica)
        kept = kept_for_backward(
            lambda: engine.train_step(batch, 1e-3, lambda _: True),  # noqa: B023
            list(weights.values()),
        )
        parameters = list(weights.values())
        sizes = {"kept": kept, "held": bytes_held(engine, run, parameters, optimizers)}
        if run.zero.stage == 3:
            sizes["gathered"] = most_gathered(engine, parameters, batch)
        (run_dir / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(sizes))
        if run.averages:
            save(engine, run_dir / "whole")
            save(engine, run_dir / "weights", weights_only=True)
        leave_layout(run)
    engine.close()


def most_gathered(engine: Engine, parameters: list[Tensor], batch: Batch) -> int:
    """Most bytes at once of parameters that have their values, whenever a module has computed."""
    sizes: list[int] = []
    handle = register_module_forward_hook(lambda *_: sizes.append(size_of(parameters)))
    engine.evaluate(batch)
    handle.remove()
    return max(sizes)


def measured(root: Path, *runs: RunConfig) -> dict[str, list[dict]]:
    """Return by run what each of two ranks measured of the engines of runs below `root`."""
    directories = [root / run.name for run in runs]
    on_ranks(2, build_and_measure, *directories)
    return {
        directory.name: [
            json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)
        ]
        for directory in directories
    }


def exact_part(run: RunConfig) -> dict[str, int]:
    """The plan is what `bytes_held` measures, to the byte."""
    estimated = "gradients, fp32" if run.engine == "deepspeed" else None
    parts = rank_memory(run, 2).components.items()
    return {name: size for name, size in parts if name in STATE and name != estimated}


def bytes_below(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_megatron_engine(tmp_path):
    """A rank holds what the plan says, to the byte, and keeps for backward so much within 1%.

    At width 128 row statistics and rotary angles, which the plan does not count, weigh as much.
    """
    two_stages = ParallelConfig(pipeline=2)
    tied = small_model(2).model_copy(update={"tie_word_embeddings": True})
    sequence = ParallelConfig(tensor=2, sequence=True)
    activations = (
        ("tp2", ParallelConfig(tensor=2), "fp32", "none", "olmo2"),
        ("sp2", sequence, "bf16", "none", "olmo2"),
        ("selective", sequence, "bf16", "selective", "olmo2"),
        ("llama", sequence, "bf16", "none", "llama"),
        ("llama-grouped", sequence, "bf16", "selective", "llama"),
        ("olmo2-grouped", sequence, "bf16", "selective", "olmo2"),
    )
    # Two groups of queries on a rank.
    grouped = {"num_attention_heads": 8, "num_key_value_heads": 4}
    runs = [
        small_run(tmp_path / "dp2", precision="bf16", averages=AVERAGES),
        *(
            small_run(
                tmp_path / f"{name}-{layers}",
                layers,
                1,
                parallel=parallel,
                precision=precision,
                recompute=recompute,
                model=small_model(layers, family).model_copy(
                    update=grouped if name.endswith("grouped") else {}
                ),
            )
            for layers in (1, 2)
            for name, parallel, precision, recompute, family in activations
        ),
        small_run(tmp_path / "pp2", 2, 1, parallel=two_stages),
        small_run(tmp_path / "tied-pp2", 2, 1, parallel=two_stages, model=tied),
    ]
    sizes = measured(tmp_path, *runs)
    for run in runs:
        ranks = [rank["held"] for rank in sizes[run.name]]
        expected = exact_part(run)
        if run.parallel == two_stages:  # the plan shows the last stage, which has a norm more
            assert ranks[1] == expected
            assert sum(ranks[0].values()) == sum(expected.values()) - 128 * 16
        else:
            assert ranks == [expected, expected]
    for name, *_ in activations:
        run = next(run for run in runs if run.name == f"{name}-2")
        whole, split = layer_activation_bytes(run)
        layer = whole // (2 if run.parallel.sequence else 1) + split // 2
        kept = [sizes[f"{name}-{layers}"][0]["kept"] for layers in (1, 2)]
        assert kept[1] - kept[0] == pytest.approx(2 * LENGTH * layer, rel=0.01), name
        # Beside layers: the loss keeps its two gradients and no logits, the final norm its input.
        d, rows = (4 if run.precision == "fp32" else 2), 320 // 2
        loss = rank_memory(run, 2).components["logits and loss"] - d * 2 * LENGTH * rows
        norm = 2 * LENGTH * 128 * d // (2 if run.parallel.sequence else 1)
        assert kept[0] - (kept[1] - kept[0]) == pytest.approx(loss + norm, rel=0.04), name
    disk = checkpoint_bytes(runs[0])
    assert bytes_below(tmp_path / "dp2" / "whole") == pytest.approx(disk.full_each, rel=0.05)
    assert bytes_below(tmp_path / "dp2" / "weights") == pytest.approx(disk.weights_each, rel=0.1)


def test_deepspeed_engine(tmp_path):
    runs = [
        small_run(tmp_path / "zero1", engine="deepspeed", precision="bf16", averages=AVERAGES),
        small_run(tmp_path / "zero2", engine="deepspeed", zero=ZeroConfig(stage=2)),
        small_run(tmp_path / "zero3", engine="deepspeed", zero=ZeroConfig(stage=3)),
    ]
    sizes = measured(tmp_path, *runs)
    for run in runs:
        assert [rank["held"] for rank in sizes[run.name]] == [exact_part(run)] * 2
    with mock.patch("train.planning.memory.ZERO_PREFETCH_ELEMENTS", 0):
        planned = rank_memory(runs[-1], 2).components["gathered weights"]
    assert [rank["gathered"] for rank in sizes["zero3"]] == [planned] * 2
    disk = checkpoint_bytes(runs[0])
    assert bytes_below(tmp_path / "zero1" / "whole") == pytest.approx(disk.full_each, rel=0.05)
    assert bytes_below(tmp_path / "zero1" / "weights") == pytest.approx(disk.weights_each, rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("family", "kv_heads"),
    [
        *(("olmo2", 2), ("llama", 2), ("qwen2", 2), ("qwen3", 2), ("smollm3", 2), ("olmo", 4)),
        ("gpt_neox", 4),
    ],
)
def test_what_transformers_keeps_for_backward(tmp_path, family, kv_heads, precision):
    """A layer more keeps so much within 2% in transformers: row statistics are not counted."""
    kept, runs = [], []
    for layers in (1, 2):
        model = small_model(layers, family, kv_heads)
        config = AutoConfig.for_model(family, **hf_settings(model, LENGTH, 0))
        built = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        inputs = {
            "input_ids": torch.randint(320, (2, LENGTH)),
            "position_ids": torch.arange(LENGTH).expand(2, -1),
        }
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            forward = partial(built, **inputs, use_cache=False)
            kept.append(kept_for_backward(forward, list(built.parameters())))
        settings: dict[str, Any] = {"model": model, "precision": precision}
        runs.append(small_run(tmp_path / f"run{layers}", engine="deepspeed", **settings))
    whole, split = layer_activation_bytes(runs[1])
    assert split == 0
    # In bf16 the rounded weights of the layer, too.
    rounded = [rank_memory(run, 2).components.get("rounded copies of weights", 0) for run in runs]
    expected = 2 * LENGTH * whole + rounded[1] - rounded[0]
    assert kept[1] - kept[0] == pytest.approx(expected, rel=0.02)


def test_fused_kernels_keep_about_what_the_paper_counts(tmp_path):
    """Korthikanti et al. count 34 s b h bytes in a GPT's layer; OLMo2's layer has some more."""
    kernels: dict[str, Any] = {"precision": "bf16", "kernels": "transformer_engine"}
    run = make_run(tmp_path / "run", model=OLMO2_7B, **kernels)
    whole, split = layer_activation_bytes(run)
    assert whole + split == pytest.approx(34 * 4096, rel=0.2)


def test_8_bit_products_keep_two_bytes_of_each_weight_in_layers(tmp_path):
    settings: dict[str, Any] = {"model": OLMO2_7B, "kernels": "transformer_engine"}
    eight, sixteen = (
        rank_memory(make_run(tmp_path / each, **settings, precision=each), 1).components
        for each in ("mxfp8", "bf16")
    )
    in_layers = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    copies = eight.pop("8-bit copies of weights")
    assert copies == pytest.approx(2 * in_layers, rel=1e-3)  # norms are counted, too
    assert eight == sixteen


@pytest.mark.parametrize("layout", ["dp1", "dp2", "bf16-dp2"])
def test_checkpoints_of_real_runs(trained, layout):
    """The files around the tensors are a quarter here, and counted: 47 parameters of 4 kinds."""
    run = load_run(trained(layout) / "run.json")
    for checkpoint in (trained(layout) / "checkpoints").glob("step*"):
        probe = (checkpoint / PROBE).stat().st_size
        around = bytes_below(checkpoint) - probe - checkpoint_bytes(run).full_each
        assert 0 < around < 4 * 47 * TENSOR_FILE_BYTES


def most_bytes(compute: Callable[[], object], least: int) -> int:
    """The most bytes at once of what torch allocates in a call, in blocks of `least` and more."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        compute()
    results: Any = recorded.profiler
    events = [each for each in results.kineto_results.events() if each.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    sizes = [event.nbytes() for event in events if abs(event.nbytes()) >= least]
    return max(itertools.accumulate(sizes))


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_embedding_and_head(tmp_path, tied):
    """With few tokens they are a microbatch's peak: the head's waits where both are one parameter.

    An autocast rounds the head's rows for its products, the embedding's or not.
    """
    rows, width, tokens = 8192, 64, 16
    sizes = widths(width, 64, 4, 4, vocab_size=rows, num_hidden_layers=1)
    settings: dict[str, Any] = {
        "model": ModelConfig(**sizes, tie_word_embeddings=tied),
        "data": {"sequence_length": tokens},
        "micro_batch_size": 1,
        "precision": "bf16",
    }
    run = make_run(tmp_path / "run", **settings)
    embedding = torch.zeros(rows, width, dtype=torch.bfloat16, requires_grad=True)
    head = embedding if tied else torch.zeros_like(embedding, requires_grad=True)
    for weight in (embedding, head):
        weight.grad_dtype = None
        weight.register_post_accumulate_grad_hook(drop)
    ids = torch.arange(tokens)

    def differentiate() -> None:
        targets = Targets(ids, torch.ones(tokens, dtype=torch.bool), 0.0)
        loss, _ = head_losses(embedded(ids, embedding), head, targets)
        loss.backward()

    components = rank_memory(run, 1).components
    names = ("activations", "logits and loss", "gradient of the embedding")
    planned = sum(components.get(name, 0) for name in names)
    peak = most_bytes(differentiate, 2 * rows * width)  # logits are less
    assert peak == (2 if tied else 1) * 4 * rows * width
    assert peak <= planned < 1.2 * peak
    with_autocast = make_run(tmp_path / "autocast", **settings, engine="deepspeed")
    rounded = rank_memory(with_autocast, 1).components["rounded copies of weights"]
    assert rounded == pytest.approx(2 * (rows * width + 7 * width * 64), rel=0.01)


def drop(weight: Tensor) -> None:
    """Take a gradient away once it is added, as DDP does."""
    weight.grad = None
