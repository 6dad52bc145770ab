"""The recipe of released models: of the hub, of a directory of revisions, and of a run's
exports.
"""

import json
import random
import shutil
from pathlib import Path

import pytest

from base.errors import UserError
from ckpt_tools.released.download import download
from dynamics.recipes.demo import tiny
from study.definition import Study, load_study, save_study
from study.recipes.resolve import resolve
from study.released import ReleasedRun
from study.steps import steps_of
from study.text.own import TextOptions, source_of
from study.text_kinds import PreparedText, TokenFile
from tests.ckpt_tools.released.fake_hub import FakeHub, config_json
from tests.sealing import reseal
from tests.study.commands import printed, refused
from train.data.prepare import prepare

REPO = "allenai/OLMo-2-1124-7B"
REVISIONS = [
    *("stage1-step1000-tokens5B", "step2000-tokens9B", "stage1-step2000-tokens9B"),
    *("stage1-step477000-tokens2001B", "stage1-step928646-tokens3896B"),
    *("stage2-ingredient1-step1000-tokens5B", "stage2-ingredient1-step11931-tokens50B"),
    *("stage2-ingredient3-step1000-tokens5B", "main", "nonsense"),
]


LISTED = {"config.json": config_json("olmo2"), "model.safetensors": b""}


@pytest.fixture
def serve(monkeypatch):
    """Serves revisions of a repository, all with the same files."""
    servers = []

    def start(repo: str, revisions: list[str], files: dict[str, bytes] = LISTED) -> FakeHub:
        server = FakeHub(dict.fromkeys(revisions, files), repo)
        servers.append(server)
        server.use(monkeypatch)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub(serve):
    return serve(REPO, REVISIONS)


def lay_out(directory: Path, *names: str) -> Path:
    """Writes a directory of revisions, as far as a study looks into them."""
    for name in names:
        (directory / name).mkdir(parents=True)
        for file, content in LISTED.items():
            (directory / name / file).write_bytes(content)
    return directory


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
        ("stage1", 4), ("stage2-ingredient1", 2), ("stage2-ingredient3", 1), ("main", 1),
    ]  # fmt: skip
    message = capsys.readouterr().err
    assert "left out 1 of 10 revisions: nonsense (is not a revision of" in message
    assert "left out 1 of 9 revisions: stage1-step2000-tokens9B (is of the same step as" in message
    stage1 = lines(study)[0]
    assert [revision.step for revision in stage1.revisions] == [1000, 2000, 477_000, 928_646]
    # configs/annealing/peteish7-from-477000-*.yaml starts from 2.0707e-4
    assert stage1.revisions[2].learning_rate == pytest.approx(2.0707e-4, rel=1e-4)
    assert stage1.revisions[2].tokens == 477_000 * 4_194_304
    assert lines(study)[1].revisions[-1].learning_rate == 0
    assert any("OLMo2-7B-stage1.yaml" in source for source in study.sources)
    caption = "Figure 2 of arXiv:2510.06213, which has one width and 4 models, here 1"
    assert study.captions["quantization_error"] == caption


@pytest.mark.usefixtures("hub")
def test_measured_as_the_paper_did_with_tasks_at_every_revision():
    settings = (f"source={REPO}", "settings=paper", "quantization.dtype=fp32")
    study = resolve("trajectory", "full", settings)
    assert study.name == "trajectory-OLMo-2-1124-7B-settings=paper-quantization.dtype=fp32"
    assert study.quantization.measure == "relative_error"
    assert study.quantization.dtype == "fp32"
    planned = [step for step in steps_of(study) if step.kind == "tasks"]
    assert len(planned) == 2 * sum(len(run.revisions) for run in lines(study))
    with pytest.raises(UserError, match="no such preset; did you mean paper"):
        trajectory("full", source=REPO, settings="papers")


@pytest.mark.parametrize(
    ("repo", "revisions", "config"),
    [
        ("allenai/OLMo-1B-hf", ["step1000-tokens4B"], config_json("olmo")),
        (
            "open-sci/open-sci-ref-v0.01-1.7b-nemotron-hq-1T-4096",
            ["iter_0058000"],
            config_json("opensci", qk_layernorm=True),
        ),
    ],
)
def test_a_library_that_rounds_a_model_wrong_is_not_planned(serve, capsys, repo, revisions, config):
    """Its job would refuse the model after the download (tests/quant_eval/libraries)."""
    serve(repo, revisions, LISTED | {"config.json": config})
    study = trajectory("full", source=repo)
    assert not [spec for spec in study.measured_specs if spec.startswith(("gptqmodel", "gptaq"))]
    assert "awq-b3-g128" in study.quantization.methods
    message = capsys.readouterr().err
    assert "left out of the methods: gptqmodel-b3-g128-paper, gptqmodel-b4-g128-paper" in message

    paper = (f"source={repo}", "settings=paper")
    with pytest.raises(UserError, match=r"gptqmodel does not quantize .* right; take this project"):
        resolve("trajectory", "full", paper)
    own = '["gptq-b3-g128-actorder", "gptq-b4-g128-actorder"]'
    study = resolve(
        "trajectory", "full", (*paper, f"quantization.specs={own}", f"tasks.specs={own}")
    )
    assert study.quantization.measure == "relative_error"


@pytest.mark.usefixtures("hub")
def test_stages_follow_each_other_and_soups_follow_none():
    """Tokens as Ai2 counts them: 3.9T of stage 1, then 50B of every ingredient."""
    runs = {run.name: run for run in lines(trajectory("full", source=REPO))}
    parents = {name: run.parent for name, run in runs.items()}
    assert parents == {
        "stage1": None, "stage2-ingredient1": "stage1", "stage2-ingredient3": "stage1", "main": None,
    }  # fmt: skip
    last = 928_646 * 4_194_304
    assert runs["stage1"].revisions[-1].tokens == last
    tokens = [revision.tokens for revision in runs["stage2-ingredient1"].revisions]
    assert tokens == [last + 1000 * 4_194_304, last + 11_931 * 4_194_304]
    soup = runs["main"].revisions[0]
    assert (soup.step, soup.tokens, soup.learning_rate) == (11_931, tokens[-1], None)
    assert runs["main"].average_of == tuple(f"stage2-ingredient{number}" for number in (1, 2, 3))


@pytest.mark.usefixtures("hub")
def test_a_soup_is_measured_alone_too():
    assert names(trajectory("full", source=REPO, stage="main")) == {"main": ["main"]}


@pytest.mark.parametrize(
    ("repo", "revisions", "left_out"),
    [
        ("EleutherAI/pythia-70m", ["step1000", "step143000", "main"], "main (repeats step143000"),
        ("swiss-ai/Apertus-8B-2509", ["step1000-tokens4B", "main"], "main (no source says which"),
        ("allenai/OLMo-7B-hf", ["step1000-tokens4B", "main"], None),  # annealed in 1000 more steps
    ],
)
def test_main_is_left_out_where_it_is_nothing_new(serve, capsys, repo, revisions, left_out):
    serve(repo, revisions)
    measured = [name for run in names(trajectory("full", source=repo)).values() for name in run]
    message = capsys.readouterr().err
    assert ("main" in measured) == (left_out is None)
    assert (left_out or "") in message
    assert message.count("left out") == bool(left_out)
    assert names(trajectory("full", source=repo, stage="main")) == {"main": ["main"]}


FOUR = {
    "allenai/OLMo-2-0425-1B": ("stage1-step1907359-tokens4001B", "stage2-ingredient3-step1000-tokens3B"),
    "allenai/OLMo-2-1124-7B": ("stage1-step928646-tokens3896B", "main"),
    "allenai/OLMo-2-1124-13B": ("stage1-step596057-tokens5001B", "main"),
    "allenai/OLMo-2-0325-32B": ("stage1-step721901-tokens6056B", "main"),
}  # fmt: skip


def test_four_models_of_the_hub_are_one_study(serve):
    """Tokenizers are compared by the hash of its file on the hub; what differs is refused at once."""
    files = LISTED | {"tokenizer.json": b"{}"}
    first, *others = FOUR
    hub = serve(first, list(FOUR[first]), files)
    hub.others = {repo: dict.fromkeys(FOUR[repo], files) for repo in others}
    source = ",".join(FOUR)
    study = trajectory("full", source=source)
    models = [repo.partition("/")[2] for repo in FOUR]
    assert study.name == f"trajectory-{'+'.join(models)}"
    assert names(study) == {
        **{"OLMo-2-0425-1B-stage1": [FOUR[first][0]]},
        **{"OLMo-2-0425-1B-stage2-ingredient3": [FOUR[first][1]]},
        **{
            f"{model}-{stage}": [revision]
            for model, revisions in zip(models[1:], [FOUR[repo] for repo in others], strict=True)
            for stage, revision in zip(("stage1", "main"), revisions, strict=True)
        },
    }
    assert [run.source for run in lines(study)] == [repo for repo in FOUR for _ in range(2)]
    assert [axis.key for axis in study.axes] == ["model", "stage"]
    assert isinstance(study.text, PreparedText)
    assert study.text.tokenizer == first
    (download,) = (
        step for step in steps_of(study) if step.name == "download-OLMo-2-0325-32B-main-main"
    )
    assert "allenai/OLMo-2-0325-32B" in download.command

    hub.others[others[1]]["main"] = files | {"tokenizer.json": b"{} "}
    with pytest.raises(UserError, match=f"{others[1]} has another tokenizer than {first}"):
        trajectory("full", source=source)


def test_curvature_is_of_sequences_within_the_shortest_context(serve):
    """The shortest of all models, known before one is fetched."""
    first, second, *_ = FOUR
    tokenizer = {"tokenizer.json": b"{}"}
    short = {"config.json": config_json("olmo2", max_position_embeddings=1024)}
    hub = serve(first, list(FOUR[first]), LISTED | tokenizer)
    hub.others = {second: dict.fromkeys(FOUR[second], LISTED | tokenizer | short)}
    for source, length in ((first, 2048), (f"{first},{second}", 1024)):
        study = trajectory("full", source=source)
        assert study.curvature
        assert study.critical
        assert (study.curvature.sequence_length, study.critical.sequence_length) == (length, length)


def test_smollm3_from_its_first_stage_to_post_training(serve, capsys):
    """Tokens by its model card: steps x 2,359,296, counted anew in each extension of context."""
    stages = {
        "stage1": ["stage1-step-40000", "stage1-step-3440000"],
        "stage2": ["stage2-step-3480000", "stage2-step-4200000"],
        "stage3": ["stage3-step-4240000", "stage3-step-4720000"],
        "lc-4k-to-32k": ["lc-4k-to-32k-step-4000", "lc-4k-to-32k-step-20000"],
        "lc-32k-to-64k": ["lc-32k-to-64k-step-4000"],
        **{f"it-{name}": [f"it-{name}"] for name in ("mid-training", "SFT", "soup-APO", "LC-expert")},
    }  # fmt: skip
    repo = "HuggingFaceTB/SmolLM3-3B-checkpoints"
    serve(repo, sorted(name for revisions in stages.values() for name in revisions))
    study = trajectory("full", source=repo)
    assert names(study) == stages
    runs = {run.name: run for run in lines(study)}
    parents = [None, "stage1", "stage2", "stage3", "lc-4k-to-32k", "lc-32k-to-64k"]
    assert [run.parent for run in runs.values()] == [*parents, "it-mid-training", None, None]
    assert [run.restarts for run in runs.values()] == [*3 * [False], *4 * [True], False, True]
    ends = [run.revisions[-1].tokens for run in runs.values()]
    per_step = 2_359_296
    steps = (3_440_000, 4_200_000, 4_720_000, 4_740_000, 4_744_000)
    assert ends == [*(step * per_step for step in steps), *4 * [None]]
    assert runs["it-soup-APO"].average_of
    message = capsys.readouterr().err
    assert "left out" not in message
    # those without tokens have a place of their own, see `study.figures.canvas`
    assert "without a place" not in message


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
    assert study.name == "trajectory-OLMo-2-1124-7B-every=10-stage=stage1"
    assert names(study) == {"stage1": ["stage1-step1000-tokens5B", "stage1-step928646-tokens3896B"]}
    with pytest.raises(UserError, match="no stage 'stage9'; take one of stage1"):
        trajectory("full", source=REPO, stage="stage9")


def test_what_cannot_be_measured_is_said_before_the_download(serve):
    remote = config_json("hf_olmo", auto_map={"AutoConfig": "configuration_olmo.OLMoConfig"})
    hub = serve("allenai/OLMo-1B", ["step1000-tokens4B"], LISTED | {"config.json": remote})
    with pytest.raises(UserError, match=r"allenai/OLMo-1B at step1000-tokens4B cannot be measured"):
        trajectory("full", source="allenai/OLMo-1B")
    assert {name for _, name in hub.got} == {"config.json"}


def test_of_a_directory_of_revisions(tmp_path, text_dir):
    lay_out(tmp_path / "models", "step1000", "step2000", "step143000")
    released = {"source": tmp_path / "models", "family": "EleutherAI/pythia-160m"}
    text = TextOptions((text_dir,))
    study = trajectory("smoke", **released, text=text)
    source = source_of(text)
    assert study.name == f"trajectory-models-smoke-text=tiny.{source.sha256[:8]}"
    (run,) = lines(study)
    assert run.name == "pretraining"
    assert (run.source, run.family) == (str(tmp_path / "models"), "EleutherAI/pythia-160m")
    assert run.revisions[-1].learning_rate == pytest.approx(6e-5)
    assert study.text == PreparedText(
        held_out=TokenFile(name=f"{text_dir}/data/held_out"),
        calibration=TokenFile(name=f"{text_dir}/data/calibration"),
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
    lay_out(path.parent, path.name)
    reseal(path / "lineage.json", {"run": "lr3e-3", "files": {}, **lineage})


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
    assert [run.average_of for run in lines(study)] == [(), ("training",)]


def test_a_trajectory_needs_a_source():
    assert "trajectory needs a released model" in refused("show", "trajectory")
    assert "give --set source=" in refused("show", "trajectory", "--set", "every=2")
    source = ("--set", f"source={REPO}")
    assert "'every': Input should be" in refused("show", "trajectory", *source, "--set", "every=0")
    assert "seed=1: no such setting" in refused("show", "trajectory", *source, "--set", "seed=1")
    assert "no such setting" in refused("show", "tiny", *source)
    empty = refused("show", "trajectory", "--set", f"source={REPO},")
    assert f"source={REPO}, has an empty name" in empty


@pytest.mark.usefixtures("hub")
def test_a_released_model_is_priced_before_it_is_fetched(tmp_path, text_dir):
    """By the config.json of the directory, or of the hub, which is all that is read."""
    source = lay_out(tmp_path / "models", "step1000", "step2000")
    family = "family=EleutherAI/pythia-160m"
    command = ("show", "trajectory", "--root", tmp_path, "--gpus", "8")
    of_directory = ("--profile", "smoke", "--set", family, "--text", text_dir)
    for where in ((f"source={source}", *of_directory), (f"source={REPO}",)):
        shown = printed(*command, "--set", *where)
        (total,) = (line for line in shown.splitlines() if line.startswith("takes "))
        assert float(total.split()[1].replace(",", "")) > 0
        assert "longest chain: " in shown


def test_a_study_that_is_there_goes_on_as_it_was_listed(tmp_path, text_dir):
    """Without its source: from study.json alone, by its name below the root."""
    source = lay_out(tmp_path / "models", "step1000")
    released = {"source": source, "family": "EleutherAI/pythia-160m"}
    study = trajectory("smoke", **released, text=TextOptions((text_dir,)))
    save_study(text_dir.parent / study.name, study)
    (source / "step2000").mkdir()  # appeared later
    shown = printed("show", study.name, "--root", text_dir.parent, "--all")
    (row,) = (line for line in shown.splitlines() if "pretraining  " in line)
    assert row.split()[1:4] == ["pretraining", "1", "step1000"]
    assert "quant_eval run" in shown
    assert f"{text_dir}/data/held_out" in shown
    assert load_study(text_dir.parent / study.name) == study


OWN = ("step100", "step200", "step1000", "notes")
FAMILY = """
tokenizer = "me/tokenizer"

[[stages]]
revisions = "step{S}"
tokens_per_step = 2000
schedule = "wsd"
peak = 3e-4
decay_from = 200
horizon = 1000
"""


@pytest.mark.parametrize("kept_in", ["hub", "directory"])
def test_revisions_of_ones_own(serve, tmp_path, text_dir, capsys, kept_in):
    """By a file that describes them; the study's steps know their names from then on."""
    (tmp_path / "mine.toml").write_text(FAMILY)
    if kept_in == "hub":
        serve("me/mine", list(OWN))
        source, repo, text = "me/mine", "me/mine", None
    else:
        source, repo = str(lay_out(tmp_path / "mine", *OWN)), "mine"
        text = TextOptions((text_dir,))
    study = trajectory("smoke", text, source=source, family=tmp_path / "mine.toml")
    (run,) = lines(study)
    assert (run.name, run.family, run.schedule) == ("training", None, "wsd of mine.toml")
    known = [(each.name, each.step, each.tokens, each.learning_rate) for each in run.revisions]
    assert known == [
        ("step100", 100, 200_000, 3e-4),
        ("step200", 200, 400_000, 3e-4),
        ("step1000", 1000, 2_000_000, 0.0),
    ]
    assert isinstance(study.text, PreparedText)
    if text is None:
        assert study.text.tokenizer == "me/tokenizer"
    message = capsys.readouterr().err
    assert "left out 1 of 4 revisions: notes (no stage of " in message
    assert "mine.toml names revisions so, they have step{S})" in message

    # the study's own command fetches them without being told the family
    download(source, tmp_path / "models", revisions=["step100"])
    record = json.loads((tmp_path / "models/step100/download.json").read_text())
    assert (record["repo"], record["revision"]) == (repo, "step100")


def test_there_is_one_way_to_describe_revisions_of_ones_own(tmp_path):
    source = ("--set", f"source={lay_out(tmp_path / 'mine', 'step100')}")
    for gone in ("pattern=step{S}", "table=mine.csv"):
        assert "no such setting" in refused("show", "trajectory", *source, "--set", gone)
    missing = refused("show", "trajectory", *source, "--set", "family=no.toml", "--text", source[1])
    assert "no.toml: No such file or directory; give a file of a family" in missing
