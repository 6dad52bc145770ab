"""Faults planted in the converter: an export that takes the weights apart wrongly is refused, by
the right name.
"""

import re
from typing import Any

import pytest

from base.errors import UserError
from ckpt_tools.export import export
from tests.probes import accused, name_of
from train.model import megatron_names
from train.model.config import parameter_shapes


def spans_in_a_row(name: str, model: Any) -> dict[str, list[tuple[int, int]]]:
    """Rows as `megatron_names.hf_rows` would give them if a fused tensor held all queries, then all keys,
    then all values.
    """
    before, rows = 0, {}
    for hf_name in megatron_names.hf_names(name):
        count = parameter_shapes(model)[hf_name][0]
        rows[hf_name] = [(before, before + count)]
        before += count
    return rows


def names_backwards(name: str) -> list[str]:
    """Names as `megatron_names.hf_names` would give them if up came before gate."""
    entry, prefix = megatron_names._entry(name)
    names = [prefix + hf_name for hf_name in entry.hf_names]
    return names[::-1] if entry.fusion == "gate_up" else names


def names_of_the_next_layer(name: str) -> list[str]:
    """Names as `megatron_names.hf_names` would give them if layers were counted from the last."""
    entry, prefix = megatron_names._entry(name)
    next_prefix = re.sub(r"\d+", lambda match: str(1 - int(match[0])), prefix)
    return [next_prefix + hf_name for hf_name in entry.hf_names]


@pytest.mark.parametrize(
    ("layout_name", "function", "wrong", "expected"),
    [
        ("tp2", "hf_rows", spans_in_a_row, "self_attn.{q,k,v}_proj"),
        ("gqa-dp1", "hf_rows", spans_in_a_row, "self_attn.{q,k,v}_proj"),
        ("dp1", "hf_names", names_backwards, "mlp.{gate,up}_proj"),
        ("pp2", "hf_names", names_of_the_next_layer, "self_attn.{q,k,v}_proj"),
    ],
    ids=["mha", "gqa", "gate and up", "layers"],
)
def test_a_wrong_converter_is_refused_by_name(
    trained, tmp_path, monkeypatch, layout_name, function, wrong, expected
):
    """The engine's outputs are read without `train.model.megatron_names`, so both cannot be
    wrong in the same way.
    """
    monkeypatch.setattr(megatron_names, function, wrong)
    with pytest.raises(UserError) as caught:
        export(trained(layout_name) / "checkpoints" / "step00000020", tmp_path / "hf")
    before, parts, after = re.split(r"[{}]", expected)
    assert accused(str(caught.value)) == {
        name_of(0, f"{before}{part}{after}") for part in parts.split(",")
    }
    assert not (tmp_path / "hf").exists()


def test_swapped_norms_of_the_converter_are_refused_by_name(trained, tmp_path, monkeypatch):
    attention, feedforward = (
        "self_attention.linear_proj.post_norm.weight",
        "mlp.linear_fc2.post_norm.weight",
    )
    entries = megatron_names.INSIDE_LAYER
    swapped = dict(entries) | {attention: entries[feedforward], feedforward: entries[attention]}
    monkeypatch.setattr(megatron_names, "INSIDE_LAYER", swapped)
    with pytest.raises(UserError) as caught:
        export(trained("dp1") / "checkpoints" / "step00000020", tmp_path / "hf")
    assert accused(str(caught.value)) == {name_of(0, "post_attention_layernorm")}
