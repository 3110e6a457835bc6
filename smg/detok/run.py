"""One generation request: its engine calls, its choices, its answer.

A run is fed by engine callbacks on the loop and never awaits. It ends in exactly one of four ways: answered, failed,
handed back to the router for another worker (nothing was sent yet), or aborted because the client is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from smg.api.errors import ApiError, refused, render_error
from smg.api.grpc_status import breaker_outcome, http_status, is_retryable
from smg.api.paths import path_of_api
from smg.api.stream_errors import stream_error_frames
from smg.detok.choice import Choice, make_choice
from smg.detok.host import Host
from smg.detok.render import Renderer, make_renderer
from smg.detok.usage import Usage
from smg.engines.base import Call, Delta, EngineError, Sink
from smg.messages import (
    Dispatch,
    GenerationPlan,
    Redispatch,
    Reply,
    StreamEnd,
    StreamStart,
    WorkerRef,
    WorkerReport,
)  # fmt: skip
from smg.vocab.decode import DecodeTable

log = logging.getLogger("smg.detok.run")

# The gateway ends overdue requests itself; the engine's own deadline is the net below it.
ENGINE_DEADLINE_SLACK_SECS = 5.0


def _shown(choice: Choice, token_ids: Sequence[int]) -> Sequence[int]:
    """Of the tokens just fed to ``choice``, those that belong to the answer."""
    return token_ids[: -choice.surplus] if choice.surplus else token_ids


class PartSink(Sink):
    """Receives the engine stream of one prompt part. ``running`` counts the choices that have not ended, ``cut_short``
    tells whether the gateway ended one."""

    __slots__ = ("call", "choices", "cut_short", "done", "first", "part_index", "run", "running", "seen", "worker")

    def __init__(self, run: Run, part_index: int, worker: WorkerRef, choices: list[Choice]) -> None:
        super().__init__()
        self.run = run
        self.first = choices[0]
        self.done = False
        self.seen = False
        self.choices = choices
        self.part_index = part_index
        self.worker = worker
        self.running = len(choices)
        self.cut_short = False
        self.call: Call | None = None

    def on_delta(self, delta: Delta) -> None:
        """A message of the stream. Tokens of one loop iteration are collected and read together (``Run.flush``)."""
        if self.done:
            return
        self.seen = True
        choice = self.first
        if delta.index:
            if delta.index >= len(self.choices):
                return
            choice = self.choices[delta.index]
        if choice.finish_reason is not None:
            return  # ended here, while the engine goes on
        run = self.run
        if not run.first_token:
            run.first_token = time.monotonic()
        if delta.finish_reason is None and choice.logprobs is None:
            if not choice.pending:
                choice.pending = delta.token_ids
            else:
                choice.behind += delta.token_ids
            if choice.last is not delta:
                choice.settle()
                choice.last = delta
            if not run.dirty:
                run.dirty = True
                run.out.write(run)
        else:
            run.on_message(self, choice, delta)

    def on_end(self) -> None:
        if not self.done:
            self.run.on_end(self)

    def on_error(self, error: EngineError) -> None:
        if not self.done:
            self.run.on_error(self, error)


class Run:
    """See the module's text. ``dirty``: ``out`` will call ``flush`` at the end of this loop iteration. ``sole`` is the
    sink of a run that has one choice."""

    __slots__ = (
        "choices", "deadline", "dirty", "dispatched", "first_token", "frontend", "host", "out", "over", "plan",
        "renderer", "route", "seq", "sinks", "sole", "streaming", "workers",
    )  # fmt: skip

    def __init__(
        self,
        host: Host,
        dispatch: Dispatch,
        plan: GenerationPlan,
        table: DecodeTable,
        renderer: Renderer | None = None,
    ) -> None:
        n = plan.response.n
        keep_ids = plan.response.return_token_ids or plan.response.api == "generate"
        choices = [make_choice(i, plan, table, keep_token_ids=keep_ids) for i in range(n * len(plan.parts))]
        # First what every token needs, side by side.
        self.first_token = 0.0
        self.dirty = False
        self.over = False
        self.streaming = False
        self.sole: PartSink | None = None
        self.out = host.out
        self.renderer: Renderer = renderer or make_renderer(plan, choices, table)
        self.seq = dispatch.seq
        self.frontend = dispatch.frontend
        self.choices = choices
        self.host = host
        self.plan = plan
        self.route = dispatch.route
        self.workers = dispatch.workers
        self.deadline = plan.deadline
        self.dispatched = time.monotonic()
        self.sinks = [
            PartSink(self, index, worker, choices[index * n : (index + 1) * n])
            for index, worker in enumerate(self.workers[: len(plan.parts)])
        ]
        if len(choices) == 1:
            self.sole = self.sinks[0]

    def start(self) -> None:
        """Send every part to its worker."""
        response = self.plan.response
        timeout = self.deadline - time.time() + ENGINE_DEADLINE_SLACK_SECS if self.deadline else None
        for sink, part in zip(self.sinks, self.plan.parts, strict=True):
            request = part.requests.get(sink.worker.kind)
            if request is None:
                message = f"no request was built for engine kind {sink.worker.kind}"
                self.on_error(sink, EngineError("UNIMPLEMENTED", message))
                return
            client = self.host.client(sink.worker)
            sink.call = client.generate(
                part.engine_id, request, sink, streaming=response.stream, dp_rank=sink.worker.dp_rank, timeout=timeout
            )
            if self.over:
                return

    # Engine ---------------------------------------------------------------------------------------

    def on_message(self, sink: PartSink, choice: Choice, delta: Delta) -> None:
        """A message that is read at once: the last one of a choice, or one with log-probabilities."""
        if choice.pending:
            self._read_pending(sink, choice)
            if choice.finish_reason is not None:
                return
        if delta.finish_reason == "error":
            self._engine_error(sink)
            return
        events = choice.feed(delta.token_ids, delta.logprobs)
        if delta.finish_reason is None:
            choice.started = True
            choice.absorb_counts(delta)
            if choice.stop_string_matched:
                events += choice.end_by_gateway()
        else:
            events += choice.complete(delta)
        self.renderer.on_tokens(choice, _shown(choice, delta.token_ids), events, delta.logprobs)
        if choice.finish_reason is not None:
            self._choice_finished(sink, choice)
        else:
            self._written()

    def _read_pending(self, sink: PartSink, choice: Choice) -> None:
        """Read the tokens that this loop iteration collected."""
        token_ids = choice.take_pending()
        events = choice.feed(token_ids)
        if choice.ended_by_gateway and choice.stop_string_matched:
            events += choice.end_by_gateway()
        self.renderer.on_tokens(choice, _shown(choice, token_ids), events, None)
        if choice.finish_reason is not None:
            self._choice_finished(sink, choice)

    def _written(self) -> None:
        """The renderer has something: send it at the end of the loop iteration."""
        if self.renderer.streaming and not self.dirty:
            self.dirty = True
            self.out.write(self)

    def _choice_finished(self, sink: PartSink, choice: Choice) -> None:
        self.renderer.on_choice_end(choice)
        sink.running -= 1
        sink.cut_short = sink.cut_short or choice.cut_short
        if not sink.done and not sink.running:
            sink.done = True
            if sink.cut_short and sink.call is not None:
                sink.call.abort()
            self._report(sink, "success")
        elif not sink.done and sink.call is not None and choice.cut_short:
            sink.call.abort_choice(choice.index - sink.choices[0].index)
        if self._all_done():
            self._answer()
        else:
            self._written()

    def on_end(self, sink: PartSink) -> None:
        """The engine's stream closed. Without a finish of every choice the generation is incomplete."""
        self._read_all_pending(sink)
        if sink.done or self.over:
            return
        sink.done = True
        self._report(sink, "failure")
        if not self.plan.response.stream:
            self._fail(
                refused("no_responses_from_server", "The engine closed the stream without an answer", status=500)
            )
            return
        for choice in sink.choices:
            if choice.finish_reason is None:
                self.renderer.on_tokens(choice, (), choice.flush(), None)
        if self._all_done():
            self._answer()

    def _all_done(self) -> bool:
        sinks = self.sinks
        return sinks[0].done if len(sinks) == 1 else all(sink.done for sink in sinks)

    def _read_all_pending(self, sink: PartSink) -> None:
        for choice in sink.choices:
            if choice.pending and not sink.done:
                self._read_pending(sink, choice)
        if not self.over and not self.streaming and self.renderer.streaming:
            self._send_collected()

    def _engine_error(self, sink: PartSink) -> None:
        """The engine finished a choice with the reason "error"."""
        sink.done = True
        if sink.call is not None:
            sink.call.abort()
        self._report(sink, "failure")
        message = "engine finished the request with an error (see engine logs)"
        if self.streaming:
            self._break_stream(message)
        else:
            self._fail(refused("worker_stream_failed", f"Generation failed: {message}", status=500))

    def on_error(self, sink: PartSink, error: EngineError) -> None:
        """The engine call failed."""
        self._read_all_pending(sink)
        if sink.done or self.over:
            return
        sink.done = True
        again = not self.streaming and not sink.seen and is_retryable(error.code)
        self._report(sink, "neutral" if again else breaker_outcome(error.code))
        if self.streaming:
            if sink.call is not None:
                sink.call.abort()
            self._break_stream(error.message)
        elif again:
            self._hand_back(sink, error)
        elif sink.seen:
            self._fail(refused("worker_stream_failed", f"Stream failed: {error.message}", status=500))
        else:
            message = f"Failed to start generation: {error.message}"
            self._fail(refused("start_generation_failed", message, status=http_status(error.code)))

    def _hand_back(self, sink: PartSink, error: EngineError) -> None:
        self.host.to_router(Redispatch(self.route, sink.worker.name, error.code, error.message, self.host.index))
        self._close(abort=True)

    def _report(self, sink: PartSink, outcome: str) -> None:
        tokens = 0
        for choice in sink.choices:
            choice.settle()
            tokens += choice.output_tokens
        prompt = self.plan.parts[sink.part_index].prompt_tokens
        worker = sink.worker
        key = self.route.routing_key
        self.host.to_router(WorkerReport(worker.url, self.host.index, outcome, prompt, tokens, worker.dp_rank, key))

    # Client ---------------------------------------------------------------------------------------

    def _headers(self) -> list[tuple[str, str]]:
        headers = [("x-smg-routed-worker-id", self.workers[0].url)]
        if self.plan.response.api in ("chat", "messages"):
            headers.append(("x-smg-parser", "legacy"))
        return headers

    def flush(self) -> None:
        """The end of a loop iteration: read what it brought and send what that gave."""
        sole = self.sole
        if sole is not None:
            if sole.first.pending and not sole.done:
                self._read_pending(sole, sole.first)
        else:
            self._read_choices()
        self.dirty = False
        if not self.over:
            self._send_collected()

    def _read_choices(self) -> None:
        for sink in self.sinks:
            for choice in sink.choices:
                if choice.pending and choice.finish_reason is None and not self.over:
                    self._read_pending(sink, choice)

    def _send_collected(self) -> None:
        data = self.renderer.take()
        if not data:
            return
        if self.streaming:
            self.out.to_stream(self.frontend, self.seq, data)
        else:
            self._begin_stream(data)

    def _begin_stream(self, data: bytes) -> None:
        self.streaming = True
        headers = [
            ("content-type", "text/event-stream; charset=utf-8"),
            ("cache-control", "no-cache"),
            ("connection", "keep-alive"),
            *self._headers(),
        ]
        self.out.to_frontend(self.frontend, StreamStart(self.seq, headers, data))

    def _answer(self) -> None:
        usage = self.usage()
        if self.renderer.streaming:
            self.renderer.on_end(usage)
            data = self.renderer.take()
            if not self.streaming:
                self._begin_stream(b"")
            self._send_end(data)
        else:
            body = self.renderer.body(usage)
            headers = [("content-type", "application/json"), *self._headers()]
            self.out.to_frontend(self.frontend, Reply(self.seq, 200, headers, body))
        self.host.metrics.answered(self, usage)
        self._close(abort=False)

    def _send_end(self, data: bytes, error_code: str = "") -> None:
        self.out.to_frontend(self.frontend, StreamEnd(self.seq, data, error_code))

    def _break_stream(self, message: str) -> None:
        path = path_of_api(self.plan.response.api)
        self._send_end(self.renderer.take() + stream_error_frames(path, message), "stream_error")
        self._close(abort=True)

    def _fail(self, error: ApiError) -> None:
        path = path_of_api(self.plan.response.api)
        status, headers, body = render_error(error, path, self.plan.response.request_id)
        if self.renderer.streaming and self.streaming:
            self._break_stream(error.message)
            return
        self.out.to_frontend(self.frontend, Reply(self.seq, status, headers, body))
        self._close(abort=True)

    def timed_out(self) -> None:
        """The request's deadline passed."""
        message = "the request took longer than the gateway allows"
        if self.streaming:
            self._break_stream(message)
        else:
            self._fail(refused("request_timeout", message, status=504))

    def abort(self) -> None:
        """The client is gone."""
        self._close(abort=True)

    def usage(self) -> Usage:
        """Token counts so far."""
        usage = Usage()
        for sink, part in zip(self.sinks, self.plan.parts, strict=True):
            usage.add_prompt(part, sink.choices)
        return usage

    def _close(self, *, abort: bool) -> None:
        if self.over:
            return
        self.over = True
        for sink in self.sinks:
            if not sink.done:
                sink.done = True
                if abort and sink.call is not None:
                    sink.call.abort()
                self._report(sink, "aborted")
            sink.call = None
        self.sole = None
        self.sinks = []  # what refers to each other would wait for the garbage collector
        self.host.finished(self)
