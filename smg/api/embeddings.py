"""``POST /v1/embeddings``: a string, several strings, token ids or several lists of them; one vector for each.

Also the bodies of ``/v1/classify`` (run as an embedding) and of the rerank routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from smg.api.completions import MAX_PROMPTS, Prompt
from smg.api.decode import BodyDecoder
from smg.api.errors import invalid, refused
from smg.api.fields import U32, Request, check_integer, too_long


class EmbeddingRequest(Request, kw_only=True):
    """The body. ``input`` is looked at by hand: anything without text or tokens in it is one error, ``empty_input``."""

    model: str
    input: Any
    encoding_format: str | None = None
    dimensions: U32 | None = None
    user: str | None = None
    rid: str | None = None


_DECODER = BodyDecoder(EmbeddingRequest, style="extractor")


def decode(body: bytes, headers: Mapping[str, str]) -> EmbeddingRequest:
    """The typed body. Raises ``ApiError`` (plain text)."""
    return _DECODER.decode(body, headers)


def _is_input(value: Any) -> bool:
    """A text or a list of token ids, empty ones too."""
    if type(value) is list:
        return all(type(token) is int and 0 <= token < 2**32 for token in value)
    return type(value) is str


def inputs_of(request: EmbeddingRequest) -> list[Prompt]:
    """The texts or token id lists to embed, in order. Raises ``ApiError`` (``empty_input``)."""
    value = request.input
    entries = [value] if _is_input(value) else value
    if type(entries) is not list or not all(map(_is_input, entries)):
        raise refused("empty_input", "input: expected a text, a list of texts, or lists of token ids")
    if not all(entries):
        raise refused("empty_input", "Input text cannot be empty")
    if len(entries) > MAX_PROMPTS:
        raise too_long("input", MAX_PROMPTS, len(entries))
    return list(entries)


def validate(request: EmbeddingRequest) -> list[Prompt]:
    """All rules that need nothing but the request; returns the inputs. Raises ``ApiError``."""
    check_integer("dimensions", request.dimensions, 1)
    if request.encoding_format not in (None, "float", "base64"):
        raise invalid("invalid_value", "expected float or base64", "encoding_format")
    return inputs_of(request)


class ClassifyRequest(Request, kw_only=True):
    """``POST /v1/classify``: the vector of one text, read as class scores."""

    model: str
    input: Any
    user: str | None = None
    rid: str | None = None


_CLASSIFY = BodyDecoder(ClassifyRequest, style="extractor")


def decode_classify(body: bytes, headers: Mapping[str, str]) -> EmbeddingRequest:
    """A classify body as the embedding request it is run as. Raises ``ApiError`` (plain text)."""
    request = _CLASSIFY.decode(body, headers)
    return msgspec.convert({"model": request.model, "input": request.input, "rid": request.rid}, EmbeddingRequest)


class RerankRequest(Request, kw_only=True):
    """``POST /v1/rerank`` and ``/rerank``."""

    query: str
    documents: list[str]
    model: str | None = None


_RERANK = BodyDecoder(RerankRequest, style="extractor")
_RERANK_API = BodyDecoder(RerankRequest)


def decode_rerank(path: str, body: bytes, headers: Mapping[str, str]) -> RerankRequest:
    """The typed body; the two routes differ in how they refuse. Raises ``ApiError``."""
    return (_RERANK if path == "/v1/rerank" else _RERANK_API).decode(body, headers)
