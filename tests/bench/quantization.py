"""The quantization part of make bench: GPTQ by this project and by two others, on one random
OLMo2 and one text.

    python -m tests.bench.quantization [--small]

4 bits, groups of 128, symmetric, natural column order, damping 0.05, fp32; 32 sequences of 2048
tokens, one at a time. Every contender has a process of its own with one thread on one core (ours
once more as two ranks, a core each). Its seconds are those of quantizing alone; imports and loading
are given beside them, and what CPU time it took, which is what counts on a busy machine.
gptqmodel's include the packing of its checkpoint, which it cannot leave out. Objectives are on the
inputs of the full-precision model, for all alike. Ours runs once more with every linear's inputs
rotated by a Hadamard matrix: its CPU time is to be at most 1.2 times that of plain GPTQ.

Shapes: O output features, I input features, T tokens, N sequences, L tokens of a sequence.
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
from quant_eval.libraries.job import WEIGHTS, Job
from quant_eval.measuring.walk import Variant, walk
from quant_eval.model.streamed import Block, StreamedModel
from quant_eval.settings import ComputeSettings
from quant_eval.specs import QuantSpec, parse_spec
from tests.conftest import make_hf_directory
from tests.runs import execute, torchrun

SPEC = "gptqmodel-b4-g128"
BATCH_SIZE = 1
# ours: by number of processes; rotated: ours with a Hadamard transform, in one
CONTENDERS = ("ours-1", "ours-2", "rotated", "gptqmodel", "llmcompressor")
SHARED_INPUTS = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


@dataclass(frozen=True)
class Size:
    """Sizes of the model and the text; groups of 128 divide both widths."""

    hidden: int
    intermediate: int
    layers: int
    sequences: int
    sequence_length: int


FULL, SMALL = Size(512, 1408, 8, 32, 2048), Size(128, 256, 2, 16, 128)


@dataclass(frozen=True)
class Cost:
    """Seconds of quantizing, in one process."""

    seconds: float
    cpu_seconds: float
    seconds_before: float  # since the process began: imports, loading
    peak_mib: float
    mib_before: float


def timed(call: Callable[[], object]) -> Cost:
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
    return Cost(seconds, cpu_seconds, seconds_before, peak_mib, mib_before)


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


def run_ours(place: Path, ids_NL: Tensor) -> Cost:
    """Its loading counts as quantizing, and so does its saving: both go block by block."""
    name = f"ours-{os.environ.get('WORLD_SIZE', '1')}"
    return cost_of_ours(place, ids_NL, SPEC.replace("gptqmodel", "gptq"), name)


def run_rotated(place: Path, ids_NL: Tensor) -> Cost:
    """The same with a Hadamard transform of every linear's inputs."""
    return cost_of_ours(place, ids_NL, SPEC.replace("gptqmodel", "gptq") + "-had", "rotated")


def cost_of_ours(place: Path, ids_NL: Tensor, spec_name: str, name: str) -> Cost:
    """Quantizes by this project; leaves the dense values in a file of that name."""
    out = place / name
    out.mkdir(exist_ok=True)
    spec = parse_spec(spec_name)
    cost = timed(lambda: quantize_ours(place / "model", ids_NL, spec, out))
    if os.environ.get("RANK", "0") == "0":
        dense: dict[str, Tensor] = {}
        for path in out.iterdir():
            dense |= load_file(path)
        save_file(dense, place / f"{name}.safetensors")
    return cost


def run_gptqmodel(place: Path, _: Tensor) -> Cost:
    """As the project runs it, with a clock around the library's own call."""
    from quant_eval.libraries import pcre, run_gptqmodel

    os.environ.update(run_gptqmodel.ENVIRONMENT)
    pcre.stand_in()
    from gptqmodel.models.base import BaseQModel

    plain, costs = BaseQModel.quantize, list[Cost]()

    def clocked(*arguments, **named):
        logs = []
        costs.append(timed(lambda: logs.append(plain(*arguments, **named))))
        return logs[0]

    job = Job(
        hf_dir=place / "model",
        spec=parse_spec(SPEC),
        calibration=place / "ids.safetensors",
        dtype="fp32",
        device="cpu",
        batch_size=BATCH_SIZE,
        threads=1,
        out=place,
    )
    with mock.patch.object(BaseQModel, "quantize", clocked):
        run_gptqmodel.quantize(job)
    (place / WEIGHTS).rename(place / "gptqmodel.safetensors")
    return costs[0]


def run_llmcompressor(place: Path, ids_NL: Tensor) -> Cost:
    """GPTQModifier on every decoder layer in turn; its linears are all calibrated in one pass
    through the layer.
    """
    from compressed_tensors.offload import remove_dispatch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.entrypoints.oneshot import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    # Pins host memory for copies to an accelerator; fails without one.
    IntermediatesCache.pin_memory = lambda *_: None  # type: ignore[method-assign]
    spec = parse_spec(SPEC)
    weights = QuantizationArgs(
        num_bits=spec.bits,
        type="int",
        symmetric=True,
        strategy="group",
        group_size=spec.group_size,
        observer="memoryless_minmax",
    )
    model = load_hf_model(place / "model", torch.float32, attention="sdpa")
    linears = [name for name, _ in linears_of(model)]
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
    remove_dispatch(model)  # plain tensors again
    dense = {
        f"{name}.weight": linear.weight.detach().contiguous() for name, linear in linears_of(model)
    }
    save_file(dense, place / "llmcompressor.safetensors")
    return cost


def linears_of(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The linears of the decoder blocks, by name."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    ]


@torch.no_grad()
def mean_objectives(place: Path, ids_NL: Tensor, contenders: list[str]) -> dict[str, float]:
    """The mean over linears of tr(dW H dW^T) / tr(W H W^T), H of the full-precision model's
    inputs.
    """
    model = load_hf_model(place / "model", torch.float32, attention="sdpa")
    hessians: dict[str, Tensor] = {}

    def collect(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor]) -> None:
            inputs_TI = inputs[0].flatten(0, 1)
            hessian_II = (inputs_TI.T @ inputs_TI).double()
            hessians[name] = hessians[name].add_(hessian_II) if name in hessians else hessian_II

        return hook

    for name, linear in linears_of(model):
        if name.rpartition(".")[2] not in SHARED_INPUTS:
            linear.register_forward_pre_hook(collect(name))
    for ids_BL in ids_NL.split(BATCH_SIZE):
        model.get_submodule("model")(ids_BL, use_cache=False)

    def objective(name: str, weight_OI: Tensor, dense_OI: Tensor) -> float:
        parent, _, leaf = name.rpartition(".")
        hessian_II = hessians[f"{parent}.{SHARED_INPUTS.get(leaf, leaf)}"]
        error, whole = (
            torch.sum((matrix_OI @ hessian_II) * matrix_OI)
            for matrix_OI in (dense_OI.double() - weight_OI.double(), weight_OI.double())
        )
        return float(error / whole)

    means = {}
    for contender in contenders:
        dense = load_file(place / f"{contender}.safetensors")
        values = [
            objective(name, linear.weight, dense[f"{name}.weight"])
            for name, linear in linears_of(model)
        ]
        means[contender] = sum(values) / len(values)
    return means


def compete(size: Size) -> list[str]:
    """Runs every contender, one after the other; a line for each, and for each peer ours against
    it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        make_hf_directory(
            place / "model",
            vocab_size=2048,
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=size.sequence_length,
        )
        generator = torch.Generator().manual_seed(0)
        ids_NL = torch.randint(2048, (size.sequences, size.sequence_length), generator=generator)
        save_file({"input_ids": ids_NL}, place / "ids.safetensors")
        failures: dict[str, str] = {}
        for name in CONTENDERS:
            method, _, processes = name.partition("-")
            command = [sys.executable, "-m", "tests.bench.quantization", method, str(place)]
            if processes == "2":
                command = torchrun(2, "tests.bench.quantization", method, str(place))
            done = execute(command, timeout_seconds=3600)
            if done.returncode:
                failures[name] = next(
                    iter(re.findall(r"^\w*Error: .*", done.stderr, re.MULTILINE)), "no message"
                )
        finished = [name for name in CONTENDERS if name not in failures]
        objectives = mean_objectives(place, ids_NL, finished)
        costs = {
            name: [Cost(**json.loads(path.read_text())) for path in place.glob(f"{name}.*.json")]
            for name in finished
        }
    lines = [line_of(name, costs[name], objectives[name]) for name in finished]
    lines += [f"{f'GPTQ by {name}':<70} failed   ({reason})" for name, reason in failures.items()]
    return lines + ratio_lines(costs)


def line_of(name: str, costs: list[Cost], objective: float) -> str:
    """One contender; of several ranks the slowest and the largest."""
    slowest = max(costs, key=lambda cost: cost.seconds)
    largest = max(costs, key=lambda cost: cost.peak_mib)
    return (
        f"{f'GPTQ by {name}':<70} {slowest.seconds:>6.1f} s (CPU {slowest.cpu_seconds:.1f} s,"
        f" imports and loading {slowest.seconds_before:.1f} s, peak {largest.peak_mib:.0f} MiB,"
        f" {largest.mib_before:.0f} of them before; mean objective {objective:.6f})"
    )


def ratio_lines(costs: dict[str, list[Cost]]) -> list[str]:
    """Rotated against plain in CPU time; ours against each peer in seconds and peak memory."""
    lines = []
    if "rotated" in costs and "ours-1" in costs:
        rotated, plain = (costs[name][0] for name in ("rotated", "ours-1"))
        ratio, memory = rotated.cpu_seconds / plain.cpu_seconds, rotated.peak_mib / plain.peak_mib
        lines.append(
            f"{'GPTQ, CPU seconds: rotated / ours-1':<70} {ratio:>6.2f}   (peak memory {memory:.2f})"
        )
    for ours in (name for name in costs if name.startswith("ours")):
        for peer in (name for name in ("gptqmodel", "llmcompressor") if name in costs):
            seconds = max(cost.seconds for cost in costs[ours]) / costs[peer][0].seconds
            memory = max(cost.peak_mib for cost in costs[ours]) / costs[peer][0].peak_mib
            lines.append(
                f"{f'GPTQ, seconds: {ours} / {peer}':<70} {seconds:>6.2f}   (peak memory"
                f" {memory:.2f})"
            )
    return lines


def quantization_lines() -> list[str]:
    """Return the lines that make bench prints."""
    return compete(FULL)


def contend(method: str, place: Path) -> None:
    """One contender's process, on a core of its own; leaves its weights and its cost in `place`."""
    rank, processes = int(os.environ.get("RANK", "0")), os.environ.get("WORLD_SIZE", "1")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.chdir(place)  # where the libraries leave their logs
    torch.set_num_threads(1)
    ids_NL = load_file(place / "ids.safetensors")["input_ids"]
    runs = {
        "ours": run_ours,
        "rotated": run_rotated,
        "gptqmodel": run_gptqmodel,
        "llmcompressor": run_llmcompressor,
    }
    cost = runs[method](place, ids_NL)
    name = f"ours-{processes}" if method == "ours" else method
    (place / f"{name}.{rank}.json").write_text(json.dumps(asdict(cost)))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        contend(sys.argv[1], Path(sys.argv[2]).resolve())
    else:
        torch.set_num_threads(1)
        for line in compete(SMALL if sys.argv[1:] == ["--small"] else FULL):
            print(line, flush=True)
