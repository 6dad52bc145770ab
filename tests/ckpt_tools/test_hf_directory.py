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


def test_a_model_that_is_missing_is_left_to_who_reads_it(tmp_path, monkeypatch):
    """Its name would say more than that of a place that another user may not write to."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    hf_dir = tmp_path / "model"
    expected = [[hf_dir / "quant" / "spec"]]
    assert result_directories([hf_dir], "quant", ["spec"], None) == expected
    hf_dir.mkdir()
    with pytest.raises(UserError, match="not writable; give another --out"):
        result_directories([hf_dir], "quant", ["spec"], None)
