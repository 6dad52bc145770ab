"""Imports: there and back bit for bit, computed with as by transformers, refused by name."""

import json
import math
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.hf_api import ModelInfo
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

from base.errors import UserError
from base.files import record_files, sha256_of, write_json
from ckpt_tools.checkpoint import verified_record
from ckpt_tools.export import export
from ckpt_tools.hf.directory import DOWNLOAD_JSON, DownloadRecord
from ckpt_tools.importing import import_checkpoint, read_trainable
from tests.conftest import VOCAB_SIZE, make_hf_directory, widths
from tests.digests import blake3_of
from tests.quant_eval.models import random_model
from tests.runs import make_run, on_ranks
from tests.sealing import reseal
from train.model.config import ModelConfig, parameter_shapes
from train.run.config import StartFrom, load_run

# As in OLMo2 1B, 7B, 13B and 32B: heads, ratio of the MLP's width to the model's; 32B has 5 queries
# to a key.
SHAPES = {
    "1b": widths(64, 256, 16, 16),
    "7b": widths(64, 172, 32, 32),
    "13b": widths(80, 216, 40, 40),
    "32b": widths(80, 432, 40, 8),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL: dict[str, Any] = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3: dict[str, Any] = {
    **{"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
# Models of `tests.quant_eval.models`, with settings that runs know.
OTHERS: dict[str, dict[str, Any]] = {
    "llama-tied": {"rope_parameters": LLAMA3},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},  # with wider heads than hidden_size / heads
    "smollm3": {"no_rope_layers": None, "num_hidden_layers": 4},
    "olmo": {"clip_qkv": None, "tie_word_embeddings": True},
    "apertus": {},
}


def make_source(root: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """An HF directory of a family or of an OLMo2's shape, with the marks of a tokenizer."""
    directory = root / name
    if name in SHAPES:
        make_hf_directory(directory, dtype=dtype, **SHAPES[name])
    elif name in OTHERS:
        random_model(name, **OTHERS[name]).to(dtype).save_pretrained(directory)
    else:
        config: Any = LlamaConfig(
            **SMALL, num_key_value_heads=2, rope_parameters=ROPE, rms_norm_eps=1e-5
        )
        if name == "gpt_neox":
            config = GPTNeoXConfig(**SMALL, rope_parameters=ROPE | {"partial_rotary_factor": 0.25})
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).save_pretrained(
            directory
        )
    (directory / "tokenizer.json").write_text("as it is\n")
    return directory


def same_weights(left: Path, right: Path) -> bool:
    before, after = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    return before.keys() == after.keys() and all(
        before[name].dtype == after[name].dtype and before[name].equal(after[name])
        for name in before
    )


CASES = [(name, dtype) for name in SHAPES for dtype in ("fp32", "bf16")]
CASES += [(name, "bf16") for name in ("llama", "llama-tied", "qwen2", "qwen3", "smollm3", "olmo")]
CASES += [("gpt_neox", "bf16"), ("gpt_neox", "fp16")]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_there_and_back_again_every_bit_is_the_same(tmp_path, capsys, name, dtype):
    """Weights, configuration and tokenizer."""
    source = make_source(tmp_path, name, DTYPES[dtype])
    checkpoint = tmp_path / "checkpoint"
    import_checkpoint(str(source), checkpoint)
    start_from = json.loads("{" + capsys.readouterr().out.splitlines()[-1] + "}")["start_from"]
    assert StartFrom(**start_from).sha256 == sha256_of(checkpoint / "checkpoint.json")
    record = verified_record(checkpoint)
    assert (record.precision, record.step, record.tokens) == (dtype, 0, 0)
    assert record.imported is not None
    assert record.imported["weights_digests"] == {
        "model.safetensors": blake3_of(source / "model.safetensors")
    }
    assert record.imported["tokenizer_digests"] == {
        "tokenizer.json": blake3_of(source / "tokenizer.json")
    }
    assert record.files.keys() == record_files(checkpoint).keys() - {"checkpoint.json"}
    export(checkpoint, tmp_path / "back")
    assert same_weights(source, tmp_path / "back")
    for file in ("generation_config.json", "tokenizer.json"):
        assert (source / file).read_bytes() == (tmp_path / "back" / file).read_bytes()
    config, back = (
        json.loads((place / "config.json").read_text()) for place in (source, tmp_path / "back")
    )
    assert {key: back[key] for key in config} == config  # more: keys by older names


def probe_in_engine(run_dir: str, checkpoint: str, out: str) -> None:
    """Worker, on every rank: starts the engine from an import; rank 0 saves its logits."""
    import torch.distributed as dist

    from train.distributed import start
    from train.engines import build_engine

    run, device = load_run(Path(run_dir) / "run.json"), start()
    engine, weights = build_engine(run, device), load_file(Path(checkpoint) / "model.safetensors")
    engine.start_from(weights.__getitem__)
    logits = engine.probe(
        load_file(Path(checkpoint) / "probe.safetensors")["input_ids"][:, :32]
    ).get("logits")
    if dist.get_rank() == 0:
        assert logits is not None
        save_file({"logits": logits.contiguous()}, out)
    engine.close()


@pytest.mark.parametrize(
    ("engine", "layout_of_run"), [("megatron", {"tensor": 2}), ("deepspeed", {})]
)
def test_the_engine_computes_with_the_weights_what_transformers_does(
    tmp_path, inputs, engine, layout_of_run
):
    """At another layout too, with 5 queries to a key; transformers by eager attention."""
    source, checkpoint = make_source(tmp_path, "32b"), tmp_path / "checkpoint"
    import_checkpoint(str(source), checkpoint)
    model = ModelConfig(**verified_record(checkpoint).model)
    make_run(tmp_path / "run", **inputs, engine=engine, model=model, **layout_of_run)
    words = (tmp_path / "run", checkpoint, tmp_path / "logits.safetensors")
    on_ranks(layout_of_run.get("tensor", 1), probe_in_engine, *words)
    probe = load_file(checkpoint / "probe.safetensors")
    reference = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
    with torch.no_grad():
        expected = reference(probe["input_ids"]).logits
    assert expected.std() > 0.1
    assert (expected - probe["logits"]).abs().max() <= 1e-5
    logits = load_file(tmp_path / "logits.safetensors")["logits"]
    assert (logits - expected[:, :32]).abs().max() <= 2e-5


def edit(source: Path, **changes: Any) -> None:
    path = source / "config.json"
    config = json.loads(path.read_text())
    write_json(
        path, {key: value for key, value in (config | changes).items() if value != "removed"}
    )


def test_both_spellings_of_rope_theta_mean_the_same(tmp_path):
    """Values that models released before transformers 5 have in config.json beside their sizes."""
    source = make_source(tmp_path, "llama")
    older = {"rope_parameters": "removed", "rope_theta": 10_000, "rope_scaling": None}
    older |= {"pretraining_tp": 1, "torch_dtype": "float32", "bos_token_id": 1}
    for name, changes in (("new", {}), ("old", older)):
        edit(source, **changes)
        import_checkpoint(str(source), tmp_path / name)
    old, new = (verified_record(tmp_path / name) for name in ("old", "new"))
    assert old.model == new.model
    assert old.model["rope_theta"] == 10_000
    assert old.files["probe.safetensors"] == new.files["probe.safetensors"]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SCALED = {"rope_type": "linear", "factor": 2.0}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("7b", {"rope_parameters": "removed", "rope_scaling": SCALED}, "rope_parameters is"),
    ("7b", {"attention_bias": True}, "attention_bias is True, runs of this family are trained"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True"),
    ("7b", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("7b", {"sliding_window": 128}, "sliding_window is 128, runs of this family are trained"),
    ("7b", {"head_dim": 16}, "olmo2 has heads of hidden_size / num_attention_heads"),
    ("llama", {"rope_parameters": ROPE | YARN}, "rope_parameters is {'"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
    ("smollm3", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers is [1, 0, 1], runs of this"),
    ("olmo", {"clip_qkv": 8.0}, "clip_qkv is 8.0, runs of this family are trained with None"),
    ("apertus", {"use_cache": False}, "is of ApertusForCausalLM; give one of Olmo2ForCausalLM"),
    ("gpt_neox", {"use_parallel_residual": False}, "use_parallel_residual is False"),
    ("7b", {"architectures": ["Olmo3ForCausalLM"]}, "is of Olmo3ForCausalLM; give one of"),
    ("7b", {"num_attention_heads": 24}, "64 does not divide over num_attention_heads 24"),
    ("7b", {"intermediate_size": 100}, "the model needs (100, 64)"),
]


@pytest.mark.parametrize(
    ("name", "changes", "expected"), REFUSED, ids=[list(changes)[-1] for _, changes, _ in REFUSED]
)
def test_what_runs_do_not_know_is_refused_by_name(tmp_path, name, changes, expected):
    source = make_source(tmp_path, name)
    edit(source, **changes)
    with pytest.raises(UserError) as caught:
        import_checkpoint(str(source), tmp_path / "out")
    assert expected in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


# Of config.json as published, what decides the architecture and what its authors' tools added.
ROPE_32 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "HuggingFaceTB/SmolLM2-135M": (
        134_515_008,
        {
            **widths(576, 1536, 9, 3, vocab_size=49_152, num_hidden_layers=30),
            **{"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            **{"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None},
            **{"rope_theta": 100_000, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192},
        },
    ),
    "HuggingFaceTB/SmolLM3-3B-Base": (
        3_075_098_624,
        {
            **widths(2048, 11_008, 16, 4, vocab_size=128_256, num_hidden_layers=36),
            **{"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"},
            **{"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9},
            **{"rope_theta": 5e6, "max_position_embeddings": 65_536, "pretraining_tp": 2},
        },
    ),
    "meta-llama/Llama-3.2-1B": (
        1_235_814_400,
        {
            **widths(2048, 8192, 32, 8, vocab_size=128_256, num_hidden_layers=16, head_dim=64),
            **{"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            **{"rope_theta": 5e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072},
            "rope_scaling": ROPE_32
            | {"original_max_position_embeddings": 8192, "rope_type": "llama3"},
        },
    ),
    "Qwen/Qwen2.5-0.5B": (
        494_032_768,
        {
            **widths(896, 4864, 14, 2, vocab_size=151_936, num_hidden_layers=24),
            **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_mrope": False},
            **{"max_window_layers": 24, "sliding_window": 32_768, "use_sliding_window": False},
            **{"rope_theta": 1e6, "max_position_embeddings": 32_768},
        },
    ),
    "Qwen/Qwen3-0.6B-Base": (
        596_049_920,
        {
            **widths(1024, 3072, 16, 8, vocab_size=151_936, num_hidden_layers=28, head_dim=128),
            **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
            **{"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False},
            **{"rope_theta": 1_000_000, "max_position_embeddings": 32_768},
        },
    ),
    "allenai/OLMo-1B-hf": (
        1_176_764_416,
        {
            **widths(2048, 8192, 16, 16, vocab_size=50_304, num_hidden_layers=16),
            **{"architectures": ["OlmoForCausalLM"], "model_type": "olmo", "pretraining_tp": 1},
            **{"clip_qkv": None, "rope_theta": 10_000.0, "max_position_embeddings": 2048},
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_small_models_that_are_published_can_be_trained(tmp_path, name):
    """As many parameters as their files have on the hub, the embedding once."""
    parameters, config = PUBLISHED[name]
    common = {"tie_word_embeddings": True, "attention_dropout": 0.0, "hidden_act": "silu"}
    write_json(tmp_path / "config.json", common | config)
    model, _ = read_trainable(tmp_path)
    assert sum(map(math.prod, parameter_shapes(model).values())) == parameters


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ({}, f"missing ['{NORM}']"),
        ({NORM: torch.ones(64), "extra": torch.ones(3)}, "unknown ['extra']"),
        ({NORM: torch.ones(3)}, f"'{NORM}' is (3,), the model needs (64,)"),
        ({NORM: torch.ones(64).bfloat16()}, f"'{NORM}' is torch.bfloat16, all weights must be of"),
        ({NORM: torch.ones(64).half()}, f"'{NORM}' is torch.float16, all weights must be of one"),
    ],
    ids=["missing", "unknown", "shape", "mixed", "fp16"],
)
def test_every_key_counts_once_and_has_the_same_type(tmp_path, added, expected):
    source = make_source(tmp_path, "7b")
    weights = load_file(source / "model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if name != NORM} | added
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as caught:
        import_checkpoint(str(source), tmp_path / "out")
    assert expected in str(caught.value)


def test_an_import_that_is_there_is_kept_and_another_refused(tmp_path):
    source, out = make_source(tmp_path, "llama"), tmp_path / "out"
    import_checkpoint(str(source), out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    import_checkpoint(str(source), out)
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(UserError, match="exists and is not this import"):
        import_checkpoint(str(make_source(tmp_path / "other", "llama")), out)


def test_lineage_is_believed_and_checked(tmp_path):
    source = make_source(tmp_path, "7b")
    files = {name: record.model_dump() for name, record in record_files(source).items()}
    reseal(source / "lineage.json", {"step": 11, "tokens": 13, "files": files})
    import_checkpoint(str(source), tmp_path / "out")
    record = verified_record(tmp_path / "out")
    assert (record.step, record.tokens) == (11, 13)
    (source / "tokenizer.json").write_text("as it Is\n")
    with pytest.raises(UserError, match=r"tokenizer\.json was changed"):
        import_checkpoint(str(source), tmp_path / "again")


def test_a_revision_of_the_hub_is_fetched_by_name(tmp_path, monkeypatch):
    """A directory is the hub; without network, and for what is no name, there is one line."""
    snapshot = make_source(tmp_path, "7b")
    asked: dict[str, Any] = {}

    def fetch(_: HfApi, repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(snapshot)

    def info(_: HfApi, repository: str, revision: str) -> ModelInfo:
        asked.update(named=(repository, revision))
        names = [{"rfilename": path.name} for path in snapshot.iterdir()]
        return ModelInfo(id=repository, sha="a commit", siblings=names)

    repository, revision = "allenai/OLMo-2-1124-7B", "stage1-step1000-tokens5B"
    with monkeypatch.context() as patched:
        patched.setattr(HfApi, "snapshot_download", fetch)
        patched.setattr(HfApi, "model_info", info)
        import_checkpoint(f"{repository}@{revision}", tmp_path / "out")
    assert asked["named"] == (repository, revision)
    assert (asked["repository"], asked["revision"]) == (repository, "a commit")
    code = ("pytorch_model.bin", "m.py")
    assert not any(fnmatch(name, each) for name in code for each in asked["allow_patterns"])
    record = verified_record(tmp_path / "out")
    assert record.imported is not None
    assert (record.imported["source"], record.imported["revision"]) == (repository, revision)
    assert (record.step, record.tokens) == (1000, 1000 * 1024 * 4096)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    nowhere = "is not a directory; give an HF directory, or a model of the hub as OWNER/NAME@"
    for source, expected in (
        (f"{repository}@{revision}", "was not reached"),
        ("no-such-directory", nowhere),
    ):
        with pytest.raises(UserError, match=expected):
            import_checkpoint(source, tmp_path / "other")


def test_a_local_revision_is_known_by_its_download(tmp_path):
    """`ckpt_tools download` leaves a record whose hashes are checked."""
    repository, revision = "allenai/OLMo-2-1124-7B", "stage1-step1000-tokens5B"
    elsewhere = make_source(tmp_path, "7b").rename(tmp_path / "elsewhere")
    download = DownloadRecord(
        repo=repository, revision=revision, commit=None, files=record_files(elsewhere)
    )
    reseal(elsewhere / DOWNLOAD_JSON, download.model_dump())
    import_checkpoint(str(elsewhere), tmp_path / "out")
    record = verified_record(tmp_path / "out")
    assert record.imported is not None
    assert (record.step, record.tokens) == (1000, 1000 * 1024 * 4096)
    assert record.imported["revision"] == revision
    (elsewhere / "tokenizer.json").write_text("as it Is\n")
    with pytest.raises(UserError, match=r"tokenizer\.json was changed"):
        import_checkpoint(str(elsewhere), tmp_path / "again")
