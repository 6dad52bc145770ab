"""Traces of the Gauss-Newton matrix and of the empirical Fisher, a backward pass a microbatch.

With l_n = -log p_n(y_n) the loss at token n of a microbatch of N, J_n the Jacobian of its logits by
the parameters and p_n its predicted probabilities, the Gauss-Newton matrix of the mean loss is
(1/N) sum_n J_n'(diag p_n - p_n p_n')J_n, for the cross-entropy the Fisher information too (Botev,
Ritter and Barber 2017; Kunstner, Balles and Hennig 2019). Its trace lacks the Hessian's term in the
curvature of the logits, so it is a companion of tr H and no substitute.

Gauss-Newton. Replace every label by y_n drawn from p_n, independently given the microbatch. Then
grad l_n = J_n'(p_n - e_{y_n}) has mean 0 and second moment E|grad l_n|^2 = tr J_n'(diag p_n - p_n
p_n')J_n, and two tokens are uncorrelated,

    E|sum_n grad l_n|^2 = sum_n E|grad l_n|^2 = N tr GGN:

the cross terms E[grad l_m . grad l_n] = E[grad l_m] . E[grad l_n] are 0.

Empirical Fisher, (1/N) sum_n grad l_n grad l_n' with the true labels. Signs e_n that are
independent of everything have E[e_m e_n] = 0 for m != n and e_n^2 = 1, so E|sum_n e_n grad l_n|^2 =
sum_n |grad l_n|^2 without N backward passes.

In both, |gradient of the sum over the microbatch|^2 / N is one unbiased sample, by tensor |gradient
of t|^2 / N; the gradient has to be summed over all ranks before it is squared.

Shapes: B sequences on this rank, S positions, V vocabulary, N tokens (B S, flattened).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from base.random_words import words

ROWS = 256  # of logits, in float64, in memory at a time


def token_uniforms(seed: int, microbatch: int, sequence: int, length: int) -> Tensor:
    """Return uniform numbers in [0, 1), float64 [S], of the positions of a sequence.

    The upper 53 bits of the words of the stream 'uniform/seed/microbatch/sequence', over 2^53.

    Example: the numbers of the first positions do not depend on the length.
        >>> token_uniforms(0, 0, 0, 2).equal(token_uniforms(0, 0, 0, 5)[:2])
        True
    """
    stream = words(f"uniform/{seed}/{microbatch}/{sequence}", 0, length)
    # The shift of signed words repeats the sign bit, which the mask takes off.
    return ((stream >> 11) & (2**53 - 1)).double() / 2**53


def token_signs(seed: int, microbatch: int, sequence: int, length: int) -> Tensor:
    """Return signs likewise: the upper bit of the words of 'sign/seed/microbatch/sequence'.

    Example:
        >>> token_signs(seed=0, microbatch=0, sequence=0, length=8).tolist()
        [-1.0, -1.0, -1.0, -1.0, -1.0, 1.0, 1.0, -1.0]
    """
    stream = words(f"sign/{seed}/{microbatch}/{sequence}", 0, length)
    return torch.where(stream < 0, 1.0, -1.0).double()


def sampled_labels(logits_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """Return labels drawn from softmax(logits) by its inverse distribution function, int64 [N].

    Label y is drawn where F(y - 1) <= u < F(y), in float64. Logits that are not finite give some
    label; their loss is as little finite and is refused where it is read.

    Example:
        >>> sampled_labels(torch.zeros(3, 4), torch.tensor([0.1, 0.3, 0.9]).double())
        tensor([0, 1, 3])
    """
    labels = []
    for rows_NV, u_N in zip(logits_NV.detach().split(ROWS), uniforms_N.split(ROWS), strict=True):
        weights_NV = rows_NV.double()
        mass_NV = (weights_NV - weights_NV.amax(dim=-1, keepdim=True)).exp().cumsum(dim=-1)
        # u times the total mass is compared, so the distribution need not be normalised.
        labels.append(torch.searchsorted(mass_NV, u_N[:, None] * mass_NV[:, -1:], right=True)[:, 0])
    # Rounding of that product, or a NaN, may lead beyond the last label.
    return torch.cat(labels).clamp(max=logits_NV.shape[-1] - 1)


def ggn_loss(
    logits_BSV: Tensor, tokens_BS1: Tensor, sequences: range, *, seed: int, microbatch: int
) -> Tensor:
    """Return the sum of the losses of labels that the model predicts: |gradient|^2 / N is tr GGN.

    Args:
        logits_BSV: of the rows of this rank, with their graph.
        tokens_BS1: the same rows.
        sequences: the numbers of the rows in the whole microbatch, so that the draw does not depend
            on who holds them.
        seed: of the draws.
        microbatch: its number.

    Example: p = (1/2, 1/2), so by the logits the trace is 1 - |p|^2 = 1/2.
        >>> logits_BSV = torch.zeros(1, 1, 2, requires_grad=True)
        >>> tokens_BS1 = torch.tensor([[0, 1]])
        >>> loss = ggn_loss(logits_BSV, tokens_BS1, range(1), seed=0, microbatch=0)
        >>> float(torch.autograd.grad(loss, logits_BSV)[0].square().sum())
        0.5
    """
    assert len(sequences) == len(tokens_BS1)
    length, vocabulary = logits_BSV.shape[1:]
    uniforms = [token_uniforms(seed, microbatch, sequence, length) for sequence in sequences]
    logits_NV = logits_BSV.reshape(-1, vocabulary)
    labels_N = sampled_labels(logits_NV, torch.cat(uniforms).to(logits_NV.device))
    return F.cross_entropy(logits_NV, labels_N, reduction="sum")


def fisher_loss(
    logits_BSV: Tensor, tokens_BS1: Tensor, sequences: range, *, seed: int, microbatch: int
) -> Tensor:
    """Return the sum of the losses with random signs: |gradient|^2 / N is the Fisher trace.

    Arguments as in `ggn_loss`; here the labels of the tokens count.

    Example: p = (3/4, 1/4) and label 1, so the gradient is +-(3/4, -3/4).
        >>> logits_BSV = torch.tensor([[[3.0, 1.0]]]).log().requires_grad_()
        >>> tokens_BS1 = torch.tensor([[0, 1]])
        >>> loss = fisher_loss(logits_BSV, tokens_BS1, range(1), seed=0, microbatch=0)
        >>> round(float(torch.autograd.grad(loss, logits_BSV)[0].square().sum()), 4)
        1.125
    """
    length = logits_BSV.shape[1]
    signs_BS = torch.stack(
        [token_signs(seed, microbatch, sequence, length) for sequence in sequences]
    )
    losses_BS = F.cross_entropy(logits_BSV.transpose(1, 2), tokens_BS1[:, 1:], reduction="none")
    return (losses_BS * signs_BS.to(losses_BS)).sum()
