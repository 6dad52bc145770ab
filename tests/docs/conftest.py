"""Directories in which the commands of the pages run: what a reader has, at sizes of seconds."""

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard

from study.recipes.resolve import resolve
from study.results.collect import collect_rows
from study.results.table import write_table
from study.text_kinds import PreparedText
from tests.ckpt_tools.released.fake_hub import FakeHub, config_json
from tests.conftest import make_hf_directory
from tests.quant_eval.tasks.task_files import write_task_files
from tests.runs import PROJECT
from tests.slurm.conftest import lab, slurm_installed  # noqa: F401  (fixtures)
from tests.slurm.studies import site_of, write_site
from tests.study.smoke import NAME
from tests.study.synthetic import text_in_place, write_study

REVISION = "stage1-step1907359-tokens4001B"
QUANTIZATION = {
    "specs": ("gptq-b3-g32",),
    "methods": (),
    "calibration_sequences": 4,
    "calibration_seeds": 1,
    "eval_tokens": 12_288,
    "block_tokens": 12_288,
}
RECIPE = '''"""In place of a large recipe: one run at a constant rate."""

from study.measurements.quantization import QuantizationSettings
from study.recipes import parts
from study.text_kinds import PreparedText, TokenFile
from train.model.presets import olmo2
from train.run.optimization import ConstantPhase, ScheduleConfig

TEXT = {text}


@parts.recipe
def {function}(*, smoke: bool = False):
    """One run of seconds."""
    run = parts.wsd_run(
        "lr3e-4",
        model=olmo2(
            hidden_size=32, layers=1, heads=2, intermediate_size=64
        ).model_copy(update={{"vocab_size": 1024}}),
        text=TEXT,
        steps=16,
        peak_lr=3e-4,
        save_steps=(16,),
        evaluate_every_steps=16,
        batch_size=4,
        micro_batch_size=4,
        schedule=ScheduleConfig(warmup_tokens=0, phase=ConstantPhase()),
    )
    quantization = QuantizationSettings(**{quantization})
    return parts.study([run], text=TEXT, quantization=quantization, ranks=1)
'''

FEW = {"batch_size": 4, "micro_batch_size": 4, "evaluate_every_steps": 8}


@pytest.fixture(scope="module")
def statistics(tmp_path_factory) -> Path:
    """A directory whose runs/tiny has the demo's runs, and made-up numbers."""
    root = tmp_path_factory.mktemp("statistics")
    study = resolve("tiny")
    directory = write_study(root / "runs/tiny", study)
    write_table(directory, study, collect_rows(directory, study).rows)
    return root


@pytest.fixture(scope="module")
def checkout(tmp_path_factory, smoke_root) -> Path:
    """A directory with runs/, recipes/, the files in my/ that pages name, and mine.py."""
    root = tmp_path_factory.mktemp("checkout")
    # a store remembers where it was made
    shutil.copytree(smoke_root, root / "runs", ignore=shutil.ignore_patterns("ml*"))
    (root / "recipes").mkdir()
    data = root / "runs" / NAME / "data"
    text = text_in_place(
        train=data / "train",
        held_out=data / "held_out",
        calibration=data / "calibration",
        tokenizer=data / "corpus/tokenizer",
    )
    for name in ("tiny", "olmo2-30m-lr", "olmo2-190m-lr", "olmo2-7b-lr"):
        recipe = RECIPE.format(
            function=name.replace("-", "_"), text=repr(text), quantization=QUANTIZATION
        )
        (root / "recipes" / f"{name}.py").write_text(recipe)
    (root / "mine.py").write_text(_own_recipe(text))
    write_task_files(root / "my/tasks")
    _write_text(root / "my")
    site = site_of(root / "shared", train_nodes=1)
    write_site(root / "lab.toml", site.model_dump(mode="json", exclude_unset=True))
    return root


def block_of(page: str, language: str) -> str:
    """Return the first block of a page in a language."""
    text = (PROJECT / page).read_text()
    return str(re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0])


def _own_recipe(text: PreparedText) -> str:
    """Return the first recipe of the guide, of one small run on the smoke study's text."""
    recipe = block_of("docs/guides/own-ablation.md", "python")
    small = "olmo2(hidden_size=32, layers=1, heads=2, intermediate_size=64)"
    for whole, part in (
        (
            "olmo2(hidden_size=96, layers=3, heads=4, intermediate_size=256), parts.SMALL_TEXT",
            f"{small}.model_copy(update={{'vocab_size': 1024}}), {text!r}",
        ),
        (
            "from study.definition",
            "from study.text_kinds import PreparedText, TokenFile\nfrom study.definition",
        ),
        (
            "parts.SMALL_QUANTIZATION",
            f"parts.SMALL_QUANTIZATION.model_copy(update={QUANTIZATION!r})",
        ),
        ("peak_lr=[3e-3, 1e-2], weight_decay=[0.0, 0.1]", "peak_lr=[1e-2], weight_decay=[0.1]"),
        ("        curvature=parts.SMALL_CURVATURE,\n", "        ranks=1,\n"),
        ("steps = 40 if smoke", "steps = 8 if smoke"),
        ("steps=steps, **factors", "steps=steps, save_steps=(6, 8), **small, **factors"),
        ("    def run(", f"    small = {FEW!r}\n\n    def run("),
    ):
        assert whole in recipe
        recipe = recipe.replace(whole, part)
    return recipe


def _write_text(folder: Path) -> None:
    """Write books.jsonl.zst, 3,000 documents of random words, OLMo's kind of token files, and
    revisions of one's own with the file that describes them.
    """
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 9))) for _ in range(900)]
    lines = [
        json.dumps({"text": " ".join(generator.choices(words, k=90))}) + "\n" for _ in range(3000)
    ]
    folder.mkdir(exist_ok=True)
    compressed = zstandard.compress("".join(lines).encode())
    (folder / "books.jsonl.zst").write_bytes(compressed)
    (folder / "checkpoints.toml").write_text(block_of("docs/guides/released-models.md", "toml"))
    (folder / "longer.csv").write_text("step,tokens,learning_rate\n100,314782515200,3e-5\n")
    for name in ("step90000", "step95000", "step100000", "longer-000100"):
        (folder / "checkpoints" / name).mkdir(parents=True)
        (folder / "checkpoints" / name / "config.json").write_bytes(config_json("llama"))
        (folder / "checkpoints" / name / "model.safetensors").touch()
    (folder / "c4").mkdir()
    for number, part in enumerate((lines[:50], lines[50:100])):
        (folder / f"c4/{number}.jsonl").write_text("".join(part))
    tokens = np.random.default_rng(0).integers(1, 300, size=4096, dtype=np.uint32)
    tokens[::64] = 0  # ends of documents
    (folder / "mix").mkdir()
    tokens.tofile(folder / "mix/part-0.npy")


@pytest.fixture(scope="module")
def hub(tmp_path_factory, tokenizer_dir) -> Iterator[FakeHub]:
    """A hub of one released model at one revision."""
    model = make_hf_directory(
        tmp_path_factory.mktemp("released") / "model",
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        max_position_embeddings=128,
    )
    files = {path.name: path.read_bytes() for path in (*model.iterdir(), *tokenizer_dir.iterdir())}
    server = FakeHub({REVISION: files, "main": files})
    yield server
    server.shutdown()
    server.server_close()
