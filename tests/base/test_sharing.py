"""Roots that a team shares, and those that it does not: modes, whatever the umask was."""

import grp
import os
import stat
import subprocess
from pathlib import Path

import pytest

from base.errors import UserError
from base.files import write_json
from base.sharing import check_shared, follow_root, is_shared, make_root
from tests.lacking import skip

UMASKS = [0o000, 0o002, 0o022, 0o027, 0o077]


@pytest.fixture
def group() -> str:
    return grp.getgrgid(os.getegid()).gr_name


def made_below(root: Path) -> dict[str, int]:
    """Modes of what is made below a root: a directory, and files in it."""
    directory = root / "study"
    directory.mkdir()
    (directory / "log").open("a").close()
    write_json(directory / "open.json", {})
    write_json(directory / "private.json", {}, private=True)
    return {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in [directory, *directory.iterdir()]
    }


@pytest.mark.parametrize("umask", UMASKS)
def test_a_shared_root_is_its_groups_and_others_have_what_the_umask_leaves(tmp_path, group, umask):
    os.umask(umask)
    root = tmp_path / "a" / "root"
    make_root(root, group)
    others = 0o777 & ~umask & 0o005
    assert stat.S_IMODE(root.stat().st_mode) == 0o2770 | others
    files = 0o660 | others & 0o004
    assert made_below(root) == {
        "study": 0o2770 | others,
        "log": files,
        "open.json": files,
        "private.json": 0o660,
    }
    os.umask(0o022)
    follow_root(root)
    assert os.umask(0) & 0o070 == 0, "a later command, which knows no site file"


@pytest.mark.parametrize("umask", UMASKS)
def test_without_a_group_nobody_else_writes(tmp_path, umask):
    os.umask(umask)
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o2775)  # as a site's directories of projects are
    root = tmp_path / "a" / "root"
    make_root(root, None)
    assert not is_shared(root)
    files = 0o644 & ~umask
    modes = made_below(root)
    assert modes.pop("study") & 0o777 == 0o755 & ~umask
    assert modes == {"log": files, "open.json": files, "private.json": 0o600}


def test_a_group_that_is_not_the_users_is_refused(tmp_path, group):
    with pytest.raises(UserError, match="there is no group 'nobodys'; correct group in the site"):
        make_root(tmp_path / "root", "nobodys")
    mine = {os.getegid(), *os.getgroups()}
    others = [entry.gr_name for entry in grp.getgrall() if entry.gr_gid not in mine]
    if not others:
        skip("this user is in every group of the machine")
    with pytest.raises(UserError, match=rf" is not in the group {others[0]}; .* log in again"):
        make_root(tmp_path / "root", others[0])
    assert not (tmp_path / "root").exists()


def test_a_root_that_is_shared_otherwise_is_refused_with_the_command_that_changes_it(
    tmp_path, group
):
    root = tmp_path / "root with a space"
    root.mkdir()
    (root / "file").touch(mode=0o600)
    with pytest.raises(UserError, match=f"root with a space is not shared with the group {group}"):
        make_root(root, group)
    with pytest.raises(UserError) as refused:
        check_shared(root, group)
    subprocess.run(["bash", "-c", str(refused.value).partition(" run: ")[2]], check=True)
    make_root(root, group)
    assert stat.S_IMODE((root / "file").stat().st_mode) == 0o660

    with pytest.raises(UserError, match="is shared with its group") as refused:
        make_root(root, None)
    subprocess.run(["bash", "-c", str(refused.value).partition(" run: ")[2]], check=True)
    make_root(root, None)
