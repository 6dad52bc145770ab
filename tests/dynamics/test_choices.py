"""Choices where the best one is planted: of a peak learning rate, of cooldowns, of an average."""

import math
import re
import subprocess
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from base.errors import UserError
from base.frozen import fingerprint
from dynamics.choices import arms as text
from dynamics.choices.arms import (
    answers,
    at_equal_cost,
    at_equal_loss,
    at_equal_tokens,
    interventions,
    sweeps,
)
from dynamics.choices.average import Bench, most_tried, name_of, pick_lines, search
from dynamics.choices.cooldowns import cost, with_cooldowns, write_recipe
from dynamics.mechanism.equal_loss import crossing, interpolated
from study.claims.verdict import Evidence, Measure, NotTested
from study.definition import load_study, save_study
from study.measurements.quantization import QUANTIZED_LOSS, RELATIVE_ERROR
from study.paths import hf_directory
from study.recipes.parts import sweep
from study.recipes.resolve import resolve
from study.results.paired import Paired
from study.results.table import Row
from study.steps import steps_of
from tests.present import present
from tests.sealing import measured_in, reseal
from tests.study import factors
from tests.study.claimed import SPEC, branched, diverge, rows_of, run_of, study_of
from tests.study.commands import printed, refused
from tests.study.synthetic import (
    TOKENS,
    per_document,
    result_of,
    table_of,
    text_in_place,
    write_study,
)
from train.data.corpus import open_corpus
from train.planning.flops import flops_per_token
from train.run.perturbation import Qat, Sam
from train.run.schedules import learning_rate

BEST, PEAKS, SEEDS = 3e-3, (1e-3, 3e-3, 1e-2, 3e-2), (1, 2, 3)
LOSS = f"quant/{SPEC}/cross_entropy"


def loss_of(run, model) -> float:
    """Lowest for the largest peak, so that errors at the end rank otherwise than at equal loss."""
    log_rate = math.log10(run.optimizer.peak_lr)
    return 4 - 0.3 * log_rate - 0.8 * math.log10(model.step) + 0.01 * run.seed


def at_loss(peak: float, loss: float) -> float:
    """The planted error: log-linear in the loss, lowest for BEST."""
    return 0.02 * math.exp(0.5 * math.log10(peak / BEST) ** 2 - 1.5 * (loss - 3))


def error_of(run, model) -> float:
    return at_loss(run.optimizer.peak_lr, loss_of(run, model))


def evidence_of(directory, error=error_of, seeds=SEEDS, noise=0.02) -> Evidence:
    runs = [run_of(f"lr{peak:g}-seed{s}", peak, seed=s) for peak in PEAKS for s in seeds]
    study = study_of(*runs)
    rows = rows_of(directory / study.name, study, error, loss=loss_of, noise=noise)
    rows = [Row.of(row | {"study": study.name}) for row in rows]
    return Evidence(study, rows, Paired(directory / study.name))


@pytest.fixture(scope="module")
def evidence(tmp_path_factory) -> Evidence:
    return evidence_of(tmp_path_factory.mktemp("sweep"))


def peak_of(label: str) -> float:
    return float(label.split()[0])


def test_the_planted_peak_is_first_at_equal_loss_with_its_closed_form(evidence):
    measure = Measure(evidence, SPEC, RELATIVE_ERROR)
    (sweep,) = sweeps(evidence.ends)
    assert list(map(float, sweep.ends)) == list(PEAKS)
    answer = at_equal_loss(measure, sweep)
    at = max(present(end.last)[LOSS] for end in sweep.ends[f"{PEAKS[0]:g}"])  # the last to arrive
    assert f"{at:.4f}" in answer.where
    expected = {peak: at_loss(peak, at) for peak in PEAKS}
    assert [peak_of(entry.label) for entry in answer.ranking] == sorted(
        expected, key=expected.__getitem__
    )
    for entry in answer.ranking:
        assert entry.estimate.value == pytest.approx(expected[peak_of(entry.label)], rel=1e-6)
        low, high = entry.estimate.interval(0.95)
        assert low < expected[peak_of(entry.label)] < high
    best, *others = answer.ranking
    assert peak_of(best.label) == BEST
    assert all(present(entry.p_adjusted) < 0.05 for entry in others)
    for entry in others:
        difference = entry.estimate.value - best.estimate.value
        assert present(entry.excess).value == pytest.approx(difference, rel=1e-6)


def test_the_end_ranks_them_otherwise(evidence):
    """At equal tokens the lowest quantized loss is the largest peak's, as planted."""
    (sweep,) = sweeps(evidence.ends)
    answer = at_equal_tokens(Measure(evidence, SPEC, QUANTIZED_LOSS), sweep)
    ends = {
        float(peak): np.mean([present(end.last)[QUANTIZED_LOSS.of(SPEC)] for end in ends])
        for peak, ends in sweep.ends.items()
    }
    assert [peak_of(entry.label) for entry in answer.ranking] == sorted(ends, key=ends.__getitem__)
    assert peak_of(answer.ranking[0].label) != BEST


def test_a_loss_that_not_all_runs_pass_is_refused(evidence):
    (sweep,) = sweeps(evidence.ends)
    measure = Measure(evidence, SPEC, RELATIVE_ERROR)
    with pytest.raises(UserError, match="--loss 2 is outside"):
        at_equal_loss(measure, sweep, 2.0)
    highest = min(row[LOSS] for row in evidence.rows if row["step"] == 40)
    assert at_equal_loss(measure, sweep, highest - 1e-6).ranking
    with pytest.raises(UserError, match="is outside"):
        at_equal_loss(measure, sweep, highest + 1e-3)


def test_an_error_without_logarithm_is_not_ranked_and_the_rest_is(tmp_path):
    evidence = evidence_of(
        tmp_path,
        lambda run, model: -0.001 if run.optimizer.peak_lr == BEST else error_of(run, model),
        seeds=(1,),
    )
    results = answers(evidence)
    assert [bool(answer.ranking) for answer in results] == [False, False, True]
    lines = list(text.answers_lines(results))
    assert "by the quantized loss" in lines[0]
    assert "is not positive" in " ".join(text.answers_lines(results, whole=True))


def test_runs_without_a_partner_of_their_seed_are_named(tmp_path):
    whole = evidence_of(tmp_path)
    lost = next(run for run in whole.study.trained if run.name == f"lr{BEST:g}-seed1")
    diverge(whole.paired.directory, lost)
    evidence = Evidence(whole.study, whole.table, whole.paired)
    others = "; ".join(f"{peak:g}, seed 1" for peak in PEAKS if peak != BEST)
    kept = " and ".join(str(seed) for seed in SEEDS if seed != 1)
    words = f"paired over seeds {kept}; left out, without a partner of the same seed: {others}"
    assert all(answer.where.endswith(words) for answer in answers(evidence))


def test_a_study_without_a_sweep_is_refused(tmp_path):
    study = study_of(run_of("one"), run_of("two", seed=2))
    with pytest.raises(UserError, match="no two runs of"):
        answers(Evidence(study, [], Paired(tmp_path)))


SAM = Sam(rho=0.05)  # in the last quarter, so 1.25 times the FLOPs
ARMS = {"plain": None, "qat": Qat(spec="rtn-b3-g32"), "sam": SAM}
# Quantized losses fall by a factor e for the passes of 400 steps, from these.
OF_ARM = {"plain": 5.0, "qat": 4.9, "sam": 5.2}


def arm_of(run) -> str:
    return run.name.partition("-")[0]


def quantized_at(arm: str, passes: float) -> float:
    return OF_ARM[arm] * math.exp(-passes / 400)


def of_an_arm(run, model) -> float:
    passes = model.step + (max(0, model.step - 300) if arm_of(run) == "sam" else 0)
    return quantized_at(arm_of(run), passes) / loss_of_arms(run, model) - 1


def loss_of_arms(run, model) -> float:
    return 1.5 - 1e-3 * model.step


@pytest.fixture(scope="module")
def arms(tmp_path_factory) -> Evidence:
    runs = [
        run_of(f"{arm}-seed{seed}", seed=seed, start=300, perturbation=perturbation)
        for arm, perturbation in ARMS.items()
        for seed in SEEDS
    ]
    study = study_of(*runs, controls=False)
    directory = tmp_path_factory.mktemp("arms") / study.name
    rows = rows_of(directory, study, of_an_arm, loss=loss_of_arms, noise=0.001)
    rows = [Row.of(row | {"study": study.name}) for row in rows]
    return Evidence(study, rows, Paired(directory))


def test_an_arm_of_doubled_passes_is_first_at_equal_tokens_and_last_at_equal_cost(arms):
    assert not sweeps(arms.ends)
    (group,) = interventions(arms.ends)
    assert [len(ends) for ends in group.ends.values()] == [len(SEEDS)] * len(ARMS)
    measure = Measure(arms, SPEC, QUANTIZED_LOSS)

    by_tokens = at_equal_tokens(measure, group).ranking
    at_the_end = {"plain": 400, "qat": 400, "sam": 500}
    expected = {arm: quantized_at(arm, passes) for arm, passes in at_the_end.items()}
    values = [ranked.estimate.value for ranked in by_tokens]
    assert values == pytest.approx(sorted(expected.values()), rel=1e-6)
    assert by_tokens[0].label.endswith(" (1.25 x the FLOPs)")
    assert not any("FLOPs" in ranked.label for ranked in by_tokens[1:])

    by_cost = at_equal_cost(measure, group)
    assert [ranked.estimate.value for ranked in by_cost.ranking] == pytest.approx(
        sorted(quantized_at(arm, 400) for arm in ARMS), rel=1e-6
    )
    assert re.search(r"SAM|sam", by_cost.ranking[-1].label)
    run = arms.study.trained[0]
    flops = run.total_tokens * flops_per_token(run.model, run.data.sequence_length)
    assert f"at {flops:.4g} training FLOPs" in by_cost.where


def test_arms_of_one_cost_have_no_list_at_equal_cost(arms):
    ends = [end for end in arms.ends if arm_of(end.run) != "sam"]
    (group,) = interventions(ends)
    with pytest.raises(NotTested, match="all cost"):
        at_equal_cost(Measure(arms, SPEC, QUANTIZED_LOSS), group)
    lines = list(text.answers_lines(answers(arms)))
    assert re.match("(choose|no choice of) the arm ", lines[0])
    assert any("x the FLOPs" in line for line in lines)


def rows(*points: tuple[float, float]) -> list[Row]:
    return [
        Row.of({"study": "s", "run": "r", "phase": "stable", "step": step, LOSS: loss, "e": error})
        for step, (loss, error) in enumerate(points)
    ]


def test_the_last_of_several_crossings_counts():
    at = crossing(rows((4, 1), (3, 2), (3.5, 4), (2.5, 8)), LOSS, 3.25)
    assert (at.first["step"], at.second["step"], at.share) == (2, 3, 0.25)
    weights = interpolated(at, "e")
    assert sum(row["e"] * weight for row, weight in weights) == pytest.approx(4 * 2**0.25)
    with pytest.raises(NotTested):
        crossing(rows((4, 1), (3, 2)), LOSS, 2.0)


def test_the_standard_error_is_that_of_leaving_documents_out(tmp_path):
    """Against the jackknife of the interpolated error itself, not of its linear form."""
    evidence = evidence_of(tmp_path, seeds=(1,), noise=0.2)
    measure = Measure(evidence, SPEC, RELATIVE_ERROR)
    (sweep,) = sweeps(evidence.ends)
    at = max(present(ends[0].last)[LOSS] for ends in sweep.ends.values())
    ranking = at_equal_loss(measure, sweep, at + 0.05).ranking
    path = [row for row in evidence.rows if row["run"] == f"lr{BEST:g}-seed1"]
    pair, directory = crossing(path, LOSS, at + 0.05), tmp_path / evidence.study.name
    left_out = []
    for document in range(len(TOKENS)):
        logs = []
        for row in (pair.first, pair.second):
            result = directory / row["run"] / f"hf/step{row['step']:08d}/quant/{SPEC}"
            sums = measured_in(result)["per_document"]
            nll, quantized = (
                np.delete(sums[name], document).sum() for name in ("nll", "nll_quantized")
            )
            logs.append(math.log(quantized / nll - 1))
        left_out.append(math.exp((1 - pair.share) * logs[0] + pair.share * logs[1]))
    count = len(left_out)
    expected = math.sqrt((count - 1) / count * (np.std(left_out) ** 2 * count))
    best = next(entry for entry in ranking if peak_of(entry.label) == BEST)
    assert best.estimate.standard_error == pytest.approx(expected, rel=0.1)


def test_the_commands_print_what_they_find(collected_dir, study):
    root = ("--root", collected_dir.parent)
    run = study.trained[0]

    chosen = printed("choose", study.name, *root)
    assert "the peak learning rate" in chosen.splitlines()[0]
    assert "by the quantized loss (GPTQ, 3 bits, groups of 32)" in " ".join(chosen.split())
    assert "--loss 9 is outside" in refused("choose", study.name, "--loss", 9, *root)

    compared = printed("compare", study.name, *root)
    assert compared.startswith("no scaling law of any error: 1 of 3 sizes")
    assert (collected_dir.parent / "compared" / "ends.parquet").exists()

    cooldowns = ("cooldowns", study.name, run.name)
    assert "1 cooldown: " in printed(*cooldowns, "--steps", run.save_steps[0], *root)
    assert "--steps now are not steps" in refused(*cooldowns, "--steps", "now", *root)
    assert "trains no run absent" in refused("choose-average", study.name, "absent", *root)


EFFECT = "Effect of batch size at the end, as above, p uncorrected"


def test_a_study_of_another_factor_is_answered_by_its_effects(tmp_path):
    """It is refused by `choose`, which names the command that prints them."""
    study = factors.of("own", sweep(factors.run, batch_size=[16, 32]))
    table_of(write_study(tmp_path / study.name, study), study)
    root = ("--root", tmp_path)
    words = "begins with the effect of batch size, see also 'python -m study report own --claims'"
    assert words in refused("choose", study.name, *root)
    report = printed("report", study.name, "--claims", *root).splitlines()
    assert re.match(r"own: (\d+|none) of \d+ claims (supported|tested)", report[0])
    head, row = report[report.index(EFFECT) + 1 :][:2]
    assert head.split("  ")[-1].strip() == "GPTQ, 3 bits, groups of 32: KL divergence"
    assert row == "32 against 16  0 [0, 0], p 1*  0 [0, 0], p 1*"


def test_the_report_says_the_first_of_them(report):
    assert re.search(
        r'<p class="choice">(Choose|No choice of) the peak learning rate [^<]* more \(Holm p ',
        report.read_text(),
    )


STABLE = run_of("stable")  # checkpoints at 40, 80, 160, 320 and 400, an anneal from 320 on
STUDY = study_of(STABLE, run_of("other", seed=7), controls=False, name="mine")


def test_a_cooldown_leaves_its_parent_where_it_says():
    study = with_cooldowns(STUDY, ["stable"], [80, 160], 20)
    assert study.runs[:2] == STUDY.runs
    first, second = study.trained[2:]
    assert (first.name, second.name) == ("stable-cooldown80-100", "stable-cooldown160-180")
    assert study.parent_of(first) == STABLE
    assert present(first.branch_from).fingerprint == fingerprint(STABLE)
    peak = STABLE.optimizer.peak_lr
    rates = [learning_rate(first, step) for step in (80, 90, 100)]
    assert rates == pytest.approx([peak, peak / 2, 0])
    names = {step.name for step in steps_of(study)} - {step.name for step in steps_of(STUDY)}
    assert {"train-stable-cooldown80-100", "train-stable-cooldown160-180"} <= names


def test_a_tenth_is_its_length_unless_it_is_given():
    ends = [run.total_steps for run in with_cooldowns(STUDY, ["stable"], [80, 320]).trained[2:]]
    assert ends == [88, 352]


def test_the_cost_is_that_of_the_branches_alone():
    *lines, total = cost(STUDY, with_cooldowns(STUDY, ["stable", "other"], [80, 160], 20))
    assert lines[0] == "stable-cooldown80-100: 20 steps, 41K tokens"  # 20 of 16 x 128 tokens
    assert len(lines) == 4
    assert total.startswith("4 cooldowns: 164K tokens, ")
    assert total.endswith(" 1.15M tokens")  # 2 x (100 + 180) steps


@pytest.mark.parametrize(
    ("runs", "steps", "words"),
    [
        (["absent"], [80], "trains no run absent; .*take one of stable, other"),
        (["stable"], [100], "branches at step 100, stable saves none there"),
        (["stable"], [400], "anneals from step 320 on"),
    ],
)
def test_a_cooldown_of_nothing_is_refused(runs, steps, words):
    with pytest.raises(UserError, match=words):
        with_cooldowns(STUDY, runs, steps)


def test_a_branch_has_no_cooldowns():
    study = study_of(STABLE, branched(STABLE, 160, 40), controls=False)
    with pytest.raises(UserError, match="is a branch itself; give its parent, stable"):
        with_cooldowns(study, ["stable-cooldown160"], [160])


def test_the_recipe_is_the_study_with_its_cooldowns_as_often_as_it_is_run(tmp_path):
    save_study(tmp_path / STUDY.name, STUDY)
    path = tmp_path / "more.py"
    write_recipe(path, tmp_path, STUDY, ["stable"], [80, 160], 20)
    study = resolve(str(path))
    assert study.name == STUDY.name
    assert study.runs == with_cooldowns(STUDY, ["stable"], [80, 160], 20).runs
    save_study(tmp_path / STUDY.name, study)  # as running it does
    assert resolve(str(path)).runs == load_study(tmp_path / STUDY.name).runs
    with pytest.raises(UserError, match="exists already"):
        write_recipe(path, tmp_path, STUDY, ["stable"], [80], 20)
    named = STUDY.model_copy(update={"name": "mine-engine=deepspeed"})
    with pytest.raises(UserError, match="cannot have the name"):
        write_recipe(tmp_path / "new.py", tmp_path, named, ["stable"], [80], 20)


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
    text = text_in_place(
        train=train_prefix,
        held_out=held_out_prefix,
        calibration=train_prefix,
        tokenizer=tokenizer_dir,
    )
    study = study_of(run, controls=False, text=text.model_dump())
    directory = tmp_path / study.name
    save_study(directory, study)
    for model in study.models_of(run):
        hf = directory / hf_directory(run.name, model)
        hf.mkdir(parents=True)
        (hf / "lineage.json").write_text("{}")
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
