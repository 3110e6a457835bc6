"""The project's proto files agree with the published ones, field by field, and the generated modules with the files."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, struct_pb2, timestamp_pb2

from smg.engines.grpc.codecs import CODECS
from smg.engines.grpc.pb import common_pb2, pool
from smg.engines.grpc.pb import mlx_engine_pb2 as mlx
from smg.engines.grpc.pb import sglang_scheduler_pb2 as sglang
from smg.engines.grpc.pb import tokenspeed_scheduler_pb2 as tokenspeed
from smg.engines.grpc.pb import trtllm_service_pb2 as trtllm
from smg.engines.grpc.pb import vllm_engine_pb2 as vllm

ROOT = Path(__file__).resolve().parents[2]
MODULES = (common_pb2, sglang, vllm, trtllm, tokenspeed, mlx)
FILES = (
    "common.proto",
    "sglang_scheduler.proto",
    "vllm_engine.proto",
    "trtllm_service.proto",
    "tokenspeed_scheduler.proto",
    "mlx_engine.proto",
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pool.DescriptorPool:
    """The published definitions, compiled into a pool of their own."""
    protoc = pytest.importorskip("grpc_tools.protoc")
    pytest.importorskip("smg_grpc_proto")
    source = importlib.resources.files("smg_grpc_proto") / "proto"
    out = tmp_path_factory.mktemp("proto") / "published.bin"
    include = Path(protoc.__file__).parent / "_proto"
    assert protoc.main(["protoc", f"-I{source}", f"-I{include}", f"--descriptor_set_out={out}", *FILES]) == 0
    result = descriptor_pool.DescriptorPool()
    for dependency in (struct_pb2, timestamp_pb2):
        result.AddSerializedFile(dependency.DESCRIPTOR.serialized_pb)
    for file in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file:
        result.Add(file)
    return result


def own_messages() -> list[Any]:
    found = []

    def visit(descriptor: Any) -> None:
        found.append(descriptor)
        for nested in descriptor.nested_types:
            visit(nested)

    for name in FILES:
        for descriptor in pool.POOL.FindFileByName(name).message_types_by_name.values():
            visit(descriptor)
    return found


def shape(field: Any) -> dict[str, Any]:
    """Everything about a field that shows on the wire or in how it is read."""
    oneof = field.containing_oneof
    return {
        "number": field.number,
        "type": field.type,
        "repeated": field.is_repeated,
        "presence": field.has_presence,
        "packed": field.is_packed,
        "message": field.message_type.full_name if field.message_type else None,
        "enum": field.enum_type.full_name if field.enum_type else None,
        "oneof": oneof.name if oneof is not None and not oneof.name.startswith("_") else None,
    }


@pytest.mark.parametrize("message", own_messages(), ids=lambda message: message.full_name)
def test_every_field_is_the_published_one(message: Any, published: descriptor_pool.DescriptorPool) -> None:
    theirs = published.FindMessageTypeByName(message.full_name).fields_by_name
    assert {name: shape(field) for name, field in message.fields_by_name.items()} == {
        name: shape(theirs[name]) for name in message.fields_by_name if name in theirs
    }


def test_enums_are_the_published_ones(published: descriptor_pool.DescriptorPool) -> None:
    enum = trtllm.GuidedDecodingParams.DESCRIPTOR.enum_types_by_name["GuideType"]
    theirs = published.FindEnumTypeByName(enum.full_name)
    assert {value.name: value.number for value in enum.values} == {v.name: v.number for v in theirs.values}


@pytest.mark.parametrize("kind", CODECS)
def test_every_method_is_the_published_one(kind: str, published: descriptor_pool.DescriptorPool) -> None:
    def methods(source: Any) -> dict[str, tuple[str, str, bool, bool]]:
        return {
            method.name: (
                method.input_type.full_name,
                method.output_type.full_name,
                method.client_streaming,
                method.server_streaming,
            )
            for method in source.methods
        }

    name = CODECS[kind].service
    own = methods(pool.POOL.FindServiceByName(name))
    theirs = methods(published.FindServiceByName(name))
    assert own == {method: theirs[method] for method in own}


def test_generated_modules_are_current() -> None:
    pytest.importorskip("grpc_tools.protoc")
    run = subprocess.run([sys.executable, ROOT / "scripts" / "gen_proto.py", "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
