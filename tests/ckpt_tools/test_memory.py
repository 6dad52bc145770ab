"""Peak memory of tools on a model that would not fit into what they are allowed."""

from pathlib import Path

from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.hf.configuration import write_configuration
from tests.ckpt_tools.random_weights import RandomWeights
from tests.conftest import widths
from tests.interpreter import interpreter
from tests.runs import PROJECT, execute
from train.model.config import ModelConfig, hf_settings

MODEL = ModelConfig(vocab_size=2048, num_hidden_layers=10, **widths(512, 2048, 8, 8))
# What a command takes for this one is its imports, and the fork that it runs in.
TINY = MODEL.model_copy(update={"vocab_size": 512, "num_hidden_layers": 1, "hidden_size": 64})
LARGEST_BYTES = 4 * MODEL.vocab_size * MODEL.hidden_size
ALLOWED_BYTES = 3 * LARGEST_BYTES + (64 << 20)
# Runs a command, then prints the peak resident set of it and its children, the largest process of
# them, in KiB. From 128 KiB on memory goes back when it is freed, as in a process that has only
# begun: in one that has imported much malloc keeps up to 32 MiB.
WATCHED = """
import ctypes, resource, sys
assert ctypes.CDLL(None).mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD
from ckpt_tools.__main__ import app
app(sys.argv[1:], standalone_mode=False)
own = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print("peak", max(int(own), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
"""


def peak_bytes(*arguments: str) -> int:
    """Peak resident set of `python -m ckpt_tools ARGUMENTS`, the largest of its processes."""
    done = execute([interpreter(), "-c", WATCHED, *arguments], cwd=PROJECT)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split()[-1]) << 10


def peaks(root: Path, model: ModelConfig) -> dict[str, int]:
    """Peak resident set of import, export and an average of a random model, by command."""
    source, checkpoint, exported = root / "source", root / "checkpoint", root / "hf"
    source.mkdir(parents=True)
    files = write_weights(source, RandomWeights(model))
    assert model is TINY or sum(file.bytes for file in files.values()) > 2 * ALLOWED_BYTES
    write_configuration(source, model.family, hf_settings(model, 64, 0), "fp32")
    commands = (
        ("import", source, checkpoint),
        ("export", checkpoint, exported),
        ("average", root / "mean", source, exported),
    )
    return {command[0]: peak_bytes(*map(str, command)) for command in commands}


def test_no_tool_holds_a_model(tmp_path):
    """A model of 0.18 GB whose largest tensor has 4 MB, against one of 2 MB."""
    few, many = peaks(tmp_path / "tiny", TINY), peaks(tmp_path / "large", MODEL)
    for name, peak in many.items():
        assert peak - few[name] < ALLOWED_BYTES, name
