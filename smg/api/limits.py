"""Checks of a prompt against the facts of its model. An engine may not survive a prompt that fails them."""

from __future__ import annotations

from collections.abc import Sequence

from smg.api.errors import ApiError, refused
from smg.messages import ModelInfo


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str, code: str = "invalid_value") -> None:
    """Client-supplied ids must be in the vocabulary (``vocab_size`` 0 = unknown). Raises ``ApiError``."""
    if vocab_size and token_ids and max(token_ids) >= vocab_size:
        raise refused(code, f"{param} holds an id outside the vocabulary of {vocab_size} tokens", param=param)


def check_stop_tokens(
    token_ids: Sequence[int] | None, min_tokens: int | None, vocab_size: int, param: str, code: str = "invalid_value"
) -> None:
    """With ``min_tokens`` an engine masks the stop tokens at first: it indexes its vocabulary with them. Otherwise one
    that does not exist just never comes. Raises ``ApiError``."""
    if token_ids and min_tokens:
        check_vocabulary(token_ids, vocab_size, param, code)


def check_length(prompt_tokens: int, info: ModelInfo, *, room: int = 1) -> None:
    """The prompt and ``room`` more tokens must fit the context (``context_length`` 0 = unknown). Raises ``ApiError``
    (``context_length_exceeded``)."""
    limit = info.context_length
    if limit and prompt_tokens + room > limit:
        text = (
            f"This model's maximum context length is {limit} tokens. However, your request has {prompt_tokens} input "
            "tokens. Please reduce the length of the input."
        )
        raise refused("context_length_exceeded", text)


def empty_prompt(param: str, code: str = "prompt_empty") -> ApiError:
    """A prompt without a single token."""
    return refused(code, f"{param}: the prompt is empty", param=param)


def effective_vocabulary(info: ModelInfo, tokenizer_size: int) -> int:
    """Ids below this exist. A worker may report its vocabulary without the added tokens, a tokenizer without the
    padding of the embedding table; 0 = neither says."""
    return max(info.vocab_size, tokenizer_size) if info.vocab_size or tokenizer_size else 0
