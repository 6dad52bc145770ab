"""A process that serves one mount: `python -m tests.faulty_filesystem.server DIR MOUNT BEHAVIOUR`.

It reads lines of JSON, [method, argument], of `Control`, and answers each with a line.
"""

import contextlib
import errno
import fcntl
import json
import os
import random
import resource
import socket
import stat
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faulty_filesystem import kernel
from tests.faulty_filesystem.behaviour import Behaviour
from tests.faulty_filesystem.kernel import Request

THREADS = 6
POLL_SECONDS = 0.02  # between attempts at a lock that was asked for with patience
MOST_DIRTY = 64 << 20  # bytes of a file that wait for its close
F_OFD_GETLK, F_OFD_SETLK = 36, 37
FLOCK = struct.Struct("hhqqi4x")  # of fcntl
# An operation that the kernel does not wait for, or that says nothing of a file, does not fail.
NEVER_FAIL = (
    *("init", "destroy", "forget", "forgets", "interrupt", "release", "releasedir"),
    *("statfs", "getlk", "unknown"),
)
# Operations that change names, and the bytes before the first name.
CHANGES = {
    **{"create": 16, "mkdir": 8, "mknod": 16, "symlink": 0, "link": 8, "unlink": 0, "rmdir": 0},
    **{"rename": 8, "rename2": 16},
}


class InjectedError(OSError):
    """An error that was injected."""


@dataclass
class Node:
    """A file or directory that the kernel knows by a number.

    Attributes:
        path_only: descriptor that keeps it alive and opens it, whatever its name.
        dirty: what was written and waits for close or fsync: offset and bytes, in order.
        unsaid: the error of a write that no fsync has reported yet.
        silly: directory and name of a file that was removed while it is open.
        opened_as: time of change and size at the last open, by which pages stay cached.
    """

    number: int
    path_only: int
    looked_up: int = 0
    opens: int = 0
    dirty: list[tuple[int, bytearray]] = field(default_factory=list)
    unsaid: int = 0
    silly: tuple[int, bytes] | None = None
    opened_as: tuple[int, int] | None = None

    @property
    def path(self) -> str:
        """A path by which the process opens it."""
        return f"/proc/self/fd/{self.path_only}"

    def status(self) -> os.stat_result:
        """Return its status; ESTALE for one that is gone."""
        status = os.fstat(self.path_only)
        if not status.st_nlink:
            raise OSError(errno.ESTALE, "gone")
        return status

    def size(self, status: os.stat_result) -> int:
        """Return its size with what waits to be written."""
        return max([status.st_size, *(offset + len(part) for offset, part in self.dirty)])

    def write(self, offset: int, part: bytes) -> None:
        """Keep a part that was written."""
        if self.dirty:
            start, last = self.dirty[-1]
            if start + len(last) == offset:
                last.extend(part)
                return
        self.dirty.append((offset, bytearray(part)))

    def read(self, descriptor: int, offset: int, size: int) -> bytes:
        """Return what it holds, with what waits to be written."""
        content = os.pread(descriptor, size, offset)
        for start, part in self.dirty:
            first, last = max(start, offset), min(start + len(part), offset + size)
            if first < last:
                padded = content.ljust(first - offset, b"\0")
                new = bytes(part[first - start : last - start])
                content = padded[: first - offset] + new + padded[last - offset :]
        return content


class Filesystem:
    """The operations of one mount, over the files of a directory.

    One lock is held during an operation, but for its delay and for what it has to wait for.
    """

    def __init__(self, backing: Path, behaviour: Behaviour, keeper: socket.socket) -> None:
        self.device = -1
        self.keeper = keeper
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()  # operations, by name
        self.injected: Counter[str] = Counter()  # "OPERATION ERROR"
        self.hangs_until = 0.0
        self.behave(behaviour)
        root = Node(1, os.open(backing, os.O_PATH | os.O_DIRECTORY), looked_up=1)
        self.nodes = {1: root}
        self.by_identity = {_identity(root.path_only): root}
        self.handles: dict[int, tuple[Node, int]] = {}
        self.listings: dict[int, list[bytes]] = {}
        self.lockers: dict[tuple[int, int], int] = {}  # node and owner -> descriptor with locks
        self.interrupted: set[int] = set()
        self.stale_in_kernel: list[int] = []  # nodes whose pages the kernel has to forget
        self.last = 1

    def behave(self, behaviour: Behaviour) -> None:
        """Begin to behave so."""
        self.behaviour, self.random = behaviour, random.Random(behaviour.seed)
        self.struck_after = behaviour.strike

    # -- one request ----------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer requests until the end."""
        while request := kernel.next_request(self.device):
            error, body = self.result(request)
            for node in self._taken(self.stale_in_kernel):
                kernel.forget_content(self.device, node)
            if request.operation not in kernel.NO_ANSWER:
                kernel.answer(self.device, request, error, body)
            # It may have been done all the same; a client of NFS looks again as well.
            if error and request.operation in CHANGES:
                for directory, name in self._changed(request):
                    kernel.forget_name(self.device, directory, name)

    @staticmethod
    def _taken(numbers: list[int]) -> list[int]:
        taken, numbers[:] = list(numbers), []
        return taken

    @staticmethod
    def _changed(request: Request) -> list[tuple[int, bytes]]:
        """Return directory and name of what a request changes."""
        names = request.names(CHANGES[request.operation])
        directories = [request.node]
        if request.operation.startswith("rename"):
            directories.append(struct.unpack_from("<Q", request.body)[0])
        return list(zip(directories, names, strict=False))

    def result(self, request: Request) -> tuple[int, bytes]:
        """Do what a request asks for, or fail as the behaviour says; return error and answer."""
        name = request.operation
        operate: Callable[[Request], bytes] | None = getattr(self, name, None)
        if operate is None:
            return errno.ENOSYS, b""
        if name not in NEVER_FAIL:
            self._wait(name)
        try:
            fails = None
            with self.lock:
                self.counts[name] += 1
                fails, after = self._fault(name)
                if fails and not after:
                    raise InjectedError(fails, "injected")
                if name not in ("setlk", "setlkw"):
                    body = operate(request)
            if name in ("setlk", "setlkw"):  # may wait
                body = operate(request)
            if fails:
                raise InjectedError(fails, "injected")
        except OSError as error:
            return error.errno or errno.EIO, b""
        except KeyError:  # a node or handle that is not known any more
            return errno.ESTALE, b""
        return 0, body

    def _wait(self, name: str) -> None:
        delays = self.behaviour.delays
        seconds = delays.get(name, delays.get("*", 0.0))
        time.sleep(max(seconds, self.hangs_until - time.monotonic(), 0.0))

    def _fault(self, name: str) -> tuple[int | None, bool]:
        """Return the error with which this operation fails, and whether it is done all the same."""
        behaviour = self.behaviour
        if self.struck_after and name not in NEVER_FAIL:
            self.struck_after -= 1
            if not self.struck_after:
                self.injected[f"{name} {behaviour.strike_error}"] += 1
                return getattr(errno, behaviour.strike_error), behaviour.strike_after
        for fault in behaviour.faults:
            if fault.operation == name and self.random.random() < fault.rate:
                key = f"{name} {fault.error}"
                if self.injected[key] < fault.until:
                    self.injected[key] += 1
                    return getattr(errno, fault.error), fault.after
        return None, False

    # -- nodes ----------------------------------------------------------------------------------

    def _entry(self, directory: int, name: bytes) -> tuple[Node, bytes]:
        """Return the node of a name, and the answer that tells the kernel of it."""
        parent = self.nodes[directory]
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent.path_only)
        identity = _identity(descriptor)
        node = self.by_identity.get(identity)
        if node:
            os.close(descriptor)
        else:
            self.last += 1
            node = self.nodes[self.last] = Node(self.last, descriptor)
            self.by_identity[identity] = node
        node.looked_up += 1
        status = os.fstat(node.path_only)
        valid, nanoseconds = kernel.timeout(self.behaviour.cache_seconds)
        head = kernel.ENTRY.pack(node.number, 0, valid, valid, nanoseconds, nanoseconds)
        return node, head + kernel.attributes(status, node.size(status))

    def _forget(self, number: int, count: int) -> None:
        node = self.nodes.get(number)
        if node and number != 1:
            node.looked_up -= count
            self._drop(node)

    def _drop(self, node: Node) -> None:
        if node.looked_up <= 0 and not node.opens:
            del self.nodes[node.number]
            del self.by_identity[_identity(node.path_only)]
            os.close(node.path_only)

    def _attributes(self, node: Node) -> bytes:
        if self.behaviour.stale_if_removed or not node.opens:
            status = node.status()
        else:
            status = os.fstat(node.path_only)
        valid = kernel.timeout(self.behaviour.cache_seconds)
        return kernel.ATTRIBUTES_FOR.pack(*valid, 0) + kernel.attributes(status, node.size(status))

    # -- what the kernel asks for; each method has the name of its operation --------------------

    def init(self, request: Request) -> bytes:
        """Agree on the protocol."""
        _, _, readahead, offered = struct.unpack_from("<IIII", request.body)
        wanted = kernel.BIG_WRITES | kernel.AUTO_INVAL_DATA | kernel.PARALLEL_DIROPS
        wanted |= kernel.ATOMIC_O_TRUNC
        if self.behaviour.locks != "local":
            wanted |= kernel.POSIX_LOCKS | kernel.FLOCK_LOCKS
        words = (7, 31, readahead, wanted & offered, 12, 9, kernel.LARGEST_WRITE, 1, 0, 0, 0)
        return struct.pack("<IIIIHHIIHHI28x", *words)

    def destroy(self, request: Request) -> bytes:
        """End."""
        return b""

    def lookup(self, request: Request) -> bytes:
        """Find a name; a missing one is remembered as well."""
        if request.node not in self.nodes:
            raise OSError(errno.ESTALE, "gone")
        if request.node != 1:
            self.nodes[request.node].status()
        try:
            return self._entry(request.node, request.names()[0])[1]
        except FileNotFoundError:
            if not self.behaviour.cache_seconds:
                raise
            valid, nanoseconds = kernel.timeout(self.behaviour.cache_seconds)
            head = kernel.ENTRY.pack(0, 0, valid, 0, nanoseconds, 0)
            return head + bytes(kernel.ATTRIBUTES.size)

    def forget(self, request: Request) -> bytes:
        """Forget a node that the kernel does not know any more."""
        self._forget(request.node, *struct.unpack("<Q", request.body))
        return b""

    def forgets(self, request: Request) -> bytes:
        """Forget several."""
        for number, count in struct.iter_unpack("<QQ", request.body[8:]):
            self._forget(number, count)
        return b""

    def interrupt(self, request: Request) -> bytes:
        """Remember which request nobody waits for any more."""
        self.interrupted.add(struct.unpack_from("<Q", request.body)[0])
        return b""

    def getattr(self, request: Request) -> bytes:
        """Return attributes."""
        return self._attributes(self.nodes[request.node])

    def setattr(self, request: Request) -> bytes:
        """Change attributes, the size among them."""
        valid, _, _, size, _, atime, mtime, _, *rest = kernel.SET_ATTRIBUTES.unpack(request.body)
        atime_ns, mtime_ns, _, mode, _, uid, gid, _ = rest
        node = self.nodes[request.node]
        if valid & kernel.SIZE:
            self._write_back(node)
            os.truncate(node.path, size)
        if valid & kernel.MODE:
            os.chmod(node.path, stat.S_IMODE(mode))
        if valid & (kernel.UID | kernel.GID):
            user, group = uid if valid & kernel.UID else -1, gid if valid & kernel.GID else -1
            os.chown(node.path, user, group)
        if valid & (kernel.ATIME | kernel.MTIME | kernel.ATIME_NOW | kernel.MTIME_NOW):
            now, status = time.time_ns(), os.fstat(node.path_only)
            times = [status.st_atime_ns, status.st_mtime_ns]
            given = (atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns)
            kinds = ((kernel.ATIME, kernel.ATIME_NOW), (kernel.MTIME, kernel.MTIME_NOW))
            for index, (is_set, is_now) in enumerate(kinds):
                if valid & is_set:
                    times[index] = now if valid & is_now else given[index]
            os.utime(node.path, ns=(times[0], times[1]))
        return self._attributes(node)

    def readlink(self, request: Request) -> bytes:
        """Return where a link leads."""
        return os.fsencode(os.readlink("", dir_fd=self.nodes[request.node].path_only))

    def _made(self, request: Request, name: bytes) -> bytes:
        """Give what was made to who asked for it, and tell the kernel of it."""
        parent = self.nodes[request.node].path_only
        os.chown(name, request.uid, request.gid, dir_fd=parent, follow_symlinks=False)
        return self._entry(request.node, name)[1]

    def symlink(self, request: Request) -> bytes:
        """Make a link."""
        name, target = request.names()
        os.symlink(target, name, dir_fd=self.nodes[request.node].path_only)
        return self._made(request, name)

    def mknod(self, request: Request) -> bytes:
        """Make a file that is not opened."""
        mode, device = struct.unpack_from("<II", request.body)
        name = request.names(16)[0]
        os.mknod(name, mode, device, dir_fd=self.nodes[request.node].path_only)
        return self._made(request, name)

    def mkdir(self, request: Request) -> bytes:
        """Make a directory."""
        name = request.names(8)[0]
        (mode,) = struct.unpack_from("<I", request.body)
        os.mkdir(name, mode, dir_fd=self.nodes[request.node].path_only)
        return self._made(request, name)

    def link(self, request: Request) -> bytes:
        """Give a file a second name."""
        (number,) = struct.unpack_from("<Q", request.body)
        name = request.names(8)[0]
        parent = self.nodes[request.node].path_only
        os.link(self.nodes[number].path, name, dst_dir_fd=parent, follow_symlinks=True)
        return self._entry(request.node, name)[1]

    def _keep_if_open(self, parent: Node, name: bytes) -> bool:
        """Rename a file that is open in this mount, so that it stays; return whether it was."""
        try:
            identity = _identity_of(name, parent.path_only)
        except FileNotFoundError:
            return False
        node = self.by_identity.get(identity)
        if not node or not node.opens or node.silly or not stat.S_ISREG(node.status().st_mode):
            return False
        hidden = b".nfs%016x%04x" % (identity[1], self.random.randrange(1 << 16))
        os.rename(name, hidden, src_dir_fd=parent.path_only, dst_dir_fd=parent.path_only)
        node.silly = (os.dup(parent.path_only), hidden)
        return True

    def unlink(self, request: Request) -> bytes:
        """Remove a file, or hide it until its last close."""
        parent, name = self.nodes[request.node], request.names()[0]
        if not self._keep_if_open(parent, name):
            os.unlink(name, dir_fd=parent.path_only)
        return b""

    def rmdir(self, request: Request) -> bytes:
        """Remove a directory."""
        os.rmdir(request.names()[0], dir_fd=self.nodes[request.node].path_only)
        return b""

    def rename(self, request: Request) -> bytes:
        """Rename; a target that is open in this mount is hidden first."""
        (target,) = struct.unpack_from("<Q", request.body)
        old, new = request.names(CHANGES[request.operation])
        source, parent = self.nodes[request.node], self.nodes[target]
        if _identity_of(old, source.path_only):
            self._keep_if_open(parent, new)
        os.rename(old, new, src_dir_fd=source.path_only, dst_dir_fd=parent.path_only)
        return b""

    def rename2(self, request: Request) -> bytes:
        """Rename with flags, of which there are none here."""
        if struct.unpack_from("<I", request.body, 8)[0]:
            raise OSError(errno.EINVAL, "flags")
        return self.rename(request)

    def _opened(self, node: Node, flags: int) -> bytes:
        """Open a node; what the kernel has cached of it stays only if it is unchanged."""
        status = node.status()
        # The handle also reads around what is written, and writes for another handle's flush.
        wanted = os.O_RDWR if flags & (os.O_WRONLY | os.O_RDWR) else os.O_RDONLY
        if flags & os.O_TRUNC:
            node.dirty.clear()
        descriptor = os.open(node.path, wanted | (flags & os.O_TRUNC))
        state = (status.st_mtime_ns, status.st_size)
        keep = node.opened_as == state and not flags & os.O_TRUNC
        if not keep and node.opened_as is not None:
            self.stale_in_kernel.append(node.number)
        node.opened_as = state
        node.opens += 1
        self.handles[descriptor] = (node, flags)
        return kernel.OPENED.pack(descriptor, kernel.KEEP_CACHE if keep else 0, 0)

    def open(self, request: Request) -> bytes:
        """Open a file."""
        (flags,) = struct.unpack_from("<I", request.body)
        return self._opened(self.nodes[request.node], flags)

    def create(self, request: Request) -> bytes:
        """Make a file and open it."""
        flags, mode = struct.unpack_from("<II", request.body)
        parent, name = self.nodes[request.node], request.names(16)[0]
        parent.status()
        making = os.O_CREAT | os.O_WRONLY | (flags & os.O_EXCL)
        try:
            os.close(os.open(name, making | os.O_EXCL, mode, dir_fd=parent.path_only))
            os.chown(name, request.uid, request.gid, dir_fd=parent.path_only)
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
        node, entry = self._entry(request.node, name)
        return entry + self._opened(node, flags)

    def read(self, request: Request) -> bytes:
        """Read."""
        handle, offset, size, *_ = kernel.TRANSFER.unpack(request.body)
        node, _ = self.handles[handle]
        if self.behaviour.stale_if_removed:
            node.status()
        return node.read(handle, offset, size)

    def write(self, request: Request) -> bytes:
        """Write, or keep it until close or fsync."""
        handle, offset, size, *_ = kernel.TRANSFER.unpack_from(request.body)
        part = request.body[kernel.TRANSFER.size :][:size]
        node, _ = self.handles[handle]
        if self.behaviour.stale_if_removed:
            node.status()
        if self.behaviour.buffered:
            node.write(offset, part)
            if sum(len(part) for _, part in node.dirty) > MOST_DIRTY:
                with contextlib.suppress(OSError):  # said by the next fsync
                    self._write_back(node)
        else:
            os.pwrite(handle, part, offset)
        return struct.pack("<II", size, 0)

    def _write_back(self, node: Node) -> None:
        """Write what waits; after an error a part of it is lost."""
        if not node.dirty:
            return
        dirty, node.dirty = node.dirty, []
        self.counts["write_back"] += 1
        fails, _ = self._fault("write_back")
        lost = self.random.randrange(len(dirty)) if fails else len(dirty)
        try:
            if self.behaviour.stale_if_removed:
                node.status()
            with open(node.path, "r+b", buffering=0) as file:  # noqa: PTH123
                for offset, part in dirty[:lost]:
                    os.pwrite(file.fileno(), part, offset)
                if fails:
                    offset, part = dirty[lost]
                    torn = part[: self.random.randrange(len(part) + 1)]
                    os.pwrite(file.fileno(), torn, offset)
                    raise InjectedError(fails, "injected")
        except OSError as error:
            node.unsaid = error.errno or errno.EIO
            self.stale_in_kernel.append(node.number)
            raise
        status = os.fstat(node.path_only)
        node.opened_as = (status.st_mtime_ns, status.st_size)

    def flush(self, request: Request) -> bytes:
        """Write what waits, at a close; locks of ranges that the process held are freed."""
        handle, _, _, owner = kernel.CLOSING.unpack(request.body)
        node, _ = self.handles[handle]
        try:
            self._write_back(node)
        finally:
            self._unlock(node, owner)
        return b""

    def fsync(self, request: Request) -> bytes:
        """Write what waits; say once what an earlier close could not write."""
        (handle,) = struct.unpack_from("<Q", request.body)
        node, _ = self.handles[handle]
        with contextlib.suppress(OSError):
            self._write_back(node)
        unsaid, node.unsaid = node.unsaid, 0
        if unsaid:
            raise OSError(unsaid, "lost")
        return b""

    def release(self, request: Request) -> bytes:
        """Close a handle; nobody learns of an error."""
        handle, _, flags, owner = kernel.CLOSING.unpack(request.body)
        node, _ = self.handles.pop(handle)
        with contextlib.suppress(OSError):
            self._write_back(node)
        if flags & kernel.FLOCK_UNLOCK:
            self._unlock(node, owner)
        os.close(handle)
        node.opens -= 1
        if node.silly and not node.opens:
            directory, name = node.silly
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)
            os.close(directory)
            node.silly = None
        self._drop(node)
        return b""

    def statfs(self, request: Request) -> bytes:
        """Return how much is free."""
        status = os.fstatvfs(self.nodes[1].path_only)
        blocks = (status.f_blocks, status.f_bfree, status.f_bavail, status.f_files, status.f_ffree)
        return kernel.STATFS.pack(*blocks, status.f_bsize, status.f_namemax, status.f_frsize, 0)

    def opendir(self, request: Request) -> bytes:
        """Open a directory: its names as they are now, or as the kernel has cached them."""
        node = self.nodes[request.node]
        node.status()
        handle = os.open(node.path, os.O_RDONLY | os.O_DIRECTORY)
        self.handles[handle] = (node, 0)
        flags = kernel.CACHE_DIR | kernel.KEEP_CACHE if self.behaviour.cache_seconds else 0
        return kernel.OPENED.pack(handle, flags, 0)

    def readdir(self, request: Request) -> bytes:
        """List a directory, from a position on."""
        handle, offset, size, *_ = kernel.TRANSFER.unpack(request.body)
        if handle not in self.listings or not offset:
            with os.scandir(handle) as entries:
                listed = [(e.name, e.inode(), e.stat(follow_symlinks=False)) for e in entries]
            self.listings[handle] = [
                kernel.directory_entry(number, os.fsencode(name), status.st_mode, position)
                for position, (name, number, status) in enumerate(listed, 1)
            ]
        body = b""
        for entry in self.listings[handle][offset:]:
            if len(body) + len(entry) > size:
                break
            body += entry
        return body

    def releasedir(self, request: Request) -> bytes:
        """Close a directory."""
        (handle,) = struct.unpack_from("<Q", request.body)
        del self.handles[handle]
        self.listings.pop(handle, None)
        os.close(handle)
        return b""

    def fsyncdir(self, request: Request) -> bytes:
        """Sync names."""
        return b""

    # -- locks ----------------------------------------------------------------------------------

    def _lock_of(self, body: bytes) -> tuple[Node, int, bytes, int, int]:
        handle, owner, start, end, kind, _, flags, _ = kernel.LOCK.unpack(body)
        if self.behaviour.locks == "none":
            raise OSError(errno.ENOLCK, "no locks")
        node, opened = self.handles[handle]
        # As on NFS, where a lock of the open file is one of all its bytes.
        readable = not opened & os.O_WRONLY
        writable = opened & (os.O_WRONLY | os.O_RDWR)
        if not (writable if kind == fcntl.F_WRLCK else readable or kind == fcntl.F_UNLCK):
            raise OSError(errno.EBADF, "opened otherwise")
        length = 0 if end >= (1 << 63) - 1 else end - start + 1
        return node, owner, FLOCK.pack(kind, os.SEEK_SET, start, length, 0), kind, flags

    def _locker(self, node: Node, owner: int) -> int:
        """Return the descriptor by which an owner has its locks on the file itself."""
        key = (node.number, owner)
        if key not in self.lockers:
            self.lockers[key] = os.open(node.path, os.O_RDWR)
            socket.send_fds(self.keeper, [b"k"], [self.lockers[key]])
        return self.lockers[key]

    def _unlock(self, node: Node, owner: int) -> None:
        descriptor = self.lockers.pop((node.number, owner), None)
        if descriptor is not None:
            # Said aloud: the keeper has the descriptor as well.
            fcntl.fcntl(descriptor, F_OFD_SETLK, FLOCK.pack(fcntl.F_UNLCK, 0, 0, 0, 0))
            os.close(descriptor)

    def getlk(self, request: Request) -> bytes:
        """Say who is in the way of a lock."""
        node, owner, lock, _, _ = self._lock_of(request.body)
        found = FLOCK.unpack(fcntl.fcntl(self._locker(node, owner), F_OFD_GETLK, lock))
        kind, _, start, length, pid = found
        end = start + length - 1 if length else (1 << 63) - 1
        return kernel.RANGE.pack(start, end, kind, max(pid, 0))

    def setlk(self, request: Request) -> bytes:
        """Lock, or unlock once what waits is written; what is cached of the file is dropped."""
        with self.lock:
            node, owner, lock, kind, flags = self._lock_of(request.body)
            if kind == fcntl.F_UNLCK:
                with contextlib.suppress(OSError):  # said by the next fsync
                    self._write_back(node)
            if kind == fcntl.F_UNLCK and flags & kernel.FLOCK:
                self._unlock(node, owner)
                return b""
            try:
                fcntl.fcntl(self._locker(node, owner), F_OFD_SETLK, lock)
            except PermissionError as error:  # EACCES is another word for it
                raise BlockingIOError(errno.EAGAIN, "locked") from error
            if kind != fcntl.F_UNLCK:
                self.stale_in_kernel.append(node.number)
            return b""

    def setlkw(self, request: Request) -> bytes:
        """Lock with patience."""
        while True:
            try:
                return self.setlk(request)
            except BlockingIOError:
                if request.unique in self.interrupted:
                    self.interrupted.discard(request.unique)
                    raise OSError(errno.EINTR, "interrupted") from None
                time.sleep(POLL_SECONDS)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _identity_of(name: bytes, directory: int) -> tuple[int, int]:
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    return status.st_dev, status.st_ino


class Control:
    """The commands of the test."""

    def __init__(self, filesystem: Filesystem) -> None:
        self.filesystem = filesystem

    def behave(self, text: str) -> None:
        """Begin to behave so."""
        with self.filesystem.lock:
            self.filesystem.behave(Behaviour.from_json(text))

    def injected(self, _: None) -> dict[str, int]:
        """Return how many faults struck so far."""
        return dict(self.filesystem.injected)

    def counts(self, _: None) -> dict[str, int]:
        """Return how many operations there were so far."""
        return dict(self.filesystem.counts)

    def hang(self, seconds: float) -> None:
        """Answer nothing for a while."""
        self.filesystem.hangs_until = time.monotonic() + seconds


def keep_locks(listener: socket.socket, lease_seconds: float) -> None:
    """Hold the locks of a mount until its process has been gone for a while, as NFS's server."""
    kept: list[int] = []
    while True:
        message, descriptors, _, _ = socket.recv_fds(listener, 1, 1)
        if not message:
            break
        kept += descriptors
    time.sleep(lease_seconds)


def main(backing: str, mountpoint: str, behaviour: str, lease_seconds: str) -> None:
    """Serve until the filesystem is unmounted or the pipe of commands ends."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.umask(0)  # the kernel has applied that of the process
    ours, keepers = socket.socketpair()
    keeper = os.fork()
    if not keeper:
        ours.close()
        os.closerange(0, 3)
        keep_locks(keepers, float(lease_seconds))
        os._exit(0)
    keepers.close()

    filesystem = Filesystem(Path(backing), Behaviour.from_json(behaviour), ours)
    filesystem.device = kernel.mount(Path(mountpoint))
    for _ in range(THREADS):
        threading.Thread(target=filesystem.serve, daemon=True).start()
    control = Control(filesystem)
    print(json.dumps(keeper), flush=True)
    for line in sys.stdin:
        method, argument = json.loads(line)
        print(json.dumps(getattr(control, method)(argument)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
