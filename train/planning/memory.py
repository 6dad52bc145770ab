"""The memory of a GPU and the disk space that a run needs, by component.

Weights, gradients and optimizer state follow from the parameters and are tested against built
engines, byte for byte but for the padding between parameters. The rest are formulas.

Shapes in names: h hidden size, k width of all key heads, f intermediate size; d bytes of a factor
of products, r bytes of a number of the residual stream.
"""

import math
from functools import cache
from typing import NamedTuple

from train.model import megatron_names
from train.model.chunks import LOSS_CHUNK_TOKENS
from train.model.config import (
    ModelConfig,
    hidden_matrices,
    multiplied_parameters,
    parameter_shapes,
)
from train.model.precision import FP8_RECIPES, dtype_of, weights_dtype
from train.optimizers.matrices import ROUND_ELEMENTS
from train.optimizers.settings import MatrixOptimizer
from train.planning.optimizer_states import FP32, all_states, rank_states
from train.run.config import RunConfig
from train.run.perturbation import Noise, Qat, Sam
from train.run.schedules import first_step

# CUDA context, NCCL's buffers, cuBLAS workspaces, transients, slack of the allocator
FRAMEWORK_BYTES = 4 * 10**9
ZERO_BUCKET_ELEMENTS = 500_000_000  # gradients that DeepSpeed reduces at once
ZERO_PREFETCH_ELEMENTS = 50_000_000  # weights that stage 3 gathers ahead of their module
# Most bytes at once for a weight of the linear that is being changed: MXFP4 and NVFP4 take these,
# the others fewer; 64-bit words are mixed for the noise.
ROUNDING, DRAWING = 22, 36


class RankMemory(NamedTuple):
    """The memory of one GPU of pipeline stage `stage`, in bytes by component."""

    stage: int
    components: dict[str, int]

    @property
    def bytes(self) -> int:
        """Return the total over all components."""
        return sum(self.components.values())


class CheckpointBytes(NamedTuple):
    """The disk space of checkpoints, without the probe and JSON beside the shards."""

    full_each: int  # weights, fp32 main weights, optimizer states, averages' slots
    weights_each: int  # weights as the model computes with them
    full: int  # permanent checkpoints with optimizer state
    weights: int  # permanent ones without
    averages: int  # checkpoints of averages, weights too
    restarts: int  # full ones while training, with the one being written; none at the end

    @property
    def kept(self) -> int:
        """Return the bytes of everything the run keeps."""
        return self.full * self.full_each + (self.weights + self.averages) * self.weights_each

    @property
    def rotated(self) -> int:
        """Return the bytes of restart checkpoints, which a run has while it trains."""
        return self.restarts * self.full_each


def parameter_count(config: RunConfig) -> int:
    """Return the parameters of the whole model."""
    return sum(math.prod(shape) for shape in parameter_shapes(config.model).values())


def bytes_of_weight(config: RunConfig) -> int:
    """Return the bytes of a weight in the model's memory and in checkpoints of weights."""
    return _bytes_of(weights_dtype(config.engine, config.precision))


def _bytes_of(dtype: str) -> int:
    return FP32 if dtype == "fp32" else 2


def _bytes_of_factor(config: RunConfig) -> int:
    """Return the bytes of a factor of products, which most activations are."""
    return _bytes_of(dtype_of(config.precision))


def _rounds_weights(config: RunConfig) -> bool:
    """Return whether weights and the residual stream are wider than the factors of products."""
    return bytes_of_weight(config) != _bytes_of_factor(config)


def _main_bytes(config: RunConfig) -> int:
    """Return the bytes of a parameter's main weight and averages' slots."""
    return FP32 * (1 + num_slots(config))


def num_slots(config: RunConfig) -> int:
    """Return the number of fp32 copies of the main weights that averages keep."""
    return sum(average.slots for average in config.averages)


@cache
def _split_parameters(model: ModelConfig, tensor: int) -> tuple[int, int, int]:
    """Return the parameters of a tensor rank in the embedding, in a layer, and after the layers."""

    def local(name: str) -> int:
        ranks = 1 if megatron_names.shard_axis(name) is None else tensor
        return math.prod(megatron_names.whole_shape(name, model)) // ranks

    embedding, *last = (local(name) for name in megatron_names.outside_layers(model))
    return (
        embedding,
        sum(
            local(f"{megatron_names.LAYERS}0.{part}") for part in megatron_names.inside_layer(model)
        ),
        sum(last),
    )


def rank_parameters(config: RunConfig, stage: int) -> int:
    """Return the parameters of one GPU of a pipeline stage."""
    if config.engine == "deepspeed":
        return parameter_count(config)
    embedding, layer, last = _split_parameters(config.model, config.parallel.tensor)
    stages = config.parallel.pipeline
    count = config.model.num_hidden_layers // stages * layer
    # An embedding that is the head as well is on the first stage and on the last.
    has_embedding = stage == 0 or (config.model.tie_word_embeddings and stage == stages - 1)
    return count + (embedding if has_embedding else 0) + (last if stage == stages - 1 else 0)


def layer_activation_bytes(config: RunConfig) -> tuple[int, int]:
    """Return bytes a layer keeps for backward per token: on every tensor rank, and over them.

    Counted tensor by tensor as by Korthikanti et al. 2022 (arXiv 2205.05198, section 4), with a
    fused attention that keeps its inputs and its output and nothing of size sequence_length^2.
    The megatron engine's norms and SwiGLU keep their inputs only, and with recompute "selective"
    the matrix products do not keep the outputs of these. In transformers a norm keeps its input and
    the normalised values in fp32, and a gated MLP the activated gate beside gate, up and product.
    Under autocast each linear keeps its input as it rounded it. Compiled layers keep less.
    """
    model, d, r = config.model, _bytes_of_factor(config), bytes_of_weight(config)
    h, f = model.hidden_size, model.intermediate_size
    q, k = model.query_size, model.key_value_size
    norm = 2 * FP32  # input and normalised values
    # Queries are copied from qkv where they share keys, of which a rank has several, for the norm.
    is_grouped = model.num_attention_heads > model.num_key_value_heads > config.parallel.tensor
    copied = q if is_grouped and model.row.query_key_norm != "none" else 0
    if config.engine == "megatron" and config.recompute == "selective":
        # The layer's input, and the inputs of norms after the parts or of the one between them;
        # qkv, the attention's output; gate and up.
        norms = 2 if model.row.norms == "after" else 1
        return (1 + norms) * h * d, (2 * q + 2 * k + 2 * f + copied) * d
    if config.engine == "megatron":
        # Also the inputs of the MLP and, after a norm before it, of the attention; q and k rotated;
        # the MLP's product.
        return 4 * h * d, (3 * q + 3 * k + 3 * f + copied) * d
    # The inputs of qkv and of gate and up: one tensor each, or rounded for each of the five.
    inputs = 5 if _rounds_weights(config) else 2
    match model.row.norms, model.row.activation:
        case "after", "swiglu":
            return ((2 + inputs) * h + 2 * k + 4 * f) * d + (3 * h + k) * norm, 0
        case "before", "swiglu":
            # An RMSNorm casts before it multiplies with its weight; a bare norm has none.
            stream = 2 * h * (FP32 + (0 if model.row.norm == "bare" else r))
            heads = (q + k) * (FP32 + d) if model.row.query_key_norm == "heads" else 0
            return (inputs * h + 2 * q + 2 * k + 4 * f) * d + stream + heads, 0
        case "before", "gelu":  # queries, keys and values are one linear
            return (9 * h + 2 * f) * d + h * r, 0
        case arrangement:
            raise NotImplementedError(f"activations of a layer of {arrangement} are not counted")


def _matrix_bytes(config: RunConfig, replicas: int) -> int:
    """Return the bytes of an update of whole matrices, in rounds: see `train.optimizers.matrices`.

    Those that a rank computes, its own parts, and what one direction takes.
    """
    if not isinstance(config.optimizer, MatrixOptimizer):
        return 0
    shapes, hidden = parameter_shapes(config.model), hidden_matrices(config.model)
    elements = [math.prod(shapes[name]) for name in hidden]
    largest = max(elements)
    of_stage = sum(elements) // config.parallel.pipeline
    share = min(of_stage // config.parallel.tensor // replicas, ROUND_ELEMENTS)
    in_flight = max(share, largest // config.parallel.tensor)
    product = _bytes_of(dtype_of(config.precision))
    temporary = max(config.optimizer.temporaries(shapes[name], product) for name in hidden)
    return 2 * in_flight * FP32 + temporary


def _activations(config: RunConfig, stage: int, replicas: int) -> dict[str, int]:
    num_micro = config.batch_size // (replicas * config.micro_batch_size)
    matrices = _matrix_bytes(config, replicas)
    parallel, model, r = config.parallel, config.model, bytes_of_weight(config)
    tokens = config.micro_batch_size * config.data.sequence_length
    replicated, split = layer_activation_bytes(config)
    token_ranks = parallel.tensor if parallel.sequence else 1  # sequence parallelism cuts tokens
    layer = tokens * (replicated // token_ranks + split // parallel.tensor)

    # 1F1B keeps as many microbatches as stages follow, itself included (Narayanan et al. 2021,
    # arXiv 2104.04473, section 2.2).
    waiting = min(parallel.pipeline - stage, num_micro)
    layers = model.num_hidden_layers // parallel.pipeline
    if config.recompute == "layers":
        kept, again = layers * tokens * model.hidden_size * r // token_ranks, layer
        components = {"inputs of layers": waiting * kept, "one recomputed layer": again}
    else:
        kept, again = layers * layer, 0
        components = {"activations": waiting * kept}

    loss = _loss_bytes(config, tokens) if stage == parallel.pipeline - 1 else 0
    components["logits and loss"] = loss
    held = kept + again + loss
    if stage == 0:  # summed when the activations of its microbatch are gone
        embedding = _embedding_gradient_bytes(config)
        components["gradient of the embedding"] = max(0, embedding - held)
    if config.cuda_graphs:  # the microbatch in the graph has memory of its own
        components["CUDA graph"] = sum(components.values())
    # An update comes when a step's activations are gone, a change of weights before there are any.
    components["matrices being updated"] = max(0, matrices - held)
    changing = _changing_bytes(config, stage, replicas)
    components["weights being changed"] = max(0, changing - max(held, matrices))
    probing = _probing_bytes(config, replicas, forward=layer + loss)
    components["weights rounded by a probe"] = max(0, probing - max(held, matrices, changing))
    return components


def _changed_bytes(config: RunConfig, share: int, replicas: int) -> dict[str, int]:
    """Return the exact values that a perturbed update restores, and a sum of its gradients.

    Args:
        config: of the run.
        share: main weights of the rank.
        replicas: number of data-parallel ranks.
    """
    match config.perturbation:
        case None:
            return {}
        case Sam() as sam:
            kept = {"exact main weights, fp32": share * FP32}
            has_groups = (sam.sequences or config.batch_size) < config.batch_size
            return kept | ({"sums of gradients, fp32": share * FP32} if has_groups else {})
        case perturbation:
            weights = sum(_changed_sizes(config, perturbation)) // config.parallel.pipeline
            if config.zero.stage == 3:
                weights = -(-weights // replicas)
            return {"exact weights": weights * bytes_of_weight(config)}


def _changed_sizes(config: RunConfig, perturbation: Qat | Noise) -> list[int]:
    """Return the weights of every linear that is changed, as a tensor rank has them."""
    shapes = parameter_shapes(config.model)
    return [
        math.prod(shapes[name]) // config.parallel.tensor
        for name in sorted(hidden_matrices(config.model))
        if perturbation.takes(name)
    ]


def _changing_bytes(config: RunConfig, stage: int, replicas: int) -> int:
    """Return the most bytes at once while weights are changed, beside what is kept of them."""
    match config.perturbation:
        case None:
            return 0
        case Sam() as sam:
            # gradients that are no views, and of the adaptive step products of a tensor
            share = -(-rank_parameters(config, stage) // replicas)
            shapes = parameter_shapes(config.model).values()
            largest = min(share, max(map(math.prod, shapes)))
            return share * FP32 + (2 * FP32 * largest if sam.adaptive else 0)
        case perturbation:
            each = ROUNDING if isinstance(perturbation, Qat) else DRAWING
            return each * max(_changed_sizes(config, perturbation), default=0)


def _probing_bytes(config: RunConfig, replicas: int, forward: int) -> int:
    """Return the exact weights that a probe of quantization restores, and what is beside them.

    That is either the linear being rounded or a forward pass, which keeps nothing for backward.
    """
    if not config.probe:
        return 0
    shapes, tensor = parameter_shapes(config.model), config.parallel.tensor
    sizes = [math.prod(shapes[name]) // tensor for name in hidden_matrices(config.model)]
    exact = sum(sizes) // config.parallel.pipeline * bytes_of_weight(config)
    if config.zero.stage == 3:  # a rank keeps its part
        exact = -(-exact // replicas)
    return exact + max(ROUNDING * max(sizes), forward)


def _embedding_gradient_bytes(config: RunConfig) -> int:
    """Return the bytes of the embedding's gradient, an fp32 sum.

    The head's, of the same parameter on the same stage, waits for it from the loss on.
    """
    model, parallel = config.model, config.parallel
    sums = 2 if model.tie_word_embeddings and parallel.pipeline == 1 else 1
    return sums * (model.vocab_size // parallel.tensor) * model.hidden_size * FP32


def _loss_bytes(config: RunConfig, tokens: int) -> int:
    """Return the bytes of the head and the loss of a microbatch.

    They are the gradient by hidden states, that by the weight as an fp32 sum, and a chunk's logits,
    in whose place is their gradient.
    """
    d, rows = _bytes_of_factor(config), config.model.vocab_size // config.parallel.tensor
    hidden_size = config.model.hidden_size
    logits = min(tokens, LOSS_CHUNK_TOKENS) * rows * d
    return tokens * hidden_size * d + rows * hidden_size * FP32 + logits


def _state(config: RunConfig, stage: int, replicas: int) -> dict[str, int]:
    """Return weights, gradients and the optimizer's state, which is sharded over replicas."""
    count, d = rank_parameters(config, stage), bytes_of_weight(config)
    share = -(-count // replicas)
    state = {
        "weights": count * d,
        "gradients, fp32": count * FP32,
        "main weights, fp32": share * FP32,
        **rank_states(config, count, replicas),
        "averages, fp32": share * FP32 * num_slots(config),
    }
    state |= _changed_bytes(config, share, replicas)
    if config.precision in FP8_RECIPES:
        # Transformer Engine keeps them from the first microbatch to the last, for the products
        # along their rows and those along their columns.
        _, layer, _ = _split_parameters(config.model, config.parallel.tensor)
        layers = config.model.num_hidden_layers // config.parallel.pipeline
        state["8-bit copies of weights"] = 2 * layers * layer
    if _rounds_weights(config):  # autocast keeps them from a microbatch's forward to its backward
        multiplied = multiplied_parameters(config.model)
        state["rounded copies of weights"] = multiplied * _bytes_of_factor(config)
    if config.engine == "megatron":
        if d == FP32:  # the weights are their own main weights
            state["main weights, fp32"] = 0
    elif config.zero.stage == 1:  # those of the model and, reduced, a share
        state["gradients, fp32"] += share * FP32
    else:  # DeepSpeed fills one bucket while it reduces the other, or in stage 3 a copy of it
        state["gradients, fp32"] = share * FP32
        state["communication buckets"] = 2 * min(ZERO_BUCKET_ELEMENTS, count) * FP32
        if config.zero.stage == 3:
            state["weights"] = share * d
            state["gathered weights"] = min(_gathered(config), count) * d
    return state


def _gathered(config: RunConfig) -> int:
    """Return the weights that ZeRO stage 3 gathers at once.

    They are those of the head, which the losses read, through all of a pass, of one other module,
    and of those that come next.
    """
    sizes = list(map(math.prod, parameter_shapes(config.model).values()))
    head = config.model.vocab_size * config.model.hidden_size
    sizes.remove(head)
    return head + max(sizes) + ZERO_PREFETCH_ELEMENTS


def rank_memory(config: RunConfig, world_size: int) -> RankMemory:
    """Return the memory of a GPU of the fullest stage; UserError where batch or layout fail."""
    replicas = config.data_parallel_size(world_size)
    stages = []
    for stage in range(config.parallel.pipeline):
        parts = _state(config, stage, replicas) | _activations(config, stage, replicas)
        parts["framework"] = FRAMEWORK_BYTES
        stages.append(RankMemory(stage, {name: size for name, size in parts.items() if size}))
    return max(stages, key=lambda memory: memory.bytes)


def _saved_bytes(config: RunConfig, world_size: int) -> tuple[int, int]:
    """Return the bytes of state, and those of weights, that a rank saves: its share of each."""
    count = max(rank_parameters(config, stage) for stage in range(config.parallel.pipeline))
    replicas = config.data_parallel_size(world_size)
    share = -(-count // replicas)
    weights = share
    if config.engine == "deepspeed":  # whole tensors: at most the largest one more
        shapes = parameter_shapes(config.model).values()
        weights = min(count, share + max(map(math.prod, shapes)))
    state = share * _main_bytes(config) + sum(rank_states(config, count, replicas).values())
    return state, weights * bytes_of_weight(config)


def snapshot_bytes(config: RunConfig, world_size: int) -> int:
    """Return the host memory of a rank that the copies of a save take, and keep for the next.

    At a permanent step these are the full state, and weights once more for every average and for a
    permanent checkpoint of weights alone.
    """
    state, weights = _saved_bytes(config, world_size)
    copies = 1 + (config.saving.full_steps is not None) + len(config.averages)
    return state + copies * weights


def bytes_to_stop(config: RunConfig, world_size: int) -> int:
    """Return the most bytes that a rank has to write once it is asked to stop.

    They are all of a save that has just begun, and the checkpoint from which training resumes.
    """
    state, weights = _saved_bytes(config, world_size)
    return snapshot_bytes(config, world_size) + state + weights


def checkpoint_bytes(config: RunConfig) -> CheckpointBytes:
    """Return the disk space of a run's checkpoints: each part of the state is stored once."""
    count, saving = parameter_count(config), config.saving
    first = first_step(config)
    averages = sum(  # those with a member: the weights after a multiple of the interval
        step // average.interval_steps * average.interval_steps > first
        for step in filter(saving.writes_averages, config.save_steps)
        for average in config.averages
    )
    full = sum(map(saving.keeps_state, config.save_steps))
    return CheckpointBytes(
        full_each=count * (bytes_of_weight(config) + _main_bytes(config)) + all_states(config),
        weights_each=count * bytes_of_weight(config),
        full=full,
        weights=len(config.save_steps) - full,
        averages=averages,
        restarts=saving.restart_keep + 1 if saving.restart_every_steps else 0,
    )
