"""The messages of `inference.proto`, in a pool of their own: other packages have the same names."""

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet

NAME = "inference.GRPCInferenceService"

POOL = descriptor_pool.DescriptorPool()
for _file in FileDescriptorSet.FromString(Path(__file__).with_name("inference.pb").read_bytes()).file:
    POOL.AddSerializedFile(_file.SerializeToString())
SERVICE = POOL.FindServiceByName(NAME)


def message(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


def filled(made: Any, found: dict[str, Any]) -> Any:
    """Returns a message with the fields of JSON that it has."""
    return json_format.ParseDict(found, made, ignore_unknown_fields=True, descriptor_pool=POOL)
