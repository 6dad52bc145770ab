"""OLMo2 and its training in fp64, written from the papers: no module of the project is used.

Arrays: B sequences, S tokens, H hidden size, A heads, D width of a head.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

LENGTH, BATCH = 32, 8
HEADS, KV_HEADS, LAYERS = 4, 2, 2
Z_LOSS, CLIP, DECAY, PEAK = 1e-2, 0.5, 0.1, 1e-3
SHARE = 1e-3  # of a weight, which independent decay takes at the peak
WARMUP_STEPS, ANNEAL_STEP, STEPS = 4, 15, 20
MOST_REPEATS, LONGEST_PERIOD = 3, 4


class Text(NamedTuple):
    """The sequences of an epoch as OLMo orders them, and which of them count."""

    tokens: np.ndarray  # [N, S + 1]
    counted: np.ndarray  # [N]


def repeats(tokens: np.ndarray) -> bool:
    """Return whether an n-gram of 1 to LONGEST_PERIOD tokens stands MOST_REPEATS times in a row."""
    values = tokens.tolist()
    for period in range(1, LONGEST_PERIOD + 1):
        span = period * MOST_REPEATS
        for start in range(len(values) - span + 1):
            if values[start : start + span] == values[start : start + period] * MOST_REPEATS:
                return True
    return False


def read_text(prefix: Path, seed: int) -> Text:
    """Cut a file of 16-bit tokens into sequences that share one token with the next."""
    stream = np.fromfile(prefix.with_suffix(".bin"), np.uint16).astype(np.int64)
    count = (len(stream) - 1) // LENGTH
    order = np.arange(count, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(seed)).shuffle(order)
    tokens = np.stack([stream[row * LENGTH : row * LENGTH + LENGTH + 1] for row in order])
    return Text(tokens, np.array([not repeats(row[:-1]) for row in tokens]))


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """Zhang and Sennrich 2019, arXiv 1910.07467."""
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def rotated(x_BASD: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) by the position times 500,000^(-2i/D), as complex numbers."""
    half = x_BASD.shape[-1] // 2
    angles = torch.arange(x_BASD.shape[2]).double()[:, None] * torch.tensor(
        [500_000.0 ** (-i / half) for i in range(half)], dtype=torch.float64
    )
    pairs = torch.complex(x_BASD[..., :half], x_BASD[..., half:])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def logits_of(weights: dict[str, Tensor], ids_BS: Tensor) -> Tensor:
    """Logits of OLMo2 (arXiv 2501.00656) whose attention stays inside documents, ended by 0."""
    ends = (ids_BS == 0).long()
    document_BS = ends.cumsum(1) - ends
    same = document_BS[:, :, None] == document_BS[:, None, :]
    allowed = same & torch.ones(ids_BS.shape[1], ids_BS.shape[1], dtype=torch.bool).tril()

    def heads(x_BSW: Tensor, number: int) -> Tensor:
        return x_BSW.unflatten(-1, (number, -1)).transpose(1, 2)

    x = weights["model.embed_tokens.weight"][ids_BS]
    for layer in range(LAYERS):

        def of(name: str, layer: int = layer) -> Tensor:
            return weights[f"model.layers.{layer}.{name}.weight"]

        query = rms_norm(x @ of("self_attn.q_proj").T, of("self_attn.q_norm"))
        key = rms_norm(x @ of("self_attn.k_proj").T, of("self_attn.k_norm"))
        value = heads(x @ of("self_attn.v_proj").T, KV_HEADS)
        query, key = rotated(heads(query, HEADS)), rotated(heads(key, KV_HEADS))
        key, value = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (key, value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(~allowed[:, None], -math.inf)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = x + rms_norm(mixed @ of("self_attn.o_proj").T, of("post_attention_layernorm"))
        gated = silu(x @ of("mlp.gate_proj").T) * (x @ of("mlp.up_proj").T)
        x = x + rms_norm(gated @ of("mlp.down_proj").T, of("post_feedforward_layernorm"))
    return rms_norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def rate_at(step: int) -> float:
    """Warm up, stay at the peak, fall linearly to zero at the last step."""
    rising = min(1.0, step / WARMUP_STEPS)
    falling = min(1.0, (STEPS - step) / (STEPS - ANNEAL_STEP))
    return PEAK * rising * falling


def orthogonalized(matrix: Tensor) -> Tensor:
    """Apply Jordan's quintic to the singular values themselves: no product is iterated."""
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return u @ values.diag() @ v * 0.2 * math.sqrt(max(matrix.shape))


class Optimizer:
    """AdamW with one of three decays, or Muon for the hidden matrices, one weight at a time."""

    def __init__(self, weights: dict[str, Tensor], *, decay: str, muon: bool) -> None:
        self.weights, self.decay, self.muon = weights, decay, muon
        self.first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def step(self, number: int, rate: float) -> None:
        """Update all weights by their clipped gradients."""
        for name, weight in self.weights.items():
            hidden = "_proj" in name
            decay = {
                "adamw": DECAY,
                "adamc": DECAY * rate / PEAK if hidden else DECAY,
                "independent": SHARE / PEAK,
            }[self.decay]
            if "embed_tokens" in name:
                decay = 0.0
            gradient, first, second = weight.grad, self.first[name], self.second[name]
            assert gradient is not None
            with torch.no_grad():
                if self.muon and hidden:
                    first.copy_(0.95 * first + 0.05 * gradient)
                    direction = orthogonalized(0.05 * gradient + 0.95 * first)
                else:
                    first.copy_(0.9 * first + 0.1 * gradient)
                    second.copy_(0.95 * second + 0.05 * gradient**2)
                    mean, square = first / (1 - 0.9**number), second / (1 - 0.95**number)
                    direction = mean / (square.sqrt() + 1e-8)
                weight.copy_(weight - rate * (decay * weight + direction))


class Step(NamedTuple):
    """Figures of a step, before its update."""

    loss: float
    z_loss: float
    grad_norm: float
    counted: float


def train(
    weights: dict[str, Tensor], text: Text, *, decay: str = "adamw", muon: bool = False
) -> list[Step]:
    """Train the weights in place; return the figures of every step."""
    for weight in weights.values():
        weight.requires_grad_(True)
    optimizer = Optimizer(weights, decay=decay, muon=muon)
    steps = []
    for number in range(1, STEPS + 1):
        rows = slice((number - 1) * BATCH, number * BATCH)
        tokens = torch.from_numpy(text.tokens[rows])
        counted = torch.from_numpy(text.counted[rows])[:, None].expand(BATCH, LENGTH)
        for weight in weights.values():
            weight.grad = None
        logits = logits_of(weights, tokens[:, :-1])
        log_z = logits.logsumexp(-1)
        entropy = log_z - logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        z_loss = Z_LOSS * log_z**2
        # Labels that do not count stay in the denominator.
        ((entropy + z_loss) * counted).sum().div(counted.numel()).backward()

        gradients = [weight.grad for weight in weights.values() if weight.grad is not None]
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
        for gradient in gradients:
            gradient.mul_(min(1.0, CLIP / (norm + 1e-6)))
        loss, z_mean = (x.detach()[counted].mean().item() for x in (entropy, z_loss))
        steps.append(Step(loss, z_mean, norm, counted.double().mean().item()))
        optimizer.step(number, rate_at(number))
    return steps
