"""Directories that are written here, read by the last transformers before 5.

It is installed beside .venv, from the package index, without anything of its own but what it needs
in older versions.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from ckpt_tools.averaging import average_models
from ckpt_tools.export import export
from ckpt_tools.importing import import_checkpoint
from tests.interpreter import interpreter
from tests.published import change_config, logits_by_transformers, make_published
from tests.quant_eval.models import make_model
from tests.quant_eval.saved.examples import save_example

VERSION, TEXT = "4.57.6", "some text"
PACKAGES = (f"transformers=={VERSION}", "huggingface-hub==0.36.0", "tokenizers==0.22.1")
LLAMA3: dict[str, Any] = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}


def install(target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--no-deps", "--target", str(target), *PACKAGES], check=True)


def write_all(root: Path, run: Path, place: Path) -> None:
    """An export of a run, exports of imports, averages, a saved checkpoint."""
    export(run / "checkpoints" / "step00000020", root / "run")

    for kind in ("pythia", "old-llama"):
        source = make_published(place / kind, kind)
        import_checkpoint(str(source), place / f"{kind}-checkpoint")
        export(place / f"{kind}-checkpoint", root / kind)

    scaled = make_model(place / "scaled", "llama", rope_parameters=LLAMA3)
    shutil.copytree(scaled, place / "again")
    average_models(root / "average", [scaled, place / "again"])
    save_example(scaled, root / "saved", "rtn-b4-g16")


@pytest.mark.stress
def test_older_readers_compute_the_same(tmp_path, trained):
    """Logits and token ids; without the older keys another base is taken without a word."""
    install(tmp_path / "packages")
    root = tmp_path / "written"
    write_all(root, trained("dp1"), tmp_path / "made")
    shutil.copytree(root / "run", root / "newer-keys-alone")
    change_config(root / "newer-keys-alone", removed=("rope_theta", "rope_scaling"))

    witness = Path(__file__).with_name("older_witness.py")
    done = subprocess.run(
        [interpreter(), str(witness), str(tmp_path / "packages"), str(root), TEXT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == VERSION

    far = []
    for directory in sorted(root.iterdir()):
        answers = load_file(directory / "older.safetensors")
        expected = logits_by_transformers(directory, answers["input_ids"])
        difference = (answers["logits"] - expected).abs().max() / expected.abs().max()
        if difference > 1e-5:
            far.append(directory.name)
        if "tokens" in answers:
            assert (
                AutoTokenizer.from_pretrained(directory)(TEXT)["input_ids"]
                == answers["tokens"].tolist()
            )
    assert far == ["newer-keys-alone"]
