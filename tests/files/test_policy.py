"""Read policies, and file systems by the mount table."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.files.conftest import mounted

from shardwise.core.errors import ConfigError
from shardwise.files.local_reader import LocalReader, find_type_in_mountinfo, is_network
from shardwise.files.storage import LOCAL, NETWORK_FILE_SYSTEM, OBJECT_STORE

MOUNTS = r"""22 28 0:20 / /sys rw,nosuid - sysfs sysfs rw
28 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw
30 28 0:50 / /models rw,relatime shared:7 master:2 - nfs4 server:/export rw,vers=4.2
31 30 259:2 / /models/fast rw - xfs /dev/nvme1n1 rw
32 28 0:51 / /with\040space rw - lustre mgs@tcp:/scratch rw
33 28 0:52 / /twice rw - nfs server:/old rw
34 28 259:3 / /twice rw - ext4 /dev/sdb rw
35 28 0:53 / /bucket rw - fuse.gcsfuse bucket rw
not a line of the table
36 28 0:54
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/user", "ext4"),
        ("/models", "nfs4"),
        ("/models/llama/a.safetensors", "nfs4"),
        ("/models-2", "ext4"),
        ("/models/fast/llama", "xfs"),
        ("/models/faster", "nfs4"),
        ("/with space/x", "lustre"),
        ("/twice/x", "ext4"),
        ("/bucket/x", "fuse.gcsfuse"),
    ],
)
def test_the_deepest_and_latest_mount_holds_a_path(path: str, kind: str) -> None:
    assert find_type_in_mountinfo(path, MOUNTS) == kind


def test_a_table_without_content() -> None:
    assert find_type_in_mountinfo("/x", "") is None
    assert not is_network(None)


def test_network_file_systems() -> None:
    kinds = "nfs nfs4 lustre cifs smb3 gpfs beegfs ceph 9p virtiofs fuse.sshfs fuse.s3fs fuse.glusterfs fuse"
    assert [kind for kind in kinds.split(" ") if not is_network(kind)] == []


def test_file_systems_of_this_machine() -> None:
    kinds = "ext4 xfs btrfs tmpfs overlay zfs fuseblk fuse.fuse-overlayfs nfsd"
    assert [kind for kind in kinds.split(" ") if is_network(kind)] == []


@pytest.mark.parametrize(("kind", "policy"), [("nfs4", NETWORK_FILE_SYSTEM), ("ext4", LOCAL)])
def test_a_folder_is_read_as_its_file_system_likes(
    kind: str, policy: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(tmp_path, kind, monkeypatch)
    (tmp_path / "models").mkdir()
    (tmp_path / "link").symlink_to("models")
    with LocalReader(tmp_path / "link") as reader:
        assert reader.policy == policy


def test_a_policy_can_be_given(tmp_path: Path) -> None:
    with LocalReader(tmp_path, policy=OBJECT_STORE) as reader:
        assert reader.policy is OBJECT_STORE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_gap_bytes", -1),
        ("request_bytes", 0),
        ("concurrency", 0),
    ],
)
def test_a_number_out_of_bounds_is_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(LOCAL, **{field: value})
