"""LAWA and EMA against averages of checkpoints made afterwards, through resuming and export."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from ckpt_tools.export import export
from quant_eval.probing import round_by_names
from tests.ckpt_tools.checkpoints import read_weights
from tests.runs import make_run, ranks, succeed
from tests.train.trajectories import assert_same, copy_until, numbers, shard_hashes
from train.data.corpus import open_corpus
from train.data.prepare import prepare
from train.run.directory import RunDirectory, read_checkpoint_record
from train.run.optimization import (
    Anneal,
    ConstantPhase,
    CosinePhase,
    Ema,
    Lawa,
    ScheduleConfig,
)
from train.run.perturbation import Qat
from train.run.saving import SavingConfig

LAWA, EMA = Lawa(interval_steps=2, window=3), Ema(decay=0.8, interval_steps=3)
LAST = 12
SAVED = (1, 2, 3, 4, 5, 6, 8, 9, 10, LAST)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory, inputs):
    """A run of two ranks that keeps both averages, saves often and holds out two files.

    Up to step 12 it is the run of the layout dp2, which is annealed after step 15.
    """
    root = tmp_path_factory.mktemp("averaged")
    (root / "digits.jsonl").write_text(json.dumps({"text": "0123456789" * 40}))
    prepare([root / "digits.jsonl"], inputs["tokenizer_dir"], root / "digits")
    directory = RunDirectory(root / "run")
    run = make_run(
        directory.path, **inputs, averages=(LAWA, EMA), total_steps=LAST, save_steps=SAVED,
        data={"more_held_out": {"digits": str(root / "digits")}}, saving=SavingConfig(asynchronous=True),
        schedule=ScheduleConfig(warmup_tokens=4 * 256, phase=CosinePhase(horizon_tokens=100 * 256)),
    )  # fmt: skip
    succeed(ranks(2, "train", "run", str(directory.path)))
    return directory, run


def members(step):
    """Worked by hand: the last three multiples of 2, without 0."""
    return {2: [2], 3: [2], 5: [2, 4], 6: [2, 4, 6], 8: [4, 6, 8], 9: [4, 6, 8], 12: [8, 10, 12]}[
        step
    ]


def test_averages_are_those_of_the_checkpoints(averaged):
    directory, _ = averaged
    weights = {step: read_weights(directory.checkpoint(step)) for step in SAVED}
    for step in (2, 3, 5, 6, 8, 9, 12):
        averages = read_weights(directory.average_checkpoint("lawa3x2", step))
        record = read_checkpoint_record(directory.average_checkpoint("lawa3x2", step))
        assert record.average == {**LAWA.model_dump(), "steps": members(step)}
        for name, weight in averages.items():
            # Bit for bit: the sum in fp64, oldest first, rounded to fp32 once.
            zero = torch.zeros_like(weight, dtype=torch.float64)
            total = sum((weights[member][name].double() for member in members(step)), start=zero)
            assert torch.equal(weight, (total / len(members(step))).float()), (step, name)
    later = range(6, LAST + 1, 3)
    emas = {step: read_weights(directory.average_checkpoint("ema0.8x3", step)) for step in later}
    for name in weights[3]:
        average = weights[3][name].double()
        for step in later:
            average = 0.8 * average + 0.2 * weights[step][name].double()
            ema = emas[step][name].double()
            torch.testing.assert_close(ema, average, rtol=1e-5, atol=1e-7)  # fp32 all along
    assert directory.complete_steps() == list(SAVED)  # averages are beside them
    assert not directory.average_checkpoint("lawa3x2", 1).exists()
    assert not directory.average_checkpoint("ema0.8x3", 2).exists()


def test_averaging_does_not_touch_training_and_its_probe_is_the_averages(
    averaged, trained, tmp_path
):
    directory, _ = averaged
    plain = read_weights(trained("dp2") / "checkpoints" / "step00000010")
    for name, weight in read_weights(directory.checkpoint(10)).items():
        assert torch.equal(weight, plain[name]), name
    rows = {row["step"]: row for row in numbers(directory.path)}
    assert (
        rows[10]["held_out_loss"]
        == {row["step"]: row for row in numbers(trained("dp2"))}[10]["held_out_loss"]
    )
    assert rows[12]["held_out_loss/lawa3x2"] != rows[12]["held_out_loss"]
    checkpoint = directory.average_checkpoint("lawa3x2", 12)
    parity = export(checkpoint, tmp_path / "hf")  # refused unless logits agree
    assert parity["max_absolute_error"] < 1e-4

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    digits = open_corpus(directory.path.parent / "digits").tokens_T
    tokens_T = torch.tensor(digits[: 5 * 32 + 1].astype("int64"))
    inputs_BS, labels_BS = tokens_T[:-1].view(5, 32), tokens_T[1:].view(5, 32)
    with torch.no_grad():
        logits = model(inputs_BS).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_BS.flatten()).item()
    assert rows[12]["held_out_loss.digits/lawa3x2"] == pytest.approx(loss, abs=1e-5)
    logged = {"digits": rows[12]["held_out_loss.digits/lawa3x2"]}
    assert read_checkpoint_record(checkpoint).more_held_out_losses == logged


@pytest.mark.parametrize("last", [5, 9])
def test_averages_go_on_bit_for_bit_after_a_resume(averaged, tmp_path, last):
    """In the middle of an interval, and with a window that is full."""
    whole, _ = averaged
    again = copy_until(last, whole, tmp_path / "run")
    succeed(ranks(2, "train", "run", str(again.path)))
    assert_same(again, whole)
    for step in (10, LAST):
        for name in ("lawa3x2", "ema0.8x3"):
            average = again.average_checkpoint(name, step)
            assert shard_hashes(average) == shard_hashes(whole.average_checkpoint(name, step))


def test_averages_under_qat_are_of_exact_weights(inputs, tmp_path):
    """Not of the rounded ones that the updates were computed at."""
    directory = RunDirectory(tmp_path / "run")
    schedule = ScheduleConfig(warmup_tokens=256, phase=ConstantPhase(), anneal=Anneal(start_step=2))
    make_run(
        directory.path, **inputs, averages=(Lawa(interval_steps=2, window=2),),
        perturbation=Qat(spec="rtn-b3-g32"), schedule=schedule, total_steps=6, save_steps=(4, 6),
    )  # fmt: skip
    succeed(ranks(1, "train", "run", str(directory.path)))
    earlier, later, average = (
        read_weights(path)
        for path in (
            *(directory.checkpoint(step) for step in (4, 6)),
            directory.average_checkpoint("lawa2x2", 6),
        )
    )
    for name, weight in average.items():
        mean = (earlier[name].double() + later[name].double()) / 2
        assert torch.equal(weight, mean.float()), name
    for name in ("q_proj", "down_proj"):
        key = next(key for key in average if f"{name}.weight" in key)
        for weight_OI in (later[key], average[key]):
            (rounded_OI,) = round_by_names(["rtn-b3-g32"], weight_OI, None, key)
            assert (rounded_OI != weight_OI).float().mean() > 0.9, name
