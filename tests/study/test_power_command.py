"""`python -m study power` on results of three seeds, with the noise that they were given."""

import numpy as np
import pytest
from typer.testing import CliRunner

from study.__main__ import app
from study.definition import Study
from study.design import with_seeds
from study.results.collect import collect_rows
from study.results.table import write_table
from tests.study.ablation import tiny
from tests.study.synthetic import TOKENS, change_losses, write_study

SPEC, SEEDS = "gptq-b3-g32", (1, 2, 3)


def study_of(seeds) -> Study:
    """Two peaks; their checkpoints are quantized by two specs, and nothing more is measured."""
    whole = tiny()
    quantization = whole.quantization.model_copy(update={"methods": (), "by_block": ()})
    return whole.model_copy(
        update={"runs": tuple(with_seeds(whole.trained[:2], seeds)), "quantization": quantization}
    )


@pytest.fixture
def printed(tmp_path):
    """Return what the command prints of results with noise between seeds alone, for this difference."""

    def print_for(difference, seeds=SEEDS, deviation=0.0):
        study = study_of(seeds)
        directory = write_study(tmp_path / study.name, study)
        generator = np.random.default_rng(0)
        for run in study.trained:
            noise = 1 + deviation * generator.normal()
            change_losses(directory, run.name, SPEC, kl=[0.01 * noise * count for count in TOKENS])
        write_table(directory, study, collect_rows(directory, study).rows)
        asked = ["power", study.name, "--root", str(tmp_path), "--difference", difference]
        return CliRunner().invoke(app, asked)

    return print_for


def test_the_table_says_how_many_seeds_decide(printed):
    """The paired difference of two seeds varies by sqrt(2) x 5%; of three seeds its standard error
    is its deviation / sqrt(3).
    """
    lines = printed("10%", deviation=0.05).stdout.splitlines()
    generator = np.random.default_rng(0)
    first, second = (1 + 0.05 * generator.normal(size=(3, 2))).T
    mean = np.mean([first, second])
    deviation = 100 * np.std(second - first, ddof=1) / mean
    assert lines[0].startswith("KL divergence (")
    assert lines[0].endswith(f"one setting against the next: 10% of {0.01 * mean:.4g}")
    assert lines[1] == f"  standard deviation by source: seeds {deviation:.2g}%"
    assert f"standard error {deviation / 3**0.5:.2g}%" in lines[2]
    assert lines[3].split() == ["seeds", "for", "80%", "power", "seeds"]
    cells = [line.split()[-1] for line in lines[4:7]]
    assert len(set(cells)) == 1, "more documents do not help where seeds are all that varies"
    assert int(cells[0]) > 3


def test_one_seed_and_other_words_are_refused(printed):
    result = printed("10%", seeds=(1,))
    assert "no comparison of the ends of two seeds yet" in str(result.exception)
    result = printed("tenth")
    assert "--difference tenth is not a share above 0; write it as 10%" in str(result.exception)
