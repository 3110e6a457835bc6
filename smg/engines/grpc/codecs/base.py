"""What the codecs of all gRPC engine kinds have in common.

A codec translates between the neutral structs of ``smg.engines`` and the bytes of one worker protocol. It does no I/O:
the tokenizer pool calls ``encode``, the detok process feeds messages to a ``Decoder``, the router builds and reads the
rest.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, ClassVar

from smg.engines.base import (
    BuildError,
    Constraint,
    Delta,
    EngineRequest,
    PromptEncoder,
    Sampling,
    TokenLogprobs,
)
from smg.engines.grpc.codecs.prompt import PromptFields
from smg.engines.grpc.facts import Embedding, Health, LoadReport, RankLoad, WorkerFacts

INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)

# Beginnings of messages whose token is remembered.
KNOWN_LEADS = 65536

# Endpoints whose text goes to the client as it is.
RAW_TEXT_APIS = frozenset(("completions", "generate"))
# Endpoints where ``skip_special_tokens`` false reaches the engine. On the others it is a wish about the gateway's text.
SPECIAL_TOKEN_APIS = RAW_TEXT_APIS | {"responses"}

# What the protobuf library raises for a value outside a field's range.
_UNFIT = (ValueError, TypeError, OverflowError)
_RANK_LOAD_FIELDS = tuple(f.name for f in fields(RankLoad))


class Decoder:
    """Reads the messages of one call, in order."""

    __slots__ = ()

    def decode(self, payload: bytes) -> Delta | None:
        """The delta in one message, None when it holds nothing for this call (chunks of a call that does not stream).

        Raises ``google.protobuf.message.DecodeError`` for bytes that are no message."""
        raise NotImplementedError


class GrpcCodec(ABC):
    """Translation for one engine kind. ``service`` is the full name of its gRPC service."""

    kind: ClassVar[str]
    service: ClassVar[str]
    request_class: ClassVar[Any]
    prompt_ids: ClassVar[str] = "input_ids"
    supports_loads: ClassVar[bool] = False
    supports_flush: ClassVar[bool] = False
    supports_profile: ClassVar[bool] = False
    supports_embedding: ClassVar[bool] = False

    def method(self, name: str) -> str:
        """Path of a method, as in ``/package.Service/Name``."""
        return f"/{self.service}/{name}"

    # ---- generation

    @cached_property
    def _prompt(self) -> PromptFields:
        return PromptFields(self.request_class, self.prompt_ids)

    def encode(self, request: EngineRequest) -> bytes:
        """Bytes of the generate request. Raises ``BuildError`` when this engine cannot take it."""
        return self.bind(request)(request.request_id, request.text, request.token_ids)

    def bind(self, request: EngineRequest) -> PromptEncoder:
        """See ``RequestCodec.bind``."""
        fields = self._prompt
        try:
            settings: bytes = self.build(request).SerializeToString()
        except _UNFIT as error:
            raise BuildError(str(error)) from error

        def encode(request_id: str, text: str, token_ids: Sequence[int]) -> bytes:
            try:
                return fields.encode(request_id, text, token_ids) + settings
            except _UNFIT as error:
                raise BuildError(str(error)) from error

        return encode

    @abstractmethod
    def build(self, request: EngineRequest) -> Any:
        """The protobuf message of ``request`` without its id and its prompt."""

    @abstractmethod
    def decoder(self, *, streaming: bool) -> Decoder:
        """A fresh decoder for one call. ``streaming``: deliver the chunks; else only the final messages count."""

    def extend(self, request: bytes, generated: Sequence[int]) -> bytes:
        """The same request with ``generated`` appended to the prompt and the token limits lowered by as many.

        Raises ``BuildError`` when such a continuation cannot be right: several choices, a constraint (the engine would
        start its grammar anew) or no token left to generate.
        """
        message = self.request_class.FromString(request)
        prompt, sampling, limits = self.continuation_parts(message)
        if (getattr(sampling, "n", 0) or getattr(sampling, "num_return_sequences", 0)) > 1:
            raise BuildError("a request for several choices cannot be continued")
        if self.is_constrained(message):
            raise BuildError("a constrained generation cannot be continued")
        prompt.extend(generated)
        for owner, name, minimum in limits:
            value = getattr(owner, name)
            # Presence is asked of fields that have it; the others read 0 when they are not sent.
            if not (owner.HasField(name) if owner.DESCRIPTOR.fields_by_name[name].has_presence else value):
                continue
            left = value - len(generated)
            if minimum is not None and left < minimum:
                raise BuildError("no token is left to generate")
            setattr(owner, name, max(left, 0))
        data: bytes = message.SerializeToString()
        return data

    @abstractmethod
    def continuation_parts(self, message: Any) -> tuple[Any, Any, list[tuple[Any, str, int | None]]]:
        """Of a parsed request: the prompt ids (a repeated field), the sampling message, and the token limits as
        ``(message, field name, least value a continuation may have; None = 0 means no limit)``."""

    def is_constrained(self, message: Any) -> bool:
        return message.sampling_params.WhichOneof("constraint") is not None

    def pin_rank(self, request: bytes, dp_rank: int) -> bytes:
        """The request pinned to a data-parallel rank; unchanged for a negative rank or an engine without ranks.

        Serialized messages concatenate to their merge, so nothing is parsed."""
        if dp_rank < 0 or "data_parallel_rank" not in self.request_class.DESCRIPTOR.fields_by_name:
            return request
        data: bytes = request + self.request_class(data_parallel_rank=dp_rank).SerializeToString()
        return data

    @abstractmethod
    def abort_request(self, request_id: str, reason: str) -> bytes:
        """Bytes of the request that stops a running generation."""

    # ---- information

    @abstractmethod
    def parse_health(self, payload: bytes) -> Health: ...

    @abstractmethod
    def facts(self, model_info: bytes, server_info: bytes) -> WorkerFacts:
        """Facts from the answers to GetModelInfo and GetServerInfo (empty bytes: not answered)."""

    def loads_request(self, include: Sequence[str], dp_rank: int | None = None) -> bytes:
        """Bytes of a load query; ``include`` names sections. Raises ``BuildError`` when the engine reports no load."""
        raise BuildError(f"{self.kind} workers report no load")

    def parse_loads(self, payload: bytes) -> LoadReport:
        raise BuildError(f"{self.kind} workers report no load")

    def embed_request(self, request_id: str, text: str, token_ids: Sequence[int]) -> bytes:
        """Bytes of an embedding request. Raises ``BuildError`` when the engine kind has none."""
        raise BuildError(f"{self.kind} workers do not embed")

    def parse_embed(self, payload: bytes) -> Embedding:
        raise BuildError(f"{self.kind} workers do not embed")


# ---- request helpers


def fill(target: Any, source: Sampling, names: Iterable[str]) -> None:
    """Copy the sampling values that are set to the fields of the same names."""
    for name in names:
        value = getattr(source, name)
        if value is not None:
            setattr(target, name, value)


def set_constraint(target: Any, constraint: Constraint | None, field_names: Mapping[str, str]) -> None:
    """Set the member of the constraint oneof that ``constraint.kind`` maps to."""
    if constraint is not None:
        setattr(target, field_names[constraint.kind], constraint.value)


def seed_of(sampling: Sampling) -> int | None:
    """The seed under either of its names."""
    return sampling.seed if sampling.seed is not None else sampling.sampling_seed


def int32(value: int) -> int:
    """``value`` clamped to the int32 range."""
    return min(max(value, INT32_MIN), INT32_MAX)


def skip_special_tokens(request: EngineRequest) -> bool:
    return request.sampling.skip_special_tokens or request.api not in SPECIAL_TOKEN_APIS


# ---- response helpers


def behind_ids(payload: bytes) -> bytes:
    """Of a response with a chunk as field 1 that begins with packed ids as field 1, both shorter than 128 bytes: what
    is behind the ids. b"" for any other response."""
    size = len(payload)
    if not 5 < size < 130 or payload[0] != 10 or payload[1] != size - 2 or payload[2] != 10:
        return b""
    return payload[4 + payload[3] :]


def read_lead(lead: bytes, known: dict[bytes, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The ids of such a response, of which ``lead`` is the beginning with all ids and nothing else; None when it is
    not. Those of single tokens are remembered in ``known``."""
    if len(lead) < 5 or lead[0] != 10 or lead[2] != 10 or lead[3] != len(lead) - 4:
        return None
    ids: list[int] = []
    value = shift = 0
    for byte in lead[4:]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            ids.append(value)
            value = shift = 0
    if shift or max(ids) >= 1 << 32:
        return None  # cut off, or too large: for the parser to judge
    if len(ids) == 1:
        if len(known) >= KNOWN_LEADS:
            known.clear()
        known[lead] = tuple(ids)
    return tuple(ids)


def output_logprobs(message: Any) -> TokenLogprobs:
    """Logprobs of output tokens (``OutputLogProbs`` of every engine but TensorRT-LLM)."""
    return TokenLogprobs(message.token_ids[:], message.token_logprobs[:], top_logprobs(message.top_logprobs))


def input_logprobs(message: Any) -> TokenLogprobs:
    """Logprobs of prompt tokens; a token without one (the first) reads NaN."""
    values = [entry.value if entry.HasField("value") else float("nan") for entry in message.token_logprobs]
    return TokenLogprobs(message.token_ids[:], values, top_logprobs(message.top_logprobs))


def top_logprobs(rows: Iterable[Any]) -> list[list[tuple[int, float]]]:
    return [list(zip(row.token_ids[:], row.values[:], strict=False)) for row in rows]


def matched_stop(message: Any) -> str | int | None:
    """The member of the ``matched_stop`` oneof that is set."""
    name = message.WhichOneof("matched_stop")
    return getattr(message, name) if name is not None else None


def closing_delta(complete: Any, index: int, token_ids: Sequence[int]) -> Delta:
    """A delta with finish reason and counts of a final message (all engine kinds name these fields alike)."""
    delta = Delta(index, token_ids)
    delta.finish_reason = complete.finish_reason or "stop"
    delta.prompt_tokens = complete.prompt_tokens
    delta.completion_tokens = complete.completion_tokens
    delta.cached_tokens = complete.cached_tokens
    return delta


# ---- information helpers


def labels(message: Any, names: Iterable[str], *, always: Sequence[str] = ()) -> dict[str, str]:
    """String labels of the fields that have a value; those in ``always`` even when they are zero or false."""
    result = {}
    for name in names:
        value = getattr(message, name)
        if not value and name not in always:
            continue
        if isinstance(value, bool):
            result[name] = "true" if value else "false"
        elif isinstance(value, str | int | float):
            result[name] = str(value)
        else:
            result[name] = json.dumps(list(value), separators=(",", ":"), ensure_ascii=False)
    return result


def load_report(message: Any) -> LoadReport:
    """A ``GetLoadsResponse`` of any engine kind that has one."""
    ranks = [RankLoad(**{name: getattr(load, name) for name in _RANK_LOAD_FIELDS}) for load in message.loads]
    return LoadReport(message.timestamp, message.version, message.dp_rank_count, ranks)


def struct_int(struct: Any, name: str, default: int = 0) -> int:
    """An integer out of a ``google.protobuf.Struct``, whose numbers are doubles."""
    value = struct.fields.get(name)
    if value is None or value.WhichOneof("kind") != "number_value":
        return default
    return int(value.number_value)
