"""Small real inputs shared by all tests: a tokenizer, token files and a random OLMo2."""

import fcntl
import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from base.cli import quick_imports
from tests.interpreter import interpreter, real_interpreter, share, workers

if any(argument.startswith("-n") for argument in sys.argv):
    share()  # it imports while this process does

with quick_imports():
    import numpy as np
    import pytest
    import torch
    from transformers import Olmo2Config, Olmo2ForCausalLM

from study.text.tokenizer import END_OF_TEXT, train_tokenizer
from tests.runs import called, make_run, ranks
from tests.study.smoke import make_smoke_study
from train.data.prepare import prepare

gc.freeze()  # no collection looks through what stays anyway; again once all tests are imported

VOCAB_SIZE = 320
# These take longest, by far, or wait for SLURM: begun last, they would keep one worker busy while
# the others have nothing left. The pages read the smoke study, which the first worker makes before.
FIRST = (
    "study/test_smoke.py",
    "slurm/test_study.py",
    "slurm/test_resuming.py",
    "slurm/test_accounting.py",
    "docs/test_commands.py",
    "study/tracking/test_importer.py",
    "train/test_watchdog.py",
    "curvature/test_cost.py",
)


class FailuresAtOnce:
    """Prints a failure when it happens: a run that is ended before its summary has named it."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print where and how a test failed, and the ends of what it printed and logged."""
        if report.failed:
            self._terminal.write_line(f"\nFAILED {report.nodeid}\n{report.longreprtext}")
            for title, text in report.sections:
                self._terminal.write_line(f"--- {title}\n{text[-4000:]}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Fork the workers of xdist, and register what prints where all their results arrive."""
    if hasattr(config, "workerinput"):
        sys.executable = real_interpreter()
        multiprocessing.set_executable(interpreter())
        os.environ.pop("PYTHONUNBUFFERED", None)  # xdist's, not of what tests start
        return
    if config.getoption("tx", None):
        program = workers(config.args)
        config.option.tx = [f"{worker}//python={program}" for worker in config.option.tx]
    if terminal := config.pluginmanager.getplugin("terminalreporter"):
        config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; `--no-loadscope-reorder` leaves them there."""
    first = {str(Path(__file__).parent / name): order for order, name in enumerate(FIRST)}
    items.sort(key=lambda item: first.get(str(item.path), len(first)))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking through the modules of all tests."""
    gc.freeze()


def made_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
    """A directory that `make` fills, once for all workers of a session; the others wait."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made_once"
    root.mkdir(exist_ok=True)
    done = root / f"{name}.done"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(root / name)
            done.touch()
    return root / name


@pytest.fixture(autouse=True)
def umask_of_its_own():
    """Restore the umask, which every command that is called in this process sets."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture
def in_process(capsys):
    """Runs a command in this process; returns its exit code, and lines of stdout and of stderr."""

    def run(app, name, *words):
        code = called(app, name, *words)
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err.splitlines()

    return run


@pytest.fixture
def tf32():
    """torch as TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 sets it."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> Path:
    """A byte-level BPE tokenizer of 320 tokens, end-of-text has id 0."""
    return made_once(tmp_path_factory, "tokenizer", _tokenizer)


def _tokenizer(directory: Path) -> None:
    directory.mkdir()
    tokenizer = train_tokenizer([Path(json.__file__).read_text()], VOCAB_SIZE)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _token_file(prefix: Path, tokenizer_dir: Path, seed: int, documents: int) -> None:
    """Documents of letters in which each letter decides its likely successors: something to
    learn.
    """
    generator = np.random.default_rng(seed)
    texts = []
    for _ in range(documents):
        letters = [int(generator.integers(26))]
        for _ in range(int(generator.integers(80, 400))):
            letters.append((letters[-1] * 3 + int(generator.integers(4))) % 26)
        texts.append("".join(chr(97 + letter) for letter in letters))
    source = prefix.parent / f"{prefix.name}.jsonl"
    prefix.parent.mkdir()
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([source], tokenizer_dir, prefix)


@pytest.fixture(scope="session")
def train_prefix(tmp_path_factory, tokenizer_dir) -> Path:
    """A training token file of about 60,000 tokens in 300 documents."""

    def make(directory: Path) -> None:
        _token_file(directory / "train", tokenizer_dir, seed=1, documents=300)

    return made_once(tmp_path_factory, "train_data", make) / "train"


@pytest.fixture(scope="session")
def held_out_prefix(tmp_path_factory, tokenizer_dir) -> Path:
    """A held-out token file of 30 documents."""

    def make(directory: Path) -> None:
        _token_file(directory / "held_out", tokenizer_dir, seed=2, documents=30)

    return made_once(tmp_path_factory, "held_out_data", make) / "held_out"


def widths(hidden: int, mlp: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """The widths of a model in transformers' words, which are also those of `ModelConfig`."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return dict(zip(names, (hidden, mlp, heads, kv_heads), strict=True)) | more


def make_hf_directory(
    directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config
) -> Path:
    """A random OLMo2 (2 layers, width 32, 4 heads) as an HF directory; keyword arguments change
    its configuration.

    Norm weights are drawn too: at their initial 1 a swapped or dropped norm would go unseen.
    """
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        **widths(32, 64, 4, 4, num_hidden_layers=2, max_position_embeddings=64),
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "eos_token_id": 0,
        "pad_token_id": None,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = Olmo2ForCausalLM(Olmo2Config(**(shape | config)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=0.15)
    (model.bfloat16() if dtype == torch.bfloat16 else model).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def hf_dir(tmp_path_factory) -> Path:
    """A random fp32 OLMo2 as an HF directory, without lineage."""
    return make_hf_directory(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="session")
def inputs(train_prefix, held_out_prefix, tokenizer_dir) -> dict[str, Path]:
    """The inputs of every run, as keyword arguments of `make_run`.

    Every worker has the same paths: they are part of a run's fingerprint.
    """
    return {
        "train_prefix": train_prefix,
        "held_out_prefix": held_out_prefix,
        "tokenizer_dir": tokenizer_dir,
    }


@pytest.fixture(scope="session")
def smoke_root(tmp_path_factory) -> Path:
    """The root of the finished smoke study; tests that write copy it."""
    return made_once(tmp_path_factory, "smoke", make_smoke_study)


# name -> processes, settings of make_run
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "tp2pp2": (4, {"tensor": 2, "pipeline": 2}),
    "gqa-dp1": (1, {"kv_heads": 2}),
    "gqa-tp2": (2, {"kv_heads": 2, "tensor": 2}),
    "bf16-dp2": (2, {"precision": "bf16"}),
    "tp2dp2": (4, {"tensor": 2, "micro_batch_size": 2}),
    "sp2": (2, {"tensor": 2, "sequence": True}),
    "recompute": (1, {"recompute": "layers"}),
    "selective": (1, {"recompute": "selective"}),
    "bf16-dp1": (1, {"precision": "bf16"}),
    "bf16-tp2pp2": (4, {"precision": "bf16", "tensor": 2, "pipeline": 2}),
    "bf16-sp2": (2, {"precision": "bf16", "tensor": 2, "sequence": True}),
    "ds-zero1": (2, {"engine": "deepspeed"}),
}
# Four ranks and bf16 once more cost 35 core-seconds: what they combine is in other layouts.
STRESSED = ("tp2dp2", "bf16-sp2", "bf16-tp2pp2")


def layouts(*names: str) -> list[Any]:
    """Parameters of a test for these layouts, the long ones in `make stress` alone."""
    return [
        pytest.param(name, marks=pytest.mark.stress) if name in STRESSED else name for name in names
    ]


@pytest.fixture(scope="session")
def trained(tmp_path_factory, inputs):
    """`trained(layout)`: the directory of a finished run at that layout, trained once per
    session.
    """

    def train(directory: Path) -> None:
        processes, settings = LAYOUTS[directory.name]
        make_run(directory, **inputs, **settings)
        finished = ranks(processes, "train", "run", str(directory))
        assert finished.returncode == 0, finished.stderr[-3000:]
        assert "Warning" not in finished.stderr, finished.stderr[-3000:]

    return lambda layout: made_once(tmp_path_factory, layout, train)
