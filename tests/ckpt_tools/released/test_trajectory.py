"""Trajectories of the hub and of directories: order, choice, table, what is unknown."""

import json
from typing import Any

import pytest
from huggingface_hub import constants

from base.errors import UserError
from base.files import first_damage
from ckpt_tools.export import export
from ckpt_tools.hf.directory import read_lineage
from ckpt_tools.released.download import download
from ckpt_tools.released.revisions import parse_revision
from ckpt_tools.released.trajectory import choose, revisions_of, show
from tests.ckpt_tools.released.fake_hub import REPO
from tests.sealing import reseal

SMOLLM3 = "HuggingFaceTB/SmolLM3-3B-checkpoints"
IN_ORDER = [
    *(
        "stage1-step40000-tokens84B",
        "stage1-step120000-tokens252B",
        "stage1-step1050000-tokens2203B",
    ),
    *("stage2-ingredient1-step7000-tokens15B", "stage2-ingredient1-step23852-tokens51B"),
    *("stage2-ingredient3-step7000-tokens15B", "main"),
]
ODD = ["revert-safetensors", "stage1-step40000-tokens9999B"]


def directories(root, names):
    for name in names:
        (root / name).mkdir(parents=True)
    return root


def test_of_the_hub(serve, capsys):
    """Steps and stages sort as numbers; names that are none are told, not lost."""
    serve({name: {} for name in sorted(IN_ORDER + ODD)})
    rows = revisions_of(REPO)
    show(rows)
    printed = capsys.readouterr()
    assert [row.revision for row in rows] == IN_ORDER
    assert [row.ingredient for row in rows] == [None, None, None, 1, 1, 3, 3]
    assert (rows[0].step, rows[0].tokens) == (40_000, 83_886_080_000)
    assert rows[0].learning_rate == pytest.approx(3.997968e-4, rel=1e-6)
    assert rows[4].learning_rate == 0
    assert printed.out.splitlines()[1].split()[:5] == [
        *(IN_ORDER[0], "stage1", "40,000", "83,886,080,000", "3.998e-04")
    ]
    assert all(name in printed.err for name in ODD)
    assert all(name in printed.out for name in IN_ORDER)
    assert "OLMo2-1B-stage1.yaml" in printed.out


@pytest.mark.parametrize(
    ("every", "stage", "kept"),
    [
        (None, None, [0, 1, 2, 3, 4, 5, 6]),
        (1, None, [0, 1, 2, 3, 4, 5, 6]),
        # the first, the third which is the last; of an ingredient the first, the last
        (2, None, [0, 2, 3, 4, 5, 6]),
        (10, None, [0, 2, 3, 4, 5, 6]),
        (10, "stage1", [0, 2]),
        (None, "stage2", [3, 4, 5]),
        (None, "main", [6]),
    ],
)
def test_choice(every, stage, kept):
    revisions = [parse_revision(REPO, name) for name in IN_ORDER]
    chosen = choose(revisions, every=every, stage=stage)
    assert [IN_ORDER.index(checkpoint.revision) for checkpoint in chosen] == kept


def test_the_last_is_kept_once():
    revisions = [parse_revision("EleutherAI/pythia-70m", f"step{step}000") for step in range(1, 8)]
    assert [checkpoint.step for checkpoint in choose(revisions, every=3)] == [1000, 4000, 7000]
    assert [checkpoint.step for checkpoint in choose(revisions[:-1], every=3)] == [1000, 4000, 6000]


def test_order_of_a_trajectory_of_many_stages(tmp_path):
    names = ["stage1-step-3440000", "stage2-step-3480000", "stage3-step-4240000"]
    names += ["lc-4k-to-32k-step-4000", "lc-32k-to-64k-step-4000", "it-mid-training", "it-SFT"]
    names += ["it-soup-APO", "it-LC-expert"]
    checkpoints = revisions_of(str(directories(tmp_path / "x", names)), family=SMOLLM3)
    assert [checkpoint.revision for checkpoint in checkpoints] == names


@pytest.mark.parametrize("told_by", ["option", "directory", "download"])
def test_of_a_directory(tmp_path, told_by, capsys):
    root = directories(
        tmp_path / ("Amber" if told_by == "directory" else "models"),
        ["ckpt_100", "ckpt_020", ".cache"],
    )
    (root / "notes.txt").touch()
    if told_by == "download":
        for path in root.glob("ckpt_*"):
            record = {"repo": "LLM360/Amber", "revision": path.name, "commit": None, "files": {}}
            reseal(path / "download.json", record)
    checkpoints = revisions_of(str(root), family="LLM360/Amber" if told_by == "option" else None)
    assert [checkpoint.step for checkpoint in checkpoints] == [21 * 762, 101 * 762]
    assert checkpoints[0].learning_rate == pytest.approx(2.982426e-4, rel=1e-6)
    assert capsys.readouterr().err == ""


def test_of_a_run(trained, tmp_path, capsys):
    """Real exports: step, tokens and rate are the run's; 8 sequences of 32 tokens a step."""
    for step in (20, 10):
        export(
            trained("dp1") / "checkpoints" / f"step{step:08d}", tmp_path / "hf" / f"step{step:08d}"
        )
    average = tmp_path / "hf" / "lawa5x2-step00000020"
    average.mkdir()
    lineage: dict[str, Any] = {"kind": "average", "run": "dp1", "steps": [18, 20]}
    lineage |= {"tokens": None, "files": {}}
    reseal(average / "lineage.json", lineage)
    checkpoints = revisions_of(str(tmp_path / "hf"))
    logged = [
        json.loads(line) for line in (trained("dp1") / "metrics.jsonl").read_text().splitlines()
    ]
    rates = {line["step"]: line["learning_rate"] for line in logged if "learning_rate" in line}
    assert [
        (checkpoint.stage, checkpoint.step, checkpoint.tokens) for checkpoint in checkpoints
    ] == [("training", 10, 10 * 8 * 32), ("training", 20, 20 * 8 * 32), ("lawa5x2", 20, None)]
    assert [checkpoint.learning_rate for checkpoint in checkpoints] == [rates[10], rates[20], None]
    assert {checkpoint.repo for checkpoint in checkpoints} == {"dp1"}
    download(str(tmp_path / "hf"), tmp_path / "copies", revisions=["step00000020"])
    copied = read_lineage(tmp_path / "copies" / "step00000020")
    assert copied is not None
    assert first_damage(tmp_path / "copies" / "step00000020", copied[1]) is None
    show(choose(checkpoints, stage="lawa5x2"))
    assert "unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "family", "reason"),
    [
        ([], None, "holds no revisions"),
        (["step1000"], None, r"--family.*--set family=.*FILE\.toml"),
        (["step1000"], "EleutherAI/pythia-15m", "not a known trajectory"),
        (["step1000-tokens5B"], "EleutherAI/pythia-14m", "not a revision of EleutherAI/pythia-14m"),
    ],
)
def test_directories_that_tell_nothing_are_refused(tmp_path, names, family, reason):
    root = directories(tmp_path / "models", names)
    root.mkdir(exist_ok=True)
    with pytest.raises(UserError, match=reason):
        revisions_of(str(root), family=family)


@pytest.mark.parametrize(
    ("place", "family", "reason"),
    [
        ("nobody/nothing", None, "not a known trajectory"),
        ("./absent", None, "not a directory"),
        ("a/b/c", None, "not a directory"),
        (REPO, None, r"not reached.*give that directory"),
        ("mirror/of-it", REPO, r"not reached for mirror/of-it"),
    ],
)
def test_places_that_are_none_are_refused(monkeypatch, place, family, reason):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=reason) as refused:
        revisions_of(place, family)
    assert "\n" not in str(refused.value)


def test_a_stage_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="no stage 'stage3'; take one of stage1, stage2, main"):
        choose([parse_revision(REPO, name) for name in IN_ORDER], stage="stage3")
