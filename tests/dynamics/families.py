"""Families of tiny local models under the names that released revisions have."""

import csv
import math
import shutil
from pathlib import Path

from dynamics.recipes.trajectory import released_of, trajectory_of
from study.definition import Study
from tests.ckpt_tools.released.fake_hub import config_json

# A revision with its step, tokens and learning rate, computed elsewhere from the same recipes.
with (Path(__file__).parents[1] / "ckpt_tools/released/released_learning_rates.csv").open() as file:
    RELEASED = list(csv.DictReader(file))
PER_STEP = {  # tokens
    "OLMo-2-0425-1B": 512 * 4096,
    "OLMo-2-1124-7B": 1024 * 4096,
    "OLMo-2-1124-13B": 2048 * 4096,
    "OLMo-2-0325-32B": 2048 * 4096,
    "SmolLM3-3B-checkpoints": 2_359_296,
}
OLMO2 = tuple(name for name in PER_STEP if name.startswith("OLMo-2"))
STAGE1_STEPS = dict(zip(OLMO2, (1_907_359, 928_646, 596_057, 721_901), strict=True))
# Of stage 1, which the authors' list does not have: while the rate is nearly at its peak.
EARLY = dict(
    zip(
        OLMO2,
        (
            (10_000, 20_000),
            (10_000, 20_000, 40_000),
            (8000, 16_000, 32_000),
            (8000, 16_000, 32_000),
        ),
        strict=True,
    )
)
POST_TRAINING = (
    *("lc-4k-to-32k-step-4000", "lc-4k-to-32k-step-20000"),
    *("lc-32k-to-64k-step-4000", "lc-32k-to-64k-step-20000"),
    *("it-mid-training", "it-SFT", "it-soup-APO", "it-LC-expert"),
)


def of_the_authors(name: str) -> list[str]:
    """The revisions of a repository that the paper's authors quantized."""
    return [row["revision"] for row in RELEASED if row["repo"].endswith(f"/{name}")]


def olmo2(name: str, *, early: bool = True) -> list[str]:
    """The revisions of an OLMo 2: the authors', its soup, and with `early` those before."""
    steps = EARLY[name] if early else ()
    first = [f"stage1-step{step}-tokens{math.ceil(step * PER_STEP[name] / 1e9)}B" for step in steps]
    return [*first, *of_the_authors(name), "main"]


def tokens_of(name: str, revision: str) -> float:
    """The tokens of pretraining that a revision has seen: counted by hand, stage 1 first."""
    step = int(revision.partition("-step")[2].partition("-tokens")[0].removeprefix("-"))
    before = STAGE1_STEPS.get(name, 0) if revision.startswith("stage2") else 0
    return (before + step) * PER_STEP[name]


def lay_out(root: Path, name: str, revisions: list[str], tokenizer: Path) -> Path:
    """Writes a directory of revisions, as far as a study looks into them before they are copied."""
    for revision in revisions:
        directory = root / name / revision
        directory.mkdir(parents=True)
        (directory / "config.json").write_bytes(config_json("olmo2"))
        (directory / "model.safetensors").touch()
        shutil.copy(tokenizer / "tokenizer.json", directory)
    return root / name


def study_of(*sources: Path) -> Study:
    """The study of these directories, on a text that nothing here looks at."""
    source = ",".join(map(str, sources))
    return trajectory_of(released_of([f"source={source}"]), smoke=True, on_text=True)
