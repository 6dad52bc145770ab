"""Sharpness-aware minimization: gradients after a step up the loss update the exact weights.

The first pass of an engine's `train_step`, which is always rejected, gives the gradient g at the
exact weights w, and leaves them at w + e. The second is that of the update: w is restored bit for
bit before the update is judged.

    SAM (arXiv 2010.01412)             e = rho g / |g|
    adaptive SAM (arXiv 2102.11600)    e = rho w^2 g / |w g|, elementwise

Norms are L2, over all ranks and all parameters. |g| = 0 takes no step. In the second paper w has an
eta added, against weights near zero: here it is 0. Neither paper's e has weight decay or clipping
in it; the gradient at w + e is clipped as any other.

m-sharpness: a batch is cut into groups of m consecutive sequences, each with a step of its own, and
the update is by the mean of the groups' gradients. Groups are the same at every layout, as a group
is the same microbatches of every replica. m = micro_batch_size on one replica is a step for every
microbatch, and m = micro_batch_size x replicas is a step for each that all replicas compute at
once.

In bf16 the model computes with w + e rounded. Most weights do not move where e is far below a unit
in the last place, 1e-4 for a weight of 0.02, and a few move by a whole unit. The sum over many
weights is that of e, with noise added: on a model of 41 thousand weights the rise of a batch's loss
was that of fp32 within 16%, 4% and 1%, with rho 1e-4, 1e-3 and 1e-2.

Memory beside that of a step, on the device, with n fp32 main weights on the rank: 4 n bytes in the
second pass, for w, and with more than one group 4 n more in both passes, for the sum of gradients.
While there are no activations: 4 n for the gradients of DeepSpeed, which are copies, and 4 bytes
for each weight of the largest tensor if the step is adaptive.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from train.data.batches import Batch
from train.distributed import gathered
from train.engine import Accept, Engine, Flags, StepResult
from train.run.perturbation import Sam


def after_ascent(
    engine: Engine,
    settings: Sam,
    batch: Batch,
    learning_rate: float,
    accept: Accept,
    flags: Flags = tuple,
) -> StepResult:
    """Run the engine's `train_step` at the weights after a step up the loss; update the exact ones.

    Loss, z-loss and counted labels are those of the exact weights, as without SAM; the gradient
    norm is that of the gradient that is clipped. Further figures are ascended_loss, of the
    weights after the step, nats per token, and ascent_length, the step's L2 norm, both means over
    the groups. A pass that overflows makes one of these figures overflow, whichever it is.
    """
    step = _AscendedStep(engine, settings, accept)
    sequences = len(batch.tokens_BS)
    if settings.sequences:
        sequences = settings.sequences // engine.replica.ranks
    *earlier, last = batch.split(sequences)

    for group in earlier:
        engine.train_step(group, learning_rate, step.ascend)
        engine.publish_weights()
        engine.train_step(group, learning_rate, step.add)
        engine.publish_weights()
    engine.train_step(last, learning_rate, step.ascend)
    engine.publish_weights()
    # Stop requests are exchanged once in a step: here, as the host then waits for the next batch.
    engine.train_step(last, learning_rate, step.judge, flags, step.average if earlier else None)
    assert step.result is not None
    if not step.accepted:  # an update publishes what it wrote
        engine.publish_weights()
    return step.result


class _AscendedStep:
    """An update in several passes of the engine: what is kept from one to the next.

    Attributes:
        result: of the whole batch, once it is judged.
        accepted: whether the update was made.
    """

    def __init__(self, engine: Engine, settings: Sam, accept: Accept) -> None:
        self._engine, self._settings, self._accept = engine, settings, accept
        self._weights: list[Tensor] = []
        self._exact: list[Tensor] = []  # copies of the weights
        self._sums: list[Tensor] = []  # of the gradients of earlier groups
        # Of every group, at the exact weights and at those after the step.
        self._results: list[StepResult] = []
        self._ascended: list[StepResult] = []
        self._lengths: list[float] = []
        self.result: StepResult | None = None
        self.accepted = False

    def ascend(self, result: StepResult) -> bool:
        """Take the step up a group's loss: an `Accept` of its first pass, which is no update."""
        self._results.append(result)
        self._weights = self._engine.weights()
        self._exact = [weights.clone() for weights in self._weights]
        length = _ascend(self._engine, self._settings, self._weights, result.grad_norm)
        self._lengths.append(length)
        return False

    def add(self, result: StepResult) -> bool:
        """Add an earlier group's gradient to the sums: an `Accept` of its second pass."""
        self._ascended.append(result)
        self._restore()
        gradients = self._engine.gradients()
        if self._sums:
            _add(self._sums, gradients)
        else:
            self._sums = [gradient.clone() for gradient in gradients]
        return False

    def average(self, gradients: list[Tensor]) -> None:
        """Make the last group's gradient the mean over all groups: a `Revise`."""
        _add(gradients, self._sums)
        self._sums = []
        for gradient in gradients:
            gradient.div_(len(self._results))

    def judge(self, result: StepResult) -> bool:
        """Ask whether the exact weights are updated: an `Accept` of the last pass."""
        self._ascended.append(result)
        self._restore()
        exact, ascended = map(StepResult.joined, (self._results, self._ascended))
        figures = {
            "ascended_loss": ascended.loss,
            "ascent_length": sum(self._lengths) / len(self._lengths),
        }
        self.result = StepResult(
            exact.loss, ascended.grad_norm, {**exact.metrics, **figures}, ascended.flags
        )
        self.accepted = self._accept(self.result)
        return self.accepted

    def _restore(self) -> None:
        for weights, exact in zip(self._weights, self._exact, strict=True):
            weights.copy_(exact)
        self._exact = []


def _ascend(engine: Engine, settings: Sam, weights: list[Tensor], grad_norm: float) -> float:
    """Add the step up the loss to the weights; return its L2 norm."""
    gradients = engine.gradients()
    if not settings.adaptive:
        # An infinite norm has a length that is not finite, and so the step is rejected.
        scale = settings.rho / grad_norm if grad_norm else 0.0
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.add_(gradient, alpha=scale)
        return scale * grad_norm

    norm, norm_of_step = _adaptive_norms(engine, weights, gradients)
    scale = settings.rho / norm if norm else 0.0
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.addcmul_(weight, weight * gradient, value=scale)
    return scale * norm_of_step


def _adaptive_norms(
    engine: Engine, weights: list[Tensor], gradients: list[Tensor]
) -> tuple[float, float]:
    """Return the L2 norms of w g and w^2 g over all ranks, every weight counted once."""
    norms = []
    pairs = zip(engine.by_parameter(weights), engine.by_parameter(gradients), strict=True)
    for (_, weight), (_, gradient) in pairs:
        product = weight * gradient
        norms += [_norm(product), _norm(product.mul_(weight))]
    # One transfer to the host; a rank may hold no weight that counts here.
    squares = torch.stack(norms).view(-1, 2).square().sum(0).tolist() if norms else [0.0, 0.0]
    # In the order of ranks, on every rank: all have the same bits.
    first, second = (sum(of_rank) ** 0.5 for of_rank in zip(*gathered(squares), strict=True))
    return first, second


def _norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm


def _add(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.add_(value)
