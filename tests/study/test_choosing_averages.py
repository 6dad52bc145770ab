"""The choice of an average: what is tried, what the search reads, and what the pick is worth."""

import subprocess
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from base.errors import UserError
from dynamics.choices.average import Bench, name_of, pick_lines
from dynamics.choices.search import most_tried, search
from study.definition import save_study
from study.paths import hf_directory
from study.text.kinds import TokenFiles
from tests.sealing import reseal
from tests.study.claimed import SPEC, run_of, study_of
from tests.study.synthetic import per_document, result_of
from train.data.corpus import open_corpus

EXPORTS = ("a", "b", "c", "d", "e")


def planted(seed: int):
    """The squared distance of a mean of weights from the best ones, and how often it was asked."""
    generator, asked = np.random.default_rng(seed), []
    weights = dict(zip(EXPORTS, generator.normal(size=(5, 2)), strict=True))

    def loss(members) -> float:
        asked.append(members)
        return float((np.mean([weights[name] for name in members], axis=0) ** 2).sum())

    return loss, asked


@pytest.mark.parametrize("seed", range(20))
def test_the_search_tries_every_window_and_a_greedy_soup(seed):
    loss, asked = planted(seed)
    losses = search(EXPORTS, (), loss)
    assert len(asked) == len(set(asked)) <= most_tried(5, 0)[0]
    assert {EXPORTS[-size:] for size in range(1, 6)} <= set(losses)
    assert all((name,) in losses for name in EXPORTS)
    every = [some for size in range(1, 6) for some in combinations(EXPORTS, size)]
    assert all(losses[some] == loss(some) for some in every if some in losses)

    # Wortsman et al. 2022, algorithm 1, over sets
    soup: set[str] = set()
    for name in sorted(EXPORTS, key=lambda name: loss((name,))):
        wider = tuple(sorted(soup | {name}))
        assert wider in losses
        if not soup or loss(wider) <= loss(tuple(sorted(soup))):
            soup = set(wider)
    assert min(losses.values()) <= loss(tuple(sorted(soup))) <= min(loss((n,)) for n in EXPORTS)


TARGET = {80: 4.0, 160: 1.5, 320: 1.2, 400: -0.9}  # distances of weights from the best ones


class Commands:
    """The commands of a bench: text is split in earnest, models are not."""

    def __init__(self, run=subprocess.run) -> None:
        self.started: list[list[str]] = []
        self._run = run

    def __call__(self, command: list[str], **options):
        words = command[2:]
        self.started.append(words)
        if words[0] == "train":
            return self._run(command, **options)
        if words[0] == "quant_eval":
            out = Path(words[words.index("--out") + 1])
            out.mkdir(parents=True)
            content = result_of(Path(words[2]), SPEC, per_document(3, self.loss(words) - 3, 0.01))
            reseal(out / "result.json", content)
        return subprocess.CompletedProcess(command, 0)

    def loss(self, words: list[str]) -> float:
        parts = Path(words[2]).name.removeprefix("step").split("-")
        steps = [int(part) for part in parts if part.isdigit()]
        return 3.1 + 0.01 * float(np.mean([TARGET[step] for step in steps])) ** 2

    def texts(self) -> list[str]:
        """The texts that models were measured on, in order."""
        return [
            Path(words[words.index("--eval") + 1]).name
            for words in self.started
            if words[0] == "quant_eval"
        ]


@pytest.fixture
def bench(tmp_path, held_out_prefix, train_prefix, tokenizer_dir, monkeypatch):
    run = run_of("one")  # checkpoints at 40, 80, 160, 320 and 400
    text = TokenFiles(
        train=str(train_prefix),
        held_out=str(held_out_prefix),
        calibration=str(train_prefix),
        tokenizer=str(tokenizer_dir),
        sha256="0" * 64,
    )
    study = study_of(run, controls=False, text=text.model_dump())
    directory = tmp_path / study.name
    save_study(directory, study)
    for model in study.models_of(run):
        place = directory / hf_directory(run.name, model)
        place.mkdir(parents=True)
        (place / "lineage.json").write_text("{}")
    commands = Commands()
    monkeypatch.setattr("dynamics.choices.average.subprocess.run", commands)
    return Bench(directory, study, run, SPEC, last=4), commands, directory


def test_the_pick_is_chosen_on_one_text_and_measured_on_another(bench, held_out_prefix):
    bench, commands, directory = bench
    assert bench.cost().startswith(f"36 quantizations with {SPEC} at most, each measured on")
    pick = bench.pick()

    means = {
        some: abs(float(np.mean([TARGET[int(name.removeprefix("step"))] for name in some])))
        for some in pick.losses
    }
    assert pick.members == min(means, key=means.__getitem__)
    assert len(pick.members) > 1, "the planted best is an average"
    assert pick.comparison.difference.value == pytest.approx(
        pick.losses[pick.members] - pick.losses["step00000400",]
    )
    assert pick.comparison.difference.p_value < 0.01

    texts = commands.texts()
    assert set(texts[:-2]) == {"selection"}
    assert texts[-2:] == ["evaluation", "evaluation"]
    halves = {
        name: open_corpus(directory / "choices" / "one" / name)
        for name in ("selection", "evaluation")
    }
    documents = {
        name: {corpus.document(index).tobytes() for index in range(corpus.manifest.documents)}
        for name, corpus in halves.items()
    }
    assert not documents["selection"] & documents["evaluation"]
    whole = open_corpus(held_out_prefix)
    assert documents["selection"] | documents["evaluation"] == {
        whole.document(index).tobytes() for index in range(whole.manifest.documents)
    }
    lines = list(pick_lines(pick))
    assert lines[1].endswith(name_of(pick.members))
    assert lines[-1].startswith(f"{name_of(pick.members)} on the evaluation text")
    assert lines[-1].endswith("lower")


def test_the_last_weights_may_be_the_pick(bench, monkeypatch):
    bench, commands, _ = bench
    monkeypatch.setitem(TARGET, 400, 0.0)
    monkeypatch.setitem(TARGET, 160, 0.5)
    pick = bench.pick()
    assert pick.members == ("step00000400",)
    assert pick.comparison is None
    assert "evaluation" not in commands.texts()
    assert "the last weights themselves" in list(pick_lines(pick))[-1]


def test_a_command_that_fails_ends_the_search(bench, monkeypatch):
    bench, *_ = bench
    failed = subprocess.CompletedProcess[bytes]([], 2)
    monkeypatch.setattr("dynamics.choices.average.subprocess.run", lambda *_, **__: failed)
    with pytest.raises(UserError, match="'python -m train prepare' ended with 2"):
        bench.pick()


def test_one_export_is_no_average(bench):
    bench, _, directory = bench
    for path in directory.glob("one/hf/step*/lineage.json"):
        path.unlink()
    with pytest.raises(UserError, match="one has 0 exported checkpoints"):
        Bench(directory, bench.study, bench.run, SPEC, last=4)
