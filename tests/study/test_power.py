"""The power of studies to come, against simulated studies and closed forms."""

import math

import numpy as np
import pytest
from scipy.stats import f, ncf

from base.errors import UserError
from base.quantities import significant
from quant_eval.estimate import DOCUMENTS, DRAWS, SEEDS, Crossed, estimate_of
from study.definition import Study
from study.design import with_seeds
from study.results.power import Components, PowerPlan, components_of
from tests.study.ablation import tiny
from tests.study.commands import printed, refused
from tests.study.synthetic import TOKENS, change_losses, table_of, write_study
from tests.study.varied import bare

TRUTH = {
    frozenset({SEEDS}): 0.5,
    frozenset({DOCUMENTS}): 6.0,
    frozenset({DRAWS}): 0.2,
    frozenset({SEEDS, DOCUMENTS}): 4.0,
    frozenset({SEEDS, DRAWS}): 0.3,
    frozenset({DOCUMENTS, DRAWS}): 1.0,
    frozenset({SEEDS, DOCUMENTS, DRAWS}): 2.0,
}


def simulated(generator, plan, mean=0.0) -> Crossed:
    """A study with these variances."""
    values = np.full(plan, mean)
    for effect, variance in TRUTH.items():
        shape = [count if name in effect else 1 for name, count in plan.counts.items()]
        values = values + math.sqrt(variance) * generator.normal(size=shape)
    return Crossed(values)


def test_components_are_those_that_the_values_were_drawn_with():
    generator = np.random.default_rng(0)
    components = components_of([simulated(generator, PowerPlan(6, 40, 5)) for _ in range(300)])
    for effect, variance in TRUTH.items():
        # the largest relative error, that of the draws': sqrt(2 / 4 / 300) of 0.2 + what
        # interactions and documents add to it
        assert components.variances[effect] == pytest.approx(variance, rel=0.2), effect


@pytest.mark.parametrize("plan", [PowerPlan(3, 30, 3), PowerPlan(6, 100, 2), PowerPlan(12, 20, 5)])
def test_power_is_the_share_of_simulated_studies_that_decide(plan):
    generator = np.random.default_rng(1)
    components = Components(plan, TRUTH, evenness=1.0)
    difference = 3.0 * components.estimate(0.0, plan).standard_error
    share = np.mean(
        [estimate_of(simulated(generator, plan, difference)).p_value() <= 0.05 for _ in range(1500)]
    )
    # Satterthwaite's degrees of freedom vary from study to study, the power has their expectation.
    assert components.power(difference, plan) == pytest.approx(share, abs=0.06)


def test_where_seeds_alone_vary_it_is_the_power_of_a_t_test():
    """In the distribution of t^2, which is a noncentral F."""
    components = Components(PowerPlan(3, 30, 1), {frozenset({SEEDS}): 4.0}, evenness=1.0)
    for seeds in (2, 5, 20):
        noncentrality = 1.5**2 / (4 / seeds)
        expected = ncf.sf(f.ppf(0.95, 1, seeds - 1), 1, seeds - 1, noncentrality)
        assert components.power(1.5, PowerPlan(seeds, 30, 1)) == pytest.approx(expected, abs=1e-6)
    # t tables: 80% power for a difference of 1.5 standard deviations, two-sided 5%, takes 6 pairs
    assert components.least_seeds(3.0, 30, 1) == 6
    assert components.least_seeds(0.01, 30, 1) is None


def test_no_difference_is_found_as_often_as_the_level_allows():
    components = Components(PowerPlan(3, 30, 3), TRUTH, evenness=0.5)
    for plan in (PowerPlan(2, 20, 3), PowerPlan(10, 100, 3)):
        assert components.power(0.0, plan) == pytest.approx(0.05)
    powers = [components.power(0.5, PowerPlan(seeds, 50, 3)) for seeds in range(2, 12)]
    assert powers == sorted(powers)


def test_one_seed_is_refused():
    with pytest.raises(UserError, match="one seed does not show"):
        components_of([Crossed(np.random.default_rng(2).normal(size=(1, 30, 3)))])


SPEC, THREE = "gptq-b3-g32", (1, 2, 3)


def study_of(seeds) -> Study:
    """Two peaks; their checkpoints are quantized by two specs, and nothing more is measured."""
    return bare(tiny(), runs=tuple(with_seeds(tiny().trained[:2], seeds)))


@pytest.fixture
def power(tmp_path):
    """The command on results with noise between seeds alone, for this difference."""

    def words_for(difference, seeds=THREE, deviation=0.0, missing=()):
        study = study_of(seeds)
        directory = write_study(tmp_path / study.name, study)
        generator = np.random.default_rng(0)
        for run in study.trained:
            noise = 1 + deviation * generator.normal()
            change_losses(directory, run.name, SPEC, kl=[0.01 * noise * count for count in TOKENS])
            if run.name in missing:
                (directory / run.name / "hf/step00000640/quant" / SPEC / "result.json").unlink()
        table_of(directory, study)
        return "power", study.name, "--root", tmp_path, "--difference", difference

    return words_for


def test_the_table_says_how_many_seeds_decide(power):
    """The paired difference of two seeds varies by sqrt(2) x 5%; of three seeds its standard error
    is its deviation / sqrt(3).
    """
    command = power("10%", deviation=0.05)
    brief, whole = printed(*command).splitlines(), printed(*command, "--all").splitlines()
    generator = np.random.default_rng(0)
    first, second = (1 + 0.05 * generator.normal(size=(3, 2))).T
    mean = np.mean([first, second])
    deviation = 100 * np.std(second - first, ddof=1) / mean
    number = next(n for n, line in enumerate(whole) if line.startswith("KL divergence ("))
    lines = whole[number:]
    assert lines[0].endswith(
        f"one setting against the next: 10% of {significant(10 * mean)} 10^-3 nats/token"
    )
    assert lines[1] == f"  standard deviation by source: seeds {deviation:.2g}%"
    assert f"standard error {deviation / 3**0.5:.2g}%" in lines[2]
    assert lines[3].split() == ["seeds", "for", "80%", "power", "seeds"]
    cells = [line.split()[-1] for line in lines[4:7]]
    assert len(set(cells)) == 1, "more documents do not help where seeds are all that varies"
    assert int(cells[0]) > 3
    # the first screen has the same in a line
    words = f"a difference of 10% takes {cells[0]} seeds (one setting against the next); tiny has 3"
    assert brief[0] == words
    row = next(line for line in brief if line.startswith("one setting against the next"))
    assert row.split()[-2:] == [cells[0]] * 2
    assert len(brief) < 24
    assert max(map(len, brief)) <= 100


def test_seeds_are_paired_where_one_is_missing(power):
    """The first peak has no first seed: the differences are those of the others."""
    lost = tiny().trained[0].name + "-seed1"
    lines = printed(*power("10%", deviation=0.05, missing=[lost]), "--all").splitlines()
    first, second = (1 + 0.05 * np.random.default_rng(0).normal(size=(3, 2)))[1:].T
    deviation = 100 * np.std(second - first, ddof=1) / np.mean([first, second])
    assert f"  standard deviation by source: seeds {deviation:.2g}%" in lines
    words = (
        "  paired over seeds 2 and 3; left out, without a partner of the same seed: 0.003, seed 1"
    )
    assert words in lines


@pytest.mark.parametrize("difference", ["0.5%", "2.5%", "7%", "12.5%", "150%"])
def test_the_head_names_the_difference_that_was_asked_for(power, difference):
    head, *_ = printed(*power(difference, deviation=0.05)).splitlines()
    assert head.startswith(f"a difference of {difference} takes ")


def test_one_seed_and_other_words_are_refused(power):
    assert "no comparison of the ends of two seeds yet" in refused(*power("10%", seeds=(1,)))
    words = "--difference tenth is not a share above 0; write it as 10%"
    assert words in refused(*power("tenth"))
