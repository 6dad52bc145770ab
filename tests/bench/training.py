"""The training part of make bench: both engines against plain transformers + DDP + AdamW, two
processes, interleaved.

    torchrun --nproc-per-node 2 -m tests.bench.training

All three are built in the same processes and take turns, so the ratios hold on a machine whose
speed drifts.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from tests.bench import line
from train.data.batches import Batch
from train.data.config import DataConfig
from train.distributed import start
from train.engine import Engine, StepResult
from train.model.config import ModelConfig, hf_settings
from train.model.initialization import initial_parameter
from train.optimizers.adamw import AdamW
from train.run.config import RunConfig
from train.run.optimization import ConstantPhase, ScheduleConfig

ROUNDS = 11
LEARNING_RATE = 1e-4
MODEL = ModelConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
)


def bench_run(engine: str) -> RunConfig:
    """d = 512, 8 layers, 4 sequences of 256 tokens a step on each of two ranks, in two
    microbatches.
    """
    return RunConfig.model_validate(
        {
            "name": "bench",
            "seed": 0,
            "engine": engine,
            "precision": "fp32",
            "model": MODEL,
            "data": DataConfig(
                train="-", held_out="-", tokenizer="-", sequence_length=256, held_out_sequences=1
            ),
            "optimizer": AdamW(peak_lr=LEARNING_RATE),
            "schedule": ScheduleConfig(warmup_tokens=0, phase=ConstantPhase()),
            "total_steps": 100,
            "batch_size": 8,
            "micro_batch_size": 2,
            "save_steps": (100,),
            "evaluate_every_steps": 100,
        }
    )


def plain_step(
    run: RunConfig, tokens_BS: torch.Tensor
) -> tuple[Callable[[], None], Callable[[Path], None]]:
    """One update by transformers, torch's DDP and AdamW, and a torch.save of what a resume would
    need.
    """
    config = AutoConfig.for_model("olmo2", **hf_settings(run.model, run.data.sequence_length, 0))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(initial_parameter(name, run.model, run.seed))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    ranks, micro = dist.get_world_size(), run.micro_batch_size
    mine = tokens_BS.unflatten(0, (-1, ranks, micro))[:, dist.get_rank()]

    def loss_of(sequences_BS: torch.Tensor) -> torch.Tensor:
        logits = replica(sequences_BS[:, :-1], use_cache=False).logits
        log_z = logits.logsumexp(-1)
        cross_entropy = (log_z - logits.gather(-1, sequences_BS[:, 1:, None]).squeeze(-1)).mean()
        loss: torch.Tensor = (cross_entropy + run.optimizer.z_loss * log_z.square().mean()) / len(
            mine
        )
        return loss

    def step() -> None:
        with replica.no_sync():
            for sequences_BS in mine[:-1]:
                loss_of(sequences_BS).backward()
        loss_of(mine[-1]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    def save(path: Path) -> None:
        if dist.get_rank() == 0:
            with path.open("wb") as file:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                os.fsync(file.fileno())
        dist.barrier()

    return step, save


def build(run: RunConfig, device: torch.device) -> Engine:
    """The engine of a run with its first weights."""
    from train.engines import build_engine

    engine = build_engine(run, device)
    engine.start_from(lambda weight: initial_parameter(weight, run.model, run.seed))
    return engine


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock time of a call that starts and ends on all ranks together."""
    dist.barrier()
    started_at = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - started_at


def save_seconds(
    engine: Engine, plain_save: Callable[[Path], None], root: Path
) -> tuple[float, float, float]:
    """Medians of: the stall of an asynchronous save (until training may continue), the whole save,
    torch.save.
    """
    stalls, wholes, plains = [], [], []
    for index in range(3):
        directory = root / str(index)
        if dist.get_rank() == 0:
            directory.mkdir()
        dist.barrier()
        started_at = time.perf_counter()
        snapshot = engine.snapshot(
            directory, weights_only=False
        )  # optimizer state too; loads nothing
        dist.barrier()
        stalls.append(time.perf_counter() - started_at)
        snapshot.write()
        dist.barrier()
        snapshot.seal()
        dist.barrier()
        wholes.append(time.perf_counter() - started_at)
        plains.append(seconds(lambda: plain_save(root / "plain.pt")))
    return statistics.median(stalls), statistics.median(wholes), statistics.median(plains)


def main() -> None:
    """Rank 0 prints one line per comparison."""
    torch.set_num_threads(1)
    device = start()
    run = bench_run("megatron")
    shape = (run.batch_size, run.data.sequence_length + 1)
    tokens_BS = torch.randint(MODEL.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch = Batch.of(tokens_BS)
    engines = {name: build(bench_run(name), device) for name in ("megatron", "deepspeed")}
    plain, plain_save = plain_step(run, tokens_BS)
    calls: dict[str, Callable[[], object]] = {"plain": plain}
    for name, engine in engines.items():
        calls[name] = lambda engine=engine: engine.train_step(
            batch.of_replica(engine.replica), LEARNING_RATE, StepResult.is_finite
        )  # type: ignore[misc]
    for call in calls.values():
        call()
    rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    with tempfile.TemporaryDirectory() as scratch:
        shared = [scratch]
        dist.broadcast_object_list(shared, src=0)
        saves = {}
        for name, engine in engines.items():
            root = Path(shared[0]) / name
            if dist.get_rank() == 0:
                root.mkdir()
            dist.barrier()
            saves[name] = save_seconds(engine, plain_save, root)
        dist.barrier()
    if dist.get_rank() == 0:
        print("\n".join(report(rounds, saves, run.tokens_per_step)), flush=True)
    dist.barrier()
    os._exit(0)  # two engines share the process groups: neither may tear them down under the other


def report(
    rounds: list[dict[str, float]], saves: dict[str, tuple[float, float, float]], tokens: int
) -> list[str]:
    """Ratios of tokens/s to the plain loop's, medians over rounds, and of save times to
    torch.save's.
    """
    lines = []
    for name, title in (("megatron", "megatron engine"), ("deepspeed", "deepspeed engine, ZeRO-1")):
        ratio = statistics.median(each["plain"] / each[name] for each in rounds)
        ours, peer = (
            tokens / statistics.median(each[key] for each in rounds) for key in (name, "plain")
        )
        what = f"tokens/s, 2 processes: {title} / HF + DDP + AdamW"
        lines.append(line(what, ratio, f"{ours:,.0f} / {peer:,.0f}"))
        stall, whole, plain = saves[name]
        what = f"save: stall of {title} / torch.save"
        remark = f"{stall * 1e3:.0f} ms, whole {whole * 1e3:.0f} / {plain * 1e3:.0f} ms"
        lines.append(line(what, stall / plain, remark))
    return lines


if __name__ == "__main__":
    main()
