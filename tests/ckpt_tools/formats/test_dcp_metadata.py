"""A hostile `.metadata`: refused before anything of it runs, whatever its hash says."""

import enum
import io
import os
import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from base.errors import UserError
from ckpt_tools.checkpoint import open_weights
from ckpt_tools.formats.dcp_metadata import read_metadata
from ckpt_tools.inspecting import inspect
from tests.ckpt_tools.checkpoints import seal
from train.run.directory import read_checkpoint_record


class Call:
    """Pickled, it calls a function when it is opened."""

    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture
def checkpoint(trained, tmp_path):
    return shutil.copytree(trained("dp1") / "checkpoints/step00000020", tmp_path / "step")


def calls(sprung) -> dict[str, object]:
    return {
        "posix.mkdir": Call(os.mkdir, str(sprung)),
        "posix.system": Call(os.system, f"mkdir {sprung}"),
        "builtins.eval": Call(eval, f"__import__('os').mkdir({str(sprung)!r})"),
        "builtins.getattr": Call(getattr, Metadata, "__init__"),
        "torch.hub.load": Call(torch.hub.load, "a", "b"),
    }


@pytest.mark.parametrize("name", calls(""))
def test_nothing_of_a_hostile_pickle_runs_though_its_hash_is_right(checkpoint, tmp_path, name):
    sprung = tmp_path / "sprung"
    metadata = checkpoint / ".metadata"
    hostile = Metadata(state_dict_metadata={"a": calls(sprung)[name]})  # type: ignore[dict-item]
    metadata.write_bytes(pickle.dumps(hostile))
    seal(checkpoint)
    inspect([checkpoint], check=True)
    with pytest.raises(UserError, match=rf"names {name}, which no checkpoint holds"):
        open_weights(checkpoint, read_checkpoint_record(checkpoint))
    assert not sprung.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x05", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(None)]
)
def test_what_is_no_metadata_is_refused_in_one_line(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata (is damaged|holds no metadata)") as refused:
        read_metadata(tmp_path)
    assert "\n" not in str(refused.value)


class EarlyPickler(pickle.Pickler):
    """Members of enumerations by name, as Python 3.11.2 of Debian 12 pickles them."""

    def reducer_override(self, value):
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_enumerations_of_early_python_3_11_are_read(checkpoint):
    metadata, written = read_metadata(checkpoint), io.BytesIO()
    EarlyPickler(written).dump(metadata)
    assert b"getattr" in written.getvalue()
    (checkpoint / ".metadata").write_bytes(written.getvalue())
    assert read_metadata(checkpoint) == metadata


def test_it_reads_what_torch_reads(checkpoint):
    with (checkpoint / ".metadata").open("rb") as file:
        assert read_metadata(checkpoint) == pickle.load(file)  # saved by this test's fixture
