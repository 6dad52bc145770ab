"""The extra `gpu`: its releases have what megatron-core takes from them."""

import importlib.metadata
import json
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.train.transformer_engine_names import RECORD, VERSIONS, derive, taken_names

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
TABLE = json.loads(RECORD.read_text())

# Not in the Python sources of any or some release, and why that stops nothing of ours.
# megatron-core catches the ImportError of each, or asks for the version first.
MISSING = {
    "transformer_engine.pytorch.attention._SplitAlongDim": (
        "a fused split of q, k and v; torch's is used instead"
    ),
    "transformer_engine.pytorch.attention.apply_rotary_pos_emb": (
        "imported from attention.rope since 2.3"
    ),
    "transformer_engine.pytorch.cpp_extensions.cast_to_fp8": "of releases before 2.0",
    "transformer_engine.pytorch.cpp_extensions.rmsnorm_fwd": (
        "compiled: of transformer_engine_torch; for inference"
    ),
    "transformer_engine.pytorch.cpu_offload_v1": (
        "offloading of activations; before 2.10 it is cpu_offload"
    ),
    "transformer_engine.pytorch.module.base.get_workspace": (
        "routers of mixtures of experts; not since 2.10"
    ),
    "transformer_engine.pytorch.tensor.utils.post_all_gather_processing": (
        "gathered fp8 parameters; since 2.10"
    ),
}


def test_the_extra_states_the_range_of_megatron_core():
    extra = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["gpu"]
    (ours,) = [Requirement(line) for line in extra]
    stated = [Requirement(line) for line in importlib.metadata.requires("megatron-core") or ()]
    (theirs,) = {str(need): need for need in stated if need.name == "transformer-engine"}.values()
    # Its metadata says core-cu13; pips up to 23.2 do not take core_cu13 for it, and leave the extra
    # out.
    assert (
        ours.extras
        == {canonicalize_name(extra) for extra in theirs.extras}
        == {"core-cu13", "pytorch"}
    )
    for version in (*VERSIONS, "2.8.0", "2.12.0", "2.20.2"):
        assert (
            ours.specifier.contains(version)
            == theirs.specifier.contains(version)
            == (version in VERSIONS)
        )


def test_the_record_is_of_the_installed_megatron_core():
    assert TABLE.keys() == taken_names(), "run python -m tests.train.transformer_engine_names"


def test_releases_in_the_range_have_what_megatron_core_takes():
    missing = {
        name
        for name, by_version in TABLE.items()
        if not all(by_version[version] for version in VERSIONS)
    }
    assert missing == MISSING.keys()
    assert len(TABLE) > 80


@pytest.mark.stress
def test_the_record_is_what_the_sources_say():
    assert derive() == TABLE
