"""A folder that only its owner can change, opened once, its files reached through it and never through a
link.

`/dev/shm` is writable for every user of the machine, and a folder there may have been made by anyone who knew
its name. So what is published is only written to, and only read from, folders and files

* that belong to this user, to root, or to the user that `owner` names,
* that nobody else can write to (no group, no others; a root that is sticky, as /dev/shm is, will do: what
  others make there is theirs, and refused),
* that are no symbolic links.

Everything is opened relative to the folder's descriptor (openat(2)) with O_NOFOLLOW: who changes the path
meanwhile changes nothing here. Files are readable by their owner alone, or, where the folder is open to a
group (mode 0750), by that group.
"""

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from tableside.loader.errors import AccessError, VersionError

LOCK_WAIT_S = 30.0
_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Folder:
    """An open folder of trusted owners. A context manager; closes its descriptor. AccessError: it is a link,
    belongs to another user, or others can write to it. FileNotFoundError: it is not there."""

    def __init__(
        self,
        path: Path,
        owner: str | None = None,
        parent: "Folder | None" = None,
        *,
        only_a_way: bool = False,
    ) -> None:
        """parent: the open folder that it is in. only_a_way: it is only gone through, which needs no leave
        to list it."""
        self.path, self.owner, self.fd = path, owner, -1
        flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_PATH if only_a_way else os.O_RDONLY)
        try:
            self.fd = os.open(path.name if parent else path, flags, dir_fd=parent.fd if parent else None)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise AccessError(
                    f"{path} is a symbolic link or a file; expected a folder of this user; name the folder "
                    "itself with --root, "
                    "or remove what is there"
                ) from error
            raise
        try:
            check_owner(os.fstat(self.fd), path, owner, may_be_sticky=parent is None)
        except AccessError:
            self.close()
            raise

    @property
    def is_open_to_group(self) -> bool:
        """Whether files of this folder may be read by its group: it was asked for (mode 0750), not left
        over from a umask."""
        return stat.S_IMODE(os.fstat(self.fd).st_mode) == 0o750

    def names(self) -> list[str]:
        """The names of what it holds, sorted."""
        return sorted(os.listdir(self.fd))

    def exists(self, name: str) -> bool:
        """Whether there is an entry `name`; a link counts as itself."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def open(self, name: str) -> int:
        """A descriptor of the file `name`, for reading. AccessError: it is no plain file of a trusted
        owner."""
        return self._open(name, os.O_RDONLY)

    def read(self, name: str, limit_bytes: int = 1 << 16) -> bytes:
        """The first `limit_bytes` bytes of the file `name`."""
        fd = self.open(name)
        try:
            return os.read(fd, limit_bytes)
        finally:
            os.close(fd)

    def create(self, name: str) -> int:
        """A new, empty file, open for reading and writing. FileExistsError: there is something of that
        name."""
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE_FLAGS, 0o600, dir_fd=self.fd)
        if self.is_open_to_group:
            os.fchown(fd, -1, os.fstat(self.fd).st_gid)
            os.fchmod(fd, 0o640)
        return fd

    def open_for_writing(self, name: str) -> int:
        """A descriptor of the file `name`, which is there, for reading and writing. AccessError as for
        `open`."""
        return self._open(name, os.O_RDWR)

    def rename(self, old: str, new: str) -> None:
        """Renames within the folder; replaces what is called `new`."""
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Removes a file where there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    @contextlib.contextmanager
    def lock(self, name: str, wait_s: float = LOCK_WAIT_S, what: str = "") -> Iterator[None]:
        """Holds the lock `name`: a file that only the owner can open. The kernel drops it when its holder
        dies.

        VersionError, with the process that holds it: it was not free within `wait_s` seconds. `what` says
        what is waited for.
        """
        fd = self._open(name, os.O_RDWR | os.O_CREAT)
        try:
            if stat.S_IMODE(os.fstat(fd).st_mode) != 0o600 and os.fstat(fd).st_uid == os.geteuid():
                os.fchmod(fd, 0o600)  # of an older release, when everybody could open it, and so hold it
            self._take(fd, name, wait_s, what)
            yield
        finally:
            os.close(fd)

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.fd)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, name: str, flags: int) -> int:
        path = self.path / name
        try:
            fd = os.open(name, flags | _FILE_FLAGS, 0o600, dir_fd=self.fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise AccessError(f"{path} is a symbolic link; expected a file; remove it") from error
            if error.errno == errno.ENXIO:
                raise AccessError(f"{path} is a socket or a FIFO; expected a file; remove it") from error
            raise
        try:
            check_owner(os.fstat(fd), path, self.owner)
        except AccessError:
            os.close(fd)
            raise
        return fd

    def _take(self, fd: int, name: str, wait_s: float, what: str) -> None:
        deadline, pause = time.monotonic() + wait_s, 0.001
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise VersionError(
                        f"{what or self.path / name}: {_holder(fd)} holds {self.path / name}"
                        + (f" for more than {wait_s:g} s" if wait_s else "")
                        + "; wait for it, or end that process"
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def make_folder(path: Path, owner: str | None = None, group: str | None = None) -> None:
    """Makes `path` for this user where it is not there, and opens it to `group` where one is named.
    AccessError as `Folder`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    except OSError as error:
        raise VersionError(f"cannot make {path}: {error.strerror}; choose another --root") from error
    with Folder(path, owner) as made:
        if group is not None:
            open_to_group(made, group)


def open_to_group(folder: Folder, group: str, mode: int = 0o750) -> None:
    """Lets a group read the folder and the files that are made in it from now on. AccessError: there is no
    such group."""
    try:
        gid = grp.getgrnam(group).gr_gid
        os.fchown(folder.fd, -1, gid)
        os.fchmod(folder.fd, mode)
    except KeyError:
        raise AccessError(f"there is no group {group!r} on this machine; name one of: getent group") from None
    except OSError as error:
        raise AccessError(
            f"{folder.path} cannot be given to group {group!r}: {error.strerror}; are you in that group?"
        ) from error


def check_owner(found: os.stat_result, path: Path, owner: str | None, may_be_sticky: bool = False) -> None:
    """AccessError unless a file or folder belongs to a trusted owner and nobody else can write to it.
    may_be_sticky: others may make files in a folder, if they cannot rename or remove this user's."""
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise AccessError(f"{path} is neither a file nor a folder; remove it")
    if found.st_uid not in _trusted(owner):
        raise AccessError(
            f"{path} belongs to user {_user(found.st_uid)}, not to {_user(os.geteuid())}: that user could "
            "put anything there; "
            f"remove it, choose another --root, or, where you trust it, say --owner {_user(found.st_uid)}"
        )
    is_sticky = may_be_sticky and found.st_mode & stat.S_ISVTX
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        raise AccessError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: users other than {_user(found.st_uid)} can "
            "change it; "
            f"chmod go-w {path}, or choose another --root"
        )


def _trusted(owner: str | None) -> set[int]:
    trusted = {0, os.geteuid()}
    if owner is not None:
        try:
            trusted.add(int(owner) if owner.isdecimal() else pwd.getpwnam(owner).pw_uid)
        except KeyError:
            raise AccessError(
                f"there is no user {owner!r} on this machine (--owner); name one, or its number"
            ) from None
    return trusted


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _holder(fd: int) -> str:
    """The process that holds the lock of an open file, from /proc/locks, as a subject of a sentence."""
    found = os.fstat(fd)
    with open("/proc/locks") as locks:
        for line in locks:
            fields = line.split()
            if (
                len(fields) >= 6
                and fields[1] == "FLOCK"
                and fields[5].rpartition(":")[2] == str(found.st_ino)
            ):
                return f"process {fields[4]}"
    return "another process"
