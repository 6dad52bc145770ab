"""Drivers of the last ten years against the builds of torch."""

import re

import pytest

from install import driver, settings

HEAD = "| NVIDIA-SMI {0}    Driver Version: {0}    CUDA Version: {1}     |"
NEW_HEAD = "| NVIDIA-SMI {0}    KMD Version: {0}     CUDA UMD Version: {1}     |"
CU126 = "https://download.pytorch.org/whl/cu126"


@pytest.mark.parametrize(
    ("report", "version", "cuda"),
    [
        (HEAD.format("470.256.02", "11.4"), "470.256.02", "11.4"),
        (HEAD.format("550.54.15", "12.4"), "550.54.15", "12.4"),
        (HEAD.format("580.159.03", "13.0"), "580.159.03", "13.0"),
        # a newer libcuda than the driver's own, as NVIDIA's images bring for data centers
        (HEAD.format("550.54.15", "13.0"), "550.54.15", "13.0"),
        (NEW_HEAD.format("610.57.04", "13.3"), "610.57.04", "13.3"),
        (HEAD.format("570.86.10", "N/A"), "570.86.10", "12.6"),
        (HEAD.format("590.44.01", "ERR!"), "590.44.01", "13.0"),
        (HEAD.format("510.108.03", "ERR!"), "510.108.03", "11"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "", ""),
        ("", "", ""),
    ],
)
def test_the_head_of_nvidia_smi(report, version, cuda):
    expected = driver.Driver(version, cuda) if version else None
    assert driver.parsed(report) == expected


@pytest.mark.parametrize(
    ("version", "cuda", "words"),
    [
        (
            *("550.54.15", "12.4"),
            r"driver 550.54.15 runs CUDA up to 12.4 and torch \S+ of PyPI needs 13.0 \(driver 580 or"
            rf" newer\): add TORCH_INDEX={CU126} to the command, or update the driver",
        ),
        ("525.60.13", "12.0", rf".*add TORCH_INDEX={CU126} "),
        ("470.256.02", "11.4", r".*add TORCH_INDEX=https://download.pytorch.org/whl/cpu "),
        ("580.65.06", "13.0", None),
        ("610.57.04", "13.3", None),
        ("550.54.15", "13.0", None),
    ],
)
def test_torch_of_pypi(version, cuda, words):
    problem = driver.problem(driver.Driver(version, cuda), settings.read([]))
    assert problem is None if words is None else re.match(words, str(problem))


@pytest.mark.parametrize(
    ("here", "word", "note"),
    [
        (None, "TORCH_INDEX=", "no NVIDIA driver here (nvidia-smi): torch for CUDA 13.0 computes"),
        (None, f"TORCH_INDEX={CU126}", "no NVIDIA driver here (nvidia-smi): torch for CUDA 12.6"),
        (None, "TORCH_INDEX=https://download.pytorch.org/whl/cpu", None),
        (("550.54.15", "12.4"), f"TORCH_INDEX={CU126}", None),
        (
            *(("550.54.15", "12.4"), f"TORCH_INDEX={CU126[:-3]}130"),
            "driver 550.54.15 runs CUDA up to 12.4: torch for CUDA 13.0 computes on GPUs of a"
            " driver 580 or newer",
        ),
        (("580.65.06", "13.0"), "TORCH_INDEX=", None),
    ],
)
def test_a_build_that_is_asked_for_is_obeyed_and_what_it_needs_is_said(here, word, note):
    present, asked = here and driver.Driver(*here), settings.read([word])
    if here or asked.torch_index:
        assert driver.problem(present, asked) is None
    said = driver.note(present, asked)
    assert said is None if note is None else str(said).startswith(note)


def test_a_machine_without_a_driver_is_not_refused():
    assert driver.problem(None, settings.read([])) is None
