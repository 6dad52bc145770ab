"""`python -m curvature` end to end: every estimator against the dense Hessian of a tiny model.

Shapes: B sequences, S positions of a sequence, V vocabulary, N tokens, R rows of a Jacobian, P
    parameters.
"""

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM

from curvature.products.parameters import block_of
from curvature.products.probes import rademacher
from tests.conftest import make_hf_directory, widths
from tests.curvature.conftest import Dense, command, dense_hessian, differentiable_gradient
from train.data.batches import batch
from train.data.corpus import open_corpus
from train.data.prepare import prepare

WORDS = ["<|endoftext|>", *(chr(97 + index) for index in range(23))]
SEED, LENGTH, SEQUENCES = 5, 12, 8
FIXED = ["--fixed-sequences", str(SEQUENCES), "--sequence-length", str(LENGTH), "--seed", str(SEED)]


class Tiny(NamedTuple):
    """A model of 1,500 parameters, 24 tokens of text, and HF's own figures in float64."""

    hf_dir: Path
    data: Path
    dense: Dense  # of the fixed batch
    reference: Any

    def tokens(self, index: int, size: int = 1) -> Tensor:
        tokens_BS1 = batch(
            open_corpus(self.data),
            step=index + 1,
            batch_size=size,
            sequence_length=LENGTH,
            seed=SEED,
        )
        return torch.from_numpy(tokens_BS1)

    def signs(self, probe: int) -> Tensor:
        parts = [
            rademacher(name, 0, weight.numel(), seed=SEED, probe=probe)
            for name, weight in self.reference.named_parameters()
        ]
        return torch.cat(parts).double()

    def measured(self, spec: str, *options) -> dict[str, Any]:
        """`measured` of the command's result."""
        assert command(spec, self.hf_dir, "--data", self.data, *FIXED, *options) == 0
        result: dict[str, Any] = json.loads(
            (self.hf_dir / "curvature" / spec / "result.json").read_text()
        )
        assert (result["spec"]["name"], result["spec"]["seed"]) == (spec, SEED)
        measured: dict[str, Any] = result["measured"]
        return measured


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    root = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="a")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    (root / "tokenizer").mkdir()
    tokenizer.save(str(root / "tokenizer/tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": WORDS[0],
        "pad_token": WORDS[0],
    }
    (root / "tokenizer/tokenizer_config.json").write_text(json.dumps(settings))
    letters = np.random.default_rng(0).integers(1, 24, (20, 60))
    lines = [json.dumps({"text": " ".join(WORDS[letter] for letter in row)}) for row in letters]
    (root / "text.jsonl").write_text("\n".join(lines))
    prepare([root / "text.jsonl"], root / "tokenizer", root / "data")
    shape = widths(8, 12, 2, 2, vocab_size=24, max_position_embeddings=16)
    hf_dir = make_hf_directory(root / "model", **shape)
    reference = AutoModelForCausalLM.from_pretrained(hf_dir, attn_implementation="eager").double()
    unfinished = Tiny(hf_dir, root / "data", Dense(0.0, torch.empty(0), torch.empty(0)), reference)
    return unfinished._replace(dense=dense_hessian(reference, unfinished.tokens(0, SEQUENCES)))


PAIRS = (
    *("--pairs", SEQUENCES, "--microbatch-sequences", "1"),
    *("--companion-pairs", "16", "--norm-pairs", "16"),
)


@pytest.fixture(scope="module")
def hutchinson(tiny) -> dict[str, Any]:
    return tiny.measured("hutchinson", *PAIRS)


def within(estimate: dict[str, Any], truth: float, errors: float = 4.0) -> None:
    """Within 4 standard errors of the truth, which a right estimate misses once in 1,000."""
    assert abs(estimate["mean"] - truth) <= errors * estimate["standard_error"]
    assert estimate["standard_error"] > 0


def test_every_pair_is_the_quadratic_form_of_its_probe_and_microbatch(tiny, hutchinson):
    names = [name for name, _ in tiny.reference.named_parameters()]
    sizes = [weight.numel() for weight in tiny.reference.parameters()]
    losses, errors, tensors = [], list[float](), dict.fromkeys(names, 0.0)
    for index, trace in enumerate(hutchinson["trace"]["per_microbatch"]):
        v_P = tiny.signs(index)
        loss, gradient_P = differentiable_gradient(tiny.reference, tiny.tokens(index))
        product = torch.autograd.grad(gradient_P @ v_P, list(tiny.reference.parameters()))
        parts = [float(v @ hv.flatten()) for v, hv in zip(v_P.split(sizes), product, strict=True)]
        losses.append(loss.item())
        for name, part in zip(names, parts, strict=True):
            tensors[name] += part / SEQUENCES
        errors.append(abs(trace - sum(parts)) / sum(map(abs, parts)))
    # fp32's rounding, which norms over four features amplify in a microbatch here and there
    assert statistics.median(errors) < 3e-6
    assert max(errors) < 3e-5
    scale = max(map(abs, tensors.values()))
    assert hutchinson["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    for name, expected in tensors.items():
        assert hutchinson["tensor_traces"][name]["mean"] == pytest.approx(
            expected, rel=1e-4, abs=1e-5 * scale
        )


def test_traces_lie_within_their_errors(tiny, hutchinson):
    diagonal_P = tiny.dense.hessian_PP.diagonal()
    weights = dict(tiny.reference.named_parameters())
    parts = dict(
        zip(weights, diagonal_P.split([weight.numel() for weight in weights.values()]), strict=True)
    )
    low, high = hutchinson["trace"]["interval"]
    assert low <= float(diagonal_P.sum()) <= high
    for block, trace in hutchinson["block_traces"].items():
        within(
            trace, sum(float(part.sum()) for name, part in parts.items() if block_of(name) == block)
        )
    norms = sum(float(part.sum()) for name, part in parts.items() if "norm" in name)
    within(hutchinson["norm_traces"]["total"], norms)


def test_the_relative_trace_is_that_along_noise_as_large_as_the_weights(tiny, hutchinson):
    """With D the root mean squares of the linears on the diagonal, 0 elsewhere: tr D H D."""
    linears = {
        f"{name}.weight": module.weight
        for name, module in tiny.reference.model.layers.named_modules(prefix="model.layers")
        if isinstance(module, torch.nn.Linear)
    }
    relative, traces = hutchinson["relative_trace"], hutchinson["tensor_traces"]
    expected = sum(
        traces[name]["mean"] * float(weight.detach().square().mean())
        for name, weight in linears.items()
    )
    assert relative["mean"] == pytest.approx(expected, rel=1e-5)
    assert np.mean(relative["per_microbatch"]) == pytest.approx(relative["mean"])
    diagonal = [
        (linears[name].square().mean().sqrt() if name in linears else torch.tensor(0.0)).expand(
            weight.numel()
        )
        for name, weight in tiny.reference.named_parameters()
    ]
    scales_P = torch.cat(diagonal).detach().double()
    within(relative, float((scales_P * tiny.dense.hessian_PP * scales_P[:, None]).trace()))


def test_gauss_newton_and_fisher_lie_within_their_errors(tiny, hutchinson):
    weights = list(tiny.reference.parameters())
    gauss_newton, fisher = [], []
    for index in range(16):
        tokens_BS1 = tiny.tokens(index)
        logits_NV = tiny.reference(tokens_BS1[:, :-1], use_cache=False).logits.flatten(0, 1)
        units = torch.eye(logits_NV.numel(), dtype=torch.float64).view(-1, *logits_NV.shape)
        rows = torch.autograd.grad(logits_NV, weights, units, is_grads_batched=True)
        jacobian_NVP = torch.cat([row.flatten(1) for row in rows], dim=1).view(*logits_NV.shape, -1)
        p_NV = logits_NV.detach().softmax(-1)
        covariance_NVV = torch.diag_embed(p_NV) - p_NV[:, :, None] * p_NV[:, None]
        kernel_NVV = jacobian_NVP @ jacobian_NVP.mT
        gauss_newton.append(float((covariance_NVV * kernel_NVV).sum() / len(p_NV)))
        errors_NV = p_NV - torch.nn.functional.one_hot(tokens_BS1[:, 1:].flatten(), 24)
        fisher.append(float((errors_NV[:, None] @ jacobian_NVP).square().sum() / len(p_NV)))
    for name, expected in (("gauss_newton_trace", gauss_newton), ("fisher_trace", fisher)):
        within(hutchinson[name], float(np.mean(expected)))
        assert hutchinson[name]["standard_error"] < 0.4 * hutchinson[name]["mean"]
        assert sum(block["mean"] for block in hutchinson[name]["blocks"].values()) == pytest.approx(
            hutchinson[name]["mean"], rel=1e-9
        )


def test_lanczos_finds_both_ends_and_the_density(tiny):
    eigenvalues_P = torch.linalg.eigvalsh(tiny.dense.hessian_PP)
    measured = tiny.measured("lanczos", "--largest", "3", "--smallest", "2", "--tolerance", "1e-3")
    assert measured["lambda_max"]["value"] == pytest.approx(float(eigenvalues_P[-1]), rel=1e-4)
    for end, expected in (("largest", eigenvalues_P.flip(0)[:3]), ("smallest", eigenvalues_P[:2])):
        assert [pair["value"] for pair in measured["eigenvalues"][end]] == pytest.approx(
            expected.tolist(), rel=1e-4
        )
        assert all(pair["converged"] for pair in measured["eigenvalues"][end])
    assert measured["loss"] == pytest.approx(tiny.dense.loss, rel=1e-6)
    within(measured["trace"], float(eigenvalues_P.sum()))
    within(measured["density"]["squared_norm"], float(eigenvalues_P.square().sum()))
    nodes, weights = (np.array(measured["density"][key]) for key in ("nodes", "weights"))
    assert weights.sum(axis=1) == pytest.approx(1, abs=1e-6)
    for index in range(4):  # a quadrature is exact for powers: v'Hv and |Hv|^2 of its start vector
        v_P = tiny.signs(index)
        hv_P = tiny.dense.hessian_PP @ v_P
        assert (nodes[index] * weights[index]).sum() * len(v_P) == pytest.approx(
            float(v_P @ hv_P), rel=1e-3
        )
        assert (nodes[index] ** 2 * weights[index]).sum() * len(v_P) == pytest.approx(
            float(hv_P @ hv_P), rel=1e-4
        )


def test_repeating_changes_nothing_and_saving_memory_only_rounding(tiny, hutchinson):
    assert tiny.measured("hutchinson", *PAIRS) == hutchinson
    scale = max(map(abs, hutchinson["trace"]["per_microbatch"]))
    thrifty = tiny.measured("hutchinson", *PAIRS, "--checkpointing", "--vectors", "host")
    assert thrifty["trace"]["per_microbatch"] == pytest.approx(
        hutchinson["trace"]["per_microbatch"], abs=1e-5 * scale
    )


def test_microbatches_of_the_fixed_batch_need_not_be_equal(tiny):
    """Eight sequences in microbatches of three and two, or whole: the same mean loss."""
    few = ("--steps", "2", "--tolerance", "1e-4")
    parts, whole = (
        tiny.measured("lanczos", "--microbatch-sequences", size, *few) for size in ("3", "8")
    )
    assert parts["lambda_max"]["value"] == pytest.approx(whole["lambda_max"]["value"], rel=1e-4)
    assert parts["trace"]["mean"] == pytest.approx(whole["trace"]["mean"], rel=1e-4)
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-6)


def test_without_lambda_max_the_traces_are_the_same(tiny):
    few = ["--pairs", "4", "--norm-pairs", "2", "--companion-pairs", "2"]
    with_it = tiny.measured("hutchinson", *few)
    no_batch = FIXED[2:]  # the fixed batch is lambda_max's alone
    arguments = ("hutchinson", tiny.hf_dir, "--data", tiny.data, *no_batch, *few)
    assert command(*arguments, "--no-lambda-max") == 0
    without = json.loads((tiny.hf_dir / "curvature/hutchinson/result.json").read_text())
    assert without["spec"]["lambda_max"] is False
    assert "lambda_max" not in without["measured"]
    assert without["measured"]["trace"] == with_it["trace"]
