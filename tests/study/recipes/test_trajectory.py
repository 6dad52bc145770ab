"""The recipe of released models: of the hub, of a directory of revisions, and of a run's
exports.
"""

import json
import random
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from base.errors import UserError
from study.__main__ import app
from study.definition import Study, load_study, save_study
from study.recipes import resolve, tiny
from study.released import ReleasedRun
from study.text.kinds import PreparedText, TokenFiles
from study.text.own import TextOptions, source_of
from tests.ckpt_tools.released.fake_hub import FakeHub
from train.data.prepare import prepare

REPO = "allenai/OLMo-2-1124-7B"
REVISIONS = [
    *(
        "stage1-step1000-tokens5B",
        "step2000-tokens9B",
        "stage1-step2000-tokens9B",
        "stage1-step477000-tokens2001B",
    ),
    *("stage1-step928646-tokens3896B", "stage2-ingredient1-step1000-tokens5B"),
    *(
        "stage2-ingredient1-step11931-tokens50B",
        "stage2-ingredient3-step1000-tokens5B",
        "main",
        "nonsense",
    ),
]


@pytest.fixture
def hub(monkeypatch):
    server = FakeHub({name: {} for name in REVISIONS}, REPO)
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def text_dir(tmp_path, tokenizer_dir) -> Path:
    """A study with the text that is measured on."""
    directory = tmp_path / "runs" / "tiny"
    save_study(directory, tiny())
    shutil.copytree(tokenizer_dir, directory / "data" / "corpus" / "tokenizer")
    for use, seed in (("train", 1), ("held_out", 2), ("calibration", 3)):
        path = tmp_path / f"{use}.txt"
        path.write_text("".join(random.Random(seed).choices("abcdefgh ", k=120_000)))
        prepare([path], tokenizer_dir, directory / "data" / use)
    return directory


def trajectory(profile: str, text: TextOptions | None = None, **released: object) -> Study:
    settings = tuple(f"{key}={value}" for key, value in released.items())
    return resolve("trajectory", profile, settings, text)


def lines(study: Study) -> list[ReleasedRun]:
    return [run for run in study.runs if isinstance(run, ReleasedRun)]


def names(study: Study) -> dict[str, list[str]]:
    assert not study.trained
    return {run.name: [revision.name for revision in run.revisions] for run in lines(study)}


@pytest.mark.usefixtures("hub")
def test_of_the_hub_a_line_per_stage_and_ingredient(capsys):
    study = trajectory("full", source=REPO)
    assert study.name == "trajectory-OLMo-2-1124-7B"
    assert [(run, len(revisions)) for run, revisions in names(study).items()] == [
        ("stage1", 4), ("stage2-ingredient1", 2), ("stage2-ingredient3", 1),
    ]  # fmt: skip
    message = capsys.readouterr().err
    assert all(f"left out: {name}" in message for name in ("nonsense", "main"))
    assert "is of the same step as" in message  # 2000 is there under two names
    stage1 = lines(study)[0]
    assert [revision.step for revision in stage1.revisions] == [1000, 2000, 477_000, 928_646]
    # configs/annealing/peteish7-from-477000-*.yaml starts from 2.0707e-4
    assert stage1.revisions[2].learning_rate == pytest.approx(2.0707e-4, rel=1e-4)
    assert stage1.revisions[2].tokens == 477_000 * 4_194_304
    assert lines(study)[1].revisions[-1].learning_rate == 0
    assert any("OLMo2-7B-stage1.yaml" in source for source in study.sources)


@pytest.mark.usefixtures("hub")
def test_the_web_is_tokenized_as_the_model_reads_it():
    text = trajectory("full", source=REPO, every=20, stage="stage1").text
    assert isinstance(text, PreparedText)
    assert text.tokenizer == REPO
    assert {use: (file.dataset, file.files) for use, file in text.files.items()} == {
        "held_out": ("tiiuae/falcon-refinedweb", "1"),
        "calibration": ("allenai/c4", "2"),
    }
    other = resolve("pythia-70m-kumar", "full").text
    assert isinstance(other, PreparedText)
    assert text.held_out.name != other.held_out.name  # other tokens of the same text


@pytest.mark.usefixtures("hub")
def test_a_stage_and_every_so_manieth():
    study = trajectory("full", source=REPO, every=10, stage="stage1")
    assert names(study) == {"stage1": ["stage1-step1000-tokens5B", "stage1-step928646-tokens3896B"]}
    with pytest.raises(UserError, match="no stage 'stage9'; give one of stage1"):
        trajectory("full", source=REPO, stage="stage9")
    with pytest.raises(UserError, match="has no revision that states a step"):  # a soup
        trajectory("full", source=REPO, stage="main")


def test_of_a_directory_of_revisions(tmp_path, text_dir):
    for name in ("step1000", "step2000", "step143000"):
        (tmp_path / "models" / name).mkdir(parents=True)
    released = {"source": tmp_path / "models", "family": "EleutherAI/pythia-160m"}
    text = TextOptions((text_dir,))
    study = trajectory("smoke", **released, text=text)
    source = source_of(text)
    assert study.name == f"trajectory-models-smoke-text=tiny.{source.sha256[:8]}"
    (run,) = lines(study)
    assert run.name == "pretraining"
    assert (run.source, run.family) == (str(tmp_path / "models"), "EleutherAI/pythia-160m")
    assert run.revisions[-1].learning_rate == pytest.approx(6e-5)
    assert study.text == TokenFiles(
        held_out=f"{text_dir}/data/held_out",
        calibration=f"{text_dir}/data/calibration",
        tokenizer=f"{text_dir}/data/corpus/tokenizer",
        sha256=source.sha256,
    )
    with pytest.raises(UserError, match="name with --text what is measured on"):
        trajectory("smoke", **released)
    with pytest.raises(UserError, match="has its tokenizer; leave --tokenizer out"):
        trajectory("smoke", **released, text=TextOptions((text_dir,), text_dir))
    Path(f"{text_dir}/data/held_out.json").unlink()
    with pytest.raises(
        UserError, match=r"held_out\.json does not exist; run 'python -m study run tiny --root"
    ):
        trajectory("smoke", **released, text=text)


def export(path: Path, **lineage) -> None:
    path.mkdir(parents=True)
    (path / "lineage.json").write_text(json.dumps({"run": "lr3e-3", "files": {}, **lineage}))


def test_of_exports_with_their_averages_as_lines_of_their_own(tmp_path, text_dir):
    hf = tmp_path / "lr3e-3" / "hf"
    for step in (64, 128):
        export(hf / f"step{step:08}", step=step, tokens=step * 2048, learning_rate=0.003)
        export(hf / f"lawa5x16-step{step:08}", step=step, average="lawa5x16", tokens=step * 2048)
    study = trajectory("smoke", source=hf, text=TextOptions((text_dir,)))
    assert study.name.startswith("trajectory-lr3e-3-smoke-text=tiny.")
    assert names(study) == {
        "training": ["step00000064", "step00000128"],
        "lawa5x16": ["lawa5x16-step00000064", "lawa5x16-step00000128"],
    }
    assert [revision.learning_rate for revision in lines(study)[1].revisions] == [None, None]


def command(*arguments: str) -> str:
    """Message of a refused command."""
    with pytest.raises(UserError) as refused:
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_trajectory_needs_a_source(tmp_path):
    assert "trajectory needs a released model" in command("show", "trajectory")
    assert "give --set source=" in command("show", "trajectory", "--set", "every=2")
    source = ("--set", f"source={REPO}")
    assert "'every': Input should be" in command("show", "trajectory", *source, "--set", "every=0")
    assert "unknown key 'seed'" in command("show", "trajectory", *source, "--set", "seed=1")
    assert "no such key" in command("show", "tiny", *source)
    assert "does not exist" in command("status", "trajectory", "--root", str(tmp_path))
    assert "no recipe 'none'" in command("show", "none", "--root", str(tmp_path))
    assert "no profile 'large'" in command("show", "trajectory", *source, "--profile", "large")


def test_a_study_that_is_there_goes_on_as_it_was_listed(tmp_path, text_dir):
    """Without its source: from study.json alone, by its name below the root."""
    source = tmp_path / "models"
    (source / "step1000").mkdir(parents=True)
    released = {"source": source, "family": "EleutherAI/pythia-160m"}
    study = trajectory("smoke", **released, text=TextOptions((text_dir,)))
    save_study(text_dir.parent / study.name, study)
    (source / "step2000").mkdir()  # appeared later
    shown = CliRunner().invoke(
        app, ["show", study.name, "--root", str(text_dir.parent)], catch_exceptions=False
    )
    assert shown.exit_code == 0
    assert f"1 revisions of {source}, step1000 to step1000" in shown.stdout
    assert "quant_eval run" in shown.stdout
    assert f"{text_dir}/data/held_out" in shown.stdout
    assert load_study(text_dir.parent / study.name) == study
