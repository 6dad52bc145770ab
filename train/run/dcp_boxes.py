"""The boxes of torch's distributed checkpoints: the place of their numbers in a file.

A box is a file of `torch.save` within a larger one, and its numbers are row after row:

    | box | description | numbers | zip directory | box | ..
          ^ offset      ^ + _checkpoint_offset    ^ + length
"""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view

ZIP = b"PK\x03\x04"  # begins every file of torch.save; other files torch.load tries as pickles

_WITHOUT_NUMBERS = FakeTensorMode()  # made once: that takes as long as to read a description


def find_numbers(path: Path, offset: int, length: int) -> tuple[Tensor, int]:
    """Return a box without its numbers, a fake tensor, and the byte of the file where they begin.

    Reads the description alone. One thread at a time may call.

    Raises:
        UnpicklingError: something else is there; a damaged zip file raises nearly anything.
    """
    with path.open("rb") as file, _WITHOUT_NUMBERS:
        view: Any = _create_file_view(file, offset, length)
        if view.read(len(ZIP)) != ZIP:
            raise UnpicklingError(f"no tensor begins at byte {offset} of {path.name}")
        view.seek(0)
        tensor = torch.load(view, weights_only=True)
    if not isinstance(tensor, Tensor):
        raise UnpicklingError(f"no tensor is at byte {offset} of {path.name}")
    storage: Any = tensor.untyped_storage()
    in_box: int = storage._checkpoint_offset + tensor.storage_offset() * tensor.element_size()
    return tensor, offset + in_box
