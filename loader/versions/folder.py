"""A folder that only its owner can change, opened once; its files are reached through the descriptor.

Everyone can write to `/dev/shm`, so a folder there may be anybody's. Published data is read and written only
in folders and files that

* belong to this user, to root, or to the user named by `owner`,
* nobody else can write to (a sticky root like /dev/shm is allowed),
* are no symbolic links.

Files are opened with openat(2) and O_NOFOLLOW. Only the owner can read them, or a group (folder mode 0750).
"""

import contextlib
import errno
import grp
import os
import pwd
import re
import stat
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tableside.loader.errors import AccessError, VersionError
from tableside.loader.files import take_lock
from tableside.loader.segment.delta import SUFFIX, parse_delta_name

LOCK_WAIT_S = 30.0
NOTE = ".verified"  # behind a file's name: what is noted of it (loader.versions.verified)
_OTHER = re.compile(r"([1-9][0-9]{0,17})\.((node[0-9]+\.)?[1-9][0-9]*\.rows|node[0-9]+\.(segment|home))")
_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Folder:
    """An open folder; a context manager. AccessError: it is a link, another user's, or writable for
    others."""

    def __init__(
        self,
        path: Path,
        owner: str | None = None,
        parent: "Folder | None" = None,
        *,
        only_a_way: bool = False,
    ) -> None:
        """parent: the open folder above it. only_a_way: opens with O_PATH, which needs no right to list
        it."""
        self.path, self.owner, self.fd = path, owner, -1
        flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_PATH if only_a_way else os.O_RDONLY)
        try:
            self.fd = os.open(path.name if parent else path, flags, dir_fd=parent.fd if parent else None)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise AccessError(
                    f"{path} is a symbolic link or a file; expected a folder of this user; name the folder "
                    "itself with --root, or remove what is there"
                ) from error
            raise
        try:
            check_owner(os.fstat(self.fd), path, owner, may_be_sticky=parent is None)
        except AccessError:
            self.close()
            raise

    @property
    def is_open_to_group(self) -> bool:
        """Returns whether the group may read files: mode is exactly 0750, not left over from a umask."""
        return stat.S_IMODE(os.fstat(self.fd).st_mode) == 0o750

    def names(self) -> list[str]:
        """Returns the sorted names of the entries."""
        return sorted(os.listdir(self.fd))

    def exists(self, name: str) -> bool:
        """Returns whether an entry `name` exists; links are not followed."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Opens a file. AccessError: it is no plain file of a trusted owner."""
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

    def read(self, name: str, limit_bytes: int = 1 << 16) -> bytes:
        """Returns the first `limit_bytes` bytes of a file."""
        fd = self.open(name)
        try:
            return os.read(fd, limit_bytes)
        finally:
            os.close(fd)

    def create(self, name: str) -> int:
        """Creates a file for reading and writing. FileExistsError: the name is taken."""
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE_FLAGS, 0o600, dir_fd=self.fd)
        if self.is_open_to_group:
            os.fchown(fd, -1, os.fstat(self.fd).st_gid)
            os.fchmod(fd, 0o640)
        return fd

    def create_unnamed(self, name: str) -> int:
        """As `create`; the name is free again, and the bytes go with the descriptor."""
        fd = self.create(name)
        self.unlink(name)
        return fd

    def rename(self, old: str, new: str) -> None:
        """Renames within the folder; replaces `new`."""
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[str]:
        """Yields the name of a file to be made, which then replaces `name`; after an error it is removed."""
        partial = f"{name}.partial"
        try:
            yield partial
            self.rename(partial, name)
        except BaseException:
            self.unlink(partial)
            raise

    def link(self, old: str, new: str) -> bool:
        """Gives a file another name, and what was noted of it; False: this user may not, it is gone, or the
        group of this folder cannot read it."""
        between: Any = {"src_dir_fd": self.fd, "dst_dir_fd": self.fd, "follow_symlinks": False}
        try:
            found = os.stat(old, dir_fd=self.fd, follow_symlinks=False)
            is_of_group = found.st_gid == os.fstat(self.fd).st_gid and found.st_mode & stat.S_IRGRP
            if self.is_open_to_group and not is_of_group:
                return False
            os.link(old, new, **between)
        except (PermissionError, FileNotFoundError):
            return False
        with contextlib.suppress(OSError):  # without a note it is read again
            os.link(old + NOTE, new + NOTE, **between)
        return True

    def unlink(self, name: str) -> None:
        """Removes a file if it exists, and what was noted of it."""
        for one in (name, name + NOTE):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(one, dir_fd=self.fd)

    @contextlib.contextmanager
    def lock(self, name: str, wait_s: float = LOCK_WAIT_S, what: str = "") -> Iterator[None]:
        """Holds a file lock, dropped by the kernel if its holder dies. VersionError after `wait_s` seconds
        names the holder and `what`."""
        fd = self.open(name, os.O_RDWR | os.O_CREAT)
        try:
            if stat.S_IMODE(os.fstat(fd).st_mode) != 0o600 and os.fstat(fd).st_uid == os.geteuid():
                os.fchmod(fd, 0o600)  # of an older release, when everybody could open it, and so hold it
            if not take_lock(fd, wait_s):
                raise VersionError(
                    f"{what or self.path / name}: {_holder(fd)} holds {self.path / name}"
                    + (f" for more than {wait_s:g} s" if wait_s else "")
                    + "; wait for it, or end that process"
                )
            yield
        finally:
            os.close(fd)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def make_folder(path: Path, owner: str | None = None) -> None:
    """Creates `path` if needed. AccessError: see `Folder`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    except OSError as error:
        raise VersionError(f"cannot make {path}: {error.strerror}; choose another --root") from error
    Folder(path, owner).close()


def open_to_group(folder: Folder, group: str, mode: int = 0o750) -> None:
    """Lets a group read the folder and files made in it later. AccessError: no such group."""
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
    """Raises AccessError for an untrusted owner or one that others can write to. may_be_sticky: allows sticky
    folders."""
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
            f"change it; chmod go-w {path}, or choose another --root"
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
    """Returns the holder of an open file's lock, from /proc/locks, as the subject of a sentence."""
    found = os.fstat(fd)
    with open("/proc/locks") as locks:
        for line in locks:
            fields = line.split()
            inode = fields[5].rpartition(":")[2] if len(fields) >= 6 else ""
            if fields[1:2] == ["FLOCK"] and inode == str(found.st_ino):
                return f"process {fields[4]}"
    return "another process"


def deltas_of(folder: Folder, version: int) -> list[int]:
    """Returns the sequences of the deltas over a version, oldest first."""
    found = [parsed for name in folder.names() if (parsed := parse_delta_name(name)) is not None]
    return sorted(sequence for over, sequence in found if over == version)


def others_of(folder: Folder) -> defaultdict[int, list[str]]:
    """Returns the names of the files that a version has beside its segment, by version: of large tables, and
    copies (loader.versions.copies)."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for name in folder.names():
        if named := _OTHER.fullmatch(name):
            found[int(named[1])].append(name)
    return found


def versions_with(folder: Folder, file: str) -> list[int]:
    """Returns the versions that have a table's file, under this name or another."""
    names = [(v, name) for v, names in others_of(folder).items() for name in names]
    inodes = {name: os.stat(name, dir_fd=folder.fd, follow_symlinks=False).st_ino for _, name in names}
    return [version for version, name in names if inodes[name] == inodes.get(file)]


def leftovers_of(folder: Folder) -> list[str]:
    """Returns unfinished segments, other files without a version's, and notes without a file. A delta that is
    written belongs to others."""
    names = folder.names()
    leftovers = [n for n in names if n.endswith(".partial") and not n.endswith(f"{SUFFIX}.partial")]
    for version, files in others_of(folder).items():
        leftovers += [] if f"{version}.segment" in names else files
    return leftovers + [n for n in names if n.endswith(NOTE) and n.removesuffix(NOTE) not in names]


def newest_delta(folder: Folder, version: int, latest: int) -> int:
    """Returns the newest delta over a version up to `latest`; 0: none."""
    return max((s for s in deltas_of(folder, version) if s <= latest), default=0)
