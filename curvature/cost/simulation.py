"""Operations and memory of one pass through a model, by running it on tensors without content.

The real code runs with one and with two decoder blocks of each kind; each adds the same, so the
model's own depth follows. Nothing of the model is in memory and no weight is read: a config.json
is enough.
"""

import copy
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)
from transformers import AutoModelForCausalLM, PretrainedConfig

from base.ranks import ALONE
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.forward import quiet_transformers
from curvature.dual.one_pass import observed
from curvature.products.model import CurvedModel, cross_entropy
from curvature.products.parameters import Parameters, Probe, dot
from curvature.settings import ProductSettings

DEPTHS = (1, 2)
aten = torch.ops.aten
# Operations to a function of their arguments that counts FLOPs; torch lacks three of ours.
COUNTED = flop_registry | {
    # Torch's own takes the type of a result, where there is one, for a shape.
    aten.addmm: shape_wrapper(lambda _, left, right, *__, **___: 2 * math.prod(left) * right[1]),
    aten._scaled_dot_product_flash_attention_for_cpu: shape_wrapper(
        lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: shape_wrapper(
        lambda gradient, query, key, value, *_, **__: sdpa_backward_flop_count(
            gradient, query, key, value
        )
    ),
}
NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten._unsafe_view}
OVERWRITING = {aten.copy_, aten.zero_, aten.fill_}  # in place, and nothing is read there
SAMPLE = 1 << 20  # weights on which is counted what a probe and its products move


class Pass(NamedTuple):
    """A forward and a backward pass over one microbatch.

    Attributes:
        flops: floating-point operations of matrix products, recomputation included.
        bf16_flops: those of them in bf16; the others are in fp32.
        moved: bytes that all other operations read and write; a function of `curvature.dual`, as
            a GPU's compiler fuses it, its arguments and results alone.
        bytes: most that activations and gradients take at once; weights and tangents come on top.
    """

    flops: float
    bf16_flops: float
    moved: float
    bytes: float


class Count(TorchDispatchMode):
    """A count of what operations compute and move, as in `Pass`, and of the storages they make.

    torch's own FlopCounterMode would keep tensors of a checkpointed forward pass alive.
    """

    def __init__(self, old_storages: set[int]) -> None:
        super().__init__()
        self._old_storages, self._sizes = old_storages, dict[int, int]()
        self._now = self.peak = self.flops = self.bf16_flops = self.moved = self.kernels = 0
        self._inside = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count it and its new storages."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._count(func, args, kwargs, result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                # Storages are counted, as views share theirs.
                storage = leaf.untyped_storage()
                key = id(storage)
                if key not in self._sizes and key not in self._old_storages:
                    self._sizes[key] = storage.nbytes()
                    self._now += storage.nbytes()
                    self.peak = max(self.peak, self._now)
                    # Python may give the id to another storage, so it is forgotten with this one.
                    weakref.finalize(storage, self._gone, key)
        return result

    def one_pass(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Run a function that a GPU's compiler fuses. It moves its arguments and its results."""
        self._inside = True
        result = function(*arguments)
        self._inside = False
        self._move([leaf for leaf in tree_leaves((arguments, result)) if isinstance(leaf, Tensor)])
        return result

    def _move(self, tensors: list[Tensor]) -> None:
        self.kernels += 1
        # An expanded tensor has more entries than its storage.
        self.moved += sum(
            min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors
        )

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        packet = func._overloadpacket
        # Views move nothing; within a fused function nothing reaches the GPU's memory.
        if self._inside or func.namespace != "aten" or func.is_view or packet in NO_KERNEL:
            return
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if packet in COUNTED:
            flops = COUNTED[packet](*args, **kwargs, out_val=result)
            self.kernels += 1
            self.flops += flops
            factor = inputs[1]  # the first may be a sum to add to
            self.bf16_flops += flops if factor.dtype == torch.bfloat16 else 0
            return
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        inputs = inputs[1:] if packet in OVERWRITING else inputs
        self._move([*inputs, *outputs])

    def _gone(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


_PASSES: dict[tuple[object, ...], Pass] = {}


def simulate(
    config: PretrainedConfig, settings: ProductSettings, sequence_length: int, *, dual: bool
) -> Pass:
    """Return a pass of the dual layers, or of transformers' code, over a microbatch."""
    kinds = _kinds(config)
    passes = {
        kind: [_at_depth(config, kind, depth, settings, sequence_length, dual) for depth in DEPTHS]
        for kind in kinds
    }
    fields = range(len(Pass._fields))
    return Pass(
        *(
            _of_model(
                kinds, {kind: (one[field], two[field]) for kind, (one, two) in passes.items()}
            )
            for field in fields
        )
    )


Kind = tuple[Any, ...]  # of a block: its entry in each setting that has one for every block


def _by_block(config: PretrainedConfig) -> dict[str, list[Any]]:
    """Return the settings that have an entry for each block."""
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == config.num_hidden_layers
    }


def _kinds(config: PretrainedConfig) -> Counter[Kind]:
    """Return how many blocks there are of each kind."""
    settings = _by_block(config).values()
    return Counter(zip(*settings, strict=True) if settings else {(): config.num_hidden_layers})


def _of_model(kinds: Counter[Kind], counted: dict[Kind, tuple[float, float]]) -> float:
    """Return a count of the model, from those with few blocks of one kind, `DEPTHS`."""
    few, more = DEPTHS
    added = {kind: (deep - shallow) / (more - few) for kind, (shallow, deep) in counted.items()}
    # All that is outside the blocks is in each of these; of a peak the highest is taken.
    return max(
        shallow + sum((kinds[each] - few * (each == kind)) * added[each] for each in kinds)
        for kind, (shallow, _) in counted.items()
    )


def _at_depth(
    config: PretrainedConfig,
    kind: Kind,
    depth: int,
    settings: ProductSettings,
    length: int,
    dual: bool,
) -> Pass:
    """Return a pass of so many blocks of a kind, simulated once: it takes seconds."""
    product = settings.dtype, settings.checkpointing, settings.microbatch_sequences
    key = (config.to_json_string(), kind, depth, *product, length, dual)
    if key not in _PASSES:
        _PASSES[key] = _simulated(config, kind, depth, settings, length, dual)
    return _PASSES[key]


def _simulated(
    config: PretrainedConfig,
    kind: Kind,
    depth: int,
    settings: ProductSettings,
    length: int,
    dual: bool,
) -> Pass:
    shortened = copy.deepcopy(config)
    shortened.num_hidden_layers = depth
    for name, entry in zip(_by_block(config), kind, strict=True):
        setattr(shortened, name, [entry] * depth)

    quiet_transformers()
    with _without_content(dual_layers=dual):
        loaded = AutoModelForCausalLM.from_config(
            shortened, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
        model = CurvedModel(
            loaded.eval(),
            ranks=ALONE,
            dtype=DTYPES[settings.dtype],
            checkpointing=settings.checkpointing,
        )

        # a gradient is dropped as soon as it is complete, as in a measurement
        tokens_BS1 = torch.zeros(settings.microbatch_sequences, length + 1, dtype=torch.int64)
        for weight in model.parameters.weights.values():
            weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))

        # weights and tangents are there before, so that the count has the rest alone
        storages = [
            tensor.untyped_storage() for tensor in (*loaded.parameters(), *loaded.buffers())
        ]
        count = Count({id(storage) for storage in storages})
        with count, observed(count.one_pass):
            loss = model.entry(tokens_BS1, None if dual else cross_entropy, range(len(tokens_BS1)))
            (loss.tangent if dual else loss).backward()
        return Pass(*map(float, (count.flops, count.bf16_flops, count.moved, count.peak)))


@contextmanager
def _without_content(*, dual_layers: bool = False) -> Iterator[None]:
    """Make no tensor with content, and keep the state of a GPU's generator.

    FakeTensorMode lets code read values and choose by the device, as that of transformers does. The
    dual layers do neither, and on the meta device they take a third of the time.
    """
    mode = torch.device("meta") if dual_layers else FakeTensorMode()
    with mode, torch.random.fork_rng(devices=[]):
        yield


def moved_around(dtype: torch.dtype, *, dual: bool) -> float:
    """Return the bytes per weight that a trace moves around a pass.

    Around a product it draws a probe, in `dtype`, and multiplies it with every gradient; around a
    gradient it squares.
    """
    with _without_content():
        parameters = Parameters(torch.nn.Linear(SAMPLE, 1, bias=False))
        gradient, tangent = torch.zeros(SAMPLE), torch.zeros(SAMPLE, dtype=dtype)
        with Count(set()) as count:
            if dual:
                tangent.copy_(parameters.signs("weight", Probe(0, 0))[0])
            dot(tangent if dual else gradient, gradient)
    return float(count.moved / SAMPLE)
