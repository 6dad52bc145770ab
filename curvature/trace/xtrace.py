"""XTrace: the trace of a fixed matrix, every product used twice (Epperly, Tropp and Webber 2024, section 2.1).

Like Hutch++ it takes the trace on a sketched subspace exactly and estimates the rest, but each of the k probes in turn
is left out of the sketch and serves as test vector for what the other k - 1 leave. Probes are exchangeable, so the mean
of the k estimates is unbiased, and what leaving a second one out changes tells how much they have in common.

The test vectors are signs (Rademacher). The paper's rescaling for vectors from a sphere rests on their invariance under
rotation, which signs lack, so it is not used.

Shapes: k vectors of the sketch, r of them independent, p the part of a vector that lies on this rank.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from curvature.trace.hutch_plus_plus import Inner, MatrixTrace, Probes, Product, sketch
from train.command import UserError

ALONE = 1e-8  # a vector adds a direction of its own to the sketch if its leverage is 1 within this


def _own_directions(factor_rk: Tensor) -> Tensor:
    """s_i [r, k]: the unit vector of the sketched subspace orthogonal to all sketched vectors but number i.

    Without vector i the sketch spans what is orthogonal to s_i. With R+ the pseudoinverse of the factor, s_i is its row
    i, normalised (for independent vectors the row of the inverse: the paper's normalised columns of R^-T). A vector
    that lies in the span of the others has leverage (R+ R)_ii below 1 and s_i = 0: without it nothing is lost.
    """
    inverse_kr = torch.linalg.pinv(factor_rk)
    alone_k = (inverse_kr @ factor_rk).diagonal() > 1 - ALONE
    return torch.where(alone_k, normalize(inverse_kr, dim=1, eps=0.0).T, 0.0)


class _Reduced(NamedTuple):
    """The matrix, the probes and what is known of the sketch, all in the sketched subspace."""

    hessian_rr: Tensor  # Q'AQ
    factor_rk: Tensor  # R = Q'A[w_1 .. w_k]
    w_rk: Tensor  # Q'[w_1 .. w_k]
    s_rk: Tensor
    c_rk: Tensor  # (1 - s_is_i')Q'w_i

    def estimates(self) -> Tensor:
        """t_i [k]: every probe as test vector of the sketch that the others make."""
        hs_rk, hc_rk = self.hessian_rr @ self.s_rk, self.hessian_rr @ self.c_rk
        parts_rk = (self.w_rk - 2 * self.c_rk) * self.factor_rk - self.s_rk * hs_rk + self.c_rk * hc_rk
        return self.hessian_rr.trace() + parts_rk.sum(dim=0)

    def changes(self) -> Tensor:
        """t_i less what it is if probe j is left out of its sketch too, at [i, j]; 0 for i = j.

        The sketch loses u, which is s_j made orthogonal to s_i, so with b = u'Q'w_i the change is
        (1 - b^2) u'Hu + 2 b u'(H c_i - r_i).
        """
        rows = []
        for index, (s_r, c_r) in enumerate(zip(self.s_rk.T, self.c_rk.T, strict=True)):
            u_rk = normalize(self.s_rk - s_r[:, None] * (s_r @ self.s_rk), dim=0)
            u_rk[:, index] = 0.0
            b_k = self.w_rk[:, index] @ u_rk
            slope_r = self.hessian_rr @ c_r - self.factor_rk[:, index]
            rows.append((1 - b_k**2) * (u_rk * (self.hessian_rr @ u_rk)).sum(dim=0) + 2 * b_k * (slope_r @ u_rk))
        return torch.stack(rows)


def xtrace(product: Product, probes: Probes, inner: Inner, *, matvecs: int) -> MatrixTrace:
    """(1/k) sum_i t_i with t_i = tr(Q_i'AQ_i) + w_i'(1 - Q_iQ_i')A(1 - Q_iQ_i')w_i and k = matvecs / 2.

    w_i is probe i and Q_i orthonormal to the range of A applied to all other probes. With [A w_1 .. A w_k] = QR,
    H = Q'AQ and c_i = (1 - s_is_i')Q'w_i the projector is Q_iQ_i' = Q(1 - s_is_i')Q', and as A is symmetric

        t_i = tr H - s_i'H s_i + (Q'w_i)'r_i - 2 c_i'r_i + c_i'H c_i.

    The standard error. Two estimates are correlated, for w_i is in the sketch of t_j and w_j in that of t_i. Their
    sample variance s^2 has the mean Var t - C with the covariance C = Cov(t_i, t_j), so Var mean = E s^2 / k + C. The
    paper's estimate s / sqrt(k) leaves C out: on six matrices the error was 1.07 to 1.60 times it. Let t_ij be t_i with
    w_j left out of its sketch too. Given all other probes t_ij has the mean tr A over w_i and ignores w_j, so

        C = E (t_i - t_ij)(t_j - t_ji)

    without bias: its mean over all pairs is added to s^2 / k, where it is positive. Exact if the rank of A is below k.

    Args:
        product: of a symmetric matrix.
        probes: independent signs; 0..k-1 are used, each twice made.
        inner: products of vectors over all ranks.
        matvecs: the most products, even, 4 or more.

    Raises:
        UserError: another number of products, or a product that is not finite.
    """
    check_products(matvecs)
    size = matvecs // 2
    basis_rp, factor_rk = sketch(product, probes, inner, size=size)
    if not len(basis_rp):
        return MatrixTrace(0.0, 0.0, size, "xtrace")
    hessian_rr = torch.stack([inner(basis_rp, product(q_p)).cpu() for q_p in basis_rp], dim=1)
    w_rk = torch.stack([inner(basis_rp, probes(index)).cpu() for index in range(size)], dim=1)
    s_rk = _own_directions(factor_rk)
    reduced = _Reduced(hessian_rr, factor_rk, w_rk, s_rk, w_rk - s_rk * (s_rk * w_rk).sum(dim=0))
    t_k, changes_kk = reduced.estimates(), reduced.changes()
    covariance = float((changes_kk * changes_kk.T).sum()) / (size * (size - 1))
    variance = float(t_k.var()) / size + max(0.0, covariance)
    return MatrixTrace(float(t_k.mean()), math.sqrt(variance), size + len(basis_rp), "xtrace")


def check_products(matvecs: int) -> None:
    """UserError for a number of products that XTrace does not make."""
    if matvecs < 4 or matvecs % 2:
        raise UserError(
            f"XTrace makes an even number of products, 4 or more, not {matvecs}; ask for {max(4, matvecs + 1)}"
        )
