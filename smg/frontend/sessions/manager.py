"""All sessions of one frontend process: the records they read and write, background responses, the clock."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import orjson

from smg.api.conversation import is_harmony
from smg.api.errors import ApiError, refused
from smg.frontend.sessions.items import Item
from smg.frontend.sessions.job import Job
from smg.frontend.sessions.outlets import EventLog, Outlet, StreamAnswer
from smg.frontend.sessions.session import Session
from smg.history.base import RUNNING, StoredItem, StoredResponse, items_of
from smg.history.factory import make_history
from smg.mcp.lazy import LazyHost
from smg.messages import ModelInfo
from smg.readiness import unserved
from smg.telemetry.metrics import SessionMetrics

if TYPE_CHECKING:
    from smg.frontend.process import FrontendProcess

log = logging.getLogger("smg.frontend.sessions")

TICK_SECS = 1.0
LEASE_SECS = 5.0
RENEW_SECS = 5.0
KEPT_LOGS = 64
KEPT_LOG_BYTES = 64 << 20
MAX_CHAIN = 1000
MAX_HISTORY_ITEMS = 20_000


class Sessions:
    """``background``: sessions that run without a client, by response id; ``logs``: the events of streamed background
    responses, the last few finished ones included."""

    def __init__(self, process: FrontendProcess) -> None:
        self.process = process
        self.settings = process.settings
        self.metrics = SessionMetrics()
        self.history = make_history(process.settings, process.run_dir)
        self.tool_host = LazyHost(process.settings, self.metrics)
        self.background: dict[str, Session] = {}
        self.logs: dict[str, EventLog] = {}
        self.streams: set[StreamAnswer] = set()
        self._reserved = 0
        self._most = -(-self.settings.max_background_responses // self.settings.frontend_procs)
        self._clock: asyncio.Task[None] | None = None

    # Life ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the records and the tool servers. Raises ``ConfigError``."""
        await self.history.open()
        await self.tool_host.start()
        self._clock = self.process.spawn(self._tick(), "sessions clock")

    async def stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
        for session in self.background.values():
            if session.task is not None:
                session.task.cancel()
        await self.tool_host.close()
        await self.history.close()

    async def drained(self) -> None:
        """Until no background response runs."""
        while self.background:
            tasks = [session.task for session in self.background.values() if session.task is not None]
            await asyncio.wait([*tasks, asyncio.ensure_future(asyncio.sleep(0.05))], return_when="FIRST_COMPLETED")

    async def _tick(self) -> None:
        """Keep-alive frames, leases, cancellations that came through the records, sizes for the metrics."""
        renewed = 0.0
        while True:
            await asyncio.sleep(TICK_SECS)
            now = time.time()
            silence = self.settings.sse_keepalive_secs
            for answer in self.streams if silence else ():
                answer.ping(now, silence)
            try:
                if self.history.shared and self.background:
                    await self._watch(now)
                if now - renewed >= RENEW_SECS:
                    renewed = now
                    self.metrics.history_records(*await self.history.counts())
            except ApiError as error:
                log.warning("%s", error.message)

    async def _watch(self, now: float) -> None:
        names = [name for name, session in self.background.items() if session.job.store]
        running = await self.history.renew(names, now + LEASE_SECS) if names else set()
        for name in names:
            session = self.background.get(name)
            if name not in running and session is not None:
                session.cancel()

    # Before a session ----------------------------------------------------------------------------

    def find_model(self, name: str) -> ModelInfo | None:
        """The served model; None while it is not known which there are. Raises ``ApiError`` (404, 503)."""
        table = self.process.models
        canonical = self.settings.model_aliases.get(name, name)
        for model in table.models:
            if canonical == model.id or canonical in model.aliases:
                return model
        if table.version == 0:
            return None
        raise unserved(table, name)

    def speaks_harmony(self, name: str) -> bool:
        """Whether the model's prompts are made of items instead of chat messages. Raises ``ApiError`` (404, 503)."""
        info = self.find_model(name)
        return is_harmony(info if info is not None else ModelInfo(name, "", []))

    async def load_history(self, job: Job) -> None:
        """The earlier items of the job's conversation. Raises ``ApiError``."""
        request = job.request
        if request.conversation_id is not None:
            name = request.conversation_id
            if await self.history.get_conversation(job.scope, name) is None:
                raise refused("conversation_not_found", f"Conversation '{name}' not found", status=404)
            page = await self.history.list_items(name, newest_first=False, limit=MAX_HISTORY_ITEMS)
            job.history = [orjson.loads(item.body) for item in page.items]
            if page.has_more:
                text = f"The conversation holds more than {MAX_HISTORY_ITEMS} items"
                raise refused("conversation_too_long", text, param="conversation")
        elif request.previous_response_id is not None:
            name = request.previous_response_id
            records = await self.history.chain(job.scope, name, MAX_CHAIN)
            if not records:
                text = f"Previous response with id '{name}' not found."
                raise refused("previous_response_not_found", text)
            if records[0].status in RUNNING:
                text = f"Response '{name}' is not finished yet and cannot be continued"
                raise refused("previous_response_not_finished", text)
            job.history = [orjson.loads(body) for record in reversed(records) for body in items_of(record)]

    async def resolve_references(self, items: list[Item], job_scope: str, known: list[Item]) -> list[Item]:
        """``items`` with every ``item_reference`` replaced by what it names. Raises ``ApiError`` (404)."""
        resolved: list[Item] = []
        for item in items:
            if item["type"] == "item_reference":
                resolved.append(await self._referenced(item["id"], job_scope, known))
            else:
                resolved.append(item)
        return resolved

    async def _referenced(self, name: str, scope: str, known: list[Item]) -> Item:
        for item in known:
            if item.get("id") == name:
                return item
        body = await self.history.find_item(scope, name)
        if body is None:
            raise refused("item_not_found", f"Item with id '{name}' not found", status=404, param="input")
        found: Item = orjson.loads(body)
        return found

    # A session -----------------------------------------------------------------------------------

    def begin(self, job: Job, outlet: Outlet) -> Session:
        """Start the session of a job."""
        session = Session(self, job, outlet)
        session.task = asyncio.ensure_future(session.run())
        return session

    async def begin_background(self, job: Job) -> tuple[dict[str, Any], EventLog]:
        """Record a background response as queued and start it; its object, and its events. Raises ``ApiError`` (429,
        503)."""
        if len(self.background) + self._reserved >= self._most:
            text = f"Too many background responses are running (at most {self.settings.max_background_responses})"
            raise ApiError(
                429, "background_responses_limit_reached", text, gateway=True, headers=(("retry-after", "2"),)
            )
        events = EventLog()
        session = Session(self, job, events)
        self._reserved += 1
        try:
            if job.store:
                await self.history.put_response(self._record(session, orjson.dumps(session.shown())))
        finally:
            self._reserved -= 1
        self.background[job.id] = session
        if job.stream:
            self._keep_log(job.id, events)
        session.task = self.process.spawn(self._run_background(session), "background response")
        queued = session.shown()
        await asyncio.sleep(0)  # a task that is cancelled before its first step never gets to its end
        return queued, events

    async def _run_background(self, session: Session) -> None:
        try:
            await session.run()
        finally:
            self.background.pop(session.job.id, None)

    def _keep_log(self, name: str, events: EventLog) -> None:
        self.logs[name] = events
        finished = [key for key, log_ in self.logs.items() if log_.over]
        size = sum(log_.size for log_ in self.logs.values())
        for key in finished:
            if len(self.logs) <= KEPT_LOGS and size <= KEPT_LOG_BYTES:
                break
            size -= self.logs.pop(key).size

    async def began(self, session: Session) -> None:
        """A background response leaves the queue."""
        if session.job.store:
            await self.history.replace_running(self._record(session, orjson.dumps(session.shown())))

    async def ended(self, session: Session, body: bytes) -> None:
        """The response has its final form: keep it, and add it to its conversation. A response that cannot be kept is
        delivered all the same."""
        job = session.job
        try:
            if job.store:
                record = self._record(session, body)
                if not job.background:
                    await self.history.put_response(record)
                elif not await self.history.replace_running(record):
                    log.info("response %s was cancelled or deleted while it ran", job.id)
            if job.request.conversation_id is not None and session.state.status != "cancelled":
                items = [StoredItem(id=item["id"], body=orjson.dumps(item)) for item in _items(session)]
                await self.history.append_items(job.scope, job.request.conversation_id, items)
        except ApiError as error:
            self.metrics.not_stored.inc()
            log.warning("response %s is not stored: %s", job.id, error.message, extra={"request_id": job.request_id})

    def _record(self, session: Session, body: bytes) -> StoredResponse:
        job, status = session.job, session.state.status
        lease = 0.0
        if status in RUNNING:
            lease = time.time() + LEASE_SECS if self.history.shared else float("inf")
        return StoredResponse(
            id=job.id,
            scope=job.scope,
            created_at=job.created,
            status=status,
            body=body,
            input=orjson.dumps(job.given),
            previous=job.request.previous_response_id,
            item_ids=[item["id"] for item in _items(session)],
            lease=lease,
        )

    # After a session -----------------------------------------------------------------------------

    async def find(self, scope: str, response_id: str) -> dict[str, Any] | None:
        """The response object as it stands; a running response whose process has died is a failed one."""
        session = self.background.get(response_id)
        if session is not None and session.job.scope == scope:
            return session.shown()
        record = await self.history.get_response(scope, response_id)
        if record is None:
            return None
        shown: dict[str, Any] = orjson.loads(record.body)
        if record.status in RUNNING and record.lease < time.time():
            shown["status"] = "failed"
            shown["error"] = {"code": "server_error", "message": "The process that worked on this response ended"}
        return shown

    async def input_items(self, scope: str, response_id: str) -> list[Item] | None:
        """The stored input items of a response, oldest first."""
        session = self.background.get(response_id)
        if session is not None and session.job.scope == scope:
            return list(session.job.given)
        record = await self.history.get_response(scope, response_id)
        return orjson.loads(record.input) if record is not None else None

    async def cancel(self, scope: str, response_id: str) -> dict[str, Any]:
        """End a background response; its object. Raises ``ApiError``."""
        session = self.background.get(response_id)
        if session is not None and session.job.scope == scope and session.task is not None:
            session.cancel()
            await asyncio.wait([session.task])
            if session.state.status == "cancelled":
                return session.shown()
        shown = await self.find(scope, response_id)
        if shown is None:
            raise refused("response_not_found", f"No response found with id '{response_id}'", status=404)
        if shown["status"] == "cancelled":
            return shown
        if shown["status"] in RUNNING:
            cancelled = await self._cancel_stored(scope, response_id)
            if cancelled is not None:
                return cancelled
        raise refused("response_already_completed", f"Response '{response_id}' is already completed")

    async def _cancel_stored(self, scope: str, response_id: str) -> dict[str, Any] | None:
        """Cancel through the records what another process runs: it looks there every second."""
        record = await self.history.get_response(scope, response_id)
        if record is None:
            return None
        shown: dict[str, Any] = orjson.loads(record.body)
        shown["status"] = record.status = "cancelled"
        record.body, record.lease = orjson.dumps(shown), 0.0
        record.item_ids = [item["id"] for item in (*orjson.loads(record.input), *shown["output"])]
        return shown if await self.history.replace_running(record) else None

    async def delete(self, scope: str, response_id: str) -> bool:
        """Delete a response; one that still runs is ended first."""
        session = self.background.get(response_id)
        known = session is not None and session.job.scope == scope
        if known and session is not None and session.task is not None:
            session.cancel()
            await asyncio.wait([session.task])
        self.logs.pop(response_id, None)
        return await self.history.delete_response(scope, response_id) or known


def _items(session: Session) -> list[Item]:
    return [*session.job.given, *session.output.items]
