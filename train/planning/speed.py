"""The time of a step by cause: a roofline, which ranks layouts before anything was measured.

Matrix products run at a share of the peak, other kernels at a share of the memory's bandwidth, and
communication that computation does not hide is added.

Shapes in names: h hidden size, k width of all key heads, f intermediate size, V vocabulary; d bytes
of an activation.
"""

from dataclasses import dataclass
from typing import NamedTuple

from train.planning.flops import Gpu, flops_per_token, product_weights
from train.planning.memory import FP32, bytes_of_weight, rank_parameters
from train.run.config import RunConfig


class Rates(NamedTuple):
    """Speeds that GPUs and links are assumed to reach; none was measured with this engine.

    Attributes:
        products: share of the peak in matrix products. On an H200 8192^3 random numbers were
            measured at 0.78 to 0.81; those of a layer are smaller, and of hours, not seconds.
        attention_forward: the same in causal attention: on an H100, at 4,096 tokens and heads of
            128, cuDNN has 518 TFLOP/s, FlashAttention-2 319 (arXiv 2407.08608, figure 5).
        attention_backward: the same in its backward, with the recomputed scores.
        bandwidth: share of the memory's bandwidth in other kernels; a copy reaches 0.9.
        accumulated: share of the gradients' fp32 sums that shows beside the products that add
            to them.
        kernel: seconds that each kernel loses between launch and full speed, and in its last wave.
        link: bytes/s of a GPU in collectives within a node, each way.
        latency: seconds that each of them takes besides.
        adapter: bytes/s of a GPU's network adapter; 46 to 48 GB/s of 400 Gbit/s.
        rings: share of a node's adapters that collectives over nodes reach; 0.55 of 8 are 202 GB/s.
        hidden: share of the replicas' communication that computing hides where it takes as long.
        host: seconds of a step in which the GPU waits for its host.
    """

    products: float
    attention_forward: float
    attention_backward: float
    bandwidth: float
    accumulated: float
    kernel: float
    link: float
    latency: float
    adapter: float
    rings: float
    hidden: float
    host: float


EXPECTED = Rates(0.66, 0.5, 0.4, 0.85, 0.5, 4e-6, 300e9, 20e-6, 46e9, 0.55, 0.9, 0.02)
# FlashAttention-2, gaps between kernels, adapters of 200 Gbit/s, half as much overlap.
PESSIMISTIC = Rates(0.61, 0.32, 0.27, 0.8, 1.0, 8e-6, 200e9, 40e-6, 23e9, 0.4, 0.5, 0.05)


class Passes(NamedTuple):
    """Reads and writes of an element by the kernels between products and attention in a layer.

    Attributes:
        heads: of queries and keys: norm and rotary embedding.
        joined: of queries, keys and values: their gradients become one tensor.
        gate: of the MLP's width: SwiGLU.
        stream: of the residual stream: two norms, two sums.
    """

    heads: float
    joined: float
    gate: float
    stream: float


class Kernels(NamedTuple):
    """Reads and writes of an engine's kernels.

    Attributes:
        forward, backward: passes over the tensors of a layer.
        again: those that recompute "selective" adds.
        logit: bytes per logit beside the products: cross-entropy and its gradient.
        head: bytes per weight of the output layer and microbatch, of its gradient.
        starts: kernels that a layer starts in a microbatch, with products and attention.
    """

    forward: Passes
    backward: Passes
    again: Passes
    logit: float
    head: float
    starts: int


# `train.model.elementwise` as torch compiles it, by its own count: in a layer of the 7B 69.8 times
# the residual stream (`tests.bench.passes`), here 69.5. In backward the gradients of norms read
# their inputs twice, for inputs and for weights; where the residual is read twice its gradients are
# summed. The head's gradient is zeroed, scaled and added to its fp32 sum.
FUSED = Kernels(
    forward=Passes(heads=2, joined=0, gate=3, stream=2 * 3),
    backward=Passes(heads=8, joined=2, gate=5, stream=2 * (5 + 3)),
    again=Passes(heads=2, joined=0, gate=3, stream=3),
    logit=6,
    head=2 + 4 + 10,
    starts=40,
)


@dataclass(frozen=True)
class Roofline:
    """A run in its layout on `gpus` GPUs; UserError where batch and layout do not divide.

    8-bit products are taken to be as fast as those in bf16, and DeepSpeed as megatron.
    """

    run: RunConfig
    gpus: int
    gpus_per_node: int
    gpu: Gpu
    rates: Rates = EXPECTED
    kernels: Kernels = FUSED

    @property
    def peak_flops(self) -> float:
        """Return FLOP/s of a GPU in the run's precision."""
        return self.gpu.fp32_flops if self.run.precision == "fp32" else self.gpu.peak_flops

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return sum(self.causes().values())

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization."""
        run = self.run
        flops = flops_per_token(run.model, run.data.sequence_length) * run.tokens_per_step
        return flops / (self.gpus * self.peak_flops * self.seconds)

    def causes(self) -> dict[str, float]:
        """Return the seconds of a step by cause, on the slowest pipeline stage."""
        run, stages = self.run, self.run.parallel.pipeline
        replicas = run.data_parallel_size(self.gpus)
        microbatches = run.batch_size // (replicas * run.micro_batch_size)
        ends = [self.microbatch(stage) for stage in (0, stages - 1)]  # those between have less
        slowest = max(ends, key=lambda stage: sum(stage.values()))
        microbatch_seconds = sum(slowest.values())
        causes = {cause: seconds * microbatches for cause, seconds in slowest.items()}
        causes |= {
            "pipeline bubble": (stages - 1) * microbatch_seconds,
            "between replicas": self._between_replicas(replicas, microbatch_seconds),
            "optimizer": self._optimizer(replicas),
            "host": self.rates.host,
        }
        return {cause: seconds for cause, seconds in causes.items() if seconds}

    def microbatch(self, stage: int) -> dict[str, float]:
        """Return the seconds of a microbatch, forward and backward, on a pipeline stage."""
        run, stages = self.run, self.run.parallel.pipeline
        layers = run.model.num_hidden_layers // stages
        causes = {cause: layers * seconds for cause, seconds in self._layer().items()}
        if stage == stages - 1:
            causes["output layer and loss"] = self._output_layer()
        if stage == 0:
            # Its gradient is zeroed and added to the fp32 sum whole.
            looked_up = run.model.vocab_size * run.model.hidden_size
            causes["embedding"] = self._moved(looked_up * (2 * self._d + 2 * FP32))
        if stages > 1:  # an activation and a gradient
            sent = 2 * self._tokens * run.model.hidden_size * self._d / run.parallel.tensor
            causes["between stages"] = sent / self.rates.adapter
        return causes

    @property
    def _tokens(self) -> int:
        return self.run.micro_batch_size * self.run.data.sequence_length

    @property
    def _d(self) -> int:
        return bytes_of_weight(self.run)

    def _moved(self, count: float) -> float:
        """Return the seconds that tensor ranks take to read or write so many bytes together."""
        bandwidth = self.rates.bandwidth * self.gpu.bandwidth
        return count / self.run.parallel.tensor / bandwidth

    def _multiplied(self, weights: int) -> float:
        """Return the seconds of the three products with so many weights."""
        flops = 6 * weights * self._tokens / self.run.parallel.tensor
        return flops / (self.rates.products * self.peak_flops)

    def _accumulated(self, weights: int) -> float:
        """Return the seconds in which gradients are added to their fp32 sum, beside products."""
        if self.run.kernels == "transformer_engine":  # whose products add to it themselves
            return self._moved(weights * 2 * FP32 * self.rates.accumulated)
        return self._moved(weights * (self._d + 2 * FP32))

    def _layer(self) -> dict[str, float]:
        """Return the seconds of a layer and microbatch."""
        run, rates = self.run, self.rates
        model, parallel = run.model, run.parallel
        h = model.hidden_size
        weights, _ = product_weights(model)
        # Scores of causal attention are half a square; 2 products forward, 5 backward.
        product = run.data.sequence_length * h * self._tokens / parallel.tensor / self.peak_flops
        passed = self._passed(self.kernels.forward) + self._passed(self.kernels.backward)
        causes = {
            "matrix products": self._multiplied(weights),
            "attention": product * (2 / rates.attention_forward + 5 / rates.attention_backward),
            "other kernels": passed,
            "sums of gradients": self._accumulated(weights),
            "starts of kernels": self.kernels.starts * rates.kernel,
        }
        if parallel.tensor > 1:
            # Gathers and reductions of the residual stream: 4 forward; of 6 backward products hide
            # 4. Norms of queries and keys take one more each way.
            sent = self._tokens * h * self._d * (parallel.tensor - 1) / parallel.tensor
            causes["between tensor ranks"] = 6 * sent / rates.link + 8 * rates.latency
        if run.recompute == "selective":
            causes["recomputed"] = self._passed(self.kernels.again)
        if run.recompute == "layers":
            causes["recomputed"] = sum(causes.values()) / 3
        return causes

    def _passed(self, passes: Passes) -> float:
        """Return the seconds of passes over the tensors of a layer."""
        model, parallel = self.run.model, self.run.parallel
        h, k = model.hidden_size, model.num_key_value_heads * model.head_dim
        # The residual stream is on every tensor rank unless sequence parallelism cuts it.
        stream_width = h if parallel.sequence else h * parallel.tensor
        elements = (
            passes.heads * (h + k)
            + passes.joined * (h + 2 * k)
            + passes.gate * model.intermediate_size
            + passes.stream * stream_width
        )
        return self._moved(elements * self._tokens * self._d)

    def _output_layer(self) -> float:
        _, weights = product_weights(self.run.model)
        logits = self._tokens * self.run.model.vocab_size
        moved = weights * self.kernels.head + logits * self.kernels.logit
        return self._multiplied(weights) + self._moved(moved)

    def _between_replicas(self, replicas: int, microbatch: float) -> float:
        """Return the seconds of reducing gradients and gathering weights that are not hidden."""
        parallel, rates = self.run.parallel, self.rates
        speed = rates.link
        if replicas * parallel.tensor > self.gpus_per_node:  # all groups of a node share adapters
            speed = rates.rings * rates.adapter * self.gpus_per_node / parallel.tensor
        count = rank_parameters(self.run, parallel.pipeline - 1) * (replicas - 1) / replicas

        # The last microbatch's backward hides reductions, the first one's forward gathers.
        exposed = 0.0
        for size, part in ((FP32, 2 / 3), (self._d, 1 / 3)):
            seconds = count * size / speed
            exposed += seconds - min(part * microbatch, rates.hidden * seconds)
        return exposed

    def _optimizer(self, replicas: int) -> float:
        """Return the seconds of zeroing gradients, and of the update of a replica's share."""
        count = rank_parameters(self.run, self.run.parallel.pipeline - 1)
        # Gradients are read for their norm and for the update, main weights and moments written.
        update = (2 * FP32 + 6 * FP32 + self._d) / replicas
        return count * (FP32 + update) / (self.rates.bandwidth * self.gpu.bandwidth)
