"""Rows read and shards written, against safetensors, torch's reader and transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Olmo2Config

from base.errors import UserError
from base.files import first_damage
from ckpt_tools.checkpoint import open_weights, verified_record
from ckpt_tools.formats import parallel
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.formats.weights import Described
from ckpt_tools.hf.forward import stream_logits
from tests.ckpt_tools.checkpoints import all_of
from tests.conftest import LAYOUTS
from train.run.config import load_run
from train.run.directory import MODEL_INDEX, RunDirectory, read_checkpoint_record


def rows_of_heads(
    whole: torch.Tensor, heads: int, kv_heads: int, dim: int
) -> dict[str, torch.Tensor]:
    """q, k and v of a fused megatron tensor, row by row as grouped queries are drawn."""
    parts: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": []}
    row = 0
    for _ in range(kv_heads):
        for part, count in (("q", heads // kv_heads), ("k", 1), ("v", 1)):
            for _ in range(count * dim):
                parts[part].append(whole[row])
                row += 1
    return {part: torch.stack(rows) for part, rows in parts.items()}


# Those whose files differ in kind; kernels and recomputation leave them as they are.
FORMATS = ("dp1", "dp2", "tp2pp2", "gqa-tp2", "bf16-dp2")
OTHERS = [name for name in LAYOUTS if name not in (*FORMATS, "ds-zero1")]


@pytest.mark.parametrize(
    "layout", [*FORMATS, *(pytest.param(name, marks=pytest.mark.stress) for name in OTHERS)]
)
def test_megatron_weights_are_what_torch_reads(trained, layout):
    """The witness loads tensors whole with torch's own reader and takes them apart by hand."""
    checkpoint = trained(layout) / "checkpoints" / "step00000020"
    model = load_run(trained(layout) / "run.json").model
    weights = all_of(open_weights(checkpoint, read_checkpoint_record(checkpoint)))
    reader = FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(tuple(value.size), dtype=value.properties.dtype)
        for key, value in stored.items()
        if isinstance(value, TensorStorageMetadata) and not key.startswith("optimizer.")
    }
    load(state, storage_reader=reader, no_dist=True)
    expected = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
        "lm_head.weight": state["output_layer.weight"],
    }
    for layer in range(2):
        inside = {
            key.removeprefix("decoder.layers."): value[layer]
            for key, value in state.items()
            if "layers" in key
        }
        here = f"model.layers.{layer}."
        fused = rows_of_heads(
            inside["self_attention.linear_qkv.weight"], 4, model.num_key_value_heads, 8
        )
        expected |= {f"{here}self_attn.{part}_proj.weight": rows for part, rows in fused.items()}
        expected[f"{here}mlp.gate_proj.weight"] = inside["mlp.linear_fc1.weight"][:64]
        expected[f"{here}mlp.up_proj.weight"] = inside["mlp.linear_fc1.weight"][64:]
        for hf_name, name in {
            "self_attn.o_proj": "self_attention.linear_proj",
            "self_attn.q_norm": "self_attention.q_layernorm",
            "self_attn.k_norm": "self_attention.k_layernorm",
            "mlp.down_proj": "mlp.linear_fc2",
            "post_attention_layernorm": "self_attention.linear_proj.post_norm",
            "post_feedforward_layernorm": "mlp.linear_fc2.post_norm",
        }.items():
            expected[f"{here}{hf_name}.weight"] = inside[f"{name}.weight"]
    assert weights.keys() == expected.keys()
    dtype = torch.bfloat16 if layout.startswith("bf16") else torch.float32
    for name, weight in weights.items():
        assert weight.dtype == dtype
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("layout", ["tp2pp2", "gqa-tp2", "ds-zero1"])
def test_any_rows_are_those_of_the_whole(trained, layout):
    checkpoint = trained(layout) / "checkpoints" / "step00000020"
    weights = open_weights(checkpoint, read_checkpoint_record(checkpoint))
    for name, whole in all_of(weights).items():
        count = len(whole)
        for start, stop in ((0, 1), (count // 2 - 3, count // 2 + 2), (count - 1, count)):
            assert torch.equal(weights.read(name, start, stop), whole[start:stop]), name


class Random:
    """Weights made of nothing: every row is a function of its tensor's name and its number."""

    def __init__(self, tensors: dict[str, Described]) -> None:
        self.tensors = tensors

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        shape, dtype = self.tensors[name].shape, self.tensors[name].dtype
        first = sum(map(ord, name)) * 1000
        rows = torch.arange(first + start, first + stop).view(-1, *[1] * (len(shape) - 1))
        return (rows * 0.37).sin().expand(stop - start, *shape[1:]).to(dtype).contiguous()


TENSORS = {
    "a": Described((40, 8), torch.float32),
    "b": Described((7,), torch.float32),
    "c": Described((300, 8), torch.bfloat16),
    "d": Described((5, 3, 2), torch.float16),
    "e": Described((0, 4), torch.float32),
}


@pytest.mark.parametrize("shard_bytes", [1, 1300, 1 << 30])
def test_shards_are_what_safetensors_reads_whatever_the_number_of_threads(
    tmp_path, monkeypatch, shard_bytes
):
    # several chunks of a tensor
    monkeypatch.setattr("ckpt_tools.formats.hf_writer.CHUNK_BYTES", 256)
    weights = Random(TENSORS)
    records = {}
    for threads in (1, 2):
        out = tmp_path / str(threads)
        out.mkdir()
        monkeypatch.setattr(parallel, "default_threads", lambda count=threads: count)
        records[threads] = write_weights(out, weights, shard_bytes=shard_bytes)
        assert first_damage(out, records[threads]) is None
        assert {path.name for path in out.iterdir()} == records[threads].keys()
    assert records[1] == records[2]
    tensors: dict[str, torch.Tensor] = {}
    for path in out.glob("*.safetensors"):
        tensors |= load_file(path)
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in tensors.items():
        expected = weights.read(name, 0, TENSORS[name].shape[0])
        assert torch.equal(tensor, expected)
    if shard_bytes < 1 << 30:
        index = json.loads((out / MODEL_INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        assert index["weight_map"].keys() == TENSORS.keys()
    again = all_of(HFWeights(out))
    assert all(torch.equal(again[name], tensors[name]) for name in TENSORS)


def climb(directory: Path) -> None:
    index = json.loads((directory / MODEL_INDEX).read_text())
    index["weight_map"]["a"] = "../elsewhere.safetensors"
    (directory / MODEL_INDEX).write_text(json.dumps(index))


def repeat(directory: Path) -> None:
    first, *_, last = sorted(directory.glob("*.safetensors"))
    save_file({**load_file(last), "a": torch.zeros(3)}, last)
    assert "a" in load_file(first)


def truncate(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (climb, "names '../elsewhere.safetensors', which is not a file beside it"),
        (repeat, "'a' is in"),
        (truncate, "is damaged"),
        (
            lambda out: sorted(out.glob("*.safetensors"))[1].unlink(),
            "which is not a file beside it",
        ),
        (lambda out: (out / MODEL_INDEX).write_text("{"), "is not valid JSON"),
        (lambda out: (out / MODEL_INDEX).write_text('{"weight_map": {}}'), "weight_map"),
        (lambda out: (out / MODEL_INDEX).unlink(), "holds no safetensors weights"),
    ],
    ids=["climbs", "twice", "truncated", "missing", "index", "empty index", "no index"],
)
def test_damaged_directories_are_refused(tmp_path, damage, expected):
    write_weights(tmp_path, Random(TENSORS), shard_bytes=1300)
    damage(tmp_path)
    with pytest.raises(UserError, match=expected.replace(".", r"\.")):
        HFWeights(tmp_path)


SHAPE: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "config",
    [
        Olmo2Config(**SHAPE, num_key_value_heads=2),
        LlamaConfig(**SHAPE, num_key_value_heads=2),
        LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=True),
        GPTNeoXConfig(**SHAPE, tie_word_embeddings=False),
    ],
    ids=["olmo2", "llama", "llama tied", "gpt_neox"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_logits_are_those_of_transformers(tmp_path, monkeypatch, config, dtype):
    # a few rows of a matrix at a time
    monkeypatch.setattr("ckpt_tools.hf.forward.CHUNK_BYTES", 1000)
    torch.manual_seed(1)
    eager: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_config(config, **eager)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.to(dtype).save_pretrained(tmp_path)
    input_ids = torch.randint(320, (2, 21))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, **eager)
    with torch.no_grad():
        expected = reference(input_ids).logits
    logits = stream_logits(tmp_path, input_ids)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("layout", ["tp2pp2", "ds-zero1"])
def test_every_damaged_file_of_a_checkpoint_is_named(trained, tmp_path, layout):
    """A byte flipped anywhere, a file cut short, a file gone: for every file of the checkpoint.

    The full check names each; so does an export those that it reads, and only those stop it.
    """
    from ckpt_tools.export import export

    shutil.copytree(trained(layout), tmp_path / "run")
    checkpoint = RunDirectory(tmp_path / "run").checkpoint(20)
    unread = []
    for name in read_checkpoint_record(checkpoint).files:
        path, whole = checkpoint / name, (checkpoint / name).read_bytes()
        if name.startswith(("optimizer", "common.pt", "metadata.json")):
            unread.append(path)
            path.write_bytes(whole[:-1])
            with pytest.raises(UserError, match=f"{name} has .* bytes instead of"):
                verified_record(checkpoint)
            path.write_bytes(whole)
            continue
        for position in (0, len(whole) // 2, len(whole) - 1):
            flipped = bytearray(whole)
            flipped[position] ^= 16
            path.write_bytes(flipped)
            with pytest.raises(UserError, match=f"{name} was changed"):
                export(checkpoint, tmp_path / "hf")
            with pytest.raises(UserError, match=f"{name} was changed"):
                verified_record(checkpoint)
        path.write_bytes(whole[:-1])
        with pytest.raises(UserError, match=f"{name} has .* bytes instead of"):
            export(checkpoint, tmp_path / "hf")
        path.unlink()
        with pytest.raises(UserError, match=f"{name} is missing"):
            export(checkpoint, tmp_path / "hf")
        path.write_bytes(whole)
    assert not (tmp_path / "hf").exists()
    assert any(path.name.startswith("optimizer") for path in unread)
    for path in unread:
        path.unlink()
    export(checkpoint, tmp_path / "hf")
