"""What plans of equal requests share. Clients send the same parameters again and again with other prompts; a ``Mold``
is everything of a plan but its prompt and its ids, the engine's parameters already encoded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from smg.api.blocks import block_hashes, token_bytes
from smg.api.errors import ApiError, refused
from smg.api.plan import Codec, Draft, EncodedPrompt, Planned
from smg.engines.base import BuildError, EngineRequest, PromptEncoder
from smg.messages import ModelInfo, PromptPart, ResponsePlan, RoutePart, StopPlan
from smg.models.constraints import engine_constraint

_replaced = msgspec.structs.replace


class Mold:
    """See the module's text. ``encoders`` holds the engine kinds that can take the request."""

    __slots__ = (
        "_block_size", "_endpoint", "_info", "_keep_ids", "_parser", "_refusal", "_response", "_stop",
        "encoders",
    )  # fmt: skip

    def __init__(self, draft: Draft, codecs: Mapping[str, Codec], block_size: int) -> None:
        """Raises ``ApiError`` when no engine kind of the model can take the request."""
        sampling = draft.sampling
        strings = draft.stop_strings if draft.stop_strings is not None else sampling.stop
        self._info: ModelInfo = draft.info
        self._block_size = block_size if draft.info.prefix_routed else 0
        self._endpoint = draft.engine_api
        self._parser = draft.parser
        self._keep_ids = draft.return_token_ids
        self._refusal = draft.refusal
        self._stop = StopPlan(
            strings=list(strings),
            token_ids=list(sampling.stop_token_ids),
            eos_ids=[] if sampling.ignore_eos else list(draft.eos_ids),
            keep=sampling.no_stop_trim or draft.keep_stop,
        )
        self._response = _response(draft)
        self.encoders = self._bind(draft, codecs)

    def planned(
        self, engine_ids: Sequence[str], prompts: Sequence[EncodedPrompt], *,
        body_id: str, request_id: str, routing_key: str = "",
    ) -> Planned:  # fmt: skip
        """The plan for prompts. Raises ``ApiError`` when no engine kind can take one of them."""
        size = self._block_size
        return Planned(
            model=self._info.id,
            tokenizer=self._info.tokenizer,
            endpoint=self._endpoint,
            request_id=request_id,
            parts=[self._part(*pair) for pair in zip(engine_ids, prompts, strict=True)],
            route_parts=[
                RoutePart(len(prompt.ids), block_hashes(prompt.ids, size) if size else b"") for prompt in prompts
            ],
            stop=self._stop,
            parser=self._parser,
            response=_replaced(self._response, body_id=body_id, request_id=request_id, created=int(time.time())),
            routing_key=routing_key,
        )

    def _part(self, engine_id: str, prompt: EncodedPrompt) -> PromptPart:
        text, ids, uncounted, echo = prompt
        requests: dict[str, bytes] = {}
        failure = ""
        for kind, encode in self.encoders.items():
            try:
                requests[kind] = encode(engine_id, text, ids)
            except BuildError as error:
                failure = str(error)
        if not requests:
            raise unbuildable(self._info, self._refusal, failure)
        return PromptPart(
            engine_id=engine_id,
            prompt_tokens=len(ids) - uncounted,
            requests=requests,
            text=echo,
            token_ids=token_bytes(ids) if self._keep_ids or echo is not None else None,
            uncounted=uncounted,
        )

    def _bind(self, draft: Draft, codecs: Mapping[str, Codec]) -> dict[str, PromptEncoder]:
        encoders: dict[str, PromptEncoder] = {}
        failure = ""
        tool = draft.tool.constraint if draft.tool is not None else None
        for kind in draft.info.kinds:
            codec = codecs.get(kind)
            if codec is None:
                failure = f"engine kind {kind!r} is not known"
                continue
            request = _engine_request(draft)
            try:
                request.constraint = engine_constraint(
                    kind, tool, draft.output, response_format=draft.response_format, chat=draft.engine_api == "chat"
                )
                encoders[kind] = codec.bind(request)
            except BuildError as error:
                failure = str(error)
        if not encoders:
            raise unbuildable(draft.info, draft.refusal, failure)
        return encoders


def unbuildable(info: ModelInfo, code: str, text: str) -> ApiError:
    """No engine kind of the model can take a request; ``text`` says why not."""
    if not info.kinds:
        return refused("no_available_workers", f"No available workers for model '{info.id}'", status=503)
    head = "" if code == "build_request_failed" else "Invalid request parameters: "
    return refused(code, head + text)


def _engine_request(draft: Draft) -> EngineRequest:
    prompt = draft.prompts[0]
    return EngineRequest(
        request_id=draft.engine_ids[0],
        api=draft.engine_api,
        text=prompt.text,
        token_ids=prompt.ids,
        stream=draft.stream,
        sampling=draft.sampling,
        logprobs=draft.logprobs,
        prompt_logprobs=draft.prompt_logprobs,
        logprob_start_len=draft.logprob_start_len,
        token_ids_logprob=draft.token_ids_logprob,
        reasoning_on=draft.reasoning_on,
        stop_encodings=draft.stop_encodings,
        return_hidden_states=draft.return_hidden_states,
        log_metrics=draft.log_metrics,
        eos_ids=draft.eos_ids,
        watched=bool(draft.sampling.stop if draft.stop_strings is None else draft.stop_strings),
        keep_stop_token=draft.parser.harmony,
    )


def _response(draft: Draft) -> ResponsePlan:
    return ResponsePlan(
        api=draft.api,
        body_id=draft.body_id,
        request_id=draft.request_id,
        model=draft.info.id,
        created=int(time.time()),
        stream=draft.stream,
        n=draft.sampling.n,
        include_usage=draft.include_usage,
        continuous_usage=draft.continuous_usage,
        logprobs=draft.logprobs,
        return_token_ids=draft.return_token_ids,
        skip_special_tokens=draft.skip_special_tokens,
        spaces_between_special_tokens=draft.sampling.spaces_between_special_tokens,
        options=draft.options,
    )


def build_plan(draft: Draft, codecs: Mapping[str, Codec], block_size: int) -> Planned:
    """The plan of a generation. Raises ``ApiError`` when no engine kind of the model can take the request."""
    return fill(Mold(draft, codecs, block_size), draft)


def fill(mold: Mold, draft: Draft) -> Planned:
    """The plan of the draft that ``mold`` was made of."""
    return mold.planned(
        draft.engine_ids,
        draft.prompts,
        body_id=draft.body_id,
        request_id=draft.request_id,
        routing_key=draft.routing_id,
    )


class EmbeddingMold(Mold):
    """The same for requests of embeddings and classifications."""

    __slots__ = ()

    def _bind(self, draft: Draft, codecs: Mapping[str, Codec]) -> dict[str, PromptEncoder]:
        usable = [kind for kind in draft.info.kinds if kind in codecs and codecs[kind].supports_embedding]
        if not usable and draft.info.kinds:
            text = f"Embeddings are not supported by the workers of model '{draft.info.id}'"
            raise refused("unsupported_backend", text, status=501)
        if not usable:
            raise unbuildable(draft.info, draft.refusal, "")
        return {kind: codecs[kind].embed_request for kind in usable}


def build_embedding_plan(draft: Draft, codecs: Mapping[str, Codec], block_size: int) -> Planned:
    """The plan of an embedding (or classification) request. Raises ``ApiError`` (501 ``unsupported_backend``)."""
    return fill(EmbeddingMold(draft, codecs, block_size), draft)
