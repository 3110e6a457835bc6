"""``POST /v1/completions``: request type and validation.

Where the public API says more than "text in, text out", it holds here: prompts may be token ids, one or a batch;
``logprobs`` come
back, with ``echo`` also those of the prompt; ``best_of`` generates that many candidates per prompt and answers with
the ``n`` of the
highest mean log-probability per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from smg.api.decode import BodyDecoder
from smg.api.errors import invalid
from smg.api.fields import (
    ONE_CONSTRAINT,
    U32,
    SamplingRequest,
    check_integer,
    check_sampling_ranges,
    check_stream_options,
    token_bias,
    too_long,
)
from smg.api.tools import type_error

MAX_N = 128
MAX_BEST_OF = 20
MAX_LOGPROBS = 20
MAX_PROMPTS = 1024
MAX_CHOICES = 4096


class CompletionRequest(SamplingRequest, kw_only=True):
    """The body. ``json_schema`` is JSON text."""

    model: str
    prompt: str | list[str | U32 | list[U32]]
    best_of: U32 | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: U32 | None = None
    json_schema: str | None = None
    user: str | None = None


_DECODER = BodyDecoder(CompletionRequest, unions={r"stop(?=\[)": (), r"prompt(?=\[)": ()})

Prompt = str | list[int]


def decode(body: bytes, headers: Mapping[str, str]) -> CompletionRequest:
    """The typed body. Raises ``ApiError``."""
    return _DECODER.decode(body, headers)


def prompts_of(request: CompletionRequest) -> list[Prompt]:
    """One entry per prompt: its text, or its token ids. Raises ``ApiError``."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt_empty", "prompt array cannot be empty", "prompt")
    kind = type(prompt[0])
    if any(type(entry) is not kind for entry in prompt):
        raise type_error("prompt", "expected a string, strings, token ids, or lists of token ids")
    entries: list[Any] = prompt
    if kind is int:
        return [entries]
    if len(entries) > MAX_PROMPTS:
        raise too_long("prompt", MAX_PROMPTS, len(entries))
    return entries


def check_json_schema(text: str | None, field: str) -> None:
    """A schema given as text must be a JSON object."""
    if text is None:
        return
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        raise invalid("json_schema_schema_not_object", "the schema is not valid JSON", field) from None
    if type(schema) is not dict:
        raise invalid("json_schema_schema_not_object", "the schema must be a JSON object", field)


def ranked_candidates(request: CompletionRequest) -> int:
    """Candidates per prompt when they are ranked, 0 when ``best_of`` asks for no more than what is shown."""
    return request.best_of if request.best_of is not None and request.best_of > (request.n or 1) else 0


def validate(request: CompletionRequest) -> list[Prompt]:
    """All rules that need nothing but the request; returns the prompts. Raises ``ApiError``."""
    prompts = prompts_of(request)
    check_integer("best_of", request.best_of, 0, MAX_BEST_OF)
    check_integer("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    check_sampling_ranges(request, MAX_N)
    if len(prompts) * max(request.n or 1, request.best_of or 0) > MAX_CHOICES:
        raise invalid("integer_above_max_value", f"expected at most {MAX_CHOICES} choices over all prompts", "n")
    check_json_schema(request.json_schema, "json_schema")
    check_stream_options(request)
    if request.best_of is not None and request.n is not None and request.best_of <= request.n:
        raise invalid("best_of_less_than_n", "best_of must be greater than n")
    if ranked_candidates(request) and request.stream:
        raise invalid("best_of_not_supported_with_stream", "best_of is not supported when stream is enabled")
    limit = request.max_tokens
    if request.min_tokens is not None and limit is not None and request.min_tokens > limit:
        raise invalid("min_tokens_exceeds_max", "min_tokens cannot exceed max_tokens")
    given = (request.regex, request.ebnf, request.json_schema)
    if sum(constraint is not None for constraint in given) > 1:
        raise invalid("multiple_constraints", ONE_CONSTRAINT)
    token_bias(request.logit_bias)
    return prompts
