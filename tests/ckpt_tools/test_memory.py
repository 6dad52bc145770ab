"""Peak memory of tools on a model that would not fit into what they are allowed."""

import sys

from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.hf.configuration import write_configuration
from tests.bench.export import RandomWeights
from tests.runs import execute
from train.model.config import ModelConfig
from train.model.families import hf_settings

MODEL = ModelConfig(
    vocab_size=16_384,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=16,
)
LARGEST_BYTES = 4 * MODEL.vocab_size * MODEL.hidden_size
ALLOWED_BYTES = 3 * LARGEST_BYTES + (600 << 20)
# Runs a command, then prints the peak resident set of it and its children, the largest process of
# them, in KiB.
WATCHED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_bytes(*arguments: str) -> int:
    """Peak resident set of `python -m ckpt_tools ARGUMENTS`, the largest of its processes."""
    command = [sys.executable, "-c", WATCHED, sys.executable, "-m", "ckpt_tools", *arguments]
    done = execute(command)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split()[-1]) << 10


def test_no_tool_holds_a_model(tmp_path):
    """Import, export and an average of a model of 0.9 GB whose largest tensor has 67 MB."""
    source, checkpoint, exported = tmp_path / "source", tmp_path / "checkpoint", tmp_path / "hf"
    source.mkdir()
    files = write_weights(source, RandomWeights(MODEL), processes=2)
    assert sum(file.bytes for file in files.values()) > ALLOWED_BYTES
    write_configuration(source, MODEL.family, hf_settings(MODEL, 64, 0), "fp32")
    for arguments in (
        ("import", source, checkpoint),
        ("export", checkpoint, exported),
        ("average", tmp_path / "mean", source, exported),
    ):
        assert peak_bytes(*map(str, arguments)) < ALLOWED_BYTES
