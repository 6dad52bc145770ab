"""Directories as others publish them: read as transformers reads them, or refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from base.errors import UserError
from ckpt_tools.averaging import average_models
from ckpt_tools.export import export
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.forward import check_shapes, empty_model, spread_ids, stream_logits
from ckpt_tools.hf.model import identify, load_hf_model
from ckpt_tools.importing import import_checkpoint
from ckpt_tools.verify import verify
from tests.digests import blake3_of
from tests.published import (
    KINDS,
    WEIGHTS,
    change_config,
    change_weights,
    logits_by_transformers,
    make_published,
    shard,
)
from tests.quant_eval.models import SHAPE, make_model

TOKENS = spread_ids(SHAPE["vocab_size"], 2, 21)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_transformers(tmp_path, kind):
    """Streamed by module, and loaded whole; the identity is of the files that were read."""
    directory = make_published(tmp_path / "model", kind)
    expected = logits_by_transformers(directory, TOKENS)
    assert expected.std() > 0.1
    with torch.no_grad():
        loaded = load_hf_model(directory, torch.float32)(TOKENS).logits
    for logits in (stream_logits(directory, TOKENS), loaded):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)

    index = directory / f"{WEIGHTS}.index.json"
    places = json.loads(index.read_text())["weight_map"] if index.exists() else {"all": WEIGHTS}
    names = set(places.values())
    assert identify(directory)["weights_digests"] == {n: blake3_of(directory / n) for n in names}
    assert "sound and finite" in verify(directory)["verdict"]


@pytest.mark.parametrize("kind", ["pythia", "old-llama"])
def test_an_import_has_every_parameter_and_no_buffer(tmp_path, kind):
    """Bit for bit, in its own dtype, and exported again for readers of either form of keys."""
    source = make_published(tmp_path / "source", kind)
    import_checkpoint(str(source), tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "back")
    weights = HFWeights(source)
    back = load_file(tmp_path / "back" / WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(source)
    assert len(back) == len(dict(model.named_parameters()))
    for name, tensor in back.items():
        stored = weights.read(name, 0, len(tensor))
        assert (stored.dtype, stored.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(stored, tensor)
    logits = logits_by_transformers(tmp_path / "back", TOKENS)
    torch.testing.assert_close(logits, logits_by_transformers(source, TOKENS), rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "plain"), [("pythia", "gpt_neox"), ("tied-copy", "llama-tied")])
def test_an_average_takes_models_with_and_without_what_is_skipped(tmp_path, kind, plain):
    """The mean of a directory and of its parameters alone are these parameters."""
    published = make_published(tmp_path / "published", kind)
    own = load_file(make_model(tmp_path / "own", plain) / WEIGHTS).keys()
    weights = load_file(published / WEIGHTS)
    save_file({name: weights[name] for name in own}, tmp_path / "own" / WEIGHTS, {"format": "pt"})
    (tmp_path / "own" / "config.json").write_bytes((published / "config.json").read_bytes())
    for name, inputs in (("first", ("published", "own")), ("last", ("own", "published"))):
        average_models(tmp_path / name, [tmp_path / each for each in inputs])
        mean = load_file(tmp_path / name / WEIGHTS)
        assert mean.keys() == own
        assert all(torch.equal(mean[key], weights[key]) for key in own)


def test_weights_of_two_dtypes_are_sound_if_one_is_that_of_the_configuration(tmp_path):
    """Norms in fp32 beside bf16, as some publish; a configuration of neither is another model's."""
    directory = make_model(tmp_path / "model", "olmo2")
    weights = load_file(directory / WEIGHTS)
    narrow = {name: each if "norm" in name else each.bfloat16() for name, each in weights.items()}
    save_file(narrow, directory / WEIGHTS, {"format": "pt"})
    for dtype in ("bfloat16", "float32"):
        change_config(directory, dtype=dtype)
        assert "sound and finite" in verify(directory)["verdict"]
    expected = logits_by_transformers(directory, TOKENS)
    torch.testing.assert_close(stream_logits(directory, TOKENS), expected, rtol=1e-5, atol=1e-5)
    change_config(directory, dtype="float16")
    with pytest.raises(UserError, match=r"config\.json says torch\.float16"):
        verify(directory)


def stale_beside_index(directory: Path) -> None:
    whole = load_file(directory / WEIGHTS)
    shard(directory)
    save_file({name: 0 * weight for name, weight in whole.items()}, directory / WEIGHTS)


def index_of_both(directory: Path) -> None:
    """transformers reads the one file and draws the rest."""
    stale_beside_index(directory)
    path = directory / f"{WEIGHTS}.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = WEIGHTS
    path.write_text(json.dumps(index))


def other_head(directory: Path) -> None:
    head = load_file(directory / WEIGHTS)["model.embed_tokens.weight"].flip(0).contiguous()
    change_weights(directory, **{"lm_head.weight": head})


def narrower_head(directory: Path) -> None:
    head = load_file(directory / WEIGHTS)["model.embed_tokens.weight"].bfloat16()
    change_weights(directory, **{"lm_head.weight": head})


def pointer_of_lfs(directory: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 999\n"
    (directory / WEIGHTS).write_text(pointer)


def adds(name: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        change_weights(directory, **{name: torch.ones(8)})

    return change


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("llama", stale_beside_index, "find out which is the model, and move the other"),
        ("llama", index_of_both, "find out which is the model, and move the other"),
        ("llama-tied", other_head, "'lm_head.weight' differs from 'model.embed_tokens.weight'"),
        ("llama-tied", narrower_head, "'lm_head.weight' differs from 'model.embed_tokens.weight'"),
        ("llama", pointer_of_lfs, "is a Git LFS pointer, the file itself was not fetched"),
        ("llama", adds("model.layers.0.self_attn.rotary_emb.cos"), "unknown"),
        ("llama", adds("model.layers.0.attention.bias"), "unknown"),
        ("gpt_neox", adds("gpt_neox.layers.0.attention.scale"), "unknown"),
        ("gpt_neox", adds("gpt_neox.layers.0.attention.bias.more"), "unknown"),
    ],
)
def test_what_is_no_model_or_two_models_is_refused(tmp_path, name, change, expected):
    """By whatever opens a model, and the files stay."""
    directory = make_model(tmp_path / "model", name)
    change(directory)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    for read in (
        lambda: load_hf_model(directory, torch.float32),
        lambda: stream_logits(directory, TOKENS),
        lambda: check_shapes(empty_model(read_config(directory)), HFWeights(directory), directory),
        lambda: verify(directory),
    ):
        with pytest.raises(UserError, match=expected):
            read()
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_grouped_queries_in_the_configuration_of_gpt_neox_mean_nothing(tmp_path):
    """transformers ignores the key, and so does an import."""
    source = make_published(tmp_path / "source", "pythia")
    change_config(source, num_key_value_heads=2)
    import_checkpoint(str(source), tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "back")
    logits = logits_by_transformers(tmp_path / "back", TOKENS)
    torch.testing.assert_close(logits, logits_by_transformers(source, TOKENS), rtol=0, atol=0)
