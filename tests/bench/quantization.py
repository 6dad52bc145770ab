"""The quantization part of make bench: GPTQ by this project and by two others, on one random
OLMo2 and one text.

    python -m tests.bench.quantization

4 bits, groups of 128, symmetric, natural column order, damping 0.05, fp32; 32 sequences of 2048
tokens, one at a time. Every contender has a process of its own with one thread on one core (ours
once more as two ranks, a core each). Its seconds are those of quantizing alone; imports and loading
are given beside them, and what CPU time it took, which is what counts on a busy machine.
gptqmodel's include the packing of its checkpoint, which it cannot leave out. Ours runs once more
with every linear's inputs rotated by a Hadamard matrix. That the weights agree is a test
(`tests/quant_eval/test_gptq_peers.py`).

Shapes: N sequences, L tokens of a sequence.
"""

import json
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from base.ranks import start
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.hf.model import load_hf_model
from quant_eval.libraries.job import Job
from quant_eval.measuring.walk import Variant, walk
from quant_eval.model.streamed import Block, StreamedModel
from quant_eval.quantizer import ColumnSpec, QuantSpec
from quant_eval.settings import ComputeSettings
from quant_eval.specs import parse_spec
from tests.bench import line
from tests.conftest import make_hf_directory
from tests.quant_eval.specs import typed
from tests.runs import execute, torchrun

SPEC = "gptqmodel-b4-g128"
BATCH_SIZE = 1
# ours: by number of processes; rotated: ours with a Hadamard transform, in one
CONTENDERS = ("ours-1", "ours-2", "rotated", "gptqmodel", "llmcompressor")
HIDDEN, INTERMEDIATE, LAYERS = 512, 1408, 8  # groups of 128 divide both widths
SEQUENCES, LENGTH = 32, 2048


@dataclass(frozen=True)
class ProcessCost:
    """Seconds of quantizing, in one process."""

    seconds: float
    cpu_seconds: float
    seconds_before: float  # since the process began: imports, loading
    peak_mib: float
    mib_before: float


def timed(call: Callable[[], object]) -> ProcessCost:
    """Runs the call; what it cost."""
    process = psutil.Process()
    seconds_before, mib_before = (
        time.time() - process.create_time(),
        process.memory_info().rss / 2**20,
    )
    started, started_cpu = time.perf_counter(), time.process_time()
    call()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return ProcessCost(seconds, cpu_seconds, seconds_before, peak_mib, mib_before)


def quantize_ours(hf_dir: Path, calibration_NL: Tensor, spec: QuantSpec, out: Path) -> None:
    """This project's walk over the model, in every rank; rank 0 leaves a file of dense values
    for every block.
    """
    ranks = start("cpu")

    def keep(index: int, block: Block) -> None:
        linears = [linear for group in block.linears() for linear in group.items()]
        if ranks.rank == 0:
            save_file(
                {f"{name}.weight": linear.weight for name, linear in linears},
                out / f"{index}.safetensors",
            )

    compute = ComputeSettings(batch_size=BATCH_SIZE)
    model = StreamedModel(hf_dir, HFWeights(hf_dir), torch.float32, ranks.device)
    walk(model, [Variant(spec, calibration_NL, finished=keep)], None, compute, ranks)


def run_ours(work: Path, ids_NL: Tensor) -> ProcessCost:
    """Its loading counts as quantizing, and so does its saving: both go block by block."""
    name = f"ours-{os.environ.get('WORLD_SIZE', '1')}"
    return cost_of_ours(work, ids_NL, SPEC.replace("gptqmodel", "gptq"), name)


def run_rotated(work: Path, ids_NL: Tensor) -> ProcessCost:
    """The same with a Hadamard transform of every linear's inputs."""
    return cost_of_ours(work, ids_NL, SPEC.replace("gptqmodel", "gptq") + "-had", "rotated")


def cost_of_ours(work: Path, ids_NL: Tensor, spec_name: str, name: str) -> ProcessCost:
    """Quantizes by this project."""
    out = work / name
    out.mkdir(exist_ok=True)
    spec = parse_spec(spec_name)
    return timed(lambda: quantize_ours(work / "model", ids_NL, spec, out))


def run_gptqmodel(work: Path, _: Tensor) -> ProcessCost:
    """As the project runs it, with a clock around the library's own call."""
    from quant_eval.libraries import pcre, run_gptqmodel

    os.environ.update(run_gptqmodel.ENVIRONMENT)
    pcre.stand_in()
    from gptqmodel.models.base import BaseQModel

    plain, costs = BaseQModel.quantize, list[ProcessCost]()

    def clocked(*arguments, **named):
        logs = []
        costs.append(timed(lambda: logs.append(plain(*arguments, **named))))
        return logs[0]

    job = Job(
        hf_dir=work / "model",
        spec=parse_spec(SPEC),
        calibration=work / "ids.safetensors",
        dtype="fp32",
        device="cpu",
        batch_size=BATCH_SIZE,
        threads=1,
        out=work,
    )
    with mock.patch.object(BaseQModel, "quantize", clocked):
        run_gptqmodel.quantize(job)
    return costs[0]


def run_llmcompressor(work: Path, ids_NL: Tensor) -> ProcessCost:
    """GPTQModifier on every decoder layer in turn; its linears are all calibrated in one pass
    through the layer.
    """
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.entrypoints.oneshot import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    # Pins host memory for copies to an accelerator; fails without one.
    IntermediatesCache.pin_memory = lambda *_: None  # type: ignore[method-assign]
    spec = typed(ColumnSpec, SPEC)
    weights = QuantizationArgs(
        num_bits=spec.bits,
        type="int",
        symmetric=True,
        strategy="group",
        group_size=spec.group_size,
        observer="memoryless_minmax",
    )
    model = load_hf_model(work / "model", torch.float32, attention="sdpa")
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    ]
    modifier = GPTQModifier(
        config_groups={"linears": QuantizationScheme(targets=linears, weights=weights)},
        ignore=[],
        block_size=128,
        dampening_frac=spec.damping,
        actorder=None,
    )
    sequences = [{"input_ids": ids_L} for ids_L in ids_NL]
    cost = timed(
        lambda: oneshot(
            model=model,
            processor=object(),  # type: ignore[arg-type]  # never called: the text is tokens already
            recipe=modifier,
            dataset=DataLoader(sequences, batch_size=BATCH_SIZE),  # type: ignore[arg-type]
            pipeline="sequential",
            sequential_targets=["Olmo2DecoderLayer"],
            batch_size=BATCH_SIZE,
            num_calibration_samples=len(ids_NL),
            shuffle_calibration_samples=False,
        )
    )
    assert not modifier._rtn_fallback_module_names
    return cost


def quantization_lines() -> list[str]:
    """Runs every contender, one after the other; a line for each, and for each peer ours against
    it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        make_hf_directory(
            work / "model",
            vocab_size=2048,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=LENGTH,
        )
        generator = torch.Generator().manual_seed(0)
        ids_NL = torch.randint(2048, (SEQUENCES, LENGTH), generator=generator)
        save_file({"input_ids": ids_NL}, work / "ids.safetensors")
        failures: dict[str, str] = {}
        for name in CONTENDERS:
            method, _, processes = name.partition("-")
            command = [sys.executable, "-m", "tests.bench.quantization", method, str(work)]
            if processes == "2":
                command = torchrun(2, "tests.bench.quantization", method, str(work))
            done = execute(command, timeout_seconds=3600)
            if done.returncode:
                failures[name] = next(
                    iter(re.findall(r"^\w*Error: .*", done.stderr, re.MULTILINE)), "no message"
                )
        finished = [name for name in CONTENDERS if name not in failures]
        costs = {
            name: [
                ProcessCost(**json.loads(path.read_text())) for path in work.glob(f"{name}.*.json")
            ]
            for name in finished
        }
    lines = [line_of(name, costs[name]) for name in finished]
    lines += [f"{f'GPTQ by {name}':<70} failed   ({reason})" for name, reason in failures.items()]
    return lines + ratio_lines(costs)


def line_of(name: str, costs: list[ProcessCost]) -> str:
    """One contender; of several ranks the slowest and the largest."""
    slowest = max(costs, key=lambda cost: cost.seconds)
    largest = max(costs, key=lambda cost: cost.peak_mib)
    return (
        f"{f'GPTQ by {name}':<70} {slowest.seconds:>6.1f} s (CPU {slowest.cpu_seconds:.1f} s,"
        f" imports and loading {slowest.seconds_before:.1f} s, peak {largest.peak_mib:.0f} MiB,"
        f" {largest.mib_before:.0f} of them before)"
    )


def ratio_lines(costs: dict[str, list[ProcessCost]]) -> list[str]:
    """Rotated against plain in CPU time; ours against each peer in seconds and peak memory."""
    lines = []
    if "rotated" in costs and "ours-1" in costs:
        rotated, plain = (costs[name][0] for name in ("rotated", "ours-1"))
        ratio, memory = rotated.cpu_seconds / plain.cpu_seconds, rotated.peak_mib / plain.peak_mib
        remark = f"peak memory {memory:.2f}"
        lines.append(line("GPTQ, CPU seconds: rotated / ours-1", ratio, remark))
    for ours in (name for name in costs if name.startswith("ours")):
        for peer in (name for name in ("gptqmodel", "llmcompressor") if name in costs):
            seconds = max(cost.seconds for cost in costs[ours]) / costs[peer][0].seconds
            memory = max(cost.peak_mib for cost in costs[ours]) / costs[peer][0].peak_mib
            remark = f"peak memory {memory:.2f}"
            lines.append(line(f"GPTQ, seconds: {ours} / {peer}", seconds, remark))
    return lines


def contend(method: str, work: Path) -> None:
    """One contender's process, on a core of its own; leaves its weights and its cost in `place`."""
    rank, processes = int(os.environ.get("RANK", "0")), os.environ.get("WORLD_SIZE", "1")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.chdir(work)  # where the libraries leave their logs
    torch.set_num_threads(1)
    ids_NL = load_file(work / "ids.safetensors")["input_ids"]
    runs = {
        "ours": run_ours,
        "rotated": run_rotated,
        "gptqmodel": run_gptqmodel,
        "llmcompressor": run_llmcompressor,
    }
    cost = runs[method](work, ids_NL)
    name = f"ours-{processes}" if method == "ours" else method
    (work / f"{name}.{rank}.json").write_text(json.dumps(asdict(cost)))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        contend(sys.argv[1], Path(sys.argv[2]).resolve())
    else:
        torch.set_num_threads(1)
        print("\n".join(quantization_lines()))
