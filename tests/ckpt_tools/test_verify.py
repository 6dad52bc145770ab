"""Verification: every fault in an HF directory is found and called by its name."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from base.errors import UserError
from ckpt_tools.export import export
from ckpt_tools.probe import check_probe
from ckpt_tools.verify import verify
from tests.ckpt_tools.checkpoints import seal_export
from tests.conftest import make_hf_directory
from tests.probes import accused, name_of
from tests.sealing import reseal
from train.model import megatron_names
from train.model.config import parameter_shapes

Weights = dict[str, Tensor]
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

Q1, K1, V1 = (name_of(1, f"self_attn.{part}_proj") for part in "qkv")
GATE1, UP1 = (name_of(1, f"mlp.{part}_proj") for part in ("gate", "up"))
O1, DOWN1 = name_of(1, "self_attn.o_proj"), name_of(1, "mlp.down_proj")


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> Callable[[str], Path]:
    """`exported(layout)`: the HF directory of its last checkpoint."""
    root = tmp_path_factory.mktemp("hf")

    def directory_of(name: str) -> Path:
        export(trained(name) / "checkpoints" / "step00000020", root / name)
        return root / name

    return directory_of


def planted(source: Path, out: Path, change: Callable[[Weights], object]) -> Path:
    """A copy of an export whose weights are changed, and whose hashes do not tell."""
    shutil.copytree(source, out)
    weights = load_file(out / "model.safetensors")
    change(weights)
    tensors = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    seal_export(out)
    return out


def refusal(hf_dir: Path) -> str:
    with pytest.raises(UserError) as caught:
        verify(hf_dir)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith((" again", "restore both"))
    return str(caught.value)


def swap(weights: Weights, name: str, other: str) -> None:
    weights[name], weights[other] = weights[other], weights[name]


def swap_layers(weights: Weights) -> None:
    for name in [name for name in weights if name.startswith("model.layers.0.")]:
        swap(weights, name, name.replace("layers.0.", "layers.1."))


def split_contiguously(weights: Weights) -> None:
    """Takes [q k v] per group, as megatron fuses them, for all q, then all k, then all v."""
    query, key, value = weights[Q1], weights[K1], weights[V1]
    head, rows = 8, []
    per_group = len(query) // len(key) * head
    for group in range(len(key) // head):
        rows += [query[group * per_group : (group + 1) * per_group]]
        rows += [key[group * head : (group + 1) * head], value[group * head : (group + 1) * head]]
    weights[Q1], weights[K1], weights[V1] = torch.cat(rows).split(
        [len(query), len(key), len(value)]
    )


def interleave_gate_and_up(weights: Weights) -> None:
    both = torch.cat([weights[GATE1], weights[UP1]])
    weights[GATE1], weights[UP1] = both[::2], both[1::2]


def roll(weights: Weights) -> None:
    weights[EMBEDDING] = weights[EMBEDDING].roll(1, 0)


def transpose(name: str) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name: weights[name].T})


NORMS1 = [name_of(1, f"post_{part}_layernorm") for part in ("attention", "feedforward")]
QK_NORMS1 = [name_of(1, f"self_attn.{part}_norm") for part in "qk"]
# what is done to the weights, and the parameters to be named
FAULTS: dict[str, tuple[Callable[[Weights], object], set[str]]] = {
    "q, k, v taken apart contiguously": (split_contiguously, {Q1, K1, V1}),
    "k and v swapped": (lambda weights: swap(weights, K1, V1), {K1, V1}),
    "gate and up swapped": (lambda weights: swap(weights, GATE1, UP1), {GATE1, UP1}),
    "gate and up taken apart row by row": (interleave_gate_and_up, {GATE1, UP1}),
    "q transposed": (transpose(Q1), {Q1}),
    "o transposed": (transpose(O1), {O1}),
    "value heads rolled": (lambda weights: weights.update({V1: weights[V1].roll(8, 0)}), {V1}),
    "down halved": (lambda weights: weights[DOWN1].mul_(0.5), {DOWN1}),
    "layers swapped": (swap_layers, {name_of(0, f"self_attn.{part}_proj") for part in "qkv"}),
    "embedding rows shifted": (roll, {EMBEDDING}),
    "lm_head rows shifted": (lambda w: w.update({HEAD: w[HEAD].roll(1, 0)}), {HEAD}),
    "lm_head for embedding": (lambda weights: swap(weights, EMBEDDING, HEAD), {EMBEDDING}),
    "final norm doubled": (lambda weights: weights[NORM].mul_(2), {NORM}),
    "norms swapped": (
        lambda weights: swap(weights, *NORMS1),
        {NORMS1[0]},
    ),  # the other's input is wrong already
}
SAME_WIDTHS: dict[str, tuple[Callable[[Weights], object], set[str]]] = {
    "q and k swapped": (lambda weights: swap(weights, Q1, K1), {Q1, K1}),
    "q and k norms swapped": (lambda weights: swap(weights, *QK_NORMS1), set(QK_NORMS1)),
}


@pytest.mark.parametrize("layout_name", ["dp1", "gqa-tp2", "bf16-dp1"])
def test_planted_faults_are_called_by_name(exported, tmp_path, layout_name):
    """In bf16 this short run's q and k norms are within rounding of each other: left out."""
    faults = FAULTS if "gqa" in layout_name else FAULTS | SAME_WIDTHS
    source = exported(layout_name)
    verify(source)
    for fault, (change, expected) in faults.items():
        if "bf16" in layout_name and fault == "q and k norms swapped":
            continue
        line = refusal(planted(source, tmp_path / fault, change))
        assert accused(line) == expected, fault


def test_one_changed_element_of_any_parameter_is_found(exported, tmp_path):
    """By the largest of its tensor; of the embedding, in the row of a token of the probe."""
    hf_dir = shutil.copytree(exported("dp1"), tmp_path / "hf")
    probe = load_file(hf_dir / "verification" / "probe.safetensors")
    weights = load_file(hf_dir / "model.safetensors")
    for name, weight in weights.items():
        element = (int(probe["input_ids"][0, 5]) if name == EMBEDDING else 3, 3)[: weight.ndim]
        kept = weight[element].item()
        weight[element] += weight.abs().max()
        save_file(weights, hf_dir / "model.safetensors", metadata={"format": "pt"})
        weight[element] = kept
        with pytest.raises(UserError) as caught:
            check_probe(hf_dir, probe, "fp32")
        assert accused(str(caught.value)) == {name}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda w: w.update(renamed=w.pop(DOWN1)), f"missing ['{DOWN1}'] and unknown ['renamed']"),
        (
            lambda w: w.update({O1: torch.ones(4, 32)}),
            f"'{O1}' is (4, 32), the model needs (32, 32",
        ),
        (lambda w: w.update({O1: w[O1].bfloat16()}), f"'{O1}' is torch.bfloat16, config.json says"),
        (lambda w: w[V1][0, 0].fill_(torch.nan), f"'{V1}' holds values that are not finite"),
        (lambda w: w[GATE1][-1, -1].fill_(-torch.inf), f"'{GATE1}' holds values that are not"),
    ],
    ids=["key", "shape", "dtype", "nan", "infinity"],
)
def test_wrong_tensors_are_called_by_name(exported, tmp_path, change, expected):
    assert expected in refusal(planted(exported("dp1"), tmp_path / "hf", change))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5.0}, "(or heads and rope"),
        ("num_attention_heads", 2, "o_proj.weight (or heads and rope"),
        (
            "rms_norm_eps",
            0.1,
            f"{name_of(0, 'self_attn.q_norm')}, {name_of(0, 'self_attn.k_norm')};",
        ),
        ("num_hidden_layers", 1, "unknown ['model.layers.1."),
    ],
)
def test_a_wrong_configuration_is_found(exported, tmp_path, key, value, expected):
    shutil.copytree(exported("dp1"), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    changes: dict[str, Any] = {key: value}
    if key == "num_attention_heads":
        changes["num_key_value_heads"] = value
    if key == "rope_parameters":
        changes["rope_theta"] = value["rope_theta"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | changes))
    seal_export(tmp_path / "hf")
    assert expected in refusal(tmp_path / "hf")


def test_the_figures_are_those_of_the_probe(exported, tmp_path):
    """With all of lm_head scaled, logits are off by that much and nothing else is."""
    source = exported("tp2")
    report = verify(source)
    assert report["parity"] == json.loads((source / "lineage.json").read_text())["parity"]
    probe = load_file(source / "verification" / "probe.safetensors")
    logits = probe["logits"].clone()
    changed = check_probe(source, probe | {"logits": logits * (1 + 1e-5)}, "fp32")
    assert changed["logits"] == pytest.approx(1e-5, rel=0.1)
    assert changed["max_logit"] == pytest.approx(logits.abs().max().item(), rel=1e-4)
    assert changed["max_absolute_error"] == pytest.approx(1e-5 * changed["max_logit"], rel=0.1)
    assert {key: changed[key] for key in ("attention", "layer")} == {
        key: report["parity"][key] for key in ("attention", "layer")
    }
    for worse, expected in (
        ("logits", "lm_head.weight"),
        ("outputs/model.layers.1", "the sum in model.layers.1"),
    ):
        with pytest.raises(UserError) as caught:
            check_probe(source, probe | {worse: probe[worse] * (1 + 1e-4)}, "fp32")
        assert accused(str(caught.value)) == {expected}
    with pytest.raises(UserError, match=r"see 'outputs/model\.norm'"):
        check_probe(
            source, {key: probe[key] for key in probe if key != "outputs/model.norm"}, "fp32"
        )
    with pytest.raises(UserError, match=r"is \(2, 8\), config.json makes it \(2, 32\)"):
        check_probe(source, probe | {"outputs/model.norm": torch.ones(2, 8)}, "fp32")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("verification/probe.safetensors", "probe.safetensors is missing"),
        ("tokenizer.json", "tokenizer.json is missing"),
    ],
)
def test_missing_files_are_called_by_name(exported, tmp_path, name, expected):
    shutil.copytree(exported("dp1"), tmp_path / "hf")
    (tmp_path / "hf" / name).unlink()
    assert expected in refusal(tmp_path / "hf")
    if "probe" in name:
        seal_export(tmp_path / "hf")  # a lineage that never knew of one
        assert "probe.safetensors is not in lineage.json" in refusal(tmp_path / "hf")


def test_weights_that_lineage_does_not_know_are_refused(exported, tmp_path):
    shutil.copytree(exported("dp1"), tmp_path / "hf")
    lineage = json.loads((tmp_path / "hf" / "lineage.json").read_text())
    del lineage["files"]["model.safetensors"]
    reseal(tmp_path / "hf" / "lineage.json", lineage)
    assert "model.safetensors is not in lineage.json" in refusal(tmp_path / "hf")


def test_a_directory_without_a_probe_is_told_so(hf_dir, tmp_path):
    """Directories of others, and averages: nothing vouches for the weights, but what is unsound is named."""
    report = verify(hf_dir)
    assert "no engine's probe vouches" in report["verdict"]
    shutil.copytree(hf_dir, tmp_path / "average")
    seal_export(tmp_path / "average", kind="average")
    assert verify(tmp_path / "average")["verdict"] == report["verdict"]
    weights = tmp_path / "average" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    with pytest.raises(UserError, match=r"was changed .*; make .*average again"):
        verify(tmp_path / "average")
    loud = make_hf_directory(tmp_path / "loud")
    tensors = load_file(loud / "model.safetensors")
    tensors[O1] = torch.full_like(tensors[O1], 3e38)
    save_file(tensors, loud / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"'model\.layers\.1\.self_attn\.o_proj' overflows"):
        verify(loud)


def spans_in_a_row(name: str, model: Any) -> dict[str, list[tuple[int, int]]]:
    """Rows as `hf_rows` would give them if a fused tensor held all q, then all k, then all v."""
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


def swapped_norms() -> dict[str, Any]:
    """`megatron_names.INSIDE_LAYER` if the norms after attention and MLP were taken for each other."""
    entries = dict(megatron_names.INSIDE_LAYER)
    first, second = (name for name in entries if name.endswith(".post_norm.weight"))
    return entries | {first: entries[second], second: entries[first]}


QKV = [f"self_attn.{part}_proj" for part in "qkv"]


@pytest.mark.parametrize(
    ("layout_name", "replaced", "wrong", "expected"),
    [
        ("tp2", "hf_rows", spans_in_a_row, QKV),
        ("gqa-dp1", "hf_rows", spans_in_a_row, QKV),
        ("dp1", "hf_names", names_backwards, ["mlp.gate_proj", "mlp.up_proj"]),
        ("pp2", "hf_names", names_of_the_next_layer, QKV),
        ("dp1", "INSIDE_LAYER", swapped_norms(), ["post_attention_layernorm"]),
    ],
    ids=["mha", "gqa", "gate and up", "layers", "norms"],
)
def test_a_wrong_converter_is_refused_by_name(
    trained, tmp_path, monkeypatch, layout_name, replaced, wrong, expected
):
    """Outputs are read without `train.model.megatron_names`: both cannot be wrong alike."""
    monkeypatch.setattr(megatron_names, replaced, wrong)
    with pytest.raises(UserError) as caught:
        export(trained(layout_name) / "checkpoints" / "step00000020", tmp_path / "hf")
    assert accused(str(caught.value)) == {name_of(0, module) for module in expected}
    assert not (tmp_path / "hf").exists()
