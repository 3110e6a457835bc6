"""The descriptor pool of the generated modules.

Not the process-wide pool: an engine package or another gateway's stubs may be imported in the same process and define
messages of the same full names.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool, message_factory, struct_pb2

POOL = descriptor_pool.DescriptorPool()
POOL.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)


def add(serialized: bytes) -> None:
    """Register one compiled file (a serialized ``FileDescriptorProto``); its dependencies come first."""
    POOL.AddSerializedFile(serialized)


def message_class(full_name: str) -> Any:
    """The message class of ``full_name``. Raises ``KeyError`` when no registered file defines it."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(full_name))
