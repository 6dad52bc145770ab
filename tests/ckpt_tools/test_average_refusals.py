"""Refusals of averages, by name and with nothing written."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from base.errors import UserError
from base.files import write_json
from ckpt_tools.averaging import average_models
from tests.ckpt_tools.checkpoints import seal_export
from tests.conftest import make_hf_directory
from tests.runs import error_line, python
from tests.sealing import reseal
from tests.train.trajectories import flip_a_byte

Q_NORM = "model.layers.1.self_attn.q_norm.weight"
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tokenizer_dir) -> Path:
    """A directory with two models and their tokenizer, `a` without and `b` with a lineage."""
    root = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate("ab"):
        shutil.copytree(
            tokenizer_dir, make_hf_directory(root / name, seed=seed), dirs_exist_ok=True
        )
    seal_export(root / "b", kind="export", step=7)
    return root


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


def edit(path: str, key: str, value: Any) -> Change:
    return lambda root: write_json(
        root / path, json.loads((root / path).read_text()) | {key: value}
    )


def told(step: Any) -> Change:
    """A lineage of b, sealed, with this step."""
    path = "b/lineage.json"
    return lambda root: reseal(root / path, json.loads((root / path).read_text()) | {"step": step})


def exported(a: int, b: int, **changes: Any) -> Change:
    """Exports of one run at these steps, b with changes of its lineage."""

    def spoil(root: Path) -> None:
        facts = {"kind": "export", "run": "stable", "fingerprint": "ab"}
        seal_export(root / "a", **facts, step=a)
        seal_export(root / "b", **facts | {"step": b} | changes)

    return spoil


def pickles_only(root: Path) -> None:
    torch.save(load_file(root / "a" / "model.safetensors"), root / "a" / "pytorch_model.bin")
    (root / "a" / "model.safetensors").unlink()


def flip(path: str) -> Change:
    return lambda root: flip_a_byte(root / path)


def fill(value: float) -> Change:
    return weights(lambda content: content[Q_NORM][5:6].fill_(value))


def cast(names: list[str], dtype: torch.dtype) -> Change:
    """Other types of these tensors, or of all."""
    return weights(
        lambda content: content.update(
            {name: content[name].to(dtype) for name in names or list(content)}
        )
    )


def climb(root: Path) -> None:
    lineage = json.loads((root / "b" / "lineage.json").read_text())
    lineage["files"]["../a/config.json"] = lineage["files"]["config.json"]
    reseal(root / "b" / "lineage.json", lineage)


def nothing(_: Path) -> None:
    pass


REFUSALS: dict[str, tuple[Change, dict[str, Any], str]] = {
    "one": (nothing, {"inputs": ["a"]}, "1 input(s), an average needs 2 or more"),
    "twice": (lambda root: (root / "c").symlink_to("a"), {"inputs": ["a", "c"]}, "root/c is given twice"),
    "not a directory": (nothing, {"inputs": ["a", "c"]}, "root/c/config.json does not exist"),
    "pickles": (pickles_only, {}, "root/a holds no safetensors weights"),
    "missing": (weights(lambda content: content.pop(Q_NORM)), {}, f"root/a: missing ['{Q_NORM}']"),
    "unknown": (weights(lambda content: content.update(b=content[Q_NORM] + 0)), {}, "root/a: unknown ['b']"),
    "shape": (weights(lambda c: c.update({Q_NORM: torch.ones(16)})), {}, f"'{Q_NORM}' is (16,), the model needs (32"),
    "integers": (cast([Q_NORM], torch.int64), {}, f"'{Q_NORM}' is torch.int64, all weights must be of one type"),
    "one tensor": (cast([Q_NORM], torch.float16), {}, f"'{Q_NORM}' is torch.float16"),
    "not a number": (fill(math.nan), {}, f"'{Q_NORM}' is not finite in"),
    "infinite": (fill(math.inf), {}, "root/a; leave that model out"),
    "overflow": (fill(3e38), {"weights": "3,1"}, f"'{Q_NORM}' overflows in the average; give"),
    "dtypes": (cast([], torch.bfloat16), {}, "average models of one type"),
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
    "told": (told("last"), {}, "root/b/lineage.json: 'step': Input should be a"),
    "climbs": (climb, {}, "names '../a/config.json', which is outside its directory"),
    "inside": (nothing, {"out": "b/out"}, "is in the input"),
    "itself": (nothing, {"out": "b"}, "is in the input"),
    "taken": (lambda root: (root / "out").mkdir(), {}, "out exists and is not this average"),
    "file": (lambda root: (root / "out").touch(), {}, "out exists and is not this average"),
    "too few": (nothing, {"weights": "1"}, "1 --weights for 2 inputs"),
    "no numbers": (nothing, {"weights": "1,x"}, "not comma-separated numbers"),
    "nan": (nothing, {"weights": "1,nan"}, "finite numbers with a positive sum"),
    "huge": (nothing, {"weights": "1e308,1e308"}, "finite numbers with a positive sum"),
    "zero": (nothing, {"weights": "1,-1"}, "finite numbers with a positive sum"),
    "cancels": (nothing, {"inputs": ["a", "b", "c"], "weights": "0.1,0.2,-0.3"}, "finite numbers with a positive sum"),
    "negative": (nothing, {"weights": "1,-2"}, "finite numbers with a positive sum"),
    "window": (nothing, {"window": 3}, "a window of 3 for 2 inputs"),
    "decay of one": (nothing, {"inputs": ["b"], "decay": "sqrt"}, "1 input(s), an average needs 2 or more"),
    "decay without steps": (nothing, {"decay": "sqrt"}, "root/a has no lineage.json with a run and a step of it"),
    "decay weighted": (nothing, {"decay": "sqrt", "weights": "1,1"}, "leave --weights and --window out"),
    "decay in windows": (nothing, {"decay": "sqrt", "window": 2}, "leave --weights and --window out"),
    "decay at a step": (exported(a=7, b=7), {"decay": "sqrt"}, "the steps 7, 7 do not rise"),
    "decay backwards": (exported(a=8, b=7), {"decay": "sqrt"}, "the steps 8, 7 do not rise"),
    "decay of runs": (exported(a=6, b=7, run="other", fingerprint="cd"), {"decay": "sqrt"}, "several runs (stable, other)"),
    "decay of an import": (exported(a=6, b=7, imported={"source": "hub"}), {"decay": "sqrt"}, "root/b has no lineage.json with a run"),
    "decay of averages": (exported(a=6, b=7, average={"kind": "ema", "decay": 0.9, "steps": [7]}),
                          {"decay": "sqrt"}, "root/b is an average itself"),
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
        average_models(root / out, [root / name for name in inputs], **options)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_the_command_refuses_in_one_line(root):
    paths = (str(root / name) for name in ("out", "a", "b"))
    done = python("ckpt_tools", "average", *paths, "--weights", "1,2,3")
    assert error_line(done) == "error: 3 --weights for 2 inputs; give one per input"


def test_an_average_that_is_there_is_kept_or_made_whole(root):
    out, inputs = root / "out", [root / "a", root / "b"]
    average_models(out, inputs, weights="0.9,1")
    inode = out.stat().st_ino
    average_models(out, inputs, weights="0.9,1")
    assert out.stat().st_ino == inode
    with pytest.raises(UserError, match="exists and is not this average"):
        average_models(out, inputs, weights="0.8,1")
    before = (out / "model.safetensors").read_bytes()
    flip("out/model.safetensors")(root)
    average_models(out, inputs, weights="0.9,1")
    assert (out / "model.safetensors").read_bytes() == before
    weights(lambda content: content[Q_NORM].add_(1))(root)
    with pytest.raises(UserError, match="exists and is not this average"):
        average_models(out, inputs, weights="0.9,1")
