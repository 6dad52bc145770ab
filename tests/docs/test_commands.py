"""Every command that a page shows, run as shown, at sizes of seconds.

A page's commands run in the order of the page, in a directory like a checkout after `make demo`:
`runs/` holds the smoke study in place of the demo. Large recipes are replaced by a study of one
run, the hub by one on the loopback, and the cluster by a SLURM on this machine. `make` says what it
would do.
"""

import re
import shlex
from pathlib import Path

import pytest

from study.tracking.store import tracking_uri
from tests.ckpt_tools.released.fake_hub import FakeHub
from tests.docs.conftest import REVISION
from tests.docs.pages import NAMES, commands_of
from tests.interpreter import interpreter
from tests.runs import PROJECT, execute, torchrun
from tests.study.smoke import NAME

MODEL = f"models/OLMo-2-0425-1B/{REVISION}"
# The smoke study has other names than the demo; there is no GPU; texts are short.
SMALLER = (
    # Transformer Engine needs a GPU: the study is only resolved
    (
        r"study run (olmo2-30m-lr .*kernels=transformer_engine)",
        r"study show --gpus 1 --gpu h100 \1",
    ),
    (r"study run (tiny-paper|tiny-interventions)", r"study show \1"),  # it takes minutes
    (r"runs/tiny\b(?!-)", f"runs/{NAME}"),
    (r"(study (status|mirror|choose-average)) tiny\b", rf"\1 {NAME}"),
    (r"lr7\.2e-2-seed1", "lr3e-2"),
    (r"lr7\.2e-2-control-seed1", "lr3e-2-control"),
    (r"step00000960", "step00000072"),
    (r"step00000720", "step00000048"),
    (r"step00000500", "step00000016"),
    (r" --device cuda", ""),
    (r" --gpus 8(?! --gpu )", ""),
    (r"--follow 60", "--follow 1"),
    (r"--watch 60", "--watch 10"),
    (r"--vocab-size 32768", "--vocab-size 1024"),
    (r"--workers 8", "--workers 2"),
    (r"(quant_eval run) (models/)", r"\1 --eval-tokens 12288 --calibration-sequences 4 \2"),
    (r"--dtype bf16 --checkpointing", "--checkpointing"),  # a small random model is too rough
    (r"--sequence-length 2048", "--sequence-length 64"),
    (
        r"curvature lanczos",
        "curvature lanczos --sequence-length 16 --fixed-sequences 1 --steps 4 --largest 1"
        " --smallest 0",
    ),
    (r"curvature step", "curvature step --sequence-length 32 --microbatches 2"),
    (r"curvature slice", "curvature slice --grid 3 --sequences 2"),
    # the smoke study has two checkpoints of a run, and averages beside them
    (r"curvature pca (\S+)/step\*", r"curvature pca --grid 3 --sequences 2 \1/*00*"),
    (r"curvature hutchinson", "curvature hutchinson --pairs 2"),
    (r"(curvature hutchinson .*)(model --data)", r"\1--sequence-length 16 \2"),
    # a step of the anneal, which begins at step 48; two ranks divide a batch of eight
    (
        r"(train run \S+) --set",
        r"\1 --set total_steps=49 --set save_steps=[49] --set batch_size=8"
        " --set data.sequence_length=32 --set data.held_out_sequences=8 --set",
    ),
    (r"(study run|slurm submit|study show) (tiny(?!-)|olmo2-\w+-lr)\b", r"\1 recipes/\2.py"),
    (
        r"study run trajectory",
        f"study run trajectory --profile smoke --text my/books.jsonl.zst --tokenizer {MODEL}",
    ),
    (r"study show trajectory", "study show trajectory --profile smoke"),
    (r"source=allenai/", "source=models/"),
    (r"allenai/OLMo-2-1124-7B", "allenai/OLMo-2-0425-1B"),
    (r"dataset:allenai/c4:en:train:1-8", "dataset:my/c4::train:1-2"),
    (r"/shared/quantdyn", "shared"),
    (r"cp slurm/sites/example.toml", "cp lab.toml"),
)
# Statistics need seeds and many checkpoints: these read made-up numbers of the demo's own runs.
STATISTICS = re.compile(r"study (choose|power|forecast|cooldowns|report) tiny ?")
PAGE_OF_MLFLOW = (PROJECT / "docs/guides/mlflow.md").read_text()
ADDRESSES = re.findall(r"^export MLFLOW_TRACKING_URI=(\S+)$", PAGE_OF_MLFLOW, re.MULTILINE)
REPEATS = "docs/comparison.md"  # shows commands of other pages, which run there
# What a reader of this page has done before.
BEFORE = {
    "docs/guides/released-models.md": [
        "python -m ckpt_tools download allenai/OLMo-2-0425-1B models/OLMo-2-0425-1B"
        f" --revision {REVISION}"
    ],
    "docs/reproduce.md": [
        "cp slurm/sites/example.toml my_cluster.toml",
        "python -m study run olmo2-30m-lr",
        "python -m study run olmo2-190m-lr",
    ],
}


def smaller(command: str) -> str:
    """Return a command at the size of a test."""
    for pattern, small in SMALLER:
        command = re.sub(pattern, small, command)
    return command


def run(command: str, directory: Path, hub: FakeHub) -> None:
    """Run a command in a directory, and fail with what it printed if it fails."""
    words = [part for word in shlex.split(command) for part in _expanded(word, directory)]
    variables = {}
    if "allenai/" in command:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(directory / "hub")}
    if words[0] == "make":
        words, directory = ["make", "--dry-run", *words[1:]], PROJECT
    elif words[0] == "torchrun":
        words = torchrun(2, *words[words.index("-m") + 1 :], python=interpreter())
    elif words[0] == "python":
        words[0] = interpreter()
    ended = execute(words, cwd=directory, variables=variables)
    assert ended.returncode == 0, f"{command}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"


def _expanded(word: str, directory: Path) -> list[str]:
    """Return the places that a word with an asterisk means, as the shell does."""
    if "*" not in word:
        return [word]
    return sorted(str(path.relative_to(directory)) for path in directory.glob(word))


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_of_mlflow_is_one_that_is_taken(monkeypatch, address):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    assert tracking_uri(Path()) == address


def test_a_page_that_repeats_commands_has_those_of_other_pages():
    run_elsewhere = {command for name in NAMES if name != REPEATS for command in commands_of(name)}
    assert set(commands_of(REPEATS)) <= run_elsewhere


@pytest.mark.parametrize("name", [n for n in NAMES if commands_of(n) and n != REPEATS])
def test_commands_of_a_page(name, checkout, statistics, hub, request):
    commands = [*BEFORE.get(name, ()), *commands_of(name)]
    if any(" -m slurm " in command for command in commands):
        request.getfixturevalue("lab")
    for command in commands:
        if STATISTICS.search(command):
            run(command, statistics, hub)
        else:
            run(smaller(command), checkout, hub)
