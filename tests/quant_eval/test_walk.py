"""The work and the memory of a walk: nothing is computed or read twice, whatever there is room for
gives the same bits, and what does not fit is refused.
"""

import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from base.errors import UserError
from base.ranks import ALONE
from quant_eval.measuring import room
from quant_eval.measuring.losses import EvaluationSet
from quant_eval.measuring.room import Room, Sizes, plan, sizes_of
from quant_eval.measuring.walk import Variant, walk
from quant_eval.model.activations import Activations
from quant_eval.model.streamed import Block
from quant_eval.settings import ComputeSettings
from quant_eval.specs import parse_spec
from tests.conftest import VOCAB_SIZE
from tests.quant_eval.models import make_model, open_model

CALIBRATION_NL = torch.randint(1, VOCAB_SIZE, (6, 32), generator=torch.Generator().manual_seed(5))
BATCHES = 3  # of two sequences
GB = 10**9


def walked(directory, variants, data=None):
    compute = ComputeSettings(batch_size=2)
    return walk(open_model(directory), variants, data, compute, ALONE)


@pytest.fixture
def passes(monkeypatch):
    """Tokens through each linear of the quantized blocks, and batches read as "reads"."""
    counted, names = Counter[str](), dict[nn.Module, str]()
    copy, read = Block.copy, Activations.read

    def copied(block):
        quantized = copy(block)
        for group in quantized.linears():
            names.update({linear: name for name, linear in group.items()})
        return quantized

    def counting(module, inputs, _):
        if module in names:
            counted[names[module]] += inputs[0][..., 0].numel()

    def counted_read(activations, index):
        counted["reads"] += 1
        return read(activations, index)

    monkeypatch.setattr(Block, "copy", copied)
    monkeypatch.setattr(Activations, "read", counted_read)
    handle = nn.modules.module.register_module_forward_hook(counting)
    yield counted
    handle.remove()


@pytest.mark.parametrize("architecture", ["olmo2", "gpt_neox"])
@pytest.mark.parametrize("fits", [True, False], ids=["room", "no room"])
def test_every_token_passes_every_linear_once(tmp_path, monkeypatch, passes, architecture, fits):
    """Gate and up, or what stands for them, twice where their outputs find no room; the last
    linear of the last block, which nothing reads, never.
    """
    directory = make_model(tmp_path / "model", architecture)
    model = open_model(directory)
    if not fits:
        sizes = sizes_of(model, CALIBRATION_NL.numel(), 0, 1, 64)
        enough = sizes.work + sizes.shared + sizes.variant
        monkeypatch.setattr(room, "free_memory", lambda: enough)
    (quantized,) = walked(directory, [Variant(parse_spec("gptq-b3-g16"), CALIBRATION_NL)])
    assert quantized.room.keeps_gated == fits
    family, last = model.family, model.num_blocks - 1
    for name in model.empty_linears():
        block, part = int(name.split(".")[2]), name.rpartition(".")[2]
        times = 1
        if block == last:
            times = 0 if part == family.mlp_writing else 1
        elif part in family.mlp_reading and not fits:
            times = 2
        assert passes[name] == times * CALIBRATION_NL.numel(), name
    # x for qkv, x for the attention, x and what it gave for o, x for the MLP; for the block's
    # output the residual, and what the MLP's last linear reads or is made from where they differ
    again = 1 if fits or model.block(0).is_parallel else 0
    assert passes["reads"] == BATCHES * (5 * (last + 1) + (1 + again) * last)


def test_documents_of_two_draws_take_turns_in_one_buffer(tmp_path, monkeypatch):
    """As sequences of one length do: `Room` counts no second one, so the first has to be gone."""
    directory = make_model(tmp_path / "model", "olmo2")
    made, sizes = Activations.__init__, dict[weakref.ref[Activations], int]()
    peak = 0

    def counted(activations, shapes, width, *arguments):
        nonlocal peak
        made(activations, shapes, width, *arguments)
        sizes[weakref.ref(activations)] = width * sum(rows * length for rows, length in shapes)
        peak = max(peak, sum(size for living, size in sizes.items() if living() is not None))

    monkeypatch.setattr(Activations, "__init__", counted)
    peaks = []
    for lengths in [((16, 16), (16, 16)), ((20, 12), (12, 20))]:
        draws = [[CALIBRATION_NL[0, :length] for length in draw] for draw in lengths]
        peak = 0
        walked(directory, [Variant(parse_spec("gptq-b3-g16"), draw) for draw in draws])
        peaks.append(peak)
    assert peaks[0] == peaks[1] > 0


def evaluation() -> EvaluationSet:
    rng = np.random.default_rng(6)
    blocks = [rng.integers(1, VOCAB_SIZE, length) for length in (40, 30, 33, 12)]
    return EvaluationSet(blocks, [0, 1, 2, 3], [0, 1, 2, 3], 0)


def test_variants_give_the_same_bits_together_and_one_after_the_other(hf_dir, monkeypatch):
    specs = [parse_spec(name) for name in ("gptq-b2-g16", "rtn-b3-g16", "gptq-b4-perchannel-asym")]
    variants = [
        Variant(spec, CALIBRATION_NL if spec.method == "gptq" else None, by_block=index == 2)
        for index, spec in enumerate(specs)
    ]
    together = walked(hf_dir, variants, evaluation())
    assert {result.room for result in together} == {Room(True, True, 3)}
    monkeypatch.setattr(room, "plan", lambda *_: Room(True, False, 1))
    apart = walked(hf_dir, variants, evaluation())
    for result, other in zip(together, apart, strict=True):
        assert result.errors == other.errors
        assert result.losses
        assert other.losses
        of_result, of_other = (
            [vars(losses) for losses in (each.losses, *each.alone, *each.others)]
            for each in (result, other)
        )
        torch.testing.assert_close(of_result, of_other, rtol=0, atol=0)


# 10 GB of shared streams, 4 of the widest inputs, 6 for each variant, 20 to compute
SIZES = Sizes(10 * GB, 4 * GB, 6 * GB, 20 * GB)


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        (80, 100, Room(True, True, 3)),  # 20 + 10 + 4 + 3 x 6 = 52
        (46, 100, Room(True, True, 2)),  # 34 + 2 x 6
        (39, 100, Room(True, False, 1)),  # 30 + 6, but not 34 + 6
        (35, 100, Room(False, False, 3)),  # pinned: half of 100 holds 10 + 3 x 6
        (35, 50, Room(False, False, 2)),
        (None, 46, Room(True, True, 2)),
        (None, 39, Room(True, False, 1)),
        (None, 16, Room(True, False, 1)),  # the streams alone
    ],
)
def test_the_plan_takes_the_first_place_with_room(device, host, expected):
    assert plan(SIZES, 3, device and device * GB, host * GB) == expected


@pytest.mark.parametrize(("device", "host"), [(None, 15), (35, 31)])
def test_a_variant_that_fits_nowhere_is_refused_with_its_size(device, host):
    with pytest.raises(UserError, match=r"take 16 GB on a rank, 15.* are free; start more ranks"):
        plan(SIZES, 1, device and device * GB, host * GB)


def test_sizes_are_those_of_the_streams(hf_dir):
    """In fp32, of a model of width 32 whose MLP's last linear reads 64."""
    sizes = sizes_of(open_model(hf_dir), calibration=100, evaluated=1000, forks=3, batch=8)
    assert sizes.variant == 4 * 32 * (100 + 3 * 1000)
    assert sizes.gated == 4 * 64 * 100
    assert sizes.shared == 4 * 32 * (2 * 1000 + 100)
