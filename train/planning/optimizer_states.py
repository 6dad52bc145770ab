"""The bytes of optimizer states: those cut as the weights are, and those of whole matrices."""

import math

from train.model.config import hidden_matrices, parameter_shapes
from train.optimizers.matrices import rounds
from train.optimizers.settings import MatrixOptimizer
from train.run.config import RunConfig

FP32 = 4  # bytes of a main weight, and of each state that the optimizer keeps for it


def rank_states(config: RunConfig, parameters: int, replicas: int) -> dict[str, int]:
    """Return the bytes on the rank that has most of each kind, by component.

    Args:
        config: of the run.
        parameters: of a rank's stage, before data-parallel ranks share their states.
        replicas: number of data-parallel ranks.
    """
    of_parameter = FP32 * len(config.optimizer.STATES)
    share = -(-parameters // replicas)
    if not isinstance(config.optimizer, MatrixOptimizer):
        return {"optimizer states, fp32": share * of_parameter}

    shapes = _hidden_shapes(config)
    shapes = shapes[: len(shapes) // config.parallel.pipeline]  # all stages have as many layers
    if config.optimizer.KEEPS_MATRICES_WHOLE:
        rest = parameters - sum(map(math.prod, shapes)) // config.parallel.tensor
        # DeepSpeed cuts the rest by itself. megatron-core cuts all parameters end to end: a rank
        # may hold nothing else.
        share = -(-rest // replicas) if config.engine == "deepspeed" else min(share, rest)
    sizes = [_whole_bytes(config.optimizer, shape) for shape in shapes]
    flops = [config.optimizer.direction_flops(shape) for shape in shapes]
    elements = [math.prod(shape) // config.parallel.tensor for shape in shapes]
    computed = [0] * replicas
    for assigned in rounds(flops, elements, replicas):
        for rank, indices in enumerate(assigned):
            computed[rank] += sum(sizes[index] for index in indices)
    return {
        "optimizer states, fp32": share * of_parameter,
        "states of whole matrices, fp32": max(computed),
    }


def all_states(config: RunConfig) -> int:
    """Return the bytes of all states, each once, as a checkpoint has them."""
    optimizer = config.optimizer
    elements = sum(map(math.prod, parameter_shapes(config.model).values()))
    whole = 0
    if isinstance(optimizer, MatrixOptimizer):
        shapes = _hidden_shapes(config)
        whole = sum(_whole_bytes(optimizer, shape) for shape in shapes)
        if optimizer.KEEPS_MATRICES_WHOLE:
            elements -= sum(map(math.prod, shapes))
    return elements * FP32 * len(optimizer.STATES) + whole


def _hidden_shapes(config: RunConfig) -> list[tuple[int, ...]]:
    shapes, hidden = parameter_shapes(config.model), hidden_matrices(config.model)
    return [shape for name, shape in shapes.items() if name in hidden]


def _whole_bytes(optimizer: MatrixOptimizer, shape: tuple[int, ...]) -> int:
    return FP32 * sum(map(math.prod, optimizer.whole_states(shape).values()))
