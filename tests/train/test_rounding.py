"""The probe of quantization while training against `quant_eval run` of the exports, transformers,
GPTQ from its derivation, and the same run without a probe.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from ckpt_tools.export import export
from ckpt_tools.hf.measured import Quantization
from ckpt_tools.hf.results import read_result
from dynamics.recipes.demo import MODEL as DEMO
from quant_eval.quantizer import ColumnSpec, GridSpec
from tests.conftest import LAYOUTS
from tests.corpora import write_corpus
from tests.quant_eval.gptq_reference import eliminate_columns, grid_points
from tests.quant_eval.specs import grid_spec
from tests.runs import make_run, python, ranks, succeed
from tests.train.trajectories import copy_until, numbers, shard_hashes
from train.data.corpus import open_corpus
from train.forward_record import LinearRecord
from train.model.config import ModelConfig, hf_settings, residual_linears
from train.model.presets import PYTHIA_160M
from train.planning.memory import rank_memory
from train.planning.report import PlannedGpus, plan_lines
from train.rounding import load_rounding, output_errors
from train.run.config import RunConfig, load_run
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics
from train.run.optimization import ConstantPhase, ScheduleConfig
from train.run.probe import ProbeConfig

SPECS = ("rtn-b3-g16", "rtn-b4-g16")
DOCUMENTS = 20  # the fewest that quant_eval takes
PROBE = ProbeConfig(every_steps=5, sequences=5, group_size=16, layers=(0, 1))


@pytest.fixture(
    scope="module",
    # Of tensor ranks the test of a pipeline of shards has the figures.
    params=["dp2", pytest.param("tp2", marks=pytest.mark.stress), "ds-zero1"],
)
def probed(request, tmp_path_factory, inputs):
    """A finished run with a probe, and the layout of the same run without."""
    processes, settings = LAYOUTS[request.param]
    directory = RunDirectory(tmp_path_factory.mktemp("probed") / request.param)
    make_run(directory.path, **inputs, **settings, probe=PROBE)
    succeed(ranks(processes, "train", "run", str(directory.path)))
    return directory, request.param


def figures_at(directory: RunDirectory, step: int) -> dict[str, float]:
    """The figures of the probe after a step, without what begins all of their names."""
    row = {row["step"]: row for row in read_metrics(directory.metrics)}[step]
    prefix = "quantization/"
    return {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}


def same_sequences(run: RunConfig, prefix: Path) -> torch.Tensor:
    """Write held-out sequences of a run as documents, of which every token but the first is a
    target; return those of the probe, [B, S + 1].
    """
    corpus = open_corpus(run.data.held_out)
    tokens_BS = corpus.sequences(np.arange(DOCUMENTS), run.data.sequence_length)
    lengths_B = np.full(len(tokens_BS), tokens_BS.shape[1])
    tokens_T = tokens_BS.astype(corpus.tokens_T.dtype).ravel()
    write_corpus(prefix, tokens_T, lengths_B, **dict(corpus.manifest))
    return torch.from_numpy(tokens_BS[: PROBE.sequences])


def test_losses_are_those_that_quant_eval_measures_of_the_export(probed, tmp_path):
    """Both in fp32, on the same tokens: they differ by rounding, some 1e-7 nats."""
    directory, _ = probed
    run = load_run(directory.run_json)
    same_sequences(run, tmp_path / "text")
    export(directory.checkpoint(20), tmp_path / "hf")
    options = [option for spec in SPECS for option in ("--spec", spec)]
    command = ["run", str(tmp_path / "hf"), *options, "--eval", str(tmp_path / "text")]
    succeed(python("quant_eval", *command))
    figures = figures_at(directory, 20)
    for spec in SPECS:
        result = read_result(tmp_path / "hf" / "quant" / spec, Quantization).measured
        by_document, probed_documents = result.per_document, slice(PROBE.sequences)
        tokens = sum(by_document.tokens[probed_documents])
        assert tokens == PROBE.sequences * 32
        full, quantized = (
            sum(nll[probed_documents]) / tokens
            for nll in (by_document.nll, by_document.nll_quantized)
        )
        expected = {
            "held_out_loss": full,
            f"{spec}/held_out_loss": quantized,
            f"{spec}/absolute_error": quantized - full,
        }
        losses = {name: figures[name] for name in expected}
        assert losses == pytest.approx(expected, abs=1e-6), spec
        assert abs(figures[f"{spec}/absolute_error"]) > 1e-4


def test_a_dead_linear_has_no_output_error_and_stops_nothing():
    """Inputs that are all zero: its outputs are 0 whatever its weights become."""
    record = LinearRecord.of(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)))
    record.inputs.add(torch.zeros(5, 32))
    settings = ProbeConfig(every_steps=1, group_size=16)
    errors = output_errors(record, "a linear", settings, load_rounding())
    assert set(errors.values()) == {0.0}
    assert len(errors) == 4


def test_output_errors_are_those_of_the_exported_model(probed, tmp_path):
    """Inputs from transformers' hooks; roundings by the slow algorithms, errors on the outputs.

    A weight midway between two points may take the other one: up to 1% of an error.
    """
    directory, _ = probed
    run = load_run(directory.run_json)
    tokens_BS = same_sequences(run, tmp_path / "text")
    export(directory.checkpoint(20), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    figures = figures_at(directory, 20)
    names = [name for layer in (0, 1) for name in residual_linears(run.model, layer)]
    assert sum("output_error" in name for name in figures) == 2 * len(SPECS) * len(names)
    for name in names:
        linear: Any = model.get_submodule(name.removesuffix(".weight"))
        seen: list[torch.Tensor] = []
        handle = linear.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
        with torch.no_grad():
            model(tokens_BS[:, :-1])
        handle.remove()
        inputs_NI, weight_OI = seen[0].flatten(0, 1).double(), linear.weight.detach().double()
        for spec in (grid_spec(name) for name in (*SPECS, "gptq-b3-g16", "gptq-b4-g16")):
            rounded_OI = by_definition(weight_OI, inputs_NI, spec)
            outputs_NO = inputs_NI @ weight_OI.T
            missing_NO = outputs_NO - inputs_NI @ rounded_OI.T
            expected = (missing_NO.square().sum() / outputs_NO.square().sum()).item()
            short = name.removeprefix("model.").removesuffix(".weight")
            error = figures[f"{spec.name}/output_error/{short}"]
            assert error == pytest.approx(expected, rel=1e-2), (spec.name, name)


def by_definition(weight_OI: torch.Tensor, inputs_NI: torch.Tensor, spec: GridSpec):
    """The rounded weight: each to its group's closest point, or by Optimal Brain Quantization."""
    if isinstance(spec, ColumnSpec):
        return eliminate_columns(weight_OI, inputs_NI.T @ inputs_NI / len(inputs_NI), spec)
    rounded_OI = weight_OI.numpy().copy()
    for row_I in rounded_OI:
        for group_K in np.split(row_I, len(row_I) // (spec.group_size or 1)):
            points_P = grid_points(group_K, spec)
            group_K[:] = points_P[np.abs(group_K[:, None] - points_P).argmin(1)]
    return torch.from_numpy(rounded_OI)


def test_weights_and_optimizer_state_are_those_of_the_run_without_it(probed, trained):
    directory, layout = probed
    plain = RunDirectory(trained(layout))
    for step in (10, 20):
        assert shard_hashes(directory.checkpoint(step)) == shard_hashes(plain.checkpoint(step))
    rows = [
        {key: value for key, value in row.items() if not key.startswith("quantization/")}
        for row in numbers(directory.path)
    ]
    assert rows == numbers(plain.path)
    assert load_run(directory.run_json) != load_run(plain.run_json)
    fingerprints = [RunDirectory(each.path).run_json.read_text() for each in (directory, plain)]
    assert len({text.split('"fingerprint"')[1] for text in fingerprints}) == 1


def test_a_resumed_run_logs_the_same(probed, tmp_path):
    directory, layout = probed
    again = copy_until(10, directory, tmp_path / "run")
    rows = again.metrics.read_text().splitlines(keepends=True)
    again.metrics.write_text("".join(row for row in rows if '"step": 1' not in row))
    succeed(ranks(LAYOUTS[layout][0], "train", "run", str(again.path)))
    for step in (15, 20):
        assert figures_at(again, step) == figures_at(directory, step)
    assert len(figures_at(again, 15)) == 1 + 2 * 2 + 4 * 4


def test_a_pipeline_of_shards_logs_what_one_process_does(tmp_path, inputs):
    """Sums in another order move weights over the middle between two points: they take the other
    one, which GPTQ hands on.
    """
    figures = []
    for layout in ("dp1", "tp2pp2"):
        processes, settings = LAYOUTS[layout]
        short: dict[str, Any] = {
            "total_steps": 5,
            "save_steps": (5,),
            "evaluate_every_steps": 20,
            "schedule": ScheduleConfig(warmup_tokens=4 * 256, phase=ConstantPhase()),
        }
        make_run(tmp_path / layout, **inputs, **(settings | short), probe=PROBE)
        succeed(ranks(processes, "train", "run", str(tmp_path / layout)))
        figures.append(figures_at(RunDirectory(tmp_path / layout), 5))
    assert figures[0].keys() == figures[1].keys()
    for name, value in figures[0].items():
        limits: dict[str, Any] = (
            {"rel": 0.2, "abs": 0} if "gptq" in name else {"rel": 1e-3, "abs": 2e-5}
        )
        assert value == pytest.approx(figures[1][name], **limits), name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"group_size": 64},
            "does not divide the 32 inputs of model.layers.0.mlp.down_proj.*set 16",
        ),
        ({"group_size": 32}, "does not divide the 16 inputs of model.layers.0.self_attn.o_proj"),
        ({"sequences": 6}, "above data.held_out_sequences 5"),
        ({"sequences": 1}, "fewer than the 64 inputs of a linear"),
        ({"layers": (2,)}, "its last is 1"),
        ({"bits": (3, 3)}, "has a width twice"),
        ({"bits": (1,)}, "greater than or equal to 2"),
        ({"bits": ()}, "at least 1 item"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, inputs, changes, words):
    run = make_run(tmp_path / "run", **inputs, tensor=2, probe=PROBE)
    content = run.model_dump(mode="json")
    content["probe"] |= changes
    with pytest.raises(ValidationError, match=words):
        RunConfig.model_validate(content)


@pytest.mark.parametrize(
    ("model", "length", "batch", "probe"),
    [
        (DEMO, 128, 16, ProbeConfig(every_steps=400, sequences=4, group_size=32)),
        (PYTHIA_160M, 2048, 256, ProbeConfig(every_steps=100)),
    ],
    ids=["demo", "160M"],
)
def test_it_costs_less_than_a_thousandth_of_training(model, length, batch, probe):
    """By torch's count of both, matrix products of rounding included."""
    forward = counted(model, length, backward=False)
    training = counted(model, length, backward=True) * batch * probe.every_steps
    passes = (1 + len(probe.bits) + 1) * probe.sequences
    gptq = sum(
        len(probe.bits) * 2 * inputs * (model.hidden_size * inputs)  # errors and columns
        + 2 * inputs**3  # Cholesky factor, inverse
        + inputs**2 * length * probe.sequences  # half of X^T X
        for inputs in (model.hidden_size, model.intermediate_size)
    )
    share = passes * forward / training
    assert share == pytest.approx(probe.cost(batch), rel=0.01)
    assert share + gptq / training < 1e-3
    assert probe.cost(batch, replicas=8) == pytest.approx(probe.cost(batch) * (4 + 7) / 4)


def counted(model: ModelConfig, length: int, *, backward: bool) -> int:
    """The FLOPs of a sequence, forward or forward and backward, of transformers' model."""
    config = AutoConfig.for_model(model.family, **hf_settings(model, length, 0))
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        tokens = torch.zeros(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        loss = network(tokens).logits.sum()
        if backward:
            loss.backward()
    return counter.get_total_flops()


def test_the_stated_cost_is_that_of_the_default():
    """10,700 sequences between two probes, as the description of `every_steps` says."""
    assert ProbeConfig(every_steps=700).cost(16) < 1e-3 < ProbeConfig(every_steps=660).cost(16)
    assert math.isclose(ProbeConfig(every_steps=1).cost(1), 4 / 3 * 8)


def test_a_plan_states_it(tmp_path, inputs):
    """Two replicas take 3 losses of 5 sequences, and one of them the inputs of its linears."""
    run = make_run(tmp_path / "run", **inputs, probe=PROBE)
    lines = plan_lines([run], PlannedGpus(1, 2, "h100"), whole=True)
    share = (3 * 5 / 2 + 5) / 3 / (5 * 8 / 2)
    assert f"probe of quantization: {share:.3%} of the time" in "\n".join(lines)


def test_the_plan_counts_exact_weights_of_a_probe(tmp_path):
    """In two bytes each, beside one layer of a forward pass and the loss, all more than a step."""
    tiny: dict[str, Any] = {"precision": "bf16", "micro_batch_size": 1}
    runs = [
        make_run(tmp_path / name, data={"sequence_length": 16}, **tiny, probe=probe)
        for name, probe in (("plain", None), ("probed", PROBE))
    ]
    plain, probed = (rank_memory(run, 1).components for run in runs)
    model = runs[0].model
    attention = 4 * model.hidden_size * model.query_size
    linears = attention + 3 * model.hidden_size * model.intermediate_size
    other_layers = plain["activations"] * (1 - 1 / model.num_hidden_layers)
    extra = 2 * model.num_hidden_layers * linears - other_layers
    assert extra > 0
    assert probed == plain | {"weights rounded by a probe": extra}
