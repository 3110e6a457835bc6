"""Codecs of the gRPC engine kinds: one file each, found by ``codec_for``."""

from __future__ import annotations

from smg.engines.grpc.codecs.base import Decoder, GrpcCodec
from smg.engines.grpc.codecs.mlx import MlxCodec
from smg.engines.grpc.codecs.sglang import SglangCodec
from smg.engines.grpc.codecs.tokenspeed import TokenspeedCodec
from smg.engines.grpc.codecs.trtllm import TrtllmCodec
from smg.engines.grpc.codecs.vllm import VllmCodec

# In the order in which an unknown worker is asked.
CODECS: dict[str, GrpcCodec] = {
    codec.kind: codec for codec in (SglangCodec(), VllmCodec(), TrtllmCodec(), TokenspeedCodec(), MlxCodec())
}

__all__ = ["CODECS", "Decoder", "GrpcCodec", "codec_for"]


def codec_for(kind: str) -> GrpcCodec:
    """The codec of an engine kind ("sglang", "vllm", "trtllm", "tokenspeed", "mlx"). Raises ``KeyError``."""
    return CODECS[kind]
