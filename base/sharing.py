"""Roots of studies that a team shares: setgid, so that files get its group, and writable for it.

The root itself holds the fact, so that every command follows it, with a site file or without.
"""

import grp
import os
import pwd
import shlex
import shutil
import stat
from pathlib import Path

from base.errors import UserError

JOIN = "ask to be added to it, and log in again"


def is_shared(directory: Path) -> bool:
    """Return whether a directory is there, and all that is made in it is its group's, too."""
    try:
        mode = directory.stat().st_mode
    except FileNotFoundError:
        return False
    return bool(mode & stat.S_ISGID and mode & stat.S_IWGRP)


def follow_root(root: Path) -> Path:
    """Let this process and its children make files as a root of studies has them; return it.

    Below a shared root their group may write them, and nowhere else, whatever the umask was. It
    still says what all others may do.
    """
    umask = os.umask(0o077)  # known only by changing it
    os.umask(umask & 0o007 | 0o002 if is_shared(root) else umask | 0o022)
    return root


def make_root(root: Path, group: str | None) -> None:
    """Make a root of studies where none is, shared with a group if one is named, and follow it.

    Raises:
        UserError: this user is not in the group, or the root that is there is shared otherwise.
    """
    if group:
        check_member(group)
    follow_root(root)
    if not root.exists():
        root.mkdir(parents=True, exist_ok=True)
        if group:
            shutil.chown(root, group=group)
            root.chmod(root.stat().st_mode | stat.S_ISGID | stat.S_IRWXG)
            follow_root(root)
    check_shared(root, group)


def check_member(group: str) -> None:
    """Raise UserError if there is no such group, or if this process is not in it."""
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        raise UserError(f"there is no group {group!r}; correct group in the site file") from None
    if number not in _groups():
        raise UserError(
            f"{this_user()} is not in the group {group}; correct group in the site file, or {JOIN}"
        )


def check_shared(directory: Path, group: str | None) -> None:
    """Raise UserError if a directory is there, and not shared with this group alone; None: at all.

    The line says how its owner changes that.
    """
    if not directory.exists():
        return
    status = directory.stat()
    if group is None and is_shared(directory):
        raise UserError(
            f"{directory} is shared with its group; give group = '{_group_name(status.st_gid)}' in"
            f" the site file, or have {_user_name(status.st_uid)} run: chmod -R g-w"
            f" {shlex.quote(str(directory))}"
        )
    number = grp.getgrnam(group).gr_gid if group else None
    if group and not (is_shared(directory) and status.st_gid == number):
        raise UserError(
            f"{directory} is not shared with the group {group}; {_opening(directory, group)}"
        )


def closed_to_group(error: OSError) -> str | None:
    """Return why the group of a shared directory cannot use a file in it, and who opens that."""
    if not isinstance(error, PermissionError) or not error.filename:
        return None
    path = Path(os.fsdecode(error.filename)).absolute()
    # Of a path below a closed directory the directory is at fault.
    for closed in (path, *path.parents):
        is_closed = closed.exists() and not os.access(closed, os.R_OK | os.W_OK)
        if is_closed and is_shared(closed.parent):
            number = closed.parent.stat().st_gid
            group = _group_name(number)
            if number not in _groups():
                return f"{this_user()} is not in the group {group} of {closed.parent}; {JOIN}"
            return f"{closed} is closed to the group {group}; {_opening(closed, group)}"
    return None


def _opening(path: Path, group: str) -> str:
    """Return the next action: the owner of a path opens it to a group, with all below it."""
    quoted = shlex.quote(str(path))
    return (
        f"have {_user_name(path.stat().st_uid)} run: chgrp -R {group} {quoted} && chmod -R g+rwX"
        f" {quoted} && find {quoted} -type d -exec chmod g+s {{}} +"
    )


def _groups() -> tuple[int, ...]:
    """Return the groups of this process."""
    return os.getegid(), *os.getgroups()


def this_user() -> str:
    """Return the name of the user of this process."""
    return _user_name(os.geteuid())


def _user_name(number: int) -> str:
    """Return the name of a user, or the number where this machine knows none."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
