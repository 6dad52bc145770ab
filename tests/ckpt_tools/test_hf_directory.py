"""Places of results: refused before hours of measuring, not after them."""

import os

import pytest

from base.errors import UserError
from ckpt_tools.hf.directory import result_directories


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "notes").write_text("keep")
    for out in (tmp_path / "notes", tmp_path / "notes" / "below" / "it"):
        with pytest.raises(UserError, match="notes is a file; give a directory"):
            result_directories([tmp_path], "quant", ["spec"], [out])
    fresh = tmp_path / "not" / "yet"
    assert result_directories([tmp_path], "quant", ["spec"], [fresh]) == [[fresh]]
    assert not fresh.parent.exists()


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_directory_that_is_not_writable_is_refused(tmp_path, monkeypatch, below):
    monkeypatch.setattr(
        os, "access", lambda path, mode: mode != os.W_OK or path != tmp_path
    )  # root may write anywhere
    with pytest.raises(UserError, match="not writable; give another --out"):
        result_directories([tmp_path / "model"], "curvature", ["spec"], [tmp_path / below])
