"""The tokenizer process: request bodies in, generation plans out; everything that costs CPU per request happens here.

Requests wait in one queue and are prepared one after the other, a few milliseconds per loop turn, so that plans leave
and messages arrive between them. A request whose tokenizer is still being loaded is parked, not refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from smg.api.entry import handle
from smg.api.errors import ApiError, refused, render_error
from smg.api.plan import Planned
from smg.messages import ModelTable, Peer, Reply, Submit
from smg.process import ChildProcess
from smg.telemetry.metrics import PoolMetrics
from smg.tokenizer_pool.context import PoolContext

log = logging.getLogger("smg.pool")

TURN_SECS = 0.002


class TokenizerProcess(ChildProcess):
    """One process of the pool. ``queue`` holds requests that are not prepared yet, ``parked`` those that wait for a
    tokenizer.
    """

    role = "tokenizer"
    talks_to = ("frontend", "router")

    async def start(self) -> str:
        self.queue: deque[Submit] = deque()
        self.parked: list[Submit] = []
        self.metrics = PoolMetrics()
        self.loop = asyncio.get_running_loop()
        self.pool = PoolContext(self.settings, self.run_dir, self.metrics, self._loaded)
        self._working = False
        self.handlers |= {Submit: self._on_submit, ModelTable: self._on_models}
        return ""

    async def drain(self) -> None:
        while self.queue or self.parked:
            await asyncio.sleep(0.02)

    # Ring -----------------------------------------------------------------------------------------

    def _on_submit(self, message: Submit) -> None:
        self.queue.append(message)
        if not self._working:
            self._working = True
            self.loop.call_soon(self._work)

    def on_peers(self, appeared: list[Peer], vanished: list[Peer]) -> None:
        if any(peer.role == "router" for peer in appeared):
            self._report()

    def _on_models(self, message: ModelTable) -> None:
        self.pool.update(message)
        self._unpark()

    def _loaded(self) -> None:
        """A tokenizer has loaded, or failed to."""
        self._report()
        self._unpark()

    def _report(self) -> None:
        for report in self.pool.reports():
            self.links.send("router", 0, report)

    def _unpark(self) -> None:
        """Models or tokenizers changed: parked requests get another try."""
        if self.parked:
            self.queue.extend(self.parked)
            self.parked.clear()
            if not self._working:
                self._working = True
                self.loop.call_soon(self._work)

    def _work(self) -> None:
        limit = time.perf_counter() + TURN_SECS
        queue = self.queue
        while queue:
            self._prepare(queue.popleft())
            if time.perf_counter() >= limit:
                break
        for role in ("router", "frontend"):
            for box in self.links.of(role).values():
                box.flush()
        if queue:
            self.loop.call_soon(self._work)
        else:
            self._working = False

    def _prepare(self, submit: Submit) -> None:
        if not self.pool.informed:  # just started: which models there are is not known yet
            self.parked.append(submit)
            return
        begun = time.perf_counter()
        timeout = self.settings.request_timeout_secs
        deadline = submit.received + timeout if timeout else 0.0
        try:
            if deadline and time.time() > deadline:
                raise refused("request_timeout", "the request waited too long to be prepared", status=504)
            result = handle(submit.path, submit.body, submit.headers, submit.request_id, self.pool)
        except ApiError as error:
            if error.code == "tokenizer_not_ready":
                self.parked.append(submit)
                return
            self._refuse(submit, error, begun)
            return
        except Exception:
            log.exception("request failed in preparation", extra={"request_id": submit.request_id})
            self._refuse(submit, refused("internal_error", "the request could not be prepared", status=500), begun)
            return
        if isinstance(result, Planned):
            self.links.deliver("router", 0, result.route(submit.seq, submit.frontend, deadline))
            self.metrics.planned(sum(part.prompt_tokens for part in result.parts), time.perf_counter() - begun)
        else:
            answer = Reply(submit.seq, result.status, result.headers, result.body)
            self.links.send("frontend", submit.frontend, answer)

    def _refuse(self, submit: Submit, error: ApiError, begun: float) -> None:
        status, headers, body = render_error(error, submit.path, submit.request_id)
        self.links.send("frontend", submit.frontend, Reply(submit.seq, status, headers, body))
        self.metrics.refused(time.perf_counter() - begun)
