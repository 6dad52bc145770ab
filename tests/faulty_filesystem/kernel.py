"""The kernel's side of a FUSE mount: requests, answers and notices, as linux/fuse.h defines them."""

import ctypes
import os
import stat
import struct
from pathlib import Path
from typing import NamedTuple

REQUEST = struct.Struct("<IIQQIIIHH")  # len, opcode, unique, nodeid, uid, gid, pid, extensions, 0
ANSWER = struct.Struct("<IiQ")  # len, error, unique; a notice has 0 as unique
ATTRIBUTES = struct.Struct("<6Q10I")
ENTRY = struct.Struct("<4QII")  # nodeid, generation, seconds of name and attributes, nanoseconds
ATTRIBUTES_FOR = struct.Struct("<QII")  # seconds, nanoseconds
OPENED = struct.Struct("<QII")  # handle, flags
SET_ATTRIBUTES = struct.Struct("<IIQQQQQQ8I")
LOCK = struct.Struct("<QQQQIIII")  # handle, owner, start, end, type, pid, flags
RANGE = struct.Struct("<QQII")
TRANSFER = struct.Struct("<QQIIQII")  # handle, offset, size, flags, lock owner, flags
CLOSING = struct.Struct("<QIIQ")  # handle, flags, release flags, lock owner
DIRENT = struct.Struct("<QQII")
STATFS = struct.Struct("<5Q4I24x")

LARGEST_WRITE = 1 << 17
BUFFER = LARGEST_WRITE + 4096

OPERATIONS = {
    **{1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 5: "readlink", 6: "symlink"},
    **{8: "mknod", 9: "mkdir", 10: "unlink", 11: "rmdir", 12: "rename", 13: "link", 14: "open"},
    **{15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync", 25: "flush"},
    **{26: "init", 27: "opendir", 28: "readdir", 29: "releasedir", 30: "fsyncdir", 31: "getlk"},
    **{32: "setlk", 33: "setlkw", 35: "create", 36: "interrupt", 38: "destroy"},
    **{42: "forgets", 45: "rename2"},
}
NO_ANSWER = ("forget", "forgets", "interrupt")

# Of the answer to init.
POSIX_LOCKS, ATOMIC_O_TRUNC, BIG_WRITES, FLOCK_LOCKS = 1 << 1, 1 << 3, 1 << 5, 1 << 10
AUTO_INVAL_DATA, PARALLEL_DIROPS = 1 << 12, 1 << 18
# Of answers to open and opendir.
KEEP_CACHE, CACHE_DIR = 1 << 1, 1 << 3
# Of setattr: the fields that are set.
MODE, UID, GID, SIZE, ATIME, MTIME, ATIME_NOW, MTIME_NOW = 1, 2, 4, 8, 16, 32, 128, 256
FLOCK = 1  # of a lock: of the open file, not of a range
FLOCK_UNLOCK = 2  # of release
INVAL_INODE, INVAL_ENTRY = 2, 3  # notices

MS_NOSUID, MS_NODEV = 2, 4


class Request(NamedTuple):
    """A request of the kernel."""

    operation: str
    unique: int
    node: int
    uid: int
    gid: int
    body: bytes

    def names(self, skip: int = 0) -> list[bytes]:
        """Return the names that end the body, after `skip` bytes."""
        return self.body[skip:].split(b"\0")[:-1]


def mount(mountpoint: Path) -> int:
    """Mount a filesystem that this process is to serve; return the descriptor of its requests."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    libc = ctypes.CDLL(None, use_errno=True)
    words = (b"faulty", os.fsencode(mountpoint), b"fuse.faulty", MS_NOSUID | MS_NODEV)
    if libc.mount(*words, options.encode()):
        raise OSError(ctypes.get_errno(), "cannot be mounted", str(mountpoint))
    return device


def next_request(device: int) -> Request | None:
    """Return the next request; None once the filesystem is unmounted."""
    while True:
        try:
            text = os.read(device, BUFFER)
        except FileNotFoundError:  # it was interrupted before it was read
            continue
        except OSError:
            return None
        _, opcode, unique, node, uid, gid, *_ = REQUEST.unpack_from(text)
        operation = OPERATIONS.get(opcode, "unknown")
        return Request(operation, unique, node, uid, gid, text[REQUEST.size :])


def answer(device: int, request: Request, error: int, body: bytes = b"") -> None:
    """Answer a request."""
    _send(device, -error, request.unique, body)


def forget_content(device: int, node: int) -> None:
    """Have the kernel drop the attributes and pages of a node that it has cached."""
    _send(device, INVAL_INODE, 0, struct.pack("<Qqq", node, 0, 0))


def forget_name(device: int, directory: int, name: bytes) -> None:
    """Have the kernel look up a name anew; not during an operation on its directory."""
    notice = struct.pack("<QII", directory, len(name), 0) + name + b"\0"
    _send(device, INVAL_ENTRY, 0, notice)


def _send(device: int, code: int, unique: int, body: bytes) -> None:
    try:
        os.write(device, ANSWER.pack(ANSWER.size + len(body), code, unique) + body)
    except OSError:  # who asked was killed, the node is not cached, or it was unmounted
        return


def attributes(status: os.stat_result, size: int) -> bytes:
    """Return the attributes of a file as an answer has them."""
    times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
    return ATTRIBUTES.pack(
        *(status.st_ino, size, status.st_blocks),
        *(time // 10**9 for time in times),
        *(time % 10**9 for time in times),
        *(status.st_mode, status.st_nlink, status.st_uid, status.st_gid, status.st_rdev),
        *(status.st_blksize, 0),
    )


def directory_entry(number: int, name: bytes, mode: int, position: int) -> bytes:
    """Return an entry of a listing, after which the listing continues at `position`."""
    entry = DIRENT.pack(number, position, len(name), stat.S_IFMT(mode) >> 12) + name
    return entry.ljust(-(-len(entry) // 8) * 8, b"\0")


def timeout(seconds: float) -> tuple[int, int]:
    """Return whole seconds and nanoseconds."""
    return int(seconds), int(seconds % 1 * 10**9)
