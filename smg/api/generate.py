"""``POST /generate``: the engine-style API. Request type, validation, sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from smg.api.completions import MAX_N, Prompt, check_json_schema
from smg.api.decode import BodyDecoder
from smg.api.errors import ApiError, refused
from smg.api.fields import (
    I32,
    MAX_ENGINE_STOP_STRINGS,
    U32,
    UINT,
    Request,
    StringOrList,
    check_decimal,
    check_integer,
    check_seed,
    check_stop,
    check_top_k,
    fill_defaults,
    stop_strings,
)
from smg.engines.base import Sampling

UNKNOWN_MODEL = "unknown"

TokenId = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class SamplingParams(Request):
    """``sampling_params``; ``json_schema`` is JSON text."""

    temperature: float | None = None
    max_new_tokens: U32 | None = None
    min_new_tokens: U32 | None = None
    top_p: float | None = None
    top_k: I32 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: StringOrList | None = None
    stop_token_ids: list[U32] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    n: U32 | None = None
    sampling_seed: UINT | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None


class GenerateRequest(Request):
    """The body. ``text`` wins when both inputs are given."""

    model: str = UNKNOWN_MODEL
    text: str | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: SamplingParams | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: I32 | None = None
    logprob_start_len: I32 | None = None
    token_ids_logprob: list[U32] | None = None
    return_hidden_states: bool | None = None
    log_metrics: bool | None = None
    rid: str | None = None


_DECODER = BodyDecoder(GenerateRequest, style="extractor")
_EMPTY = SamplingParams()


def decode(body: bytes, headers: Mapping[str, str]) -> GenerateRequest:
    """The typed body. Raises ``ApiError`` (plain text)."""
    return _DECODER.decode(body, headers)


def prompt_of(request: GenerateRequest) -> Prompt:
    """The text or the token ids. Raises ``ApiError`` (``resolve_input_failed``)."""
    if request.text is not None:
        return request.text
    if request.input_ids is None:
        raise refused("resolve_input_failed", "Either `text` or `input_ids` must be provided")
    ids = [token for token in request.input_ids if type(token) is int]
    if len(ids) != len(request.input_ids):
        raise refused("resolve_input_failed", "Batches of input_ids are not supported, send one request per prompt")
    if ids and min(ids) < 0:
        raise refused("resolve_input_failed", "input_ids must be non-negative")
    return ids


def validate(request: GenerateRequest) -> SamplingParams:
    """Ranges an engine would refuse, and the one-constraint rule. Raises ``ApiError``."""
    params = request.sampling_params or _EMPTY
    given = (params.regex, params.ebnf, params.json_schema)
    if sum(constraint is not None for constraint in given) > 1:
        raise refused("build_request_failed", "Multiple structured constraints are not allowed")
    try:
        _check_ranges(params)
    except ApiError as error:
        raise refused("build_request_failed", error.message, param=error.param) from None
    return params


def _check_ranges(params: SamplingParams) -> None:
    prefix = "sampling_params."
    check_decimal(prefix + "temperature", params.temperature, 0, float("inf"))
    check_decimal(prefix + "top_p", params.top_p, 0, 1, above=True)
    check_top_k(prefix + "top_k", params.top_k or -1)
    check_decimal(prefix + "min_p", params.min_p, 0, 1)
    check_decimal(prefix + "frequency_penalty", params.frequency_penalty, -2, 2)
    check_decimal(prefix + "presence_penalty", params.presence_penalty, -2, 2)
    check_decimal(prefix + "repetition_penalty", params.repetition_penalty, 0, 2)
    check_integer(prefix + "n", params.n, 1, MAX_N)
    check_seed(prefix + "sampling_seed", params.sampling_seed)
    check_stop(prefix + "stop", params.stop, MAX_ENGINE_STOP_STRINGS)
    if params.min_new_tokens is not None and params.max_new_tokens is not None:
        check_integer(prefix + "min_new_tokens", params.min_new_tokens, 0, params.max_new_tokens)
    check_json_schema(params.json_schema, prefix + "json_schema")


def sampling_of(params: SamplingParams, defaults: Mapping[str, float]) -> Sampling:
    """The engine's sampling parameters; ``defaults`` is the worker's generation config. ``top_k`` 0 means off."""
    sampling = Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=-1 if params.top_k == 0 else params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        n=params.n or 1,
        sampling_seed=params.sampling_seed,
        stop=stop_strings(params.stop),
        stop_token_ids=params.stop_token_ids or (),
        ignore_eos=bool(params.ignore_eos),
        no_stop_trim=bool(params.no_stop_trim or params.include_stop_str_in_output),
        skip_special_tokens=params.skip_special_tokens is not False,
    )
    fill_defaults(sampling, defaults)
    return sampling
