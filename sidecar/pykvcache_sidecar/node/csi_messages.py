"""The messages of CSI 1.x (Identity and Node) and of kubelet's plug-in registration that we use, and no others.

Built from tables when imported, so that no generated code and no compiler is needed. Names and numbers are those of
csi.proto 1.9 and of pluginregistration/v1 api.proto; unknown fields of later versions are skipped by protobuf. Nothing
is checked here.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_TEXT = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_BOOL = descriptor_pb2.FieldDescriptorProto.TYPE_BOOL
_INT64 = descriptor_pb2.FieldDescriptorProto.TYPE_INT64
_ENUM = descriptor_pb2.FieldDescriptorProto.TYPE_INT32  # the same on the wire
_MAP = "map of texts"
_TEXTS = "list of texts"

_Fields = dict[str, tuple[int, Any]]
"""Name → number and type: a number of protobuf's, one of the words above, or another message's name."""

_CSI: dict[str, _Fields] = {
    "GetPluginInfoRequest": {},
    "GetPluginInfoResponse": {"name": (1, _TEXT), "vendor_version": (2, _TEXT)},
    "GetPluginCapabilitiesRequest": {},
    "GetPluginCapabilitiesResponse": {},
    "ProbeRequest": {},
    "ProbeResponse": {},
    "NodeGetInfoRequest": {},
    "NodeGetInfoResponse": {"node_id": (1, _TEXT), "max_volumes_per_node": (2, _INT64)},
    "NodeGetCapabilitiesRequest": {},
    "NodeGetCapabilitiesResponse": {},
    "BlockVolume": {},
    "MountVolume": {"fs_type": (1, _TEXT), "mount_flags": (2, _TEXTS), "volume_mount_group": (3, _TEXT)},
    "AccessMode": {"mode": (1, _ENUM)},
    "VolumeCapability": {"block": (1, "BlockVolume"), "mount": (2, "MountVolume"), "access_mode": (3, "AccessMode")},
    "NodePublishVolumeRequest": {
        "volume_id": (1, _TEXT),
        "publish_context": (2, _MAP),
        "staging_target_path": (3, _TEXT),
        "target_path": (4, _TEXT),
        "volume_capability": (5, "VolumeCapability"),
        "readonly": (6, _BOOL),
        "secrets": (7, _MAP),
        "volume_context": (8, _MAP),
    },
    "NodePublishVolumeResponse": {},
    "NodeUnpublishVolumeRequest": {"volume_id": (1, _TEXT), "target_path": (2, _TEXT)},
    "NodeUnpublishVolumeResponse": {},
}
_REGISTRATION: dict[str, _Fields] = {
    "InfoRequest": {},
    "PluginInfo": {"type": (1, _TEXT), "name": (2, _TEXT), "endpoint": (3, _TEXT), "supported_versions": (4, _TEXTS)},
    "RegistrationStatus": {"plugin_registered": (1, _BOOL), "error": (2, _TEXT)},
    "RegistrationStatusResponse": {},
}


def _add_field(message: Any, name: str, number: int, kind: Any, *, package: str) -> None:
    field = message.field.add(name=name, number=number, label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL)
    if kind in (_MAP, _TEXTS):
        field.label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    if kind == _TEXTS:
        field.type = _TEXT
    elif kind == _MAP:
        entry = message.nested_type.add(name="".join(map(str.title, name.split("_"))) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, _TEXT, package=package)
        _add_field(entry, "value", 2, _TEXT, package=package)
        field.type_name = f".{package}.{message.name}.{entry.name}"
        field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
    elif isinstance(kind, str):
        field.type_name = f".{package}.{kind}"
        field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
    else:
        field.type = kind


def _build(package: str, table: dict[str, _Fields]) -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name=f"pykvcache/{package}", package=package, syntax="proto3")
    for message_name, fields in table.items():
        message = file.message_type.add(name=message_name)
        for name, (number, kind) in fields.items():
            _add_field(message, name, number, kind, package=package)
    pool = descriptor_pool.DescriptorPool()  # our own: another library may load the whole csi.proto
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in table}


CSI_PACKAGE = "csi.v1"
REGISTRATION_PACKAGE = "pluginregistration"
CSI = _build(CSI_PACKAGE, _CSI)
"""Message classes by name."""
REGISTRATION = _build(REGISTRATION_PACKAGE, _REGISTRATION)
