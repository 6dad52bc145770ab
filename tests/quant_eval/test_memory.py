"""Memory of a measurement: one decoder block and the activations, however many
blocks there are.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import make_hf_directory
from tests.interpreter import interpreter
from tests.quant_eval.models import token_file

BLOCKS = (2, 18)
HIDDEN, INTERMEDIATE = 512, 1536
BLOCK_MIB = 4 * (4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE) / 2**20  # 13
# getrusage would tell the peak of the process that started it, too: of the tests before, and of
# making the model.
PEAK = """
import sys
from quant_eval.__main__ import app
app(sys.argv[1:], standalone_mode=False)
print(int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024)
"""


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory, tokenizer_dir) -> Path:
    """A token file of 64 documents of some ten tokens: time goes with tokens, memory does not."""
    texts = (f"for {n} in self" for n in range(64))
    return token_file(tmp_path_factory.mktemp("short") / "short", texts, tokenizer_dir)


@pytest.fixture(
    params=["rtn-b4-g128", pytest.param("gptq-b4-g128", marks=pytest.mark.stress)], scope="module"
)
def peaks(request, tmp_path_factory, short_documents) -> list[float]:
    """Peak memory of the whole process in MiB, by number of blocks."""
    sizes = []
    for blocks in BLOCKS:
        root = tmp_path_factory.mktemp("memory")
        model = make_hf_directory(
            root / "model",
            num_hidden_layers=blocks,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
        )
        words = ["run", model, "--spec", request.param, "--out", root / "out"]
        words += ["--calibration", short_documents, "--calibration-sequences", 8]
        words += ["--eval", short_documents, "--eval-tokens", 500]
        done = subprocess.run(
            [interpreter(), "-c", PEAK, *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).resolve().parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        sizes.append(float(done.stdout.split()[-1]))
    return sizes


def test_memory_does_not_grow_with_the_number_of_blocks(peaks):
    """Sixteen more blocks hold 208 MiB; peaks of equal processes differed by up to 60 MiB under
    load: pages of libraries, and what malloc keeps.
    """
    more = (BLOCKS[1] - BLOCKS[0]) * BLOCK_MIB
    assert more > 200
    assert peaks[1] - peaks[0] < 0.5 * more
