"""What averages refuse, by name and with nothing written, and averages made again from their lineage."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools.averaging.average import average_models, rebuild
from tests.ckpt_tools.checkpoints import seal
from tests.conftest import make_hf_directory
from tests.runs import error_line, python
from train.command import UserError
from train.run_directory import RunDirectory, record_files, write_json

Q_NORM = "model.layers.1.self_attn.q_norm.weight"
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tokenizer_dir) -> Path:
    """A directory with two models and their tokenizer, `a` without and `b` with a lineage."""
    root = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate("ab"):
        shutil.copytree(tokenizer_dir, make_hf_directory(root / name, seed=seed), dirs_exist_ok=True)
    seal_lineage(root / "b")
    return root


def seal_lineage(hf_dir: Path) -> None:
    """A lineage that vouches for the files as they are now."""
    (hf_dir / "lineage.json").unlink(missing_ok=True)
    files = {name: record.model_dump() for name, record in record_files(hf_dir).items()}
    write_json(hf_dir / "lineage.json", {"kind": "export", "step": 7, "files": files})


@pytest.fixture
def root(pair, tmp_path) -> Path:
    """A copy of the pair to spoil."""
    return Path(shutil.copytree(pair, tmp_path / "root"))


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def spoil(root: Path) -> None:
        path = root / "a" / "model.safetensors"
        content = load_file(path)
        change(content)
        save_file(content, path)

    return spoil


def to(name: str, dtype: torch.dtype) -> Change:
    return weights(lambda content: content.update({name: content[name].to(dtype)}))


def edit(path: str, key: str, value: Any) -> Change:
    return lambda root: write_json(root / path, json.loads((root / path).read_text()) | {key: value})


def pickles_only(root: Path) -> None:
    torch.save(load_file(root / "a" / "model.safetensors"), root / "a" / "pytorch_model.bin")
    (root / "a" / "model.safetensors").unlink()


def flip(path: str) -> Change:
    def spoil(root: Path) -> None:
        content = bytearray((root / path).read_bytes())
        content[-1] ^= 16
        (root / path).write_bytes(content)

    return spoil


def all_to(dtype: torch.dtype) -> Change:
    return weights(lambda content: content.update({name: each.to(dtype) for name, each in content.items()}))


def climb(root: Path) -> None:
    lineage = json.loads((root / "b" / "lineage.json").read_text())
    lineage["files"]["../a/config.json"] = lineage["files"]["config.json"]
    write_json(root / "b" / "lineage.json", lineage)


def nothing(_: Path) -> None:
    pass


REFUSALS: dict[str, tuple[Change, dict[str, Any], str]] = {
    "one": (nothing, {"inputs": ["a"]}, "1 input(s), an average needs 2 or more"),
    "twice": (lambda root: (root / "c").symlink_to("a"), {"inputs": ["a", "c"]}, "root/c is given twice"),
    "no directory": (nothing, {"inputs": ["a", "c"]}, "root/c holds neither a model nor a checkpoint"),
    "pickles": (pickles_only, {}, "root/a holds no safetensors weights"),
    "missing": (weights(lambda content: content.pop(Q_NORM)), {}, f"root/a: missing ['{Q_NORM}']"),
    "unknown": (weights(lambda content: content.update(b=content[Q_NORM] + 0)), {}, "root/a: unknown ['b']"),
    "shape": (weights(lambda c: c.update({Q_NORM: torch.ones(16)})), {}, f"'{Q_NORM}' is (16,), config.json needs (32"),
    "integers": (to(Q_NORM, torch.int64), {}, f"'{Q_NORM}' is torch.int64; only fp32, bf16 and fp16"),
    "one tensor": (to(Q_NORM, torch.float16), {}, f"'{Q_NORM}' is torch.float16"),
    "dtypes": (all_to(torch.bfloat16), {}, "the type to write with --dtype"),
    "rope": (edit("a/config.json", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}), {},
             "differ in 'rope_parameters' of their config.json"),
    "vocabulary": (edit("a/config.json", "vocab_size", 321), {}, "'vocab_size' of their config.json (321, 320)"),
    "family": (edit("a/config.json", "architectures", ["GPT2LMHeadModel"]), {}, "root/a holds a GPT2LMHeadModel"),
    "tokenizer": (edit("a/tokenizer.json", "version", "2"), {}, "'tokenizer.json' of their tokenizers"),
    "special": (edit("a/tokenizer_config.json", "eos_token", "a"), {}, "'tokenizer_config.json' of their tokenizers"),
    "added": (lambda root: write_json(root / "a" / "added_tokens.json", {"new": 9}), {}, "in 'added_tokens.json' of"),
    "no tokenizer": (lambda root: (root / "a" / "tokenizer.json").unlink(), {}, "in 'tokenizer.json' of"),
    "damaged": (flip("b/model.safetensors"), {}, "root/b/model.safetensors was changed"),
    "configuration": (flip("b/tokenizer.json"), {}, "root/b/tokenizer.json was changed"),
    "cut": (lambda root: (root / "b" / "model.safetensors").write_bytes(b"1234"), {}, "has 4 bytes instead of"),
    "told": (edit("b/lineage.json", "step", "last"), {}, "root/b/lineage.json: 'step': Input should be a"),
    "climbs": (climb, {}, "names '../a/config.json', which lies elsewhere"),
    "inside": (nothing, {"out": "b/out"}, "lies in the input"),
    "itself": (nothing, {"out": "b"}, "lies in the input"),
    "taken": (lambda root: (root / "out").mkdir(), {}, "out exists and is not this average"),
    "file": (lambda root: (root / "out").touch(), {}, "out exists and is not this average"),
    "too few": (nothing, {"weights": "1"}, "1 --weights for 2 inputs"),
    "no numbers": (nothing, {"weights": "1,x"}, "not comma-separated numbers"),
    "nan": (nothing, {"weights": "1,nan"}, "finite numbers with a positive sum"),
    "huge": (nothing, {"weights": "1e308,1e308"}, "finite numbers with a positive sum"),
    "zero": (nothing, {"weights": "1,-1"}, "finite numbers with a positive sum"),
    "cancels": (nothing, {"inputs": ["a", "b", "c"], "weights": "0.1,0.2,-0.3"}, "finite numbers with a positive sum"),
    "negative": (nothing, {"weights": "1,-2"}, "finite numbers with a positive sum"),
    "decay": (nothing, {"decay": 1.0}, "decay 1 is not between 0 and 1"),
    "no decay": (nothing, {"decay": float("nan")}, "decay nan is not between 0 and 1"),
    "window": (nothing, {"window": 3}, "a window of 3 for 2 inputs"),
    "names": (lambda root: shutil.copytree(root / "a", root / "c" / "b"), {"inputs": ["a", "b", "c/b"], "window": 2},
              "two inputs have the same name"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "options", "expected"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_name_what_is_wrong_and_write_nothing(root, change, options, expected):
    change(root)
    options = {"out": "out", "inputs": ["a", "b"], **options}
    out, inputs = options.pop("out"), options.pop("inputs")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=re.escape(expected)):
        average_models(root / out, [root / name for name in inputs], processes=1, **options)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_checkpoints_of_another_configuration_are_refused(trained, tmp_path):
    run = RunDirectory(shutil.copytree(trained("dp1"), tmp_path / "run"))
    seal(run.checkpoint(10), fingerprint="0" * 64)
    with pytest.raises(UserError, match="step00000010 is not of the run in"):
        average_models(tmp_path / "out", [run.checkpoint(10), run.checkpoint(20)])
    assert not (tmp_path / "out").exists()


def test_the_command_refuses_in_one_line(root):
    done = python("ckpt_tools", "average", str(root / "out"), str(root / "a"), str(root / "b"), "--weights", "1,2,3")
    assert error_line(done) == "error: 3 --weights for 2 inputs; give one per input"


def test_an_average_that_is_there_is_kept_or_made_whole(root):
    out, inputs = root / "out", [root / "a", root / "b"]
    average_models(out, inputs, decay=0.9)
    made = out.stat().st_ino
    average_models(out, inputs, decay=0.9)
    assert out.stat().st_ino == made
    with pytest.raises(UserError, match="exists and is not this average"):
        average_models(out, inputs, decay=0.8)
    before = (out / "model.safetensors").read_bytes()
    flip("out/model.safetensors")(root)
    average_models(out, inputs, decay=0.9)
    assert (out / "model.safetensors").read_bytes() == before
    weights(lambda content: content[Q_NORM].add_(1))(root)
    with pytest.raises(UserError, match="exists and is not this average"):
        average_models(out, inputs, decay=0.9)


@pytest.fixture
def made(root) -> Path:
    """Two models and their average in bf16."""
    average_models(root / "out", [root / "a", root / "b"], weights="0.3,0.7", accumulate="fp64", dtype="bf16")
    return root


@pytest.mark.parametrize("given", ["out", "out/lineage.json"])
def test_averages_are_made_again_bit_for_bit(made, tmp_path, given):
    """Also where the whole directory has moved to."""
    moved = made.rename(tmp_path / "moved")
    rebuild(moved / given, tmp_path / "elsewhere" / "again", processes=2)
    first, again = moved / "out", tmp_path / "elsewhere" / "again"
    for path in first.iterdir():
        assert path.name == "lineage.json" or (again / path.name).read_bytes() == path.read_bytes()
    one, other = (json.loads((path / "lineage.json").read_text()) for path in (first, again))
    assert [each.pop("path") for each in one["ingredients"]] == ["a", "b"]
    assert [each.pop("path") for each in other["ingredients"]] == ["../moved/a", "../moved/b"]
    assert {**one, "environment": None} == {**other, "environment": None}


def edit_lineage(**changes: Any) -> Change:
    return lambda root: write_json(
        root / "out" / "lineage.json", json.loads((root / "out" / "lineage.json").read_text()) | changes
    )


def wrong_hash(root: Path) -> None:
    lineage = json.loads((root / "out" / "lineage.json").read_text())
    lineage["files"]["model.safetensors"]["sha256"] = "0" * 64
    write_json(root / "out" / "lineage.json", lineage)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            weights(lambda content: content[Q_NORM].add_(1)),
            "/a/model.safetensors is not what the average was made from",
        ),
        (flip("b/model.safetensors"), "/b/model.safetensors was changed after it was written"),
        (lambda root: shutil.rmtree(root / "b"), "its ingredient is not at /.*/root/b; restore it there"),
        (wrong_hash, "model.safetensors comes out otherwise than the lineage says"),
        (edit_lineage(factors=[0.4, 0.6]), "model.safetensors comes out otherwise than the lineage says"),
        (edit_lineage(factors=[1.0]), "has not one factor for every ingredient"),
        (edit_lineage(kind="export"), "'kind': Input should be 'average'"),
        (edit_lineage(accumulate="fp16"), "'accumulate': Input should be"),
        (lambda root: (root / "out" / "lineage.json").unlink(), "is no lineage.json and holds none"),
    ],
    ids=["changed", "damaged", "gone", "hash", "factors", "count", "kind", "accumulate", "none"],
)
def test_what_would_be_another_average_is_not_made(made, tmp_path, change, expected):
    change(made)
    with pytest.raises(UserError, match=expected):
        rebuild(made / "out", tmp_path / "again" / "out")
    assert not list((tmp_path / "again").glob("*"))


def test_the_command_makes_averages_again(made, tmp_path):
    done = python("ckpt_tools", "average", str(tmp_path / "again"), "--from-lineage", str(made / "out/lineage.json"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again/model.safetensors").read_bytes() == (made / "out/model.safetensors").read_bytes()
