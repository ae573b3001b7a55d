"""Mounting pool directories into pods, and taking the mounts away again.

Facts: kubelet asks again whenever it is not sure, so every step may find its work done, half done, or done for another
directory. A bind mount takes its flags only with a second call, and the process may be killed in between. A pod starts
only after we answered, so what is half done nobody sees. A mount over another hides it, and both must go.

Therefore a target is what it should be only if exactly one mount is on it, of the same directory, with all flags; else
everything on it is detached and mounted anew, which containers that run already do not notice. No part of a path below
kubelet's directory is followed if it is a link. Mounts are never executable, never devices, never set-uid: so a
directory that every user may write to is safe to share.

In a container the agent's mounts reach the node by propagation, which copies a mount's flags when it is attached and
never again. So a mount is made apart, given its flags, and then attached. Kernels before 5.12 know no such call; there
the flags come second, and hold for the agent but not for the pod.

Unmounting is lazy only where it is busy: the pod is gone, and what still holds the mount keeps its files until it ends.
Runs in the CSI service's threads; one call per target at a time is the caller's duty. Linux, CAP_SYS_ADMIN.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

from pykvcache_contract.names import UNAVAILABLE_MARKER
from pykvcache_sidecar.node.filesystems import holder_of, inner_path
from pykvcache_sidecar.node.folders import LOOK_FLAGS, below_descriptor, open_folder, open_inside, parts_of
from pykvcache_sidecar.node.mount_table import Mount, read_mount_table

STACKED_MAX = 16
"""Mounts on one target that are taken away in one call; more are an error and left to the next."""

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND = 32, 4096
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_HARMLESS = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
_MARKER_OPTIONS = "size=64k,nr_inodes=16,mode=0755"
_REASON_BYTES_MAX = 4096

# The same numbers on every architecture.
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_OPEN_TREE_CLONE, _AT_EMPTY_PATH, _MOVE_EMPTY_PATHS = 1, 0x1000, 0x4 | 0x40
_MOUNT_ATTRIBUTES = struct.Struct("=QQQQ")

_libc = ctypes.CDLL(None, use_errno=True)


class Target:
    """A place in kubelet's directory where a pod's volume is mounted.

    Args:
        path: absolute, without `..`; as kubelet names it.
        kubelet_directory: everything happens below it. It may itself be a link.

    Raises:
        ValueError: the path is not below kubelet's directory.
    """

    def __init__(self, path: str, *, kubelet_directory: str) -> None:
        self._base = kubelet_directory
        self.parts = parts_of(path, below=kubelet_directory)
        """The names that lead to it from kubelet's directory."""
        *self._parents, self._name = self.parts
        self.path = path
        self.real_path = "/".join((os.path.realpath(kubelet_directory), *self.parts))
        """As the mount table tells it."""

    def mount_directory(self, directory: str, *, read_only: bool) -> None:
        """Show a directory at the target; return at once if it is shown already, replace whatever else is there.

        Args:
            directory: absolute, exists, no part of it is a link.
            read_only: also where the directory's own mount can be written; what is read-only there stays so.

        Raises:
            ValueError: it is no plain absolute path.
            OSError: a part of either path is a link or missing, or the kernel refuses.
        """
        source = open_folder("/", parts_of(directory))
        try:
            flags = _HARMLESS | (_MS_RDONLY if read_only else _shown_flags(source) & _MS_RDONLY)
            parent = self._open_parent(create=True)
            try:
                self._mount_directory(source, parent, flags)
            finally:
                os.close(parent)
        finally:
            os.close(source)

    def mount_marker(self, reason: str) -> None:
        """Show an empty read-only directory with one file that tells why; return at once if one is shown already.

        Raises:
            OSError: a part of the target's path is a link or missing, or the kernel refuses.
        """
        parent = self._open_parent(create=True)
        try:
            self._mount_marker(parent, reason)
        finally:
            os.close(parent)

    def unmount(self) -> None:
        """Take everything off the target and remove its directory; nothing there is fine.

        Raises:
            OSError: a part of the path is a link, or files lie in the directory below the mounts: they are not ours.
        """
        try:
            parent = self._open_parent(create=False)
        except FileNotFoundError:
            return
        try:
            self._detach_all(parent)
            os.close(open_inside(parent, self._name))  # not a link, or it says so better than rmdir
            os.rmdir(self._name, dir_fd=parent)
        except FileNotFoundError:
            return
        finally:
            os.close(parent)

    def _open_parent(self, *, create: bool) -> int:
        parent = open_folder(self._base, self._parents)
        try:
            if create:
                os.mkdir(self._name, 0o750, dir_fd=parent)
        except FileExistsError:
            return parent  # a directory, or else opening it fails
        except BaseException:
            os.close(parent)
            raise
        return parent

    def _mounted(self) -> list[Mount]:
        return [mount for mount in read_mount_table() if mount.point == self.real_path]

    def _mount_directory(self, source: int, parent: int, flags: int) -> None:
        mounted = self._mounted()
        if len(mounted) == 1 and self._shows(source, parent, flags):
            return
        if mounted:
            self._detach_all(parent)
        target = open_inside(parent, self._name)
        try:
            _attach_clone(source, target, flags=flags)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            self._mount_on_target(below_descriptor(source), parent, flags=_MS_BIND)
            self._flag(parent, _MS_BIND | flags)
        finally:
            os.close(target)

    def _mount_marker(self, parent: int, reason: str) -> None:
        mounted = self._mounted()
        # It becomes read-only last, so then the file is complete.
        if len(mounted) == 1 and mounted[0].source == UNAVAILABLE_MARKER and "ro" in mounted[0].options:
            return
        if mounted:
            self._detach_all(parent)
        self._mount_on_target(UNAVAILABLE_MARKER, parent, flags=_HARMLESS, kind="tmpfs", options=_MARKER_OPTIONS)
        root = open_inside(parent, self._name, flags=LOOK_FLAGS)
        try:
            _write_reason(root, reason)
        finally:
            os.close(root)
        self._flag(parent, _HARMLESS | _MS_RDONLY)

    def _mount_on_target(self, source: str, parent: int, *, flags: int, kind: str = "", options: str = "") -> None:
        target = open_inside(parent, self._name)
        try:
            _mount(source, below_descriptor(target), flags=flags, kind=kind, options=options)
        finally:
            os.close(target)

    def _flag(self, parent: int, flags: int) -> None:
        root = open_inside(parent, self._name)  # opened anew: this is the root of what was mounted
        try:
            _mount("none", below_descriptor(root), flags=_MS_REMOUNT | flags)
        finally:
            os.close(root)

    def _shows(self, source: int, parent: int, flags: int) -> bool:
        root = open_inside(parent, self._name)
        try:
            return os.path.samestat(os.fstat(root), os.fstat(source)) and _shown_flags(root) == flags
        finally:
            os.close(root)

    def _detach_all(self, parent: int) -> None:
        for _ in range(STACKED_MAX):
            if not self._mounted():
                return
            try:
                _unmount(below_descriptor(parent, self._name))
            except OSError as error:
                if error.errno == errno.EINVAL and not self._mounted():
                    return  # another process was faster
                raise
        raise OSError(errno.EBUSY, f"more than {STACKED_MAX} mounts are stacked here", self.path)


def mounts_of(directory: str, *, below: str) -> int:
    """Return how many mounts show this directory or one inside it.

    Args:
        directory: absolute, without links; a pool's directory. It may be gone.
        below: only mount points below this directory count: kubelet's.
    """
    table = read_mount_table()
    holder = holder_of(directory, table)
    root = inner_path(directory, holder)
    base = os.path.realpath(below).rstrip("/") + "/"
    return sum(
        mount.device == holder.device and _is_in(mount.root, root) for mount in table if mount.point.startswith(base)
    )


def mounts_inside(directory: str, mounts: Sequence[Mount]) -> list[str]:
    """Return the mount points inside a directory, which is itself none of them."""
    return [mount.point for mount in mounts if mount.point.startswith(directory.rstrip("/") + "/")]


def _is_in(path: str, folder: str) -> bool:
    # True also of a directory that was removed since: the table then says `/pool//deleted`.
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _shown_flags(folder: int) -> int:
    return os.fstatvfs(folder).f_flag & (_HARMLESS | _MS_RDONLY)  # the values are those of mount(2)


def _write_reason(folder: int, reason: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(UNAVAILABLE_MARKER, flags, 0o644, dir_fd=folder)
    try:
        os.fchmod(descriptor, 0o644)
        os.write(descriptor, reason.encode(errors="replace")[:_REASON_BYTES_MAX] + b"\n")
    finally:
        os.close(descriptor)


def _attach_clone(source: int, target: int, *, flags: int) -> None:
    """Mount an open directory on another one, flags first.

    Raises:
        OSError: ENOSYS where the kernel is too old; then nothing is mounted.
    """
    clone = _call(_OPEN_TREE, source, b"", _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH)
    try:
        attributes = _MOUNT_ATTRIBUTES.pack(flags, 0, 0, 0)  # the flags' values are those of mount(2)
        _call(_MOUNT_SETATTR, clone, b"", _AT_EMPTY_PATH, attributes, len(attributes))
        _call(_MOVE_MOUNT, clone, b"", target, b"", _MOVE_EMPTY_PATHS)
    finally:
        os.close(clone)


def _call(number: int, *arguments: int | bytes) -> int:
    words = [ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value) for value in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *words))
    if result < 0:
        raise _error("mount")
    return result


def _mount(source: str, target: str, *, flags: int, kind: str = "", options: str = "") -> None:
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), os.fsencode(options) or None
    )
    if result:
        raise _error("mount")


def _unmount(target: str) -> None:
    """Unmount what is on top at a path; lazily only where somebody still uses it."""
    if _libc.umount2(os.fsencode(target), _UMOUNT_NOFOLLOW) == 0:
        return
    if ctypes.get_errno() != errno.EBUSY:
        raise _error("unmount")
    if _libc.umount2(os.fsencode(target), _UMOUNT_NOFOLLOW | _MNT_DETACH):
        raise _error("unmount")


def _error(operation: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{operation}: {os.strerror(code)}")
