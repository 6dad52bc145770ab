"""Publishing: names by Ai2's rule, bytes, cards, nothing of this machine, refusals."""

import errno
import hashlib
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from base.environment import version
from base.errors import UserError
from base.files import record_file, write_json
from ckpt_tools.averaging import average_models
from ckpt_tools.export import export
from ckpt_tools.hf.directory import RESULT_JSON, write_result
from ckpt_tools.hf.model import identify
from ckpt_tools.hf.results import read_result
from ckpt_tools.publishing import publish, published_name, tokens_unit
from ckpt_tools.released.download import download
from ckpt_tools.verify import verify
from tests.ckpt_tools.checkpoints import seal
from tests.runs import PROJECT
from tests.sealing import reseal
from tests.train.trajectories import flip_a_byte
from train.run.config import load_run

LAST = "stage1-step20-tokens6K"  # 5,120 tokens
AVERAGES = [f"{LAST}-lawa3x5", f"{LAST}-soup2"]
REVISIONS = ["stage1-step0-tokens0K", "stage1-step10-tokens3K", LAST, *AVERAGES]
SPEC = "gptq-b3-g32"


@pytest.mark.parametrize(
    ("tokens_per_step", "revision"),
    [  # of allenai/OLMo-2-0425-1B, -1124-7B, -1124-13B and -0325-32B
        (2_097_152, "stage1-step40000-tokens84B"),
        (2_097_152, "stage1-step330000-tokens693B"),
        (2_097_152, "stage1-step1740000-tokens3650B"),
        (4_194_304, "stage1-step150-tokens1B"),
        (4_194_304, "stage1-step338000-tokens1418B"),
        (4_194_304, "stage1-step722000-tokens3029B"),
        (8_388_608, "stage1-step223000-tokens1871B"),
        (8_388_608, "stage1-step596057-tokens5001B"),
        (8_388_608, "stage1-step711000-tokens5965B"),
    ],
)
def test_names_are_those_of_the_released_models(tokens_per_step, revision):
    step = int(revision.split("-")[1].removeprefix("step"))
    assert published_name(step, step * tokens_per_step, unit="B") == revision
    assert published_name(step, step * tokens_per_step, unit="B", average="lawa5x16") == (
        f"{revision}-lawa5x16"
    )


@pytest.mark.parametrize(
    ("unit", "totals"),
    [("K", (5_120, 1_310_720, 99_999_999)), ("M", (10**8, 999_999_999)), ("B", (10**9,))],
)
def test_small_runs_count_in_smaller_units(unit, totals):
    assert {tokens_unit(total) for total in totals} == {unit}


def test_the_demos_last_checkpoint_is_called_by_its_tokens():
    assert published_name(640, 1_310_720, unit="K") == "stage1-step640-tokens1311K"


def figures(scale: float) -> dict[str, Any]:
    values = {"cross_entropy": 3.4, "cross_entropy_quantized": 3.5, "relative_error": 0.03 * scale}
    values |= {"absolute_error": 0.1, "kl_divergence": 0.02}
    intervals = {name: [value - 0.001, value + 0.001] for name, value in values.items()}
    method = {"level": 0.95, "method": "percentile bootstrap paired over documents"}
    method |= {"samples": 100, "seed": 0}
    return {**values, "tokens": 700, "documents": 9, "intervals": intervals, "interval": method}


def measure_by_hand(
    hf_dir: Path, *, scale: float = 1.0, evaluation: str = "e" * 64, spec: str = SPEC
) -> None:
    """A result.json of quant_eval, with a prefix that must not be published."""
    digests = {"model.safetensors": record_file(weights_of(hf_dir)).digest}
    text = {"prefix": str(hf_dir / "held_out"), "sha256": evaluation, "sequence_length": 32}
    settings = {"name": spec, "bits": 3, "dtype": "fp32", "batch_size": 8, "evaluation": text}
    result = {"model": {"path": str(hf_dir), "weights_digests": digests}, "spec": settings}
    write_result(hf_dir / "quant" / spec, result | {"measured": figures(scale)})


def curve_by_hand(hf_dir: Path) -> None:
    """Results of a trace, a slice, and an older version, with an argv that is not published."""
    model = {"weights_digests": {"model.safetensors": record_file(weights_of(hf_dir)).digest}}
    top = {"value": 5.25, "residual": 1e-4, "converged": False, "iterations": 50}
    trace = {"mean": 123.5, "standard_error": 4.5, "probes": 32}
    point = {"name": "base", "x": 0.0, "y": 0.0, "loss": 3.4}
    environment: dict[str, Any] = {"quantdyn": "7.8.9", "commit": "c0ffee"}
    environment |= {"host": socket.gethostname(), "argv": [str(hf_dir)]}
    data = {"prefix": str(hf_dir), "bin_sha256": "d" * 64}
    for name, spec, measured in (
        ("hutchinson", {}, {"loss": 3.4, "trace": trace, "lambda_max": top}),
        ("slice-random", {"plane": "random"}, {"points": [point]}),
        ("older", {}, {"trace": {"mean": 99.5}}),
    ):
        result = {"model": model, "spec": {"data": data, **spec}, "measured": measured}
        write_result(hf_dir / "curvature" / name, result | {"environment": environment})


def weights_of(hf_dir: Path) -> Path:
    return hf_dir / "model.safetensors"


def change_lineage(hf_dir: Path, **changes: Any) -> None:
    lineage = json.loads((hf_dir / "lineage.json").read_text()) | changes
    reseal(
        hf_dir / "lineage.json", {key: value for key, value in lineage.items() if value is not ...}
    )


def note_origin_of_tokenizer(hf_dir: Path) -> None:
    """An export whose tokenizer transformers saved, which notes where it came from."""
    path = hf_dir / "tokenizer_config.json"
    write_json(
        path,
        json.loads(path.read_text()) | {"name_or_path": str(hf_dir.parent), "model_max_length": 32},
    )
    files = json.loads((hf_dir / "lineage.json").read_text())["files"]
    change_lineage(hf_dir, files=files | {path.name: record_file(path).model_dump()})


@pytest.fixture(scope="module")
def exported_run(trained, tmp_path_factory) -> Path:
    """A run with exports, a LAWA kept in training, and averages of files, some measured."""
    run = tmp_path_factory.mktemp("published") / "dp1"
    shutil.copytree(trained("dp1"), run)
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step00000020", checkpoints / "lawa3x5-step00000020")
    average = {"kind": "lawa", "interval_steps": 5, "window": 3, "steps": [10, 15, 20]}
    seal(checkpoints / "lawa3x5-step00000020", train_loss=None, average=average)
    for name in ("step00000000", "step00000010", "step00000020", "lawa3x5-step00000020"):
        export(run / "checkpoints" / name, run / "hf" / name)
        note_origin_of_tokenizer(run / "hf" / name)
    inputs = [run / "hf/step00000010", run / "hf/step00000020"]
    average_models(run / "hf/soup2-step00000020", inputs)
    for name, scale in (("step00000010", 1.0), ("step00000020", 2.0)):
        measure_by_hand(run / "hf" / name, scale=scale)
    curve_by_hand(run / "hf/step00000020")
    return run


@pytest.fixture(scope="module")
def published(exported_run, tmp_path_factory) -> Path:
    """Its publication, by links."""
    out = tmp_path_factory.mktemp("out") / "deep" / "dp1"
    assert [path.name for path in publish(exported_run, out)] == REVISIONS
    return out


def test_published_directories_hold_the_exported_weights(exported_run, published):
    assert {path.name for path in published.iterdir()} == set(REVISIONS)
    for step, revision in ((0, REVISIONS[0]), (10, REVISIONS[1]), (20, LAST)):
        expected = load_file(weights_of(exported_run / "hf" / f"step{step:08d}"))
        weights = AutoModelForCausalLM.from_pretrained(published / revision).state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert AutoTokenizer.from_pretrained(published / revision).eos_token_id == 0
        assert verify(published / revision)["parity"]["logits"] <= 1e-5
    assert not [path for path in published.rglob("*") if path.is_symlink()]
    assert weights_of(published / LAST).samefile(weights_of(exported_run / "hf/step00000020"))
    for name in (f"quant/{SPEC}", "curvature/hutchinson", "curvature/slice-random"):
        copy, measured = (
            json.loads((place / name / "result.json").read_text())
            for place in (published / LAST, exported_run / "hf/step00000020")
        )
        assert copy["measured"] == measured["measured"]


def test_what_is_published_has_the_hashes_that_others_compute(published):
    """SHA-256 in lineages, and in results for the weights they are of, which name the same file."""
    for revision in REVISIONS:
        files = json.loads((published / revision / "lineage.json").read_text())["files"]
        for name, record in files.items():
            content = (published / revision / name).read_bytes()
            assert record["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
        for result in (published / revision).glob("*/*/result.json"):
            digests = json.loads(result.read_text())["model"]["weights_digests"]
            assert all(files[name]["digest"] == digest for name, digest in digests.items())


def test_a_download_of_what_is_published_is_whole_without_its_results(published, tmp_path):
    """lineage.json vouches for the model alone; a result that was changed is still refused."""
    download(str(published), tmp_path / "models", revisions=[LAST])
    copy = tmp_path / "models" / LAST
    assert not list(copy.glob(f"*/*/{RESULT_JSON}"))
    assert verify(copy)["parity"]["logits"] <= 1e-5
    assert identify(copy)["weights_digests"].keys() == {"model.safetensors"}
    shutil.copytree(published / LAST, tmp_path / "changed")
    changed = tmp_path / "changed" / "quant" / SPEC / RESULT_JSON
    changed.write_text(changed.read_text().replace("3.4", "3.3"))
    with pytest.raises(UserError, match="was changed after it was written"):
        read_result(changed)


def test_nothing_of_this_machine_is_published(exported_run, published, tmp_path_factory):
    places = [str(tmp_path_factory.getbasetemp().parent), str(PROJECT)]
    for path in published.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not [place for place in places if place.encode() in content], path
        if path.suffix != ".safetensors":
            assert f'"{socket.gethostname()}"'.encode() not in content, path
    before = json.loads((exported_run / "hf/step00000010/tokenizer_config.json").read_text())
    after = json.loads((published / REVISIONS[1] / "tokenizer_config.json").read_text())
    assert before == after | {"name_or_path": str(exported_run / "hf")}
    lineage = json.loads((published / f"{LAST}-soup2" / "lineage.json").read_text())
    assert [ingredient["path"] for ingredient in lineage["ingredients"]] == [REVISIONS[1], LAST]
    lineage = json.loads((published / LAST / "lineage.json").read_text())
    assert lineage["checkpoint"] == "checkpoints/step00000020"
    assert lineage["environment"].keys().isdisjoint({"host", "hosts", "argv"})
    assert lineage["environment"]["quantdyn"] == version()


def card(directory: Path) -> tuple[dict[str, Any], str]:
    _, front, text = (directory / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_cards_parse_and_say_what_was_measured(exported_run, published):
    for revision in REVISIONS:
        front, text = card(published / revision)
        assert (front["library_name"], front["license"]) == ("transformers", "other")
        assert "olmo2" in front["tags"]
        assert "not named a license" in text
    run = load_run(exported_run / "run.json")
    _, text = card(published / LAST)
    for words in (
        f'"peak_lr": {run.optimizer.peak_lr}',
        "after update 20 of 20",
        f"| `quant/{SPEC}` | relative error | 0.06 | [0.059, 0.061] |",
        "| `curvature/hutchinson` | trace | 123.5 | 4.5 |",
        "NOT converged",
        "| `curvature/older` | trace | 99.5 | - |",
        "of the largest logit",
    ):
        assert words in text
    _, text = card(published / REVISIONS[0])
    assert "Nothing." in text
    _, text = card(published / f"{LAST}-soup2")
    assert "no training engine computed with these weights" in text
    assert f"- 0.5 of `{REVISIONS[1]}`" in text


def test_publishing_again_repairs_what_was_changed(exported_run, tmp_path):
    out = tmp_path / "out"
    publish(exported_run, out, license="apache-2.0")
    assert card(out / LAST)[0]["license"] == "apache-2.0"
    whole = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (out / REVISIONS[0] / "extra.bin").write_bytes(b"x")
    (out / LAST / "config.json").unlink()
    publish(exported_run, out, license="apache-2.0")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == whole


def test_a_published_revision_that_has_left_the_run_stays(exported_run, published, tmp_path):
    ignored = shutil.ignore_patterns("checkpoints", SOUP)
    run = shutil.copytree(exported_run, tmp_path / "dp1", ignore=ignored)
    out = shutil.copytree(published, tmp_path / "out")
    left = out / f"{LAST}-soup2"
    whole = {path: path.read_bytes() for path in left.rglob("*") if path.is_file()}
    assert [path.name for path in publish(run, out)] == REVISIONS[:-1]
    assert {path: path.read_bytes() for path in left.rglob("*") if path.is_file()} == whole


def test_where_no_link_is_possible_files_are_copied(exported_run, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    publish(exported_run, tmp_path / "out")
    places = (exported_run / "hf/step00000020", tmp_path / "out" / LAST)
    exported, copied = map(weights_of, places)
    assert exported.read_bytes() == copied.read_bytes()
    assert not copied.samefile(exported)


STEP, SOUP = "step00000020", "soup2-step00000020"
UNPROVEN = "is not a proven export or average of run dp1 alone"


def of_other_weights(hf: Path) -> None:
    shutil.copytree(hf / "step00000010/quant", hf / "step00000000/quant")


def add_file(hf: Path, name: str) -> None:
    files = json.loads((hf / "step00000020/lineage.json").read_text())["files"]
    change_lineage(hf / "step00000020", files=files | {name: files["config.json"]})


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (
            lambda hf: flip_a_byte(weights_of(hf / STEP)),
            r"model\.safetensors was changed after it was",
        ),
        (lambda hf: change_lineage(hf / STEP, parity=...), UNPROVEN),
        (lambda hf: change_lineage(hf / STEP, fingerprint="0" * 16), UNPROVEN),
        (lambda hf: change_lineage(hf / SOUP, fingerprint=..., step=...), UNPROVEN),
        (lambda hf: change_lineage(hf / STEP, kind="other"), UNPROVEN),
        (lambda hf: (hf / STEP / "lineage.json").unlink(), UNPROVEN),
        (lambda hf: shutil.copytree(hf / STEP, hf / "again"), f"are both {LAST}"),
        (lambda hf: (hf / SOUP).rename(hf / "a soup-step00000020"), "is not a name for the hub"),
        (lambda hf: add_file(hf, "../../run.json"), r"run\.json', which is outside its directory"),
        (of_other_weights, "measured of other weights"),
        (shutil.rmtree, "holds no exports"),
    ],
)
def test_nothing_is_published_of_what_is_wrong(exported_run, tmp_path, spoil, expected):
    run = tmp_path / "dp1"
    shutil.copytree(exported_run, run, ignore=shutil.ignore_patterns("checkpoints"))
    spoil(run / "hf")
    with pytest.raises(UserError, match=expected):
        publish(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_not_ours_is_kept(exported_run, published, tmp_path):
    with pytest.raises(UserError, match="within the exports"):
        publish(exported_run, exported_run / "hf" / "published")
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UserError, match=r"README\.md was not published from this run"):
        publish(exported_run, tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    other = shutil.copytree(published, tmp_path / "other")
    lineage = json.loads((other / LAST / "lineage.json").read_text())
    change_lineage(other / LAST, published=lineage["published"] | {"fingerprint": "0" * 16})
    with pytest.raises(UserError, match="not published from this run"):
        publish(exported_run, other)
