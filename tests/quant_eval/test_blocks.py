"""Blocks quantized alone, all but one, and several calibration draws, each done again another way."""

import numpy as np
import pytest
import torch

from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.hf_model import load_hf_model
from ckpt_tools.ranks import Ranks
from quant_eval.measurement import measure
from quant_eval.quantized import quantized_model
from quant_eval.settings import CalibrationSettings, ComputeSettings, EvaluationSettings
from quant_eval.specs import parse_spec
from quant_eval.streamed import StreamedModel

ALONE = Ranks(0, 1, torch.device("cpu"))
COMPUTE = ComputeSettings(dtype="fp32", batch_size=8, device="cpu", scratch=None)
SPEC = parse_spec("gptq-b2-g16")


@pytest.fixture(scope="module")
def texts(train_prefix, held_out_prefix):
    def settings(seed=0, seeds=1, max_tokens=1500):
        calibration = CalibrationSettings(
            prefix=train_prefix, sequences=24, sequence_length=None, seed=seed, seeds=seeds
        )
        evaluation = EvaluationSettings(
            prefix=held_out_prefix,
            max_tokens=max_tokens,
            sequence_length=None,
            documents="separate",
            bootstrap_samples=200,
            level=0.95,
            seed=0,
        )
        return calibration, evaluation

    return settings


def measured_of(hf_dir, tmp_path, texts, specs=(SPEC,), by_block=False, **changes):
    outs = [tmp_path / spec.name for spec in specs]
    calibration, evaluation = texts(**changes)
    results = measure(hf_dir, list(specs), outs, calibration, evaluation, COMPUTE, ALONE, by_block)
    return [result["measured"] for result in results]


@torch.no_grad()
def loss_of(model, held_out_prefix, max_tokens=1500):
    """Mean loss of transformers' own model on the same blocks."""
    from quant_eval.losses import evaluation_set
    from train.corpus import open_corpus

    data = evaluation_set(open_corpus(held_out_prefix), 64, max_tokens, "separate")
    nll = tokens = 0.0
    for block_T in data.blocks:
        block = torch.from_numpy(block_T)[None]
        nll += float(model(block, labels=block).loss) * (len(block_T) - 1)
        tokens += len(block_T) - 1
    return nll / tokens


def test_blocks_alone_and_all_but_one_are_what_putting_them_in_gives(hf_dir, tmp_path, texts, held_out_prefix):
    """Here by exchanging layers between two whole models of transformers."""
    (measured,) = measured_of(hf_dir, tmp_path, texts, by_block=True)
    quantized = quantized_model(hf_dir, SPEC, texts()[0], COMPUTE)
    full_loss = loss_of(load_hf_model(hf_dir, torch.float32), held_out_prefix)
    assert measured["cross_entropy"] == pytest.approx(full_loss, rel=1e-6)
    assert [one["block"] for one in measured["blocks"]] == [0, 1]
    for index, one in enumerate(measured["blocks"]):
        mixed = load_hf_model(hf_dir, torch.float32)
        mixed.model.layers[index] = quantized.model.layers[index]
        expected = loss_of(mixed, held_out_prefix) - full_loss
        assert one["alone"]["absolute_error"] == pytest.approx(expected, abs=2e-6)
        # of two blocks, all but one is the other alone
        assert measured["blocks"][1 - index]["all_but_it"]["absolute_error"] == pytest.approx(expected, abs=2e-6)
        low, high = one["alone"]["intervals"]["absolute_error"]
        assert low < one["alone"]["absolute_error"] < high


def test_several_draws_are_the_mean_of_single_ones(hf_dir, tmp_path, texts):
    (together,) = measured_of(hf_dir, tmp_path, texts, seeds=3)
    single = [measured_of(hf_dir, tmp_path, texts, seed=seed)[0] for seed in range(3)]
    values = [one["relative_error"] for one in single]
    assert together["calibration"]["seeds"] == 3
    found = together["calibration"]["figures"]["relative_error"]
    assert found["values"] == pytest.approx(values, rel=1e-9)
    assert found["standard_deviation"] == pytest.approx(np.std(values, ddof=1), rel=1e-9)
    assert together["relative_error"] == pytest.approx(np.mean(values), rel=1e-9)


def test_bitsandbytes_is_measured_in_the_same_walk(hf_dir, tmp_path, texts, held_out_prefix):
    """LLM.int8() and NF4 against whole models of transformers with those linears."""
    specs = [parse_spec(name) for name in ("int8-t6", "nf4-g64")]
    model = StreamedModel(hf_dir, HFWeights(hf_dir), torch.float32, torch.device("cpu"))
    assert len(model.empty_linears()) == 14
    (int8,) = measured_of(hf_dir, tmp_path, texts, specs[:1])
    whole = quantized_model(hf_dir, specs[0], texts()[0], COMPUTE)
    assert int8["cross_entropy_quantized"] == pytest.approx(loss_of(whole, held_out_prefix), rel=1e-5)
    assert abs(int8["relative_error"]) < 0.02
    assert all(0 < layer["relative_output_error"] < 0.01 for layer in int8["layers"])
