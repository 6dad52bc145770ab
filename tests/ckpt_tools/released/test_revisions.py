"""Names of released revisions against figures computed elsewhere and schedules by hand."""

import csv
import itertools
import math
from pathlib import Path

import pytest

from base.errors import UserError
from ckpt_tools.released.revisions import parse_revision, repo_of_directory

# Computed independently of this project from the same recipes, to seven digits.
with (Path(__file__).parent / "released_learning_rates.csv").open() as file:
    RELEASED = list(csv.DictReader(file))
OLMO2_1B, OLMO2_7B, OLMO2_13B, OLMO2_32B = (
    f"allenai/OLMo-2-{name}" for name in ("0425-1B", "1124-7B", "1124-13B", "0325-32B")
)
SMOLLM3, APERTUS = "HuggingFaceTB/SmolLM3-3B-checkpoints", "swiss-ai/Apertus-8B-2509"
OLMO_1B, OLMO_7B = "allenai/OLMo-1B", "allenai/OLMo-7B"
OPEN_SCI = "open-sci/open-sci-ref-v0.01-1.7b-nemotron-hq-1T-4096"
OPEN_SCI_SMALL = "open-sci/open-sci-ref-v0.01-0.13b-fineweb-edu-1.4t-300B-4096"
OPEN_SCI_LONG = "open-sci/open-sci-ref-v0.01-1.7b-nemotron-hq-1T-16384"
OLMO3_7B, OLMO3_32B = "allenai/Olmo-3-1025-7B", "allenai/Olmo-3-1125-32B"
MARIN = "marin-community/marin-8b-base"


# Tokens of stage 1 of OLMo 2, by the step in the name of its last revision. The table counts those
# of stage 2 from 0.
BEFORE = {
    OLMO2_1B: 1_907_359 * 2_097_152,
    OLMO2_7B: 928_646 * 4_194_304,
    OLMO2_13B: 596_057 * 8_388_608,
    OLMO2_32B: 721_901 * 8_388_608,
}


def test_every_revision_of_the_table_is_known():
    """Apertus's batch is counted in samples there, which moves its decay by up to 4e-6."""
    assert len(RELEASED) == 138
    for row in RELEASED:
        checkpoint = parse_revision(row["repo"], row["revision"])
        before = BEFORE.get(row["repo"], 0) if checkpoint.stage == "stage2" else 0
        step, tokens = int(row["step"]), before + int(row["tokens"])
        assert (checkpoint.step, checkpoint.tokens) == (step, tokens), row
        expected = float(row["lr"])
        tolerance = 5e-6 if row["repo"] == APERTUS else 1e-6
        assert checkpoint.learning_rate == pytest.approx(expected, rel=tolerance, abs=0), row
        assert (checkpoint.learning_rate == 0.0) == (expected == 0.0), row
        assert checkpoint.source


PRE = "pretraining"
ENDS = {  # exact, where names round
    "7B": (928_646 + 11_931) * 4_194_304,
    "13B": (596_057 + 11_931) * 8_388_608,
    "32B": (721_901 + 11_921) * 8_388_608,
    "Apertus": 4096 * (1024 * 1_678_000 + 2048 * 22_000),
}


@pytest.mark.parametrize(
    ("repo", "revision", "stage", "ingredient", "step", "tokens"),
    [
        (OLMO2_7B, "step150-tokens1B", "stage1", None, 150, 150 * 4_194_304),
        (OLMO2_7B, "stage1-step928646-tokens3896B", "stage1", None, 928_646, 928_646 * 4_194_304),
        (OLMO2_7B, "stage2-ingredient1-step11931-tokens50B", "stage2", 1, 11_931, ENDS["7B"]),
        (OLMO2_13B, "stage2-ingredient1-step11931-tokens100B", "stage2", 1, 11_931, ENDS["13B"]),
        (OLMO2_32B, "stage2-ingredient4-step11921-tokens101B", "stage2", 4, 11_921, ENDS["32B"]),
        (OLMO_1B, "step738020-tokens3095B", PRE, None, 738_020, 738_020 * 4_194_304),
        (OLMO_1B, "step20000-tokens84B", PRE, None, 20_000, 20_000 * 4_194_304),
        (OLMO_7B, "step452000-tokens2000B", PRE, None, 452_000, 452_000 * 2160 * 2048),
        (SMOLLM3, "stage3-step-4720000", "stage3", None, 4_720_000, 4_720_000 * 2_359_296),
        (SMOLLM3, "lc-4k-to-32k-step-20000", "lc-4k-to-32k", None, 20_000, 4_740_000 * 2_359_296),
        (SMOLLM3, "lc-32k-to-64k-step-16000", "lc-32k-to-64k", None, 16_000, 4_756_000 * 2_359_296),
        ("allenai/OLMo-7B-0424-hf", "step1000-tokens4B", PRE, None, 1000, 4 * 10**9),  # by its name
        (SMOLLM3, "it-LC-expert", "it-LC-expert", None, None, None),
        (APERTUS, "step1700000-tokens7232B", PRE, None, 1_700_000, ENDS["Apertus"]),
        (APERTUS, "step2627139-tokens15T", PRE, None, 2_627_139, 14_999_997_120_512),
        (OPEN_SCI, "iter_0058000", PRE, None, 58_000, 58_000 * 1008 * 4096),
        (OPEN_SCI_LONG, "iter_0242000", PRE, None, 242_000, None),
        (OLMO3_7B, "stage1-step0", "stage1", None, 0, 0),
        (OLMO3_32B, "stage2-ingredient2-step0", "stage2", 2, 0, 656_000 * 8_388_608),
        (MARIN, "kestrel", "kestrel", None, 660_000, 660_000 * 4_194_304),
        ("LLM360/Amber", "ckpt_358", PRE, None, 359 * 762, 359 * 762 * 2240 * 2048),
        ("EleutherAI/pythia-160m", "step0", PRE, None, 0, 0),
        ("EleutherAI/pythia-12b-deduped", "step512", PRE, None, 512, 2**30),
        ("EleutherAI/pythia-70m", "step143000", PRE, None, 143_000, 299_892_736_000),
    ],
)
def test_names_beyond_the_table(repo, revision, stage, ingredient, step, tokens):
    checkpoint = parse_revision(repo, revision)
    assert (checkpoint.stage, checkpoint.ingredient) == (stage, ingredient)
    assert (checkpoint.step, checkpoint.tokens) == (step, tokens)


@pytest.mark.parametrize(
    ("repo", "trillions", "last"),
    [
        (OLMO2_1B, 4, "stage1-step1907359-tokens4001B"),
        (OLMO2_7B, 3.9, "stage1-step928646-tokens3896B"),
        (OLMO2_13B, 5, "stage1-step596057-tokens5001B"),
        (OLMO2_32B, 6.06, "stage1-step721901-tokens6056B"),
    ],
)
def test_stage_2_starts_where_stage_1_stopped(repo, trillions, last):
    """Tokens as arXiv 2501.00656 and the model cards round them. The 7B's second stage starts at
    6.1499e-5 in its yaml, the cosine stops at 6.1351e-5.
    """
    before, first = (
        parse_revision(repo, name) for name in (last, "stage2-ingredient1-step0-tokens0B")
    )
    assert (first.parent, first.restarts) == ("stage1", False)
    assert first.tokens == before.tokens == BEFORE[repo]
    assert first.tokens == pytest.approx(trillions * 1e12, rel=2e-3)
    assert first.learning_rate == pytest.approx(before.learning_rate, rel=3e-3)


@pytest.mark.parametrize(
    ("repo", "ingredients", "last"),
    [
        (OLMO2_7B, 3, "stage2-ingredient3-step11931-tokens50B"),
        (OLMO2_13B, 4, "stage2-ingredient4-step35773-tokens300B"),
        (OLMO2_32B, 3, "stage2-ingredient3-step35763-tokens301B"),
    ],
)
def test_a_soup_is_where_its_last_ingredient_ends(repo, ingredients, last):
    soup, end = parse_revision(repo, "main"), parse_revision(repo, last)
    assert (soup.step, soup.tokens) == (end.step, end.tokens)
    assert soup.average_of == tuple(f"stage2-ingredient{n + 1}" for n in range(ingredients))
    assert soup.parent is None


@pytest.mark.parametrize(
    ("repo", "revision", "trillions"),
    [  # as model cards, arXiv 2512.13961 and arXiv 2509.09009 round them
        (OLMO3_7B, "stage1-step1413814", 5.93),
        (OLMO3_7B, "stage2-step47684", 6.03),  # and 100B
        (OLMO3_7B, "stage3-step11921", 6.08),  # and 50B
        (OLMO3_32B, "stage1-step656000", 5.50),
        (OLMO3_32B, "stage2-ingredient1+2-step23842", 5.60),
        (OLMO3_32B, "stage3-step11921", 5.70),
        (OPEN_SCI, "main", 1.0),
        (OPEN_SCI_SMALL, "main", 0.3),
        (OPEN_SCI_SMALL, "iter_0002000", 0.0083),
        (MARIN, "ocelot", 3.78),
        (MARIN, "jellyfish", 4.78),
        (MARIN, "phoenix", 11.1),
        (MARIN, "starling", 12.4),
        (MARIN, "main", 12.75),
    ],
)
def test_tokens_are_those_of_the_cards(repo, revision, trillions):
    tokens = parse_revision(repo, revision).tokens
    assert tokens == pytest.approx(trillions * 1e12, rel=6e-3)


def test_stages_of_olmo_3_and_phases_of_marin_follow_each_other():
    stages = [("stage2-step0", "stage1"), ("stage3-step0", "stage2"), ("main", "stage3")]
    phases = ["kestrel", "ocelot", "jellyfish", "phoenix", "starling", "deeper-starling"]
    for revision, parent in stages:
        assert parse_revision(OLMO3_7B, revision).parent == parent
    for before, phase in itertools.pairwise(phases):
        assert parse_revision(MARIN, phase).parent == before
    soup = parse_revision(OLMO3_32B, "stage2-ingredient1+2-step23842")
    assert soup.average_of == ("stage2-ingredient1", "stage2-ingredient2")
    assert parse_revision(OLMO3_32B, "stage3-step1000").parent == soup.line
    assert parse_revision(OLMO3_7B, "main").copies == "stage3"
    assert parse_revision(MARIN, "main").copies == "deeper-starling"
    # Mid-training is an anneal of pretraining, longer context a stage of its own.
    assert [parse_revision(OLMO3_7B, f"stage{n}-step0").restarts for n in (1, 2, 3)] == [
        *(False, False, True)
    ]


def olmo_core_half_cosine(step: float, peak: float, warmup: int, end: int) -> float:
    """The second half of a cosine from `warmup` on, as allenai/OLMo-core describes it: its middle
    is there.
    """
    progress = 0.5 + 0.5 * (step - warmup) / (end - warmup)
    return 0.1 * peak + 0.9 * peak * math.cos(math.pi * progress / 2) ** 2


@pytest.mark.parametrize("step", [597_047, 800_000, 1_413_814])
def test_olmo_3_after_its_schedule_was_stretched(step):
    expected = olmo_core_half_cosine(step, 3e-4, 1_192_092 // 2 + 1000, 1_668_930)
    assert parse_revision(OLMO3_7B, f"stage1-step{step}").learning_rate == pytest.approx(
        expected, rel=1e-6
    )


@pytest.mark.parametrize(
    "repo",
    [OLMO_1B, OLMO_7B, *(f"allenai/OLMo-{name}" for name in ("7B-0424", "1B-0724", "7B-0724"))],
)
def test_the_form_of_transformers_is_the_same_trajectory(repo):
    name = "step1000-tokens4B"
    there, here = parse_revision(f"{repo}-hf", name), parse_revision(repo, name)
    assert there.model_copy(update={"repo": repo}) == here


@pytest.mark.parametrize(
    ("repo", "step", "learning_rate"),
    [
        (OLMO2_1B, 23_852, 0.0),  # ingredient 3, not averaged
        (OLMO2_7B, 11_931, None),  # soups
        (OLMO2_13B, 35_773, None),
        (OLMO2_32B, 35_763, None),
        (OLMO3_7B, 11_921, 0.0),
        (OLMO3_32B, 11_921, None),  # a soup of the last checkpoints of stage 3
        (MARIN, 1_420_000, 1.7e-5),
        (OPEN_SCI, 242_204, 0.0),
        (OPEN_SCI_LONG, None, None),
        ("HuggingFaceTB/SmolLM3-3B", None, None),
        ("allenai/OLMo-7B", 557_000, 0.0),
        ("allenai/OLMo-1B", None, None),
        (APERTUS, None, None),
        ("LLM360/Amber", None, None),
        ("EleutherAI/pythia-160m-deduped", 143_000, 6e-5),
    ],
)
def test_main(repo, step, learning_rate):
    checkpoint = parse_revision(repo, "main")
    assert (checkpoint.stage, checkpoint.step) == ("main", step)
    assert checkpoint.learning_rate == (
        None if learning_rate is None else pytest.approx(learning_rate)
    )


@pytest.mark.parametrize(
    ("repo", "revision"),
    [
        (OPEN_SCI_LONG, "iter_0100000"),
        (MARIN, "kestrel"),
        ("allenai/OLMo-7B", "step556000-tokens2460B"),  # after 2T tokens
        (SMOLLM3, "it-soup-APO"),
        ("allenai/OLMo-7B-0424-hf", "step1000-tokens4B"),
    ],
)
def test_what_no_source_tells_is_unknown(repo, revision):
    assert parse_revision(repo, revision).learning_rate is None


@pytest.mark.parametrize(
    ("repo", "revision", "expected"),
    [
        (OLMO2_7B, "stage1-step1000-tokens5B", 1.5e-4),  # half of the warm-up
        (OLMO2_7B, "stage1-step2000-tokens9B", 3e-4),  # its end
        # configs/annealing/peteish7-from-477000-*.yaml
        (OLMO2_7B, "stage1-step477000-tokens2001B", 2.0707e-4),
        (OLMO2_1B, "stage1-step4000-tokens9B", 4e-4),
        (OLMO2_13B, "stage1-step1000-tokens9B", 9e-4),
        (OLMO2_13B, "stage1-step596057-tokens5001B", 9e-5),  # 10% at the horizon
        (OLMO2_32B, "stage1-step2000-tokens17B", 6e-4),
        ("allenai/OLMo-1B", "step1000-tokens4B", 2.2e-4),  # halfway from 10% to the peak
        ("allenai/OLMo-1B", "step739328-tokens3101B", 4e-5),
        ("allenai/OLMo-7B", "step5000-tokens22B", 3e-4),
        ("allenai/OLMo-7B", "step452000-tokens2000B", 3.00678e-5),  # 112.3 steps before 10%
        (SMOLLM3, "stage1-step-1000", 1e-4),
        (SMOLLM3, "lc-4k-to-32k-step-1000", 2e-5),
        (SMOLLM3, "lc-4k-to-32k-step-10500", 1e-5),  # half of the cosine
        (SMOLLM3, "lc-4k-to-32k-step-20000", 0.0),
        (APERTUS, "step2000-tokens8B", 5.5e-5),
        (APERTUS, "step2627139-tokens15T", 1.1e-5),
        (OLMO3_7B, "stage1-step1000", 1.5e-4),
        (OLMO3_7B, "stage1-step597046", 1.65e-4),  # the middle between 10% and the peak
        (OLMO3_7B, "stage2-step23842", 2.0712353e-4 / 2),
        (OLMO3_7B, "stage3-step100", 2.0712353e-4 / 2),  # of 200 steps of warm-up
        (OLMO3_7B, "stage3-step11921", 0.0),
        (OLMO3_32B, "stage1-step2000", 6e-4),
        (OLMO3_32B, "stage2-ingredient2-step11921", 2.0712353e-4 / 2),
        (MARIN, "ocelot", 1.7e-3),
        (MARIN, "jellyfish", 1.7e-4),
        (MARIN, "phoenix", 1.7e-3),
        (MARIN, "starling", 1.7e-5),
        (OPEN_SCI, "iter_0012500", 2e-3),
        (OPEN_SCI, "iter_0193764", 4e-3),  # the cooldown of 48,440 steps starts
        (OPEN_SCI, "iter_0217984", 2e-3),
        (OPEN_SCI_SMALL, "iter_0065395", 2e-3),
        ("LLM360/Amber", "ckpt_000", 3e-4 * 762 / 2000),
        ("EleutherAI/pythia-160m", "step512", 6e-4 * 512 / 1430),
    ],
)
def test_corners_of_the_schedules(repo, revision, expected):
    assert parse_revision(repo, revision).learning_rate == pytest.approx(
        expected, rel=3e-5, abs=1e-15
    )


@pytest.mark.parametrize("step", [2000, 70_000, 100_000, 115_000, 116_000, 130_000, 143_000])
def test_pythia_as_gpt_neox_computed_it_then(step):
    """The formula of Pythia's training, as EleutherAI/gpt-neox pull request 1008 quotes it."""
    iteration = min(step, 143_000 - 1430) - 1430
    expected = max(0.5 * 1e-3 * (1 + math.cos(math.pi * iteration / 143_000)), 1e-4)
    assert parse_revision("EleutherAI/pythia-70m", f"step{step}").learning_rate == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize(
    ("repo", "revision", "reason"),
    [
        (
            "allenai/OLMo-2-1124-8B",
            "main",
            f"did you mean {OLMO2_7B}? Else take one of allenai/OLMo-2-",
        ),
        ("open-sci/open-sci-ref-v0.02-1.7b-c4", "main", "not a known trajectory"),
        (OLMO2_7B, "stage1-step55000-tokens231", "such as stage1-step{S}-tokens{T}, "),
        (OLMO2_7B, "stage1-step055000-tokens231B", "not a revision"),
        (OLMO2_7B, "stage2-step1000-tokens5B", "not a revision"),
        (OLMO2_7B, "stage2-ingredient4-step1000-tokens5B", "not a revision"),
        (OLMO2_7B, "stage1-step55000-tokens231B\n", "not a revision"),
        (OLMO2_13B, "step150-tokens1B", "not a revision"),  # only the 7B has names without stage1
        (OLMO2_7B, "stage1-step55000-tokens462B", "saw 230,686,720,000 tokens"),
        # of the 7B, by its tokens
        (OLMO2_13B, "stage1-step55000-tokens231B", "saw 461,373,440,000 tokens"),
        (SMOLLM3, "main", "not a revision"),
        (SMOLLM3, "stage4-step-40000", "not a revision"),
        (APERTUS, "step150000-tokens630T", "saw 629,145,600,000 tokens"),
        ("LLM360/Amber", "ckpt_10", "not a revision"),
        (OPEN_SCI, "iter_58000", "not a revision"),
        (OPEN_SCI_SMALL, "iter_0074000", "is known to end at step 72661"),
        (OLMO3_7B, "stage2-step47684-mix-round5-from-2T-ckpt", "not a revision"),
        (OLMO3_32B, "stage2-step1000", "not a revision"),
    ],
)
def test_what_is_no_revision_is_refused_in_one_line(repo, revision, reason):
    with pytest.raises(UserError) as refused:
        parse_revision(repo, revision)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value).replace(revision, "")


@pytest.mark.parametrize(
    ("name", "repo"),
    [
        ("allenai--OLMo-2-1124-7B", OLMO2_7B),
        ("OLMo-2-1124-7B", OLMO2_7B),
        ("pythia-1.4b-deduped", "EleutherAI/pythia-1.4b-deduped"),
        (OPEN_SCI.split("/")[1], OPEN_SCI),
        ("models", None),
        ("pythia-15m", None),
    ],
)
def test_a_directory_is_known_by_its_name(name, repo):
    assert repo_of_directory(name) == repo
