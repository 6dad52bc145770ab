"""A hostile `.metadata`: refused before anything of it runs, whatever its hash says."""

import enum
import io
import os
import pickle
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from base.errors import UserError
from ckpt_tools.checkpoint import open_weights
from ckpt_tools.formats.megatron_shards import ShardedTensors
from ckpt_tools.inspecting import inspect
from tests.ckpt_tools.checkpoints import seal
from train.run.dcp_metadata import read_metadata
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


def without(record, field):
    del record.__dict__[field]


def first(mapping):
    return next(iter(mapping.values()))


# of the first tensor and of its first place in a file
RECORD_DAMAGES: dict[str, Callable[[Any, Any], None]] = {
    "relative_path": lambda tensor, stored: without(stored, "relative_path"),
    "offset": lambda tensor, stored: without(stored, "offset"),
    "sizes": lambda tensor, stored: without(tensor.chunks[0], "sizes"),
    "properties": lambda tensor, stored: without(tensor, "properties"),
    "is not a file of it": lambda tensor, stored: vars(stored).update(relative_path="../../a"),
    "are no place in": lambda tensor, stored: vars(stored).update(offset=-1),
    "is outside of it": lambda tensor, stored: vars(tensor).update(size=torch.Size([1])),
    "is no shape": lambda tensor, stored: vars(tensor).update(size=[8]),
}


@pytest.mark.parametrize("problem", RECORD_DAMAGES)
def test_a_record_without_a_field_or_with_anothers_is_damaged(checkpoint, problem):
    metadata = read_metadata(checkpoint)
    RECORD_DAMAGES[problem](first(metadata.state_dict_metadata), first(metadata.storage_data))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=rf"\.metadata is damaged \(.*{problem}"):
        read_metadata(checkpoint)


def test_a_stack_of_a_hundred_million_layers_is_no_model(checkpoint):
    metadata = read_metadata(checkpoint)
    key = next(key for key in metadata.state_dict_metadata if key.startswith("decoder.layers."))
    stacked: Any = metadata.state_dict_metadata[key]
    stacked.size, stacked.chunks = torch.Size([100_000_000, 0]), []
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="stacks no layers of a model"):
        ShardedTensors(checkpoint)


TORN = {
    "nothing": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "half": lambda content: content[: len(content) // 2],
    "no end": lambda content: content[:-100],
    "no zip directory": lambda content: content[:-400] + b"\xff" * 400,
    "not ours": lambda content: b"GIF89a" + content[6:],
}


@pytest.mark.parametrize("tear", TORN)
def test_a_torn_file_of_numbers_is_named(checkpoint, tear):
    path = checkpoint / "__0_0.distcp"
    path.write_bytes(TORN[tear](path.read_bytes()))
    stored = ShardedTensors(checkpoint)
    names = [name for name, boxes in stored.boxes.items() if boxes[0].path == path]

    def read_all() -> None:
        for name in names:
            stored.read(name, 0, stored.tensors[name].shape[0])

    with pytest.raises(UserError, match=rf"^{path} is damaged \(") as refused:
        read_all()
    assert "\n" not in str(refused.value)
