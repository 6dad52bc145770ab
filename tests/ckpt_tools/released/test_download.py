"""Downloads: exactly the data of each revision, resumed after a kill, checked, never half."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from base.errors import UserError
from base.reading import read_sealed
from ckpt_tools.released.download import download
from tests.ckpt_tools.released.fake_hub import REPO, FakeHub, model_files
from tests.runs import environment
from tests.sealing import reseal
from tests.waiting import HANG_SECONDS, wait_until

FIRST, SECOND, LAST = (
    f"stage1-step{step}-tokens{tokens}B"
    for step, tokens in ((10_000, 21), (20_000, 42), (30_000, 63))
)
WANTED = {
    *(f"model-0000{number}-of-00002.safetensors" for number in (1, 2)),
    *("model.safetensors.index.json", "config.json", "tokenizer.json", "merges.txt"),
}


@pytest.fixture
def hub(serve):
    """A hub of three revisions."""
    return serve({name: model_files(seed) for seed, name in enumerate((FIRST, SECOND, LAST))})


def check(directory: Path, hub: FakeHub, commit: str | None) -> None:
    """Every wanted file byte by byte, nothing else, and a record that says so."""
    revision = directory.name
    files = {
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    }
    assert files == WANTED | {"download.json"}
    contents = {name: hub.revisions[revision][name] for name in WANTED}
    assert {name: (directory / name).read_bytes() for name in WANTED} == contents
    hashes = {
        name: {"bytes": len(content), "digest": f"sha256:{hashlib.sha256(content).hexdigest()}"}
        for name, content in contents.items()
    }
    record = read_sealed(directory / "download.json", "")
    stated = {"repo": REPO, "revision": revision, "commit": commit, "files": hashes}
    assert record == stated | {"converted": {}}


def test_from_the_hub_and_never_twice(hub, tmp_path, capsys):
    download(REPO, tmp_path / "models", every=2)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [FIRST, LAST]
    for name in (FIRST, LAST):
        check(tmp_path / "models" / name, hub, hub.commit(name))
    asked = len(hub.got)
    assert asked == 2 * len(WANTED) + 1  # config.json first, which both have in common
    download(REPO, tmp_path / "models")
    assert {name for name, _ in hub.got[asked:]} == {SECOND}
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 revisions in ")


def whole_files(notes: Path) -> set[str]:
    """Files that huggingface_hub has noted as whole: by commit, hash and time, a line each."""
    return {
        note.stem
        for note in notes.glob("*.metadata")
        if note.read_text().count("\n") == 3  # it may be open and not yet written
    }


def test_a_killed_download_goes_on(hub, tmp_path):
    """SIGKILL with half of the second shard there: no record, and no file fetched twice."""
    hub.stalled = "model-00002-of-00002.safetensors"
    arguments = ["download", REPO, str(tmp_path / "models"), "--revision", FIRST]
    variables = environment() | {"HF_ENDPOINT": hub.endpoint}
    command = [sys.executable, "-m", "ckpt_tools", *arguments]
    process = subprocess.Popen(command, text=True, env=variables, stderr=subprocess.PIPE)
    try:
        assert hub.reached_stall.wait(HANG_SECONDS)
        notes = tmp_path / "models" / FIRST / ".cache" / "huggingface" / "download"
        others = WANTED - {hub.stalled}
        wait_until(lambda: others <= whole_files(notes), "the other files", process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not (tmp_path / "models" / FIRST / "download.json").exists()
    hub.let_go.set()
    download(REPO, tmp_path / "models", revisions=[FIRST])
    check(tmp_path / "models" / FIRST, hub, hub.commit(FIRST))
    assert hub.got.count((FIRST, hub.stalled)) == 2
    others = WANTED - {hub.stalled, "config.json"}  # which is looked into first
    assert all(hub.got.count((FIRST, name)) == 1 for name in others)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [FIRST]


@pytest.mark.parametrize("origin", ["hub", "directory"])
@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_damage_is_found_and_repaired(hub, tmp_path, capsys, origin, damage):
    place = REPO if origin == "hub" else str(hub.lay_out(tmp_path / "OLMo-2-0425-1B"))
    download(place, tmp_path / "models", revisions=[FIRST])
    path = tmp_path / "models" / FIRST / "model-00001-of-00002.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1]) if damage == "truncated" else path.unlink()
    download(place, tmp_path / "models", revisions=[FIRST])
    check(tmp_path / "models" / FIRST, hub, hub.commit(FIRST) if origin == "hub" else None)
    assert "fetching it again" in capsys.readouterr().err


def test_from_a_directory(hub, tmp_path):
    source = hub.lay_out(tmp_path / "allenai--OLMo-2-0425-1B")
    download(str(source), tmp_path / "models", every=2)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [FIRST, LAST]
    check(tmp_path / "models" / LAST, hub, None)
    before = (tmp_path / "models" / LAST).stat().st_ino
    download(str(source), tmp_path / "models", every=2)
    assert (tmp_path / "models" / LAST).stat().st_ino == before, "what is complete is left alone"


def test_what_was_downloaded_can_be_downloaded_from(hub, tmp_path):
    """It needs no --family, keeps the commit, and vouches for its files."""
    download(REPO, tmp_path / "models", revisions=[FIRST, LAST])
    download(str(tmp_path / "models"), tmp_path / "copies", revisions=[FIRST])
    check(tmp_path / "copies" / FIRST, hub, hub.commit(FIRST))
    shard = tmp_path / "models" / LAST / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    with pytest.raises(UserError, match="was changed after it was written"):
        download(str(tmp_path / "models"), tmp_path / "copies", revisions=[LAST])
    assert [path.name for path in (tmp_path / "copies").iterdir()] == [FIRST]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"revisions": ["stage1-step7-tokens1B"]}, "no such revision"),
        ({"revisions": ["../outside"]}, "cannot name a directory"),
        ({"revisions": ["refs/pr/1"]}, "cannot name a directory"),
        ({"revisions": [FIRST], "every": 2}, "one or the other"),
        ({"stage": "stage3"}, "no stage 'stage3'; did you mean stage1?"),
        ({"source": "allenai/OLMo-2-1124-7B"}, "not on the hub"),
        ({"source": "nobody/nothing"}, "not a known trajectory"),
        ({"source": "no such place"}, "not a directory"),
    ],
)
def test_bad_input_is_refused(hub, tmp_path, arguments, reason):
    with pytest.raises(UserError, match=reason) as refused:
        download(**({"source": REPO, "into": tmp_path / "models"} | arguments))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "models").exists()


def no_safetensors(hub: FakeHub, into: Path) -> None:
    a_shard_missing(hub, into)
    del hub.revisions[LAST]["model-00002-of-00002.safetensors"]
    del hub.revisions[LAST]["pytorch_model.bin"]


def a_shard_missing(hub: FakeHub, into: Path) -> None:
    del hub.revisions[LAST]["model-00001-of-00002.safetensors"]


def wrong_bytes(hub: FakeHub, into: Path) -> None:
    hub.corrupted = "model-00001-of-00002.safetensors"


def a_directory_of_somebody(hub: FakeHub, into: Path) -> None:
    (into / LAST).mkdir(parents=True)


def a_file_of_somebody(hub: FakeHub, into: Path) -> None:
    into.mkdir()
    (into / LAST).touch()


def another_repository(hub: FakeHub, into: Path) -> None:
    download(REPO, into, revisions=[LAST])
    record = json.loads((into / LAST / "download.json").read_text())
    reseal(into / LAST / "download.json", record | {"repo": "somebody/else"})


def a_record_that_climbs_out(hub: FakeHub, into: Path) -> None:
    another_repository(hub, into)
    record = json.loads((into / LAST / "download.json").read_text())
    record["files"]["../../secret"] = record["files"]["config.json"]
    reseal(into / LAST / "download.json", record)


def a_pickle_that_climbs_out(hub: FakeHub, into: Path) -> None:
    """The download is damaged, else nothing of its conversions is looked at."""
    download(REPO, into, revisions=[LAST])
    record = json.loads((into / LAST / "download.json").read_text())
    files = sorted(name for name in record["files"] if name.endswith(".safetensors"))
    origin = {"record": record["files"][files[0]], "left_out": [], "torch": "2"}
    record["converted"] = {files[0]: origin | {"pickle": "../../../secret"}}
    reseal(into / LAST / "download.json", record)
    (into / LAST / files[1]).unlink()


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (no_safetensors, "no safetensors"),
        (a_shard_missing, "is not a file beside it"),
        (wrong_bytes, "other bytes than the hub says"),
        (a_directory_of_somebody, "is not a download"),
        (a_file_of_somebody, "is not a download"),
        (another_repository, "of somebody/else"),
        (a_record_that_climbs_out, "is outside its directory"),
        (a_pickle_that_climbs_out, "names '../../../secret', which is outside its directory"),
    ],
)
def test_what_does_not_fit_is_refused_and_left_alone(hub, tmp_path, prepare, reason):
    into = tmp_path / "models"
    prepare(hub, into)
    before = {path: path.stat().st_ino for path in into.rglob("*")}
    with pytest.raises(UserError, match=reason) as refused:
        download(REPO, into, revisions=[LAST])
    assert "\n" not in str(refused.value)
    if prepare in (a_shard_missing, wrong_bytes):  # seen once all is there: not a download yet
        assert not (into / LAST / "download.json").exists()
    else:
        assert {path: path.stat().st_ino for path in into.rglob("*")} == before


@pytest.mark.parametrize("origin", ["hub", "directory"])
def test_a_full_disk_is_seen_before_anything_is_written(hub, tmp_path, monkeypatch, origin):
    """Two revisions need 2 x 320 kB of weights; 500 kB take one of them, not both."""
    place = REPO if origin == "hub" else str(hub.lay_out(tmp_path / "OLMo-2-0425-1B"))
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 500_000, 500_000)
    )
    with pytest.raises(UserError, match="choose fewer revisions"):
        download(place, tmp_path / "models", revisions=[FIRST, LAST])
    assert list((tmp_path / "models").glob("*")) == []
    download(place, tmp_path / "models", revisions=[FIRST])
