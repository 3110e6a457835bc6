"""Field types, range rules and sampling defaults that several APIs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from smg.api.errors import ApiError, invalid
from smg.engines.base import Sampling

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
UINT = Annotated[int, Meta(ge=0)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
I64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StringOrList = str | list[str]

MAX_STOP_STRINGS = 4
MAX_ENGINE_STOP_STRINGS = 1024

_STREAM_OPTIONS = "The 'stream_options' parameter is only allowed when 'stream' is enabled"
_BIAS_KEYS = "keys must be non-negative integer token ids"

ONE_CONSTRAINT = "only one structured output constraint (regex, ebnf, or json_schema) can be active at a time"

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a worker's generation config may fill in; its other keys are not used."""


class Request(msgspec.Struct, kw_only=True, gc=False):
    """Base of the request bodies. Unknown members are ignored, ``null`` is as good as absent for optional members."""


class StreamOptions(Request):
    """``stream_options`` of the OpenAI APIs."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingRequest(Request):
    """Sampling members that chat and completions have in common. ``include_stop_str_in_output`` is another name
    of ``no_stop_trim``."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: I32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    n: U32 | None = None
    stop: StringOrList | None = None
    stop_token_ids: list[U32] | None = None
    seed: I64 | None = None
    sampling_seed: UINT | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: U32 | None = None
    min_tokens: U32 | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_hidden_states: bool | None = None
    return_token_ids: bool | None = None
    rid: str | None = None
    lora_path: str | None = None
    session_params: dict[str, Any] | None = None


def check_decimal(field: str, value: float | None, low: float, high: float, *, above: bool = False) -> None:
    """``low <= value <= high`` (``above``: ``low < value``), else ``decimal_below_min_value`` /
    ``decimal_above_max_value``."""
    if value is None or (low < value <= high) or (value == low and not above):
        return
    if value > high:
        text = f"decimal above maximum value. Expected a value <= {high:.1f}, but got {value:g} instead."
        raise invalid("decimal_above_max_value", f"Invalid '{field}': {text}", field)
    bound = f"{'>' if above else '>='} {low:.1f}"
    text = f"decimal below minimum value. Expected a value {bound}, but got {value:g} instead."
    raise invalid("decimal_below_min_value", f"Invalid '{field}': {text}", field)


def check_integer(field: str, value: int | None, low: int, high: int | None = None) -> None:
    """``low <= value <= high``, else ``integer_below_min_value`` / ``integer_above_max_value``."""
    if value is None:
        return
    if value < low:
        text = f"integer below minimum value. Expected a value >= {low}, but got {value} instead."
        raise invalid("integer_below_min_value", f"Invalid '{field}': {text}", field)
    if high is not None and value > high:
        text = f"integer above maximum value. Expected a value <= {high}, but got {value} instead."
        raise invalid("integer_above_max_value", f"Invalid '{field}': {text}", field)


def check_top_k(field: str, value: int | None) -> None:
    """-1 (off) or at least 1."""
    if value is not None and value != -1 and value < 1:
        raise invalid("invalid_value", f"must be -1 (disabled) or at least 1, but got {value}", field)


def stop_strings(value: StringOrList | None) -> Sequence[str]:
    """The stop strings as a list."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def check_seed(field: str, value: int | None) -> None:
    """Seeds end at 64 bits."""
    if value is not None and value >= 2**64:
        raise ApiError(400, "invalid_type", f"Invalid JSON data: {field}: expected a 64-bit integer", field)


def too_long(field: str, limit: int, length: int) -> ApiError:
    """An array with more than ``limit`` entries."""
    text = f"Expected an array with maximum length {limit}, but got an array with length {length} instead."
    return invalid("array_above_max_length", f"Invalid '{field}': array too long. {text}", field)


def check_stop(field: str, value: StringOrList | None, limit: int = MAX_STOP_STRINGS) -> None:
    """No empty string, at most ``limit`` of them."""
    strings = stop_strings(value)
    if len(strings) > limit:
        raise too_long(field, limit, len(strings))
    if not all(strings):
        raise invalid("invalid_value", "stop sequences cannot be empty", field)


def check_sampling_ranges(request: SamplingRequest, max_n: int) -> None:
    """Range rules of single members, in alphabetical order: the first broken one is reported."""
    check_decimal("frequency_penalty", request.frequency_penalty, -2, 2)
    check_decimal("min_p", request.min_p, 0, 1)
    check_integer("n", request.n, 1, max_n)
    check_decimal("presence_penalty", request.presence_penalty, -2, 2)
    check_decimal("repetition_penalty", request.repetition_penalty, 0, 2)
    check_seed("sampling_seed", request.sampling_seed)
    check_stop("stop", request.stop)
    check_decimal("temperature", request.temperature, 0, 2)
    check_top_k("top_k", request.top_k)
    check_decimal("top_p", request.top_p, 0, 1, above=True)


def check_stream_options(request: SamplingRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options_requires_stream", _STREAM_OPTIONS)


def token_bias(logit_bias: Mapping[str, float] | None, vocab_size: int = 0) -> dict[int, float] | None:
    """``logit_bias`` with integer keys. ``vocab_size`` 0 = unknown. Raises ``logit_bias_invalid_key``."""
    if not logit_bias:
        return None
    bias: dict[int, float] = {}
    for key, value in logit_bias.items():
        digits = key[1:] if key[:1] == "+" else key
        token = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 20 else -1
        if token < 0:
            raise invalid("logit_bias_invalid_key", f"Invalid key in 'logit_bias': {key!r}; {_BIAS_KEYS}")
        if vocab_size and token >= vocab_size:
            raise invalid("logit_bias_invalid_key", f"token id {token} of 'logit_bias' is outside the vocabulary")
        bias[token] = value
    return bias


def sampling_of(
    request: SamplingRequest, defaults: Mapping[str, float], *, max_tokens: int | None, vocab_size: int = 0
) -> Sampling:
    """The engine's sampling parameters: the request's values, and ``defaults`` (the worker's generation config) for
    what
    the request leaves unset."""
    sampling = Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        n=request.n or 1,
        seed=request.seed,
        sampling_seed=request.sampling_seed,
        stop=stop_strings(request.stop),
        stop_token_ids=request.stop_token_ids or (),
        ignore_eos=bool(request.ignore_eos),
        no_stop_trim=bool(request.no_stop_trim or request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        logit_bias=token_bias(request.logit_bias, vocab_size),
    )
    if defaults:
        fill_defaults(sampling, defaults)
    return sampling


def fill_defaults(sampling: Sampling, defaults: Mapping[str, float]) -> None:
    """Put the worker's generation config where ``sampling`` is unset."""
    for name in SAMPLING_DEFAULTS:
        value = defaults.get(name)
        if value is not None and getattr(sampling, name) is None:
            setattr(sampling, name, int(value) if name == "top_k" else float(value))


def unsupported_media(kind: str, model: str) -> ApiError:
    """Media input: no worker of this gateway takes any."""
    return ApiError(400, "multimodal_not_supported", f"{kind} input is not supported by model '{model}'", gateway=True)
