"""One response from its request to its last event: the loop of generations and tool calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from smg.api.errors import ApiError, refused
from smg.api.ids import uuid7
from smg.api.responses import turn_encoder, wants_logprobs
from smg.frontend.sessions.events import EventWriter
from smg.frontend.sessions.items import Item, approved_requests, model_items
from smg.frontend.sessions.job import Job, State, Usage, response_object
from smg.frontend.sessions.outlets import Outlet
from smg.frontend.sessions.output import Output
from smg.frontend.sessions.output_items import Call, arguments_of
from smg.frontend.sessions.results import bounded, model_text
from smg.frontend.sessions.turn import TurnExchange
from smg.frontend.sessions.turns import (
    build_turn,
    first_choice,
    hosted_types,
    later_choice,
    server_requests,
    tool_names,
)
from smg.mcp.base import ToolError, ToolResult, ToolSet
from smg.messages import TurnEnd, TurnEvent

if TYPE_CHECKING:
    from smg.frontend.sessions.manager import Sessions

log = logging.getLogger("smg.frontend.sessions")

DEFAULT_TOOL_CALLS = 10
MAX_TOOL_CALLS = 1000
CALLS_AT_ONCE = 8
TOOL_CALL_SECS = 300.0
MAX_RESULT_BYTES = 4 << 20


class Ending(NamedTuple):
    """How a response ends: its status, why it is incomplete, the error of a failed one."""

    status: str
    incomplete: str | None = None
    error: dict[str, str] | None = None


CANCELLED = Ending("cancelled")


class Session:
    """Runs one job; ``run`` is its task's body. ``output`` and ``state`` may be read at any time."""

    def __init__(self, sessions: Sessions, job: Job, outlet: Outlet) -> None:
        self.sessions = sessions
        self.job = job
        self.outlet = outlet
        self.state = State("queued" if job.background else "in_progress")
        self.usage = Usage()
        self.writer = EventWriter(job.stream)
        self.names = tool_names(job.request, ())
        self.tools: ToolSet | None = None
        self.task: asyncio.Task[None] | None = None
        asked = job.request.max_tool_calls
        self._most_calls = min(asked, MAX_TOOL_CALLS) if asked else DEFAULT_TOOL_CALLS
        self._own_limit = not asked or asked > MAX_TOOL_CALLS
        self._cancelled = False
        self._ending = False
        self._at_once = asyncio.Semaphore(CALLS_AT_ONCE if job.request.parallel_tool_calls is not False else 1)
        self.output = Output(self.writer, self.names, self._most_calls, logprobs=wants_logprobs(job.request))

    # Life ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Answer the request; every failure becomes part of the answer. Raises only ``CancelledError``, when nobody
        waits for the answer any more."""
        left = self.job.deadline - time.time() if self.job.deadline else None
        try:
            async with asyncio.timeout(left):
                ending = await self._answer()
            await self._end(ending)
        except ApiError as error:
            await self._fail(error)
        except TimeoutError:
            await self._fail(refused("request_timeout", "the request took longer than the gateway allows", status=504))
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            await self._end(CANCELLED)
        except Exception:
            log.exception("response failed", extra={"request_id": self.job.request_id})
            await self._fail(refused("internal_error", "the response could not be completed", status=500))
        finally:
            if self.tools is not None:
                await self.tools.close()

    def cancel(self) -> None:
        """End the response with status ``cancelled``, unless it has its final status already."""
        if self.task is not None and not self.task.done() and not self._ending:
            self._cancelled = True
            self.task.cancel()

    def shown(self) -> dict[str, Any]:
        """The response object as it stands."""
        return response_object(self.job, self.state, self.output.items)

    # The loop ------------------------------------------------------------------------------------

    async def _answer(self) -> Ending:
        """All generations and tool calls. Raises ``ApiError``."""
        await self._open()
        items = model_items((*self.job.history, *self.job.given))
        items += await self._run_approved()
        choice = first_choice(self.job.request, self.job.parsed.choice, self.names)
        while True:
            known = len(self.output.items)
            end = await self._generate(items, choice)
            cut = end is None or end.finish_reason == "length"
            calls = self.output.end_turn(cut=cut)
            if cut:
                self._abandon(calls)
                return Ending("incomplete", incomplete="max_output_tokens")
            ran = [call for call in calls if call.runs]
            items += [item for item in self.output.items[known:] if item["type"] in ("message", "reasoning")]
            items += await self._run_calls(ran)
            if self.output.over_limit and self._own_limit:
                text = f"Internal tool call safety limit ({self._most_calls}) reached"
                return Ending("failed", error={"code": "max_tool_calls_exceeded", "message": text})
            if not ran or len(ran) < len(calls):
                return Ending("completed")
            choice = later_choice(choice)

    async def _open(self) -> None:
        """Say that the response exists, connect its tools and list them."""
        first = "queued" if self.job.background else "in_progress"
        self.writer.event("response.created", {"response": self.shown()})
        if first == "queued":
            self.writer.event("response.queued", {"response": self.shown()})
            self._flush()
            self.state.status = "in_progress"
            await self.sessions.began(self)
        self.writer.event("response.in_progress", {"response": self.shown()})
        servers = server_requests(self.job.request)
        hosted = hosted_types(self.job.request)
        host = self.sessions.tool_host
        if host is not None and (servers or host.hosted_types.intersection(hosted)):
            self.tools = await host.connect(servers, hosted)
            self.names = tool_names(self.job.request, self.tools.servers)
            self.output.names = self.names
            for server in self.tools.servers:
                if server.listed:
                    self.output.list_tools(server)
        if self.job.background:
            self._flush()

    async def _generate(self, items: Sequence[Item], choice: Any) -> TurnEnd | None:
        """One turn around the ring; None when there is no room for another token. Raises ``ApiError``."""
        limit = self.job.request.max_output_tokens
        room = limit - self.usage.output if limit is not None else None
        if room is not None and room <= 0:
            return None
        job, process = self.job, self.sessions.process
        turn = build_turn(job, self.names, items, choice, room)

        def encode() -> bytes:
            turn.engine_id = f"{job.request_id}-{uuid7()}"
            return turn_encoder.encode(turn)

        exchange = TurnExchange(job.request_id, job.headers, job.created, job.deadline, encode, self._on_events)
        if self.tools is not None:
            self.sessions.metrics.tool_iterations.inc(job.request.model)
        try:
            process.submit(exchange)
            await exchange.done
        finally:
            exchange.gone = exchange.outcome is None
            process.forget(exchange)
        outcome = exchange.outcome
        if isinstance(outcome, ApiError):
            raise outcome
        assert outcome is not None
        self.usage.add(outcome.usage)
        if outcome.error is not None:
            status, code, message = outcome.error
            raise refused(code, message, status=status)
        return outcome

    def _on_events(self, events: Sequence[TurnEvent]) -> None:
        self.output.feed(events)
        if self.writer.streaming:
            self.outlet.write(self.writer.take())

    def _flush(self) -> None:
        if self.writer.streaming:
            self.outlet.write(self.writer.take())

    # Tool calls ----------------------------------------------------------------------------------

    async def _run_approved(self) -> list[Item]:
        """Run what the client has approved; the calls and their results as the model is shown them."""
        calls = []
        for request in approved_requests(self.job.history, self.job.given):
            tool = self.names.tools.get(request["name"])
            if tool is None or tool.server_label != request["server_label"]:
                text = f"The tool '{request['name']}' of the approved call is not among the tools of this request"
                raise refused("approved_tool_not_found", text, param="tools")
            calls.append(self.output.approved_call(request, tool))
        return await self._run_calls(calls)

    async def _run_calls(self, calls: Sequence[Call]) -> list[Item]:
        """Run calls side by side; what the model is shown of them: first the calls, then the results."""
        if not calls:
            return []
        self._flush()
        try:
            results = await asyncio.gather(*(self._run_call(call) for call in calls))
        except BaseException:
            self._abandon(calls)
            raise
        asked = [
            {
                "type": "function_call",
                "call_id": call.identity,
                "name": call.name,
                "arguments": call.arguments or "{}",
            }
            for call in calls
        ]
        told = [
            {"type": "function_call_output", "call_id": call.identity, "output": text}
            for call, text in zip(calls, results, strict=True)
        ]
        return [*asked, *told]

    async def _run_call(self, call: Call) -> str:
        tool, tools = call.tool, self.tools
        assert tool is not None
        assert tools is not None
        async with self._at_once:
            begun = time.monotonic()
            try:
                result = await tools.call(tool, arguments_of(call.arguments), TOOL_CALL_SECS)
            except Exception:
                log.exception("tool call failed", extra={"request_id": self.job.request_id})
                result = ToolResult(error=ToolError(kind="protocol", message="The tool call could not be made"))
            seconds = time.monotonic() - begun
        result = bounded(result, MAX_RESULT_BYTES)
        model = self.job.request.model
        self.sessions.metrics.tool_called(model, tool.name, success=result.error is None, seconds=seconds)
        call.finish(result)
        self._flush()
        return model_text(result)

    @staticmethod
    def _abandon(calls: Sequence[Call]) -> None:
        for call in calls:
            call.abandon()

    # The end -------------------------------------------------------------------------------------

    async def _fail(self, error: ApiError) -> None:
        """The answer to a request that cannot be completed: an HTTP error while that is possible, else a response
        that says so."""
        if not self.outlet.started and not self.job.background:
            self.outlet.refuse(error)
            return
        await self._end(Ending("failed", error={"code": error.code, "message": error.message}))

    async def _end(self, ending: Ending) -> None:
        """Store the response, then tell the client."""
        self._ending = True
        self._abandon(self.output.end_turn(cut=True))
        status, code = ending.status, ""
        if ending.error is not None:
            code = ending.error["code"]
            if self.job.stream:
                self.sessions.metrics.stream_failures.inc(self.job.request.model, code)
        self.state = State(status, None, ending.error, ending.incomplete, self.usage)
        if status in ("completed", "incomplete"):
            self.state.completed = time.time()
        shown = self.shown()
        body = orjson.dumps(shown)
        await self.sessions.ended(self, body)
        if status != "cancelled":
            self.writer.event(f"response.{status}", {"response": shown})
        self._flush()
        self.outlet.finish(body, code)
