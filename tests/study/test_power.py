"""The power of studies to come, against simulated studies and closed forms."""

import math

import numpy as np
import pytest
from scipy.stats import f, ncf

from base.errors import UserError
from quant_eval.estimate import DOCUMENTS, DRAWS, SEEDS, Crossed, estimate_of
from study.results.power import Components, Plan, components_of

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
    components = components_of([simulated(generator, Plan(6, 40, 5)) for _ in range(300)])
    for effect, variance in TRUTH.items():
        # the largest relative error, that of the draws': sqrt(2 / 4 / 300) of 0.2 + what
        # interactions and documents add to it
        assert components.variances[effect] == pytest.approx(variance, rel=0.2), effect


@pytest.mark.parametrize("plan", [Plan(3, 30, 3), Plan(6, 100, 2), Plan(12, 20, 5)])
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
    components = Components(Plan(3, 30, 1), {frozenset({SEEDS}): 4.0}, evenness=1.0)
    for seeds in (2, 5, 20):
        noncentrality = 1.5**2 / (4 / seeds)
        expected = ncf.sf(f.ppf(0.95, 1, seeds - 1), 1, seeds - 1, noncentrality)
        assert components.power(1.5, Plan(seeds, 30, 1)) == pytest.approx(expected, abs=1e-6)
    # t tables: 80% power for a difference of 1.5 standard deviations, two-sided 5%, takes 6 pairs
    assert components.least_seeds(3.0, 30, 1) == 6
    assert components.least_seeds(0.01, 30, 1) is None


def test_no_difference_is_found_as_often_as_the_level_allows():
    components = Components(Plan(3, 30, 3), TRUTH, evenness=0.5)
    for plan in (Plan(2, 20, 3), Plan(10, 100, 3)):
        assert components.power(0.0, plan) == pytest.approx(0.05)
    powers = [components.power(0.5, Plan(seeds, 50, 3)) for seeds in range(2, 12)]
    assert powers == sorted(powers)


def test_one_seed_is_refused():
    with pytest.raises(UserError, match="one seed does not show"):
        components_of([Crossed(np.random.default_rng(2).normal(size=(1, 30, 3)))])
