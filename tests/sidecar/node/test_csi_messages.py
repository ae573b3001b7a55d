"""Messages of CSI and of plug-in registration against bytes made by hand from the published field numbers."""

import pytest

from pykvcache_sidecar.node.csi_messages import CSI, REGISTRATION


def field(number: int, content: "bytes | str | int") -> bytes:
    """Encode a field of fewer than 128 bytes, or a small number."""
    if isinstance(content, int):
        return bytes([number << 3, content])
    content = content.encode() if isinstance(content, str) else content
    return bytes([number << 3 | 2, len(content)]) + content


def pair(key: str, value: str) -> bytes:
    return field(1, key) + field(2, value)


def test_a_publish_request_is_read_as_kubelet_writes_it():
    capability = field(2, field(1, "ext4") + field(2, "noatime") + field(2, "ro")) + field(3, field(1, 5))
    wire = b"".join(
        [
            field(1, "csi-1"),
            field(2, pair("published", "yes")),
            field(3, "/staging"),
            field(4, "/target"),
            field(5, capability),
            field(6, 1),
            field(7, pair("token", "secret")),
            field(8, pair("pool", "fast")),
            field(8, pair("other", "value")),
        ]
    )
    request = CSI["NodePublishVolumeRequest"].FromString(wire)
    assert (request.volume_id, request.staging_target_path, request.target_path) == ("csi-1", "/staging", "/target")
    assert dict(request.publish_context) == {"published": "yes"}
    assert request.volume_capability.HasField("mount")
    assert not request.volume_capability.HasField("block")
    assert request.volume_capability.mount.fs_type == "ext4"
    assert list(request.volume_capability.mount.mount_flags) == ["noatime", "ro"]
    assert request.volume_capability.access_mode.mode == 5
    assert request.readonly
    assert dict(request.secrets) == {"token": "secret"}
    assert dict(request.volume_context) == {"pool": "fast", "other": "value"}


def test_a_block_volume_is_told_from_a_mounted_one():
    request = CSI["NodePublishVolumeRequest"].FromString(field(5, field(1, b"")))
    assert request.volume_capability.HasField("block")
    assert not request.volume_capability.HasField("mount")


def test_an_unpublish_request_is_read_as_kubelet_writes_it():
    request = CSI["NodeUnpublishVolumeRequest"].FromString(field(1, "csi-1") + field(2, "/target"))
    assert (request.volume_id, request.target_path) == ("csi-1", "/target")


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (CSI["GetPluginInfoResponse"](name="n", vendor_version="1"), field(1, "n") + field(2, "1")),
        (CSI["NodeGetInfoResponse"](node_id="a", max_volumes_per_node=3), field(1, "a") + field(2, 3)),
        (
            REGISTRATION["PluginInfo"](type="t", name="n", endpoint="e", supported_versions=["1", "2"]),
            field(1, "t") + field(2, "n") + field(3, "e") + field(4, "1") + field(4, "2"),
        ),
        (REGISTRATION["RegistrationStatus"](plugin_registered=True, error="e"), field(1, 1) + field(2, "e")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_answer_is_written_as_kubelet_reads_it(message, wire):
    assert message.SerializeToString(deterministic=True) == wire


def test_fields_of_later_versions_are_skipped():
    wire = field(1, "csi-1") + field(15, "new")
    assert CSI["NodeUnpublishVolumeRequest"].FromString(wire).volume_id == "csi-1"
