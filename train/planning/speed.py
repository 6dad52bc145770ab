"""The time of a training step by cause, before anything runs: a roofline.

Matrix products run at a share of the peak, other kernels at a share of the memory's bandwidth. Each
kernel loses a moment at its start, and communication that computation does not hide is added.
`train.planning.plan` chooses layouts by it, `python -m train plan` and `study show` print hours.

Left out are evaluation, saving, probes, the start and the ends of GPUs; documents, inside which
attention is shorter; clocks that fall under load; and networks that others use. 8-bit products are
taken to be as fast as those in bf16, and tensor ranks to share tokens (`parallel.sequence`).

Shapes in names: h hidden size, q and k widths of all query and key heads, f intermediate size; d
bytes of an activation.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from base.errors import UserError
from train.model.chunks import LOSS_CHUNK_TOKENS
from train.model.config import ModelConfig, hidden_matrices, parameter_shapes
from train.model.families.family import Activation, NormKind, QueryKeyNorm
from train.model.precision import dtype_of, weights_dtype
from train.planning.flops import GpuKind, flops_per_token, product_weights
from train.run.config import RunConfig
from train.run.perturbation import Noise, Qat, Sam
from train.run.schedules import first_step

FP32 = 4  # bytes


class Rates(NamedTuple):
    """Speeds that GPUs and links are assumed to reach.

    One GPU was measured (docs/guides/one-gpu.md): at `EXPECTED` the 190M and the 1B take 0.99 to
    1.02 times what they took on an H100 and an H200. Links and networks were not measured.

    Attributes:
        products: share of the peak in matrix products. 8192^3 random numbers reach 0.78 to 0.81 on
            an H200; those of a layer are smaller, and of hours, not seconds.
        attention: share of the peak in causal attention, forward and in its backward with the
            recomputed scores. At 4,096 tokens and heads of 128 cuDNN has 518 TFLOP/s forward on an
            H100, FlashAttention-2 319 (arXiv 2407.08608, figure 5).
        narrow_heads: of that with heads narrower than 128, by the measured 190M.
        bandwidth: share of the memory's bandwidth in other kernels; a copy reaches 0.9.
        sums: share of the reads and writes of fp32 sums that products do not hide.
        start: seconds that a kernel loses between launch and full speed, and in its last wave;
            a quarter of that in a CUDA graph.
        link: bytes/s of a GPU in collectives within a node, each way.
        latency: seconds that each of them takes besides.
        network: bytes/s of a GPU's adapter in collectives over nodes: 0.55 of 46e9, what 400 Gbit/s
            carry.
        hidden: share of the replicas' communication that computing hides where it takes as long.
        host: seconds of a step in which the GPU waits for its host.
        sync: seconds that it waits where the host reads one number from it; a guess.
    """

    products: float
    attention: tuple[float, float]
    narrow_heads: float
    bandwidth: float
    sums: float
    start: float
    link: float
    latency: float
    network: float
    hidden: float
    host: float
    sync: float


EXPECTED = Rates(0.70, (0.5, 0.4), 0.8, 0.85, 0.5, 4e-6, 300e9, 20e-6, 25e9, 0.9, 0.02, 20e-6)
FAST = Rates(0.75, (0.55, 0.45), 0.85, 0.9, 0.25, 3e-6, 350e9, 15e-6, 35e9, 1.0, 0.01, 10e-6)
# FlashAttention-2, gaps between kernels, adapters of 200 Gbit/s, half as much overlap.
SLOW = Rates(0.61, (0.32, 0.27), 0.75, 0.8, 1.0, 8e-6, 200e9, 40e-6, 9e9, 0.5, 0.05, 50e-6)


class Arrangement(NamedTuple):
    """A layer as an engine computes it, by the row of its family; a Llama's but for what is said.

    Models that differ in nothing of it start the same kernels.
    """

    engine: str
    norms: str = "before"
    norm: NormKind = "rms"
    query_key_norm: QueryKeyNorm = "none"
    activation: Activation = "swiglu"
    biases: bool = False


def arrangement_of(engine: str, model: ModelConfig) -> Arrangement:
    """Return the arrangement of a model's layers."""
    row = model.row
    biases = bool(model.training.biases)
    return Arrangement(engine, row.norms, row.norm, row.query_key_norm, row.activation, biases)


class Kernels(NamedTuple):
    """The kernels of an arrangement beside attention, as counted in tests.

    tests/train/test_speed.py has those of megatron, test_compiled_layers.py those of DeepSpeed.

    Attributes:
        h, q, k, f: reads and writes of a layer's tensors of these widths, forward and backward. q
            is 0 where queries are as wide as h in all models, and h has theirs.
        starts: kernels of a layer and microbatch, with products.
        logit: bytes per logit.
        loss_starts: kernels of the head and the losses, for a chunk of tokens.
        chunk: tokens that they see at a time; 0: a microbatch.
        adds: products add gradients of weights to their fp32 sums themselves.
        weight, head, embedding: bytes per weight and microbatch, of a layer and outside, in which
            gradients get to these sums in other kernels.
    """

    h: float
    q: float
    k: float
    f: float
    starts: int
    logit: float
    loss_starts: int
    chunk: int
    adds: bool
    weight: float
    head: float
    embedding: float


LOSS: dict[str, Any] = {"logit": 4, "loss_starts": 5, "chunk": LOSS_CHUNK_TOKENS}
# Gradients are fp32 sums: of the head zeroed and scaled, of the embedding zeroed; then read and
# added to the buffer. Those of one parameter, head and embedding of a tied model on one stage, are
# added to each other, which moves as much as adding both to the buffer.
BUFFERED: dict[str, Any] = {"adds": True, "weight": 0, "head": 4 + 8 + 12, "embedding": 4 + 12}
# DeepSpeed's weights are fp32: products read them rounded, and their gradients are widened.
AUTOCAST: dict[str, Any] = {"adds": False, "weight": 12 + 12, "head": 6 + 24, "embedding": 16}
# A quarter of SmolLM3's layers have no rotary embedding; they count as if they had one.
KERNELS = {
    # `train.model.elementwise`, each function compiled to a pass over its tensors. The loss reads
    # logits, again out of the cache, and writes their gradient.
    Arrangement("megatron", norms="after", query_key_norm="whole"): Kernels(
        18, 7, 9, 8, 24, **LOSS, **BUFFERED
    ),
    Arrangement("megatron"): Kernels(22, 6, 8, 8, 26, **LOSS, **BUFFERED),
    # A bias is added in a pass over the product, its gradient is summed in another.
    Arrangement("megatron", biases=True): Kernels(22, 9, 14, 8, 29, **LOSS, **BUFFERED),
    # Layers of transformers, compiled.
    Arrangement("deepspeed", norms="after", query_key_norm="whole"): Kernels(
        43, 0, 9, 8, 53, **LOSS, **AUTOCAST
    ),
    Arrangement("deepspeed"): Kernels(43, 5, 4, 8, 50, **LOSS, **AUTOCAST),
    Arrangement("deepspeed", biases=True): Kernels(49, 0, 6, 8, 59, **LOSS, **AUTOCAST),
    Arrangement("deepspeed", query_key_norm="heads"): Kernels(43, 10, 9, 8, 54, **LOSS, **AUTOCAST),
    Arrangement("deepspeed", norm="bare"): Kernels(40, 0, 4, 8, 47, **LOSS, **AUTOCAST),
    Arrangement("deepspeed", norm="layer", activation="gelu", biases=True): Kernels(
        52, 0, 0, 6, 46, **LOSS, **AUTOCAST
    ),
}
# What recompute "selective" adds to h, q, k, f: two norms before linears, or one after them with
# its residual; the rotation; SwiGLU.
SELECTIVE = {"before": (4, 2, 2, 3), "after": (3, 2, 2, 3)}
# megatron copies grouped queries out of the first linear's output: reads and writes of q.
COPIED_QUERIES = 2
ATTENTION_STARTS = 4  # forward; sums of rows, gradients, their cast


class Changing(NamedTuple):
    """The kernels that change a linear's weight for an update and restore it, as counted in tests.

    tests/train/test_perturbation_cost.py has them, with a scale for 128 weights, or as many as the
    format has it.

    Attributes:
        weight: bytes that they move for a weight of 2 bytes.
        wider: bytes that they move more where it has 4.
        starts: kernels of a linear.
    """

    weight: float
    wider: float
    starts: int


ROUNDING = {  # QAT, by the first word of the spec
    "rtn": Changing(66, 6, 49),
    "fp8": Changing(76, 6, 41),
    "fp8e5m2": Changing(76, 6, 25),
    "mxfp8": Changing(85, 6, 55),
    "mxfp4": Changing(139, 6, 64),
    "nvfp4": Changing(147, 10, 71),
    "ternary": Changing(67, 6, 26),
    "binary": Changing(73, 6, 23),
}
# Random words are of 64 bits, which most of the bytes mix. Linears above 16M weights start more.
NOISE = Changing(396, 8, 84)
# An fp32 main weight in an ascent of SAM and its end: copied, moved along the gradient, restored;
# and then each time written to the model's weights. With several ascents gradients are summed, too.
ASCENT, SUM = (8 + 12 + 8 + 2 * FP32), 12


def changing_of(perturbation: Qat | Noise) -> Changing:
    """Return the kernels that change a linear; UserError for a spec without such a grid."""
    if isinstance(perturbation, Noise):
        return NOISE
    grid = perturbation.spec.partition("-")[0]
    if grid not in ROUNDING:
        raise UserError(
            f"perturbation.spec {perturbation.spec} names no grid that weights are rounded to; give"
            f" one that begins with {', '.join(ROUNDING)}"
        )
    return ROUNDING[grid]


@dataclass(frozen=True)
class Roofline:
    """A run in its layout on `gpus` GPUs; UserError where batch and layout do not divide."""

    run: RunConfig
    gpus: int
    gpus_per_node: int
    gpu: GpuKind
    rates: Rates = EXPECTED

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return sum(self.causes().values())

    @property
    def perturbed_seconds(self) -> float:
        """Return the seconds of a step at changed weights."""
        return self.seconds + sum(self.perturbation_causes().values())

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization of a step against the peak of the run's precision."""
        run = self.run
        flops = flops_per_token(run.model, run.data.sequence_length) * run.tokens_per_step
        return flops / (self.gpus * self._peak * self.seconds)

    @property
    def hours(self) -> float:
        """Return the GPU-hours of the whole run; a branch counts from its start."""
        run, first = self.run, first_step(self.run)
        seconds = (run.total_tokens - run.tokens_at(first)) * self.seconds
        if perturbed := run.perturbed_tokens(first, run.total_steps):
            seconds += perturbed * (self.perturbed_seconds - self.seconds)
        return seconds / run.tokens_per_step * self.gpus / 3600

    def causes(self) -> dict[str, float]:
        """Return the seconds of a step by cause, on the slowest pipeline stage."""
        slowest = self._slowest
        causes = {cause: seconds * self._microbatches for cause, seconds in slowest.items()}
        causes |= {
            "pipeline bubble": self._bubble,
            "between replicas": self._reducing + self._gathering,
            "optimizer": self._optimizer(self._replicas),
            "host": self.rates.host,
        }
        return {cause: seconds for cause, seconds in causes.items() if seconds}

    def perturbation_causes(self) -> dict[str, float]:
        """Return the seconds by cause that a step at changed weights takes beside `causes`."""
        match self.run.perturbation:
            case None:
                causes = {}
            case Sam() as sam:
                causes = self._ascending(sam)
            case perturbation:
                causes = self._changing(perturbation)
        return {cause: seconds for cause, seconds in causes.items() if seconds}

    def _changing(self, perturbation: Qat | Noise) -> dict[str, float]:
        """Return the seconds of changing and restoring the linears of a stage."""
        run, kernels = self.run, changing_of(perturbation)
        shapes = parameter_shapes(run.model)
        changed = [name for name in hidden_matrices(run.model) if perturbation.takes(name)]
        stages = run.parallel.pipeline
        weights = sum(math.prod(shapes[name]) for name in changed) / stages
        wider = kernels.wider if self._w == FP32 else 0
        moved = self._moved(weights * (kernels.weight + wider))

        # Each rank has a part of every linear. The host reads of each whether its scales are
        # finite, and never runs far ahead, so that a CUDA graph would not help.
        started = len(changed) / stages * (kernels.starts * self.rates.start + self.rates.sync)
        if run.zero.stage == 3:  # the linears are gathered once more, one by one
            waited = self._collective(weights * self._w)
        else:  # all weights are needed at once, so the first microbatch hides no gather of them
            waited = self._collective(self._stage_weights() * self._w) - self._gathering
        return {"changing weights": moved + started, "waiting for weights": waited}

    def _ascending(self, sam: Sam) -> dict[str, float]:
        """Return the seconds of the passes and steps up the loss that are not in a step without.

        See `train.ascending`: two passes of the engine for each group, all but the last of which
        publish the weights that they leave.
        """
        run, replicas, stage = self.run, self._replicas, self.run.zero.stage
        groups = run.batch_size // (sam.sequences or run.batch_size)
        more = 2 * groups - 1
        zeroed = FP32 + FP32 / replicas  # and read for the norm
        ascents = groups * (ASCENT + 2 * self._w) + (SUM * groups if groups > 1 else 0)
        moved = self._stage_weights() * (more * zeroed + ascents / replicas)

        # What every microbatch takes is taken twice, whatever the groups.
        reducing = self._reducing if stage > 1 else more * self._reducing
        published = more * self._collective(self._stage_weights() * self._w)
        gathering = self._gathering if stage == 3 else published
        return {
            "second passes": self._microbatches * sum(self._slowest.values()),
            "pipeline bubble": more * self._bubble,
            "between replicas": reducing + gathering,
            "steps up the loss": moved / (self.rates.bandwidth * self.gpu.bandwidth),
            "host": more * self.rates.host,
        }

    @property
    def _replicas(self) -> int:
        return self.run.data_parallel_size(self.gpus)

    @property
    def _microbatches(self) -> int:
        return self.run.batch_size // (self._replicas * self.run.micro_batch_size)

    @cached_property
    def _slowest(self) -> dict[str, float]:
        """The seconds of a microbatch by cause on the slowest stage."""
        ends = (0, self.run.parallel.pipeline - 1)  # those between have less
        return max(map(self._microbatch, ends), key=lambda stage: sum(stage.values()))

    @property
    def _bubble(self) -> float:
        """The seconds in which a stage waits while the pipeline fills and drains."""
        return (self.run.parallel.pipeline - 1) * sum(self._slowest.values())

    @property
    def _reducing(self) -> float:
        """The seconds of reducing gradients that backward passes do not hide.

        ZeRO stages 2 and 3 reduce those of every microbatch.
        """
        stage = self.run.zero.stage
        times = self._microbatches if stage > 1 else 1
        # A third each of a microbatch hides it and the gather for the backward pass.
        return times * self._exposed(FP32, 1 / 3 if stage == 3 else 2 / 3)

    @property
    def _gathering(self) -> float:
        """The seconds of gathering weights that forward passes, and others, do not hide.

        ZeRO stage 3 gathers before each pass of every microbatch, all others after the update.
        """
        times = 1
        if self.run.zero.stage == 3:  # forward, recomputed, backward
            times = self._microbatches * (3 if self.run.recompute == "layers" else 2)
        return times * self._exposed(self._w, 1 / 3)

    @property
    def _kernels(self) -> Kernels:
        return KERNELS[arrangement_of(self.run.engine, self.run.model)]

    @property
    def _peak(self) -> float:
        return self.gpu.fp32_flops if self._d == FP32 else self.gpu.peak_flops

    @property
    def _d(self) -> int:
        return FP32 if dtype_of(self.run.precision) == "fp32" else 2

    @property
    def _w(self) -> int:
        """Bytes of a weight that the model computes with."""
        return FP32 if weights_dtype(self.run.engine, self.run.precision) == "fp32" else 2

    @property
    def _tokens(self) -> int:
        """Tokens of a microbatch on each of a replica's tensor ranks, which share all its work."""
        return self.run.micro_batch_size * self.run.data.sequence_length

    def _moved(self, count: float) -> float:
        """Return the seconds in which tensor ranks together read or write so many bytes."""
        return count / self.run.parallel.tensor / (self.rates.bandwidth * self.gpu.bandwidth)

    @property
    def _start(self) -> float:
        return self.rates.start * (0.25 if self.run.cuda_graphs else 1.0)

    @property
    def _added(self) -> float:
        """Bytes per weight of adding to an fp32 sum, as far as the product does not hide them."""
        return 2 * FP32 * self.rates.sums

    def _multiplied(self, weights: float) -> float:
        """Return the seconds of the three products with so many weights."""
        flops = 6 * weights * self._tokens / self.run.parallel.tensor
        return flops / (self.rates.products * self._peak)

    def _microbatch(self, stage: int) -> dict[str, float]:
        """Return the seconds of a microbatch, forward and backward, on a pipeline stage."""
        run, stages, kernels = self.run, self.run.parallel.pipeline, self._kernels
        layers = run.model.num_hidden_layers // stages
        table = run.model.vocab_size * run.model.hidden_size
        causes = {cause: layers * seconds for cause, seconds in self._layer().items()}
        if stage == stages - 1:
            chunks = -(-self._tokens // (kernels.chunk or self._tokens))
            logits = self._tokens * run.model.vocab_size
            causes["output layer"] = self._multiplied(table)
            causes["loss"] = self._moved(logits * kernels.logit)
            causes["loss"] += chunks * kernels.loss_starts * self._start
            added = chunks * self._added if kernels.chunk else 0
            causes["its gradient"] = self._moved(table * (kernels.head + added))
        if stage == 0:
            causes["embedding"] = self._moved(table * kernels.embedding)
        if stages > 1:  # an activation and a gradient
            sent = 2 * self._tokens * run.model.hidden_size * self._d / run.parallel.tensor
            causes["between stages"] = sent / self.rates.network
        return causes

    @property
    def _copies_queries(self) -> bool:
        model = self.run.model
        is_grouped = model.num_key_value_heads != model.num_attention_heads
        return self.run.engine == "megatron" and is_grouped

    @property
    def _elements(self) -> float:
        """Numbers that kernels beside products and attention move, per token of a layer."""
        run, kernels = self.run, self._kernels
        model = run.model
        widths = (
            model.hidden_size,
            model.query_size,
            model.key_value_size,
            model.intermediate_size,
        )
        passes = [kernels.h, kernels.q, kernels.k, kernels.f]
        if run.recompute == "selective":
            again = SELECTIVE[model.row.norms]
            passes = [once + more for once, more in zip(passes, again, strict=True)]
        if self._copies_queries:
            passes[1] += COPIED_QUERIES
        return sum(count * width for count, width in zip(passes, widths, strict=True))

    def _layer(self) -> dict[str, float]:
        """Return the seconds of a layer and microbatch."""
        run, rates, kernels = self.run, self.rates, self._kernels
        model, tensor = run.model, run.parallel.tensor
        weights = product_weights(model)

        # Scores of causal attention are half a square; 2 products forward, 5 backward.
        forward, backward = rates.attention
        product = run.data.sequence_length * model.query_size * self._tokens / tensor / self._peak
        narrow = rates.narrow_heads if model.head_size < 128 else 1.0

        adds = kernels.adds or run.kernels == "transformer_engine"
        added = self._added if adds else kernels.weight
        starts = kernels.starts + self._copies_queries + ATTENTION_STARTS
        causes = {
            "matrix products": self._multiplied(weights),
            "attention": product * (2 / forward + 5 / backward) / narrow,
            "other kernels": self._moved(self._elements * self._tokens * self._d),
            "sums of gradients": self._moved(weights * added),
            "starts of kernels": starts * self._start,
        }
        if tensor > 1:
            # Gathers and reductions of the residual stream: 4 forward; of 6 backward products hide
            # 4. Norms of queries and keys take one more each way.
            sent = self._tokens * model.hidden_size * self._d * (tensor - 1) / tensor
            causes["between tensor ranks"] = 6 * sent / rates.link + 8 * rates.latency
        if run.recompute == "layers":
            causes["recomputed"] = sum(causes.values()) / 3
        return causes

    def _stage_weights(self) -> float:
        """Return the weights of a rank of the last pipeline stage, but for norms."""
        model, parallel = self.run.model, self.run.parallel
        # The last of several stages has the head alone; a tied head is the embedding.
        tables = 1 if parallel.pipeline > 1 or model.tie_word_embeddings else 2
        layers = model.num_hidden_layers // parallel.pipeline * product_weights(model)
        return (layers + tables * model.vocab_size * model.hidden_size) / parallel.tensor

    def _collective(self, count: float) -> float:
        """Return the seconds of reducing or gathering so many bytes over replicas."""
        parallel, rates, replicas = self.run.parallel, self.rates, self._replicas
        speed = rates.link
        if replicas * parallel.tensor > self.gpus_per_node:  # all groups of a node share adapters
            speed = rates.network * self.gpus_per_node / parallel.tensor
        return count * (replicas - 1) / replicas / speed

    def _exposed(self, size: int, part: float) -> float:
        """Return the seconds of a collective of all weights less what part of a microbatch hides.

        It has `size` bytes of each.
        """
        seconds = self._collective(self._stage_weights() * size)
        hiding = part * sum(self._slowest.values())
        return seconds - min(hiding, self.rates.hidden * seconds)

    def _optimizer(self, replicas: int) -> float:
        """Return the seconds of zeroing gradients, and of the update of a replica's share."""
        # Gradients are read for their norm and for the update, main weights and moments written.
        update = (2 * FP32 + 6 * FP32 + self._w) / replicas
        moved = self._stage_weights() * (FP32 + update)
        return moved / (self.rates.bandwidth * self.gpu.bandwidth)


class GpuHours(NamedTuple):
    """GPU-hours of training: expected, and by the fast and the slow rates."""

    expected: float
    least: float
    most: float

    def __str__(self) -> str:
        """Return them to three digits.

        Example:
            >>> str(GpuHours(48_123.4, 44_000.0, 60_000.0)), str(GpuHours(0.18, 0.15, 0.41))
            ('48,100 (44,000 to 60,000)', '0.18 (0.15 to 0.41)')
        """
        expected, least, most = (f"{float(f'{hours:.3g}'):,g}" for hours in self)
        return f"{expected} ({least} to {most})"


def gpu_hours(
    layouts: Iterable[tuple[RunConfig, int]], *, gpus_per_node: int, gpu: GpuKind
) -> GpuHours:
    """Return the GPU-hours of runs, each on so many GPUs."""
    layouts = list(layouts)

    def hours(rates: Rates) -> float:
        return sum(Roofline(run, gpus, gpus_per_node, gpu, rates).hours for run, gpus in layouts)

    return GpuHours(*map(hours, (EXPECTED, FAST, SLOW)))
