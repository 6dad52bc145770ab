"""The kind of processor: that of this machine by its own tools, and of kernels that tell others."""

import os
import shutil
import subprocess

import pytest
import torch

from base import processor
from base.environment import environment
from base.processor import cpu_model, kind_of
from tests.lacking import skip
from tests.present import present

NEOVERSE = """\
processor\t: 0
BogoMIPS\t: 2000.00
Features\t: fp asimd sve
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd4f

processor\t: 1
CPU part\t: 0xd40
"""


def test_it_is_what_lscpu_says(monkeypatch):
    if shutil.which("lscpu") is None:
        skip("lscpu is not installed (apt-get install util-linux)")
    shown = subprocess.run(
        ["lscpu"], capture_output=True, text=True, check=True, env=os.environ | {"LC_ALL": "C"}
    ).stdout
    fields = dict(line.split(":", 1) for line in shown.splitlines() if ":" in line)
    here = environment()["processor"]
    assert here["architecture"] == fields["Architecture"].strip()
    assert here["threads"] == torch.get_num_threads()
    if here["architecture"] == "x86_64":
        assert here["cpu"] == fields["Model name"].strip()
        # the widest that the CPU has by the kernel's names
        assert here["instructions"].replace("_f", "f") in fields["Flags"].split()


def test_another_limit_of_instructions_is_another_kind(monkeypatch):
    plain = present(kind_of({"processor": processor.processor().model_dump()}))
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert (
        kind_of({"processor": processor.processor().model_dump()})
        == f"{plain[:-1]}, MKL_CBWR=COMPATIBLE)"
    )
    assert kind_of({"host": "node1"}) is None, "a record of before"
    assert kind_of({"gpus": ["NVIDIA H200", "NVIDIA H100"]}) == "NVIDIA H100 and NVIDIA H200"


@pytest.mark.parametrize(
    ("text", "model"),
    [
        (NEOVERSE, "CPU implementer 0x41, CPU part 0xd4f, CPU variant 0x0"),
        ("processor: 0\nmodel name\t: AMD  EPYC 7763\n\nmodel name: B\n", "AMD EPYC 7763"),
        ("", "unknown CPU"),
    ],
)
def test_the_model_is_read_as_kernels_write_it(tmp_path, monkeypatch, text, model):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_model() == model
