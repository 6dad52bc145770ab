"""Host memory of snapshots: what is copied stays until it is given back, and then is used again."""

import torch

from train.snapshot_memory import SnapshotMemory


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((), (7,), (5, 3), (2, 3, 4))
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [*drawn, drawn[2].bfloat16().t(), torch.arange(9)]


def test_two_saves_in_a_row_keep_their_copies():
    """The second is made, of changed values, while the first is still being written."""
    memory, live = SnapshotMemory(torch.device("cpu")), tensors()
    first = memory.copied(live)
    for tensor in live:
        tensor.add_(1)
    second = memory.copied(live)
    first.wait()
    for copy, value in zip(first.tensors, tensors(), strict=True):
        assert copy.dtype == value.dtype
        assert copy.equal(value)
    places = [copy.data_ptr() for copy in first.tensors]
    first.release()
    third = memory.copied(tensors())
    assert [copy.data_ptr() for copy in third.tensors] == places
    for copies, values in ((second, live), (third, tensors())):
        assert all(map(torch.equal, copies.tensors, values))


def test_every_copy_is_saved_alone(tmp_path):
    """torch.save writes a tensor's storage, which must not be the block of all."""
    copies = SnapshotMemory(torch.device("cpu")).copied([torch.zeros(1000), torch.ones(3)])
    torch.save(copies.tensors[1], tmp_path / "one")
    assert (tmp_path / "one").stat().st_size < 4000
    assert SnapshotMemory(torch.device("cpu")).copied([]).tensors == []
