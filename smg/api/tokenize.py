"""The small text routes: tokenize, detokenize, and the two parser try-outs. Request types and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from smg.api.decode import BodyDecoder
from smg.api.errors import ApiError
from smg.api.fields import U32, Request

UNNAMED_MODELS = ("", "unknown")


class TokenizeRequest(Request, kw_only=True):
    """``model`` may be "" or "unknown": the first registered tokenizer."""

    model: str
    prompt: str | list[str]


class DetokenizeRequest(Request, kw_only=True):
    model: str
    tokens: list[U32 | list[U32]]
    skip_special_tokens: bool = True


class ParseFunctionCallRequest(Request, kw_only=True):
    """``tools`` are chat declarations."""

    text: str
    tool_call_parser: str
    tools: list[ParsedTool]


class ParsedTool(Request, kw_only=True):
    type: str
    function: ParsedFunction


class ParsedFunction(Request, kw_only=True):
    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class ParseReasoningRequest(Request, kw_only=True):
    text: str
    reasoning_parser: str


_TOKENIZE = BodyDecoder(TokenizeRequest, style="extractor")
_DETOKENIZE = BodyDecoder(DetokenizeRequest, style="extractor")
_FUNCTION_CALL = BodyDecoder(ParseFunctionCallRequest, style="extractor")
_REASONING = BodyDecoder(ParseReasoningRequest, style="extractor")
_encode = msgspec.json.Encoder().encode


def decode_tokenize(body: bytes, headers: Mapping[str, str]) -> TokenizeRequest:
    """The typed body. Raises ``ApiError`` (plain text)."""
    return _TOKENIZE.decode(body, headers)


def decode_detokenize(body: bytes, headers: Mapping[str, str]) -> DetokenizeRequest:
    """The typed body. Raises ``ApiError`` (plain text)."""
    request = _DETOKENIZE.decode(body, headers)
    if len({type(entry) for entry in request.tokens}) > 1:
        raise ApiError(422, "invalid_type", "tokens: expected token ids or lists of token ids", "tokens", plain=True)
    return request


def decode_function_call(body: bytes, headers: Mapping[str, str]) -> ParseFunctionCallRequest:
    """The typed body. Raises ``ApiError`` (plain text)."""
    return _FUNCTION_CALL.decode(body, headers)


def decode_reasoning(body: bytes, headers: Mapping[str, str]) -> ParseReasoningRequest:
    """The typed body. Raises ``ApiError`` (plain text)."""
    return _REASONING.decode(body, headers)


def tokenizer_not_found(model: str, known: Sequence[str]) -> ApiError:
    """No tokenizer of that name."""
    message = f"Tokenizer for model '{model}' not found. Available: {', '.join(known)}"
    return ApiError(400, "tokenizer_not_found", message, type="tokenizer_not_found")


def tokenize_body(prompt: str | list[str], ids: Sequence[Sequence[int]]) -> bytes:
    """The answer to a tokenize request: plain values for a string, lists for a list. ``ids`` has one entry per text."""
    if isinstance(prompt, str):
        return _encode({"tokens": list(ids[0]), "count": len(ids[0]), "char_count": len(prompt)})
    counts = [len(tokens) for tokens in ids]
    return _encode({"tokens": list(map(list, ids)), "count": counts, "char_count": [len(text) for text in prompt]})


def detokenize_body(request: DetokenizeRequest, texts: Sequence[str]) -> bytes:
    """The answer to a detokenize request; ``texts`` has one entry per id list."""
    return _encode({"text": list(texts) if is_batch(request) else texts[0]})


def is_batch(request: DetokenizeRequest) -> bool:
    """Whether ``tokens`` is a list of lists."""
    return bool(request.tokens) and type(request.tokens[0]) is list


def id_lists(request: DetokenizeRequest) -> list[list[int]]:
    """The id lists to decode: one unless the request is a batch."""
    tokens: list[Any] = request.tokens
    return tokens if is_batch(request) else [tokens]


def function_call_body(remaining: str, calls: Sequence[tuple[str, str]]) -> bytes:
    """The answer to a function-call parse; ``calls`` are (name, JSON text of the arguments)."""
    shown = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return _encode({"remaining_text": remaining, "tool_calls": shown, "success": True})


def reasoning_body(normal: str, reasoning: str) -> bytes:
    """The answer to a reasoning parse."""
    return _encode({"normal_text": normal, "reasoning_text": reasoning, "success": True})


def unknown_parser(kind: str, name: str) -> ApiError:
    """``kind`` is "tool" or "reasoning"."""
    return ApiError(400, "unknown_parser", f"Unknown {kind} parser: {name}")
