"""Families of the user's own: what a TOML file says of names, tokens and learning rates."""

import math
from pathlib import Path

import pytest

from base.errors import UserError
from ckpt_tools.released.download import download
from ckpt_tools.released.own_family import SCHEDULES, OwnStage, family_file
from ckpt_tools.released.revisions import Revision
from ckpt_tools.released.trajectory import revisions_of

STAGE = '[[stages]]\nrevisions = "step{S}"\n'
TWO_STAGES = """
source = "our wiki"

[[stages]]
name = "stable"
revisions = "step{S}"
tokens_per_step = [[0, 100], [30, 400]]
schedule = "constant"
peak = 1e-3
warmup = 1000
unit = "tokens"

[[stages]]
name = "anneal"
revisions = "anneal-{S:04}-tokens{T}"
parent = "stable"
starts_at = 31_000
tokens_per_step = 400
schedule = "linear"
peak = 1e-3
horizon = 40
floor = 0.25
"""


def read(tmp_path: Path, text: str | bytes, *names: str) -> list[Revision]:
    """Revisions of a directory with these names, by a file of this text."""
    directory = tmp_path / "mine"
    for name in names or ("step100",):
        (directory / name).mkdir(parents=True, exist_ok=True)
    (tmp_path / "mine.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return revisions_of(str(directory), str(tmp_path / "mine.toml"))


def test_stages_follow_each_other_in_the_order_of_the_file(tmp_path):
    """The last of each batch size by hand: 30 x 100 + 70 x 400 tokens, and 20 x 400 more."""
    names = ["anneal-0020-tokens8K", "step100", "step5", "step20", "anneal-0000-tokens0K"]
    revisions = read(tmp_path, TWO_STAGES, *names)
    known = [(each.revision, each.line, each.tokens, each.learning_rate) for each in revisions]
    assert known == [
        ("step5", "stable", 500, pytest.approx(0.5e-3)),
        ("step20", "stable", 2000, 1e-3),
        ("step100", "stable", 31_000, 1e-3),
        ("anneal-0000-tokens0K", "anneal", 31_000, 1e-3),
        ("anneal-0020-tokens8K", "anneal", 39_000, pytest.approx(1e-3 * (1 - 0.75 / 2))),
    ]
    assert [each.parent for each in revisions[2:4]] == [None, "stable"]
    assert revisions[0].schedule == "constant of mine.toml"
    assert revisions[0].source == "our wiki"


def rate(schedule: str, at: float, begin: float, end: float, floor: float) -> float:
    """The share of the peak, by the field's own formulas."""
    progress = min(max((at - begin) / (end - begin), 0), 1)
    left = {
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "sqrt": 1 - math.sqrt(progress),
    }[schedule]
    return floor + (1 - floor) * left


@pytest.mark.parametrize("unit", ["steps", "tokens"])
@pytest.mark.parametrize(
    ("schedule", "more", "shape", "begin"),
    [
        ("cosine", "", "cosine", 10),
        ("linear", "", "linear", 10),
        ("wsd", "decay_from = {60}\n", "linear", 60),
        ("wsd", 'decay_from = {60}\ndecay = "sqrt"\n', "sqrt", 60),
        ("wsd", 'decay_from = {60}\ndecay = "cosine"\n', "cosine", 60),
    ],
)
def test_schedules(tmp_path, unit, schedule, more, shape, begin):
    """In steps, or in tokens of a batch that doubles at step 50."""

    def place(step: int) -> int:
        return step if unit == "steps" else sum(10 if s < 50 else 20 for s in range(step))

    text = (
        STAGE + f'tokens_per_step = [[0, 10], [50, 20]]\nschedule = "{schedule}"\npeak = 2e-3\n'
        f'unit = "{unit}"\nwarmup = {place(10)}\nhorizon = {place(90)}\nfloor = 0.1\n'
    ) + more.replace("{60}", str(place(60)))
    steps = [2, 10, 40, 60, 75, 90, 95]
    revisions = read(tmp_path, text, *(f"step{step}" for step in steps))
    assert [each.tokens for each in revisions] == [
        sum(10 if s < 50 else 20 for s in range(step)) for step in steps
    ]
    rates = [each.learning_rate for each in revisions]
    expected = [2e-3 * rate(shape, step, begin, 90, 0.1) for step in steps]
    expected[0] = 2e-3 * 2 / 10
    assert rates == pytest.approx(expected)


def test_every_schedule_has_its_keys():
    assert {name for name in SCHEDULES if name} == {"constant", "cosine", "linear", "wsd"}
    keys = set[str]().union(*(needed | more for needed, more in SCHEDULES.values()))
    assert keys < OwnStage.model_fields.keys()


def test_a_table_for_what_no_schedule_says(tmp_path):
    """One stage of two has one; with a byte-order mark, as spreadsheets write it."""
    table = "\ufeffstep,tokens,learning_rate\r\n5,2000,3e-4\r\n100,,\r\n"
    (tmp_path / "odd.csv").write_text(table)
    first = '[[stages]]\nname = "odd"\nrevisions = "step{S}"\ntable = "odd.csv"\n'
    text = first + TWO_STAGES[TWO_STAGES.rindex("[[stages]]") :].replace('parent = "stable"\n', "")
    names = ("step5", "step100", "step7", "anneal-0020-tokens8K")
    known = [(each.step, each.tokens, each.schedule) for each in read(tmp_path, text, *names)]
    assert known == [
        (5, 2000, "schedule of odd.csv"),
        (7, None, None),
        (100, None, "schedule of odd.csv"),
        (20, 39_000, "linear of mine.toml"),
    ]


@pytest.mark.parametrize("place", ["a directory beside the file", "a repository"])
def test_the_tokenizer_is_a_repository_or_beside_the_file(tmp_path, place):
    if place == "a directory beside the file":
        (tmp_path / "me/tokenizer").mkdir(parents=True)
    (tmp_path / "mine.toml").write_text('tokenizer = "me/tokenizer"\n' + STAGE)
    file = family_file(str(tmp_path / "mine.toml"))
    assert file
    is_here = place == "a directory beside the file"
    assert file.tokenizer == (str(tmp_path / "me/tokenizer") if is_here else "me/tokenizer")


def test_a_download_takes_the_file_too(serve, tmp_path, capsys):
    """A directory of them; from then on download.json says whose the revisions are."""
    (tmp_path / "mine.toml").write_text(STAGE)
    for name in ("step100", "step200", "step300", "notes"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "model.safetensors").write_bytes(b"")
        config = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
        (tmp_path / "mine" / name / "config.json").write_text(config)
    family = str(tmp_path / "mine.toml")
    for chosen in ({"every": 2}, {"revisions": ["step200"]}):
        download(str(tmp_path / "mine"), tmp_path / "models", family=family, **chosen)  # type: ignore[arg-type]
    assert {path.name for path in (tmp_path / "models").iterdir()} == {
        "step100", "step200", "step300",
    }  # fmt: skip
    assert "left out 1 of 4 revisions: notes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pattern", "names", "steps"),
    [
        ("ckpt-{S:08}", ["ckpt-00000100", "ckpt-100", "ckpt-123456789"], [100, 123_456_789]),
        ("run.1-step{S}-tokens{T}", ["run.1-step7-tokens3M", "runx1-step8-tokens3M"], [7]),
        ("{S}", ["12", "012", "-1", "9" * 30], [12]),
    ],
)
def test_patterns(tmp_path, pattern, names, steps):
    revisions = read(tmp_path, f'[[stages]]\nrevisions = "{pattern}"\n', *names)
    assert [each.step for each in revisions] == steps
    assert revisions[0].tokens == (3_000_000 if "{T}" in pattern else None)
    assert revisions[0].line == "training"


def stage(*lines: str) -> str:
    return STAGE + "".join(f"{line}\n" for line in lines)


COSINE = ('schedule = "cosine"', "peak = 1e-3")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "key 'stages' is missing"),
        ("stages = []", "at least 1 item"),
        ("stages = 3", "'stages'"),
        ("[[stages]]\n", "key 'stages.0.revisions' is missing"),
        ("[[stages]\n", "is not TOML: "),
        (b"\xff", "is not TOML: "),
        ("a = " + "[" * 9000, "is not TOML: "),
        (f"a = {'9' * 9000}", "is not TOML: "),
        (
            stage("peek = 1e-3"),
            r"unknown key 'stages.0.peek'; did you mean peak\? Else take one of",
        ),
        ('source = "\\u0007"\n' + STAGE, "holds a control character; remove it"),
        ("tokenisor = 'x'\n" + STAGE, r"unknown key 'tokenisor'; .*tokenizer, source, stages"),
        (STAGE.replace("{S}", ""), "does not say where the step is; give one such as step{S}"),
        (STAGE.replace("{S}", "{S}-{S}"), "does not say where the step is"),
        (STAGE.replace("{S}", "{N}"), "does not say where the step is"),
        (STAGE.replace("{S}", "{S:99}"), "does not say where the step is"),
        (STAGE.replace("{S}", "{K:03}"), "does not say where the step is"),
        (STAGE.replace("step{S}", "a/{S}"), "cannot name directories"),
        (STAGE.replace("step{S}", "-{S}"), "cannot name directories"),
        (STAGE.replace("step{S}", "other{S}"), r"step100: no stage of .*\.toml names revisions so"),
        (STAGE + STAGE, "two stages are named training"),
        (STAGE + stage('name = "b"'), r"two stages have revisions step\{S\}"),
        (stage('name = "a/b"'), "'stages.0.name'"),
        (stage('parent = "before"'), "starts from before, which is not a stage before it"),
        (stage('schedule = "step"'), "'stages.0.schedule'"),
        (stage('schedule = "cosine"', "horizon = 9"), "schedule 'cosine' needs peak; add it"),
        (stage(*COSINE), "schedule 'cosine' needs horizon; add it"),
        (stage(*COSINE, "horizon = 9", "decay_from = 2"), "'cosine' has no decay_from; remove it"),
        (stage("peak = 1e-3"), "a stage without schedule has no peak; remove it"),
        (stage('schedule = "wsd"', "peak = 1.0", "horizon = 9"), "'wsd' needs decay_from"),
        (stage(*COSINE, "horizon = 9", "warmup = 9"), "warmup, decay_from and horizon do not rise"),
        (stage(*COSINE, "horizon = nan"), "'stages.0.horizon'"),
        (stage(*COSINE, "horizon = inf"), "'stages.0.horizon'"),
        (stage(*COSINE, 'horizon = "9"'), "'stages.0.horizon'"),
        (stage(*COSINE, "horizon = 9", "floor = 1.5"), "'stages.0.floor'"),
        (stage('schedule = "constant"', "peak = 0"), "'stages.0.peak'"),
        (stage(*COSINE, "horizon = 9", 'unit = "tokens"'), "unit 'tokens' needs tokens_per_step"),
        (stage("tokens_per_step = 0"), "'stages.0.tokens_per_step"),
        (stage("tokens_per_step = true"), "'stages.0.tokens_per_step"),
        (stage('tokens_per_step = "4M"'), "'stages.0.tokens_per_step"),
        (stage("tokens_per_step = [[5, 100]]"), r"begins at steps \[5\]; give 0 and later ones"),
        (stage("tokens_per_step = [[0, 9], [0, 8]]"), r"begins at steps \[0, 0\]"),
        (stage("starts_at = 1.5"), "'stages.0.starts_at'"),
        (stage('table = "x.csv"', "tokens_per_step = 9"), "leave the other keys of the schedule"),
        (stage('table = "no.csv"'), "no.csv: No such file"),
    ],
)
def test_what_a_file_cannot_mean_is_refused_in_one_line(tmp_path, text, reason):
    with pytest.raises(UserError, match=reason) as refused:
        read(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_more_tokens_than_a_table_holds_are_refused(tmp_path):
    names = ("step100", f"step{10**17}")
    (kept,) = read(tmp_path, stage("tokens_per_step = 1_000_000_000"), *names)
    assert kept.step == 100


def test_names_that_state_other_tokens_say_so(tmp_path, capsys):
    """The reason is the tokens, not the form of the name."""
    text = stage("tokens_per_step = 1_000_000").replace("{S}", "{S}-tokens{T}")
    wrong = "step100-tokens7B"
    (kept,) = read(tmp_path, text, "step100-tokens100M", wrong)
    assert kept.tokens == 100_000_000
    reason = "mine saw 100,000,000 tokens by step 100 of training"
    assert f"left out 1 of 2 revisions: {wrong} ({reason})" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("step;tokens\n100;2\n", "has the columns step;tokens; give step"),
        ("step,loss\n100,2\n", "has the columns step, loss; give step"),
        ("step\n100\n", "has the columns step; give step, and tokens"),
        ("step,tokens,tokens\n100,2,3\n", "has the columns step, tokens, tokens; .* each once"),
        ("", "has the columns none; give step"),
        ("step,tokens\n7,2\n", "has none of the steps"),
        ("step,tokens\n100,2e9\n", "line 2 of .*tokens is '2e9'"),
        ("step,tokens\n100,-2\n", "tokens is '-2'; give a whole number"),
        (f"step,tokens\n100,{'9' * 5000}\n", "give a whole number"),
        ("step,learning_rate\n100,nan\n", "'nan'; give a number of at"),
        ("step,tokens\n100,2\n100,3\n", "line 3 of .* no step of its own"),
        ("step,tokens\n100,2,3\n", "or too many values"),
        (b"step\n\xff\n", "is not UTF-8"),
    ],
)
def test_tables_that_are_not_told_right(tmp_path, table, reason):
    (tmp_path / "mine.csv").write_bytes(table if isinstance(table, bytes) else table.encode())
    with pytest.raises(UserError, match=reason) as refused:
        read(tmp_path, stage('table = "mine.csv"'))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("place", ["missing.toml", "."])
def test_a_file_that_is_not_there(tmp_path, place):
    path = tmp_path / place if place != "." else tmp_path / "directory.toml"
    if place == ".":
        path.mkdir()
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match=r"give a file of a family$"):
        revisions_of(str(tmp_path / "mine"), str(path))
