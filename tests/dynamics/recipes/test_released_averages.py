"""Averages along a released trajectory: which revisions they take in, where they stand, what is
fetched for them, and that the weights are the mean.
"""

import json
import math
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from base.errors import UserError
from ckpt_tools.released.revisions import Revision
from dynamics.figures.averages import PUBLISHED, averages
from dynamics.figures.losses import AFTER, BEFORE, full_against_quantized
from dynamics.recipes.released_averages import averages_of, with_averages
from dynamics.recipes.trajectory import released_of, trajectory_of
from study.definition import Study, save_study
from study.figures.canvas import WEIGHTS, Canvas
from study.machine.disk import needed_bytes
from study.paths import MeasuredModel, hf_directory, model_record, quantization_result
from study.recipes.resolve import resolve
from study.recipes.shown import summary
from study.released import ReleasedRevision, ReleasedRun
from study.results.averages import SOUP, averagings_of
from study.results.collect import collect_rows
from study.step import Step
from study.steps import steps_of
from tests.ckpt_tools.released.fake_hub import FakeHub, config_json
from tests.conftest import make_hf_directory
from tests.dynamics.drawing import chart_of, drawn
from tests.interpreter import interpreter
from tests.runs import PROJECT, environment, execute
from tests.sealing import reseal
from tests.study.claimed import table
from tests.study.synthetic import per_document, result_of, table_of, write_result
from tests.waiting import wait_until

REPO, PER_STEP = "allenai/OLMo-2-1124-7B", 4_194_304
TOKENS = {10: 42, 30: 126, 50: 210, 70: 294, 90: 378, 110: 462}  # billions by thousands of steps
STAGE1 = [f"stage1-step{step}000-tokens{tokens}B" for step, tokens in TOKENS.items()]
STAGE2_STARTS = 928_646 * PER_STEP
INGREDIENTS = {
    number: [
        f"stage2-ingredient{number}-step{step}-tokens{tokens}B"
        for step, tokens in ((1000, 5), (6000, 26), (11931, 50))
    ]
    for number in (1, 2, 3)
}
ENDS = [names[-1] for names in INGREDIENTS.values()]


@pytest.fixture
def hub(monkeypatch):
    files = {"config.json": config_json("olmo2"), "model.safetensors": b""}
    names = [*STAGE1, *(name for of_run in INGREDIENTS.values() for name in of_run), "main"]
    server = FakeHub(dict.fromkeys(names, files), REPO)
    server.use(monkeypatch)
    yield server
    server.shutdown()
    server.server_close()


def trajectory_without_averages() -> Study:
    return resolve("trajectory", "full", (f"source={REPO}",))


def trajectory(averages: str, **released: object) -> Study:
    settings = {"source": REPO, "averages": averages} | released
    return resolve("trajectory", "full", tuple(f"{key}={value}" for key, value in settings.items()))


def made(study: Study) -> dict[tuple[str, str], list[list[str]]]:
    """The names of the members of every average, by stage and name."""
    found: dict[tuple[str, str], list[list[str]]] = {}
    for run in study.runs:
        for model in study.models_of(run):
            if model.average:
                members = [member.rpartition("/")[2] for member in model.members]
                found.setdefault((run.name, model.average), []).append(members)
    return found


def by_name(study: Study) -> dict[str, Step]:
    steps = {step.name: step for step in steps_of(study)}
    # a graph, in whose order each step comes after those that it needs
    seen: set[str] = set()
    for step in steps.values():
        assert seen.issuperset(step.after), step.name
        seen.add(step.name)
    return steps


@pytest.mark.usefixtures("hub")
def test_a_window_slides_over_the_measured_revisions_of_one_stage(capsys):
    """As the authors list revisions and average the last L: never across stages or branches."""
    study = trajectory("lawa3", every=2)  # of stage 1 revisions 1, 3, 5 and the last; of others two
    measured = [STAGE1[0], STAGE1[2], STAGE1[4], STAGE1[5]]
    assert made(study) == {("stage1", "lawa3"): [measured[:3], measured[1:]]}
    assert (
        "lawa3 leaves out stages of fewer revisions: stage2-ingredient1 (2)"
        in capsys.readouterr().err
    )
    (run, *_) = study.runs
    models = study.models_of(run)
    assert [(model.step, model.average) for model in models] == [
        (10_000, None), (50_000, None), (90_000, None), (90_000, "lawa3"),
        (110_000, None), (110_000, "lawa3"),
    ]  # fmt: skip
    steps = by_name(study)
    step = steps["average-stage1-lawa3-step00110000"]
    places = ["lawa3-step00110000", *measured[1:]]
    assert step.command[3:] == ("average", *(f"{{study}}/stage1/hf/{name}" for name in places))
    assert step.after == tuple(f"download-stage1-{name}" for name in measured[1:])
    spec = study.quantization.specs[0]
    assert step.name in steps[f"quantize-stage1-lawa3-step00110000-{spec}"].after
    # curvature is that of weights
    assert not [name for name in steps if name.startswith("curvature-stage1-lawa3")]
    shown = " ".join(" ".join(summary(study, whole=True)).split())  # in one line
    assert f"lawa3 of {measured[0]} to {measured[2]}, ..., {measured[1]} to {measured[3]}" in shown
    assert "LAWA, the mean of 3 consecutive measured revisions of a stage" in study.description


@pytest.mark.usefixtures("hub")
def test_a_soup_takes_in_revisions_of_several_stages():
    """At the tokens of the last; what it alone needs is fetched, not measured."""
    asked = [ENDS[2], ENDS[0], INGREDIENTS[1][1], ENDS[1]]  # in any order
    study = trajectory(f"lawa2,mine:{':'.join(asked)}", every=9)
    members = [INGREDIENTS[1][1], *ENDS]
    assert made(study)["stage2-ingredient3", "mine"] == [members]
    assert [name for name in made(study) if name[1] == "mine"] == [("stage2-ingredient3", "mine")]
    runs = {run.name: run for run in study.runs if isinstance(run, ReleasedRun)}
    assert [each.name for each in runs["stage2-ingredient1"].ingredients] == [INGREDIENTS[1][1]]
    assert not runs["stage2-ingredient3"].ingredients

    steps = by_name(study)
    average = steps["average-stage2-ingredient3-mine-step00011931"]
    owners = ("ingredient1", "ingredient1", "ingredient2", "ingredient3")
    assert average.command[5:] == tuple(
        f"{{study}}/stage2-{owner}/hf/{name}" for owner, name in zip(owners, members, strict=True)
    )
    # every revision that is measured or averaged is fetched once, no other one
    fetched = [step.models[1] for step in steps.values() if step.run and step.kind == "download"]
    needed = {STAGE1[0], STAGE1[-1], "main", INGREDIENTS[1][1]}
    needed |= {name for names in INGREDIENTS.values() for name in (names[0], names[-1])}
    assert len(fetched) == len(set(fetched))
    assert set(fetched) == needed
    measured = {word for step in steps.values() if step.kind == "quantize" for word in step.models}
    assert not [word for word in measured if INGREDIENTS[1][1] in word]
    assert any("mine-step00011931" in word for word in measured)


@pytest.mark.usefixtures("hub")
def test_a_soup_of_a_later_end_and_an_earlier_branch_comes_after_both():
    """The newest is of the first ingredient, which is before the third in the study."""
    members = [INGREDIENTS[3][0], ENDS[0]]
    study = trajectory(f"mine:{':'.join(members)}", stage="stage2")
    assert made(study) == {("stage2-ingredient1", "mine"): [members]}
    assert "average-stage2-ingredient1-mine-step00011931" in by_name(study)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("averages", "released", "reason"),
    [
        ("lawa7", {}, "lawa7 takes in 7 consecutive revisions of a stage, no stage has over 6"),
        ("lawa3", {"every": 9}, "no stage has over 2; give a smaller window, or a smaller every"),
        ("lawa1", {}, "'lawa1' is no average; give such as lawa5, or NAME:REVISION:REVISION"),
        ("lawa", {}, "'lawa' is no average"),
        ("lawa-5", {}, "is no average"),
        ("lawa05", {}, "is no average"),
        ("lawa99999999999", {}, "is no average"),
        ("", {}, "'' is no average"),
        ("lawa2,", {}, "'' is no average"),
        ("ema0.9", {}, "is no average"),
        ("mine:a", {}, "'mine:a' is no average"),
        (f"lawa2:{STAGE1[0]}:{STAGE1[1]}", {}, "is no average"),
        (f"../up:{STAGE1[0]}:{STAGE1[1]}", {}, "is no average"),
        ("lawa2,lawa2", {}, "names lawa2 twice"),
        (f"a:{STAGE1[0]}:{STAGE1[1]},a:{STAGE1[2]}:{STAGE1[1]}", {}, "names a twice"),
        (f"a:{STAGE1[0]}:{STAGE1[0]}", {}, "takes in a revision twice"),
        (f"a:{STAGE1[0]}:stage1-step10", {}, "stage1-step10, which is no revision of the source"),
        (f"a:{STAGE1[0]}:{ENDS[0]}", {"stage": "stage1"}, "a stage that is not measured; leave"),
    ],
)
def test_averages_that_there_cannot_be_are_refused(averages, released, reason):
    with pytest.raises(UserError, match=reason) as refused:
        trajectory(averages, **released)
    assert "\n" not in str(refused.value)


def test_a_name_that_two_sources_have_is_refused():
    """Else a soup would be of one model or the other by the order of the sources."""
    revisions = [Revision(repo=REPO, revision=name, stage="stage1", step=1) for name in "ab"]
    runs = [
        ReleasedRun(
            name=f"{source}-stage1",
            model=source,
            source=f"me/{source}",
            revisions=(ReleasedRevision.of(revisions[0]),),
        )
        for source in ("one", "two")
    ]
    listed = {run.source: revisions for run in runs}
    with pytest.raises(UserError, match="takes in a, which is in several sources; give one"):
        with_averages(runs, listed, "mine:a:b")
    del listed["me/two"]
    (first, second) = with_averages(runs, listed, "mine:a:b")
    assert [soup.members for soup in first.soups] == [("one-stage1/a", "one-stage1/b")]
    assert not second.soups


def test_names_are_those_of_directories():
    assert averages_of("lawa5,lawa12").windows == (5, 12)
    with pytest.raises(UserError, match="is no average"):
        averages_of("a\n:b:c")


# Tiny models in bf16, in several files each, as they are published.
STEPS = (100, 200, 300, 400)
FAMILY = """
[[stages]]
name = "stable"
revisions = "step{S}"
tokens_per_step = 1000

[[stages]]
name = "anneal"
revisions = "anneal-step{S}"
parent = "stable"
starts_at = 400_000
tokens_per_step = 1000
"""
MADE: dict[
    str, dict[str, list[str]]
] = {  # by stage: what lies in its hf/, an average with its members
    "stable": {"step100": [], "step200": [], "step400": []},
    "anneal": {"anneal-step100": []},
}
MADE["stable"]["lawa2-step00000400"] = ["stable/step100", "stable/step400"]
MADE["anneal"]["mine-step00000100"] = ["stable/step200", "stable/step400", "anneal/anneal-step100"]
# Downloads and averages of a study, by processes as the runner starts them.
MAKING = """
import sys
from pathlib import Path
from study.definition import load_study
from study.steps import steps_of
from tests.study.running import run_steps
directory = Path(sys.argv[1])
kinds = ("download", "average")
steps = [step for step in steps_of(load_study(directory)) if step.run and step.kind in kinds]
run_steps(directory, steps)
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A directory of revisions, and beside it the file of their family."""
    root = tmp_path_factory.mktemp("published")
    names = [*(f"step{step}" for step in STEPS), "anneal-step100"]
    for seed, name in enumerate(names):
        whole = make_hf_directory(root / "whole" / name, seed=seed, dtype=torch.bfloat16)
        model = AutoModelForCausalLM.from_pretrained(whole, dtype="auto")
        model.save_pretrained(root / "models" / name, max_shard_size="20KB")
        assert len(list((root / "models" / name).glob("*.safetensors"))) > 2
    (root / "mine.toml").write_text(FAMILY)
    return root


def bits_of(hf_dir: Path) -> dict[str, np.ndarray]:
    """The 16 bits of every number of every tensor, by the format's own description:

    eight bytes with the length of a JSON header, which has the place of each tensor.
    """
    found = {}
    for path in hf_dir.glob("*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            assert tensor["dtype"] == "BF16"
            first, end = tensor["data_offsets"]
            found[name] = np.frombuffer(content[start + first : start + end], dtype=np.uint16)
    return found


def mean_bits(members: list[np.ndarray]) -> np.ndarray:
    """The mean in fp32, then its upper half, rounded to the nearest, ties to even."""
    wide = [(member.astype(np.uint32) << 16).view(np.float32) for member in members]
    total = wide[0]
    for other in wide[1:]:
        total = total + other
    bits = (total / np.float32(len(wide))).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def test_killed_and_resumed_the_weights_are_the_mean(published, tmp_path):
    """By numpy on the files' bytes; nothing is fetched beside what is measured or averaged."""
    settings = (
        f"source={published / 'models'}",
        f"family={published / 'mine.toml'}",
        "averages=lawa2,mine:step200:step400:anneal-step100",
        "every=3",
    )
    study = trajectory_of(released_of(settings), smoke=True, on_text=True)
    directory = tmp_path / study.name
    save_study(directory, study)
    command = [interpreter(), "-c", MAKING, str(directory)]
    process = subprocess.Popen(command, cwd=PROJECT, env=environment(), start_new_session=True)
    averages = directory / "logs"
    wait_until(lambda: list(averages.glob("average-*.log")), "the first average", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = execute(command, cwd=PROJECT)
    assert done.returncode == 0, done.stderr[-3000:]

    written = 0
    for stage, models in MADE.items():
        hf = directory / stage / "hf"
        assert {path.name for path in hf.iterdir()} == models.keys()
        for name, members in models.items():
            written += sum(bits.nbytes for bits in bits_of(hf / name).values())
            if not members:
                continue
            inputs = [bits_of(directory / place.replace("/", "/hf/")) for place in members]
            average = bits_of(hf / name)
            assert average.keys() == inputs[0].keys()
            for key, bits in average.items():
                expected = mean_bits([each[key] for each in inputs])
                np.testing.assert_array_equal(bits, expected, err_msg=f"{name} {key}")
            lineage = json.loads((hf / name / "lineage.json").read_text())
            assert (lineage["accumulate"], lineage["dtype"]) == ("fp32", "bf16")
            origins = [each["revision"] for each in lineage["ingredients"]]
            assert origins == [place.partition("/")[2] for place in members]
    assert written == needed_bytes(study)["released models"]

    rows = {(row["run"], row["average"]): row for row in collect_rows(directory, study).rows}
    places = {key[1]: (row["step"], row["tokens"]) for key, row in rows.items() if key[1]}
    assert places == {"lawa2": (400, 400_000), "mine": (100, 500_000)}


def loss_of(model: MeasuredModel, tokens: int) -> float:
    """Falls with the logarithm of the tokens; an average is lower."""
    return 6 - 0.25 * math.log(tokens / 1e9) - (0.05 if model.average else 0)


def error_of(model: MeasuredModel, tokens: int) -> float:
    """Flat, a surge in the anneal; averages have two thirds of it."""
    surge = 0.04 * max(0, tokens - STAGE2_STARTS) / 50e9
    return (0.02 + surge) * (0.66 if model.average else 1)


def measure(directory: Path, study: Study) -> Path:
    """Writes what steps leave of every model, with these losses."""
    save_study(directory, study)
    for run in study.runs:
        assert isinstance(run, ReleasedRun)
        for model in study.models_of(run):
            last = model.revision or model.members[-1].rpartition("/")[2]
            tokens = run.named(last).tokens or 0
            reseal(made_directory(directory / model_record(run.name, model)), {"files": {}})
            loss, error = loss_of(model, tokens), error_of(model, tokens)
            for spec in study.quantization.everywhere:
                size = error * loss * (1 if "b3" in spec else 0.2)
                losses = per_document(loss, size, 1.1 * size)
                result = result_of(directory / hf_directory(run.name, model), spec, losses)
                write_result(directory / quantization_result(run.name, model, spec), result)
    return directory


def made_directory(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.usefixtures("hub")
def test_the_figure_has_averages_beside_the_weights(tmp_path):
    """LAWA dashed, a soup as a star, at the tokens of their last members."""
    soup = ":".join((STAGE1[-1], *ENDS))
    study = trajectory(f"lawa2,lawa3,mine:{soup}")
    directory = measure(tmp_path / study.name, study)
    canvas = Canvas(study, table_of(directory, study), directory)
    assert [each.kind for each in averagings_of(study)] == ["LAWA", "LAWA", SOUP]
    drawing = drawn(averages, canvas)
    panel = drawing.rows[0]["panel"]
    of_panel = [row for row in drawing.rows if row["panel"] == panel]
    by_series: dict[str, list[float]] = {}
    for row in of_panel:
        by_series.setdefault(row["series"], []).append(row["tokens"])
    stage1 = [step * 1000 * PER_STEP for step in TOKENS]
    assert by_series["lawa3"][: len(stage1) - 2] == stage1[2:]
    assert by_series["lawa2"][: len(stage1) - 1] == stage1[1:]
    assert by_series[SOUP] == [STAGE2_STARTS + 11_931 * PER_STEP]
    assert len(by_series["lawa3"]) == 4 + 3
    assert len(by_series[WEIGHTS]) == 6 + 9
    assert by_series[PUBLISHED] == by_series[SOUP]  # main, a soup of the same ingredients

    text = json.dumps(chart_of(drawing))
    series = [WEIGHTS, "lawa2", "lawa3", PUBLISHED, SOUP]
    (dashes,) = set(re.findall(r'"strokeDash": {"field": "series".*?"range": (\[\[.*?\]\])', text))
    assert json.loads(dashes) == [[1, 0], [5, 3], [7, 2, 2, 2], [0, 1], [0, 1]]
    assert f'"domain": {json.dumps(series)}' in text


@pytest.mark.usefixtures("hub")
def test_quantized_against_full_loss_has_averages_of_released_models(tmp_path):
    """Open points, as the paper has OLMo and OLMo 2, between their losses and the line x = y."""
    study = trajectory(f"lawa2,mine:{':'.join(ENDS)}")
    directory = measure(tmp_path / study.name, study)
    canvas = Canvas(study, table_of(directory, study), directory)
    drawing = drawn(full_against_quantized, canvas)
    panel = drawing.rows[0]["panel"]
    found = {
        (row["run"], row["series"], row["step"]): (row[BEFORE.label], row[AFTER.label])
        for row in drawing.rows
        if row["panel"] == panel
    }
    assert {series for _, series, _ in found} == {WEIGHTS, "lawa2", "mine"}
    for (run, series, step), (full, quantized) in found.items():
        if series == "lawa2":
            weights = found[run, WEIGHTS, step]
            assert full < weights[0]
            assert full < quantized < weights[1]
    assert '"fill": "#ffffff"' in json.dumps(chart_of(drawing))


@pytest.mark.usefixtures("hub")
def test_averages_are_no_steps_of_training(tmp_path):
    """No claim, forecast or end of training takes one for weights."""
    plain = trajectory_without_averages()
    averaged = trajectory(f"lawa2,mine:{STAGE1[0]}:{STAGE1[1]}")
    lines: list[dict[str, tuple[str, str]]] = []
    for study in (plain, averaged):
        directory = measure(tmp_path / str(len(lines)) / study.name, study)
        judged = table(directory, study, list(table_of(directory, study)))
        lines.append({name: (line.outcome, line.p) for name, line in judged.items()})
    assert lines[0] == lines[1]
    assert lines[0]["surge"][0] == "supported"
