"""HTTP routes of ``/v1/responses``."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from smg.api import responses
from smg.api.errors import ApiError, refused
from smg.api.ids import uuid7
from smg.frontend.exchange import AwaitedExchange
from smg.frontend.http import Request
from smg.frontend.sessions.items import stored_input
from smg.frontend.sessions.job import Job
from smg.frontend.sessions.manager import Sessions
from smg.frontend.sessions.outlets import EventLog, StreamAnswer, WholeAnswer
from smg.frontend.sessions.paging import Page, integer, listing, query_of, segment

if TYPE_CHECKING:
    from smg.frontend.app import App, Handler


class ResponseRoutes:
    """The handlers; ``table`` says which paths and methods they serve."""

    def __init__(self, app: App, sessions: Sessions) -> None:
        self.app = app
        self.sessions = sessions

    def table(self) -> list[tuple[str, str, Handler]]:
        """(method, path template, handler)."""
        return [
            ("POST", "/v1/responses", self.create),
            ("GET", "/v1/responses/{id}", self.get),
            ("DELETE", "/v1/responses/{id}", self.delete),
            ("POST", "/v1/responses/{id}/cancel", self.cancel),
            ("GET", "/v1/responses/{id}/input_items", self.input_items),
        ]

    # POST /v1/responses --------------------------------------------------------------------------

    async def create(self, request: Request) -> None:
        """Make a response."""
        if self.app.process.draining:
            retry = (("retry-after", "1"),)
            raise ApiError(503, "shutting_down", "the gateway is shutting down", gateway=True, headers=retry)
        parsed = responses.validate(responses.decode(await self.app.read_body(request), request.headers))
        job = await self._job(request, parsed)
        if job.background:
            await self._create_background(request, job)
        else:
            await self._create(request, job)

    async def _job(self, request: Request, parsed: responses.Parsed) -> Job:
        body, sessions = parsed.request, self.sessions
        if body.prompt is not None:
            raise refused("unsupported_parameter", "Stored prompts are not supported", param="prompt")
        now = time.time()
        timeout = sessions.settings.request_timeout_secs
        job = Job(
            id=f"resp_{uuid7()}",
            parsed=parsed,
            request_id=request.request_id,
            headers=self.app.forwarded_headers(request),
            scope=self.app.auth.tenant(request.headers.get("authorization")),
            created=now,
            deadline=now + timeout if timeout else 0.0,
            given=stored_input(body.input),
            harmony=sessions.speaks_harmony(body.model),
            background=bool(body.background) and sessions.settings.max_background_responses > 0,
        )
        await sessions.load_history(job)
        earlier = (item["tools"] for item in job.history if item["type"] == "additional_tools")
        responses.add_tools(body, (tool for tools in earlier for tool in tools))
        job.given = await sessions.resolve_references(job.given, job.scope, job.history)
        return job

    async def _create(self, request: Request, job: Job) -> None:
        exchange = self.app.new_exchange(request, request.path, b"")
        session = self.sessions.begin(job, self._stream_answer(exchange) if job.stream else WholeAnswer(exchange))
        try:
            await self.app.deliver(request, exchange)
        finally:
            if session.task is not None and not session.task.done():
                session.task.cancel()
                await asyncio.wait([session.task])

    async def _create_background(self, request: Request, job: Job) -> None:
        queued, events = await self.sessions.begin_background(job)
        if job.stream:
            await self._follow(request, events, -1)
        else:
            await request.respond_json(200, queued)

    async def _follow(self, request: Request, events: EventLog, after: int) -> None:
        """Stream a log to the client; the response does not depend on it."""
        exchange = self.app.new_exchange(request, request.path, b"")
        answer = self._stream_answer(exchange)
        events.follow(answer, after)
        await self.app.deliver(request, exchange)

    def _stream_answer(self, exchange: AwaitedExchange) -> StreamAnswer:
        answer = StreamAnswer(exchange)
        self.sessions.streams.add(answer)
        exchange.done.add_done_callback(lambda _: self.sessions.streams.discard(answer))
        return answer

    # /v1/responses/{id} --------------------------------------------------------------------------

    def _scope(self, request: Request) -> str:
        return self.app.auth.tenant(request.headers.get("authorization"))

    async def get(self, request: Request) -> None:
        """The response object, or the events of a streamed background response."""
        name, scope = segment(request, 3), self._scope(request)
        shown = await self.sessions.find(scope, name)
        if shown is None:
            raise refused("not_found", f"No response found with id '{name}'", status=404)
        query = query_of(request)
        if query.get("stream", "").lower() not in ("true", "1"):
            await request.respond_json(200, shown)
            return
        events = self.sessions.logs.get(name)
        if events is None:
            raise refused("stream_not_available", "Only recent background responses with stream=true can be streamed")
        await self._follow(request, events, integer(query, "starting_after", -1, least=-1))

    async def delete(self, request: Request) -> None:
        name = segment(request, 3)
        if not await self.sessions.delete(self._scope(request), name):
            raise refused("not_found", f"No response found with id '{name}'", status=404)
        await request.respond_json(200, {"id": name, "object": "response.deleted", "deleted": True})

    async def cancel(self, request: Request) -> None:
        """End a background response."""
        await request.respond_json(200, await self.sessions.cancel(self._scope(request), segment(request, 3)))

    async def input_items(self, request: Request) -> None:
        """The response's own input items, newest first unless the query says otherwise."""
        name = segment(request, 3)
        items = await self.sessions.input_items(self._scope(request), name)
        if items is None:
            raise refused("not_found", f"No response found with id '{name}'", status=404)
        page = Page.of(request)
        if page.newest_first:
            items.reverse()
        start = next((place + 1 for place, item in enumerate(items) if item["id"] == page.after), 0)
        data = items[start : start + page.limit]
        await request.respond_json(200, listing(data, has_more=start + page.limit < len(items)))
