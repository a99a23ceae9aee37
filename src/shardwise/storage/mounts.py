"""Tells which kind of file system a path lies on, from Linux's table of mounts."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath

_NETWORK = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "virtiofs",
        "wekafs",
    }
)

_FUSE_ON_LOCAL_DISKS = frozenset(
    {
        "fuse.bindfs",
        "fuse.fuse-overlayfs",
        "fuse.lxcfs",
        "fuse.mergerfs",
        "fuse.ntfs-3g",
        "fuse.snapfuse",
        "fuse.squashfuse",
    }
)

_TABLE = "/proc/self/mountinfo"

_OCTAL = re.compile(r"\\([0-7]{3})")


def is_on_network(path: str) -> bool:
    """Whether a path, which need not exist, lies on a network file system; False where nobody tells."""
    return is_network(type_at(path))


def type_at(path: str) -> str | None:
    """The type of the file system that a path, which need not exist, lies on; None where nobody tells."""
    try:
        with open(_TABLE, encoding="utf-8", errors="surrogateescape") as table:
            return file_system_type(os.path.realpath(path), table.read())
    except OSError:  # not Linux, or no /proc
        return None


def file_system_type(path: str, mountinfo: str) -> str | None:
    """The type ("ext4", "nfs4", "fuse.gcsfuse") of the file system that holds ``path``; None where it is not told.

    ``path`` is absolute and free of links; ``mountinfo`` is the text of ``/proc/self/mountinfo`` (proc(5)).
    """
    found: str | None = None
    depth = -1
    place = PurePosixPath(path)
    for line in mountinfo.splitlines():
        # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw: optional fields end with the dash.
        before, dash, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if not dash or len(fields) < 5 or not kinds[0]:
            continue
        point = PurePosixPath(_unescaped(fields[4]))
        # Of two mounts on one folder the later one is on top.
        if place.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = kinds[0], len(point.parts)
    return found


def is_network(kind: str | None) -> bool:
    """Whether files of this type of file system are fetched from another machine, or from outside a virtual one."""
    if kind is None:
        return False
    if kind.startswith("fuse."):
        return kind not in _FUSE_ON_LOCAL_DISKS
    return kind in _NETWORK


def _unescaped(field: str) -> str:
    r"""A path as mountinfo writes it, with ``\040`` for a space."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)
