"""The curvature part of make bench: Hessian-vector products and traces by this project and by
three libraries.

    python -m tests.bench.curvature

One OLMo2 of 1.3 million parameters, trained for 200 steps on synthetic text, and batches of 8
sequences of 128 tokens; fp32, one thread; every contender in a process of its own. Seconds are CPU
seconds, which is what counts on a busy machine, and stand as multiples of one forward and backward
pass of transformers (sdpa attention) on such a batch, measured in the same process in turn with
what they are compared with. Peak memory is the high-water mark of one product, its preparation
included, above what the process held with the model and the vector loaded.

Errors of traces are relative to the mean over all text. A library multiplies with the Hessian of a
fixed data set, so its time is shared out between batches and probes; every library has the best
share of all. What any share is worth follows from three variances, of sequences, of probes and of
both together, measured on a table of exact products: for the time that 64 pairs of a probe and a
batch take us, and for that of 16. In the latter every library's own Hutchinson trace is run as it
stands, ten times, beside what is expected of it.

Shapes: N and I sequences, S positions of a sequence, J probes, P parameters.
"""

import ctypes
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from curvlinops import hutchinson_trace, hutchpp_trace, xtrace
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from base.ranks import ALONE
from curvature.products.exact import DualHessian
from curvature.products.model import CurvedModel
from curvature.products.parameters import Probe
from tests.curvature.conftest import differentiable_gradient
from tests.curvature.libraries import LIBRARIES, Product, curvlinops_of
from tests.curvature.variances import Variances, jackknife, variances_of
from tests.curvature.workload import BATCH, POOL, load, mean_loss, prepare
from tests.runs import execute

TABLE = 24  # sequences, and probes
PAIRS, PAIRS_RUN, SEEDS = 64, 16, 10
REPETITIONS, TIMED_PROBES = 5, 4
MOST_BATCHES = 64  # of a library's data set
M_MMAP_THRESHOLD = -3  # of malloc.h
OURS = ("ours", "ours, checkpointing")


def our_hessian(name: str, model: PreTrainedModel) -> DualHessian:
    """Exact; with checkpointing where the name says so."""
    return DualHessian(CurvedModel(model, ranks=ALONE, checkpointing=name == "ours, checkpointing"))


def double_backward(model: PreTrainedModel, tokens_NS1: Tensor) -> Product:
    """The gradient of g.v through the graph of g."""

    def product(v_P: Tensor) -> Tensor:
        _, gradient_P = differentiable_gradient(model, tokens_NS1)  # type: ignore[arg-type]
        return torch.cat(
            [
                part.flatten()
                for part in torch.autograd.grad(gradient_P @ v_P, list(model.parameters()))
            ]
        )

    return product


def product_of(name: str, model: PreTrainedModel, tokens_NS1: Tensor) -> Callable[[Tensor], object]:
    """One contender's v -> Hv on one batch."""
    if name in OURS:
        hessian = our_hessian(name, model)
        return lambda v_P: hessian.product(tokens_NS1, v_P)
    if name == "double backward":
        return double_backward(model, tokens_NS1)
    return LIBRARIES[name].product(model, [tokens_NS1])


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def in_gradients(call: Callable[[], object], gradient: Callable[[], object]) -> tuple[float, float]:
    """Median ratio of CPU times of neighbouring calls, and the median seconds of the first."""
    call(), gradient()
    times = [(cpu_seconds(call), cpu_seconds(gradient)) for _ in range(REPETITIONS)]
    return statistics.median(a / b for a, b in times), statistics.median(a for a, _ in times)


def peak_mib(name: str, place: Path, pool_NS1: Tensor) -> float:
    """High-water mark of this process's memory during one product, above what it held before.

    From its start on freed tensors go back to the system at once, which costs time: it is what was
    needed that counts, not how malloc fills its gaps. A product before it makes what stays for
    good.
    """
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    for _ in range(2):
        model = load(place / "model", attention_of(name))
        v_P = torch.ones(model.num_parameters())
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # begins a new high-water mark
        before = psutil.Process().memory_info().rss / 2**20
        product_of(name, model, pool_NS1[:BATCH])(v_P)
    match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) / 2**10 - before


def attention_of(name: str) -> str:
    """sdpa has no second derivative on CPU."""
    return "sdpa" if name in OURS else "eager"


def cost(name: str, place: Path, pool_NS1: Tensor) -> dict[str, float]:
    """Seconds of one product, and of one product and its probe as the contender's trace has it."""
    tokens_NS1, attention = pool_NS1[:BATCH], attention_of(name)
    plain = load(place / "model", "sdpa")
    v_P = (
        torch.randint(2, (plain.num_parameters(),), generator=torch.Generator().manual_seed(0))
        * 2.0
        - 1
    )

    def gradient() -> None:
        torch.autograd.grad(mean_loss(plain, tokens_NS1), list(plain.parameters()))

    product = product_of(name, load(place / "model", attention), tokens_NS1)
    gradients, seconds = in_gradients(lambda: product(v_P), gradient)
    result = {"gradients": gradients, "seconds": seconds}
    if name == "ours":
        hessian = our_hessian(name, load(place / "model", attention))
        result["pair"], _ = in_gradients(partial(quadratic, hessian, tokens_NS1, 0), gradient)
    if name in LIBRARIES:
        model = load(place / "model", attention)
        once, _ = in_gradients(
            lambda: LIBRARIES[name].trace(model, [tokens_NS1], TIMED_PROBES), gradient
        )
        result["pair"] = once / TIMED_PROBES
    return result


def quadratic(hessian: DualHessian, tokens_NS1: Tensor, probe: int) -> float:
    """v'Hv with probe number `probe`."""
    return sum(hessian.probed(tokens_NS1, Probe(0, probe)).dots.values())


def exact(place: Path, pool_NS1: Tensor) -> dict[str, Any]:
    """v'Hv of every probe with every sequence of a part of the text, and the trace over all of
    it.
    """
    hessian = our_hessian("ours", load(place / "model", "sdpa"))
    vectors = (hessian.parameters.probe(Probe(0, probe)) for probe in range(TABLE))
    table = [
        [
            sum(hessian.quadratic(tokens_S1[None], v_P).dots.values())
            for tokens_S1 in pool_NS1[:TABLE]
        ]
        for v_P in vectors
    ]
    numbered = enumerate(pool_NS1)
    twice_N2 = torch.tensor(
        [
            [quadratic(hessian, tokens_S1[None], 2 * n + k) for k in (100, 101)]
            for n, tokens_S1 in numbered
        ]
    )
    # The sequences are all there are, so only the probes are random: half the squared difference is
    # their variance.
    error = math.sqrt(
        float((twice_N2[:, 0] - twice_N2[:, 1]).square().mean()) / 2 / twice_N2.numel()
    )
    return {"table_JI": table, "trace": float(twice_N2.mean()), "standard_error": error}


def run_trace(
    name: str, place: Path, pool_NS1: Tensor, batches: int, probes: int
) -> dict[str, Any]:
    """Ten traces on text drawn anew; ours of as many pairs of a probe and a batch as there are
    batches.
    """
    model = load(place / "model", attention_of(name))
    hessian = our_hessian(name, model) if name in OURS else None

    def estimate(seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        drawn_N = torch.randint(POOL, (batches * BATCH,), generator=generator)
        drawn = pool_NS1[drawn_N].split(BATCH)
        if hessian:
            numbered = enumerate(drawn, start=1000 + seed * batches)
            return statistics.fmean(
                quadratic(hessian, tokens_BS1, probe) for probe, tokens_BS1 in numbered
            )
        return LIBRARIES[name].trace(model, list(drawn), probes)

    start = time.process_time()
    estimates = [estimate(seed) for seed in range(SEEDS)]
    result: dict[str, Any] = {
        "seconds": (time.process_time() - start) / SEEDS,
        "estimates": estimates,
    }
    if name == "curvlinops":
        operator = curvlinops_of(model, [pool_NS1[:2]])
        result["algorithms"] = {
            algorithm.__name__: [float(algorithm(operator, 12)) for _ in range(SEEDS)]
            for algorithm in (hutchinson_trace, hutchpp_trace, xtrace)
        }
    return result


def best_share(variances: Variances, time_in_gradients: float, pair: float) -> tuple[int, int]:
    """The batches and probes that a library's time is best shared out between."""
    shares = [
        (batches, int(time_in_gradients / (batches * pair)))
        for batches in range(1, MOST_BATCHES + 1)
    ]
    return min(
        (share for share in shares if share[1]), key=lambda share: error_of_share(variances, share)
    )


def error_of_share(variances: Variances, share: tuple[int, int]) -> float:
    batches, probes = share
    return variances.error_of_fixed(batches * BATCH, probes)


def child(*arguments: str) -> Any:
    """One measurement in a process of its own."""
    done = execute(
        [sys.executable, "-m", "tests.bench.curvature", *arguments], timeout_seconds=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def line(what: str, value: float, remark: str) -> str:
    return f"{what:<70} {value:>6.2f}   ({remark})"


def product_lines(costs: dict[str, dict[str, float]]) -> list[str]:
    """Time and memory of every contender, and memory against double backward."""
    lines = []
    for name, figures in costs.items():
        remark = f"{figures['seconds']:.3f} s, peak {figures['peak_mib']:.0f} MiB above the model"
        lines.append(
            line(
                f"Hessian-vector product, {name} / forward and backward (HF)",
                figures["gradients"],
                remark,
            )
        )
    for name in OURS:
        ratio = costs[name]["peak_mib"] / costs["double backward"]["peak_mib"]
        lines.append(
            line(
                f"Hessian-vector product, peak memory: {name} / double backward",
                ratio,
                "both above the model",
            )
        )
    return lines


def trace_lines(place: Path, costs: dict[str, dict[str, float]]) -> list[str]:
    """Errors in equal time: expected in the time of 64 of our pairs, and found in that of 16."""
    reference = child("exact", "ours", str(place))
    table_IJ, trace = torch.tensor(reference["table_JI"], dtype=torch.float64).T, reference["trace"]
    variances = variances_of(table_IJ)
    ours, ours_run = (variances.error_of_fresh(pairs, BATCH) for pairs in (PAIRS, PAIRS_RUN))
    parts = ", ".join(
        f"{key} {math.sqrt(max(value, 0)):.1%}" for key, value in variances._asdict().items()
    )
    remark = f"standard error {reference['standard_error'] / trace:.1%}; s.d. of v'Hv: {parts}"
    lines = [line("Trace of the Hessian, mean over all text", trace, remark)]

    def error_of_runs(name: str, batches: int, probes: int) -> tuple[float, Any]:
        run = child("trace", name, str(place), str(batches), str(probes))
        return (
            math.sqrt(statistics.fmean((value / trace - 1) ** 2 for value in run["estimates"])),
            run,
        )

    error_ours, run_ours = error_of_runs("ours", PAIRS_RUN, 1)
    remark = (
        f"{SEEDS} runs of {PAIRS_RUN} pairs, {run_ours['seconds']:.1f} s; expected {ours_run:.3f}"
    )
    lines.append(line("Trace, relative error of ours", error_ours, remark))
    for name in LIBRARIES:
        pair = costs[name]["pair"]
        share = best_share(variances, PAIRS * costs["ours"]["pair"], pair)

        def ratio(table: Tensor, share: tuple[int, int] = share) -> float:
            table_variances = variances_of(table)
            return error_of_share(table_variances, share) / table_variances.error_of_fresh(
                PAIRS, BATCH
            )

        remark = (
            f"+- {jackknife(table_IJ, ratio):.2f}; expected of {share[0]} batches and {share[1]}"
            f" probes, and of {PAIRS} of our pairs: {error_of_share(variances, share):.3f} and"
            f" {ours:.3f}"
        )
        lines.append(line(f"Trace, error in equal time: {name} / ours", ratio(table_IJ), remark))
        share = best_share(variances, PAIRS_RUN * costs["ours"]["pair"], pair)
        error, run = error_of_runs(name, *share)
        remark = (
            f"{SEEDS} runs of {share[0]} batches and {share[1]} probes, {run['seconds']:.1f} s:"
            f" {error:.3f} and {error_ours:.3f}; expected"
            f" {error_of_share(variances, share) / ours_run:.2f}"
        )
        lines.append(
            line(f"Trace, error in equal, shorter time: {name} / ours", error / error_ours, remark)
        )
        for algorithm, values in run.get("algorithms", {}).items():
            spread = statistics.stdev(values) / statistics.fmean(values)
            remark = (
                f"curvlinops' {algorithm}, s.d. of {SEEDS} runs with 12 products on one fixed batch"
                " of 2 sequences"
            )
            lines.append(
                line(f"Trace of a fixed batch, relative error of {algorithm}", spread, remark)
            )
    return lines


def curvature_lines() -> list[str]:
    """Return the lines that make bench prints."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        prepare(place)
        names = (*OURS, "double backward", *LIBRARIES)
        costs = {
            name: child("cost", name, str(place)) | child("peak", name, str(place))
            for name in names
        }
        return product_lines(costs) + trace_lines(place, costs)


def contend(task: str, name: str, place: Path, *numbers: int) -> dict[str, Any]:
    """Return the figures that a child process prints."""
    pool_NS1 = load_file(place / "pool.safetensors")["tokens"]
    if task == "cost":
        return cost(name, place, pool_NS1)
    if task == "peak":
        return {"peak_mib": peak_mib(name, place, pool_NS1)}
    return exact(place, pool_NS1) if task == "exact" else run_trace(name, place, pool_NS1, *numbers)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        print(
            json.dumps(
                contend(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
            )
        )
    else:
        print("\n".join(curvature_lines()))
