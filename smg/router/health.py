"""Health probes and load reports of the workers behind one URL."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from smg.engines.base import EngineError
from smg.router.breaker import OPEN
from smg.router.spec import MIN_SECS, HealthSpec
from smg.router.worker import DRAINING, NOT_READY, PENDING, READY, Worker
from smg.settings import Settings

if TYPE_CHECKING:
    from smg.engines.grpc.facts import LoadReport
    from smg.router.process import RouterProcess

log = logging.getLogger("smg.router.health")

# A worker that failed is probed at least this often: it is wanted back as soon as it can.
SUSPECT_SECS = 2.0
IDLE_PAUSE = 3600.0


@dataclass(frozen=True, slots=True)
class HealthRules:
    """How one worker is watched. Intervals and ``timeout`` are seconds; an interval of 0 switches that off."""

    health_interval: float
    load_interval: float
    timeout: float
    failure_threshold: int
    success_threshold: int

    @classmethod
    def of(cls, settings: Settings, spec: dict[str, Any]) -> HealthRules:
        """The gateway's flags, as far as the worker's registration body ``spec`` does not say otherwise."""
        own = msgspec.convert(spec.get("health") or {}, HealthSpec)
        off = settings.disable_health_check if own.disable_health_check is None else own.disable_health_check
        load_interval = float(spec.get("load_monitor_interval_secs") or settings.load_monitor_interval)
        return cls(
            0.0 if off else float(own.check_interval_secs or settings.health_check_interval_secs),
            load_interval if polls_load(settings) else 0.0,
            float(own.timeout_secs or settings.health_check_timeout_secs),
            own.failure_threshold or settings.health_failure_threshold,
            own.success_threshold or settings.health_success_threshold,
        )


def polls_load(settings: Settings) -> bool:
    """Whether load reports are polled: always, or with ``--disable-load-monitoring`` only for a policy that is about
    them."""
    if not settings.disable_load_monitoring or settings.policy == "least_load":
        return True
    return settings.policy == "power_of_two" and settings.power_of_two_load_metric != "requests"


class Watch:
    """Watches one URL until no worker is left behind it. Data-parallel ranks share their server's probes."""

    def __init__(self, router: RouterProcess, url: str) -> None:
        self.router = router
        self.url = url
        self._hurry = asyncio.Event()
        self._task = router.spawn(self._run(), f"watch {url}")

    def stop(self) -> None:
        """Watch no more."""
        self._task.cancel()

    def hurry(self) -> None:
        """Requests fail: look sooner than planned."""
        self._hurry.set()

    def _workers(self) -> list[Worker]:
        workers = self.router.registry.find_url(self.url)
        return [worker for worker in workers if worker.status not in (PENDING, DRAINING)]

    async def _run(self) -> None:
        """Probe and poll, each at its own interval; the first load report is fetched at once."""
        # The registration has just been a successful probe.
        last_health, next_load = time.monotonic(), 0.0
        while workers := self._workers():
            rules = HealthRules.of(self.router.settings, workers[0].spec)
            now = time.monotonic()
            if rules.load_interval and now >= next_load:
                next_load = now + rules.load_interval
                await self._poll_load(workers[0], rules)
            if rules.health_interval and now >= last_health + self._interval(rules):
                last_health = now
                await self._probe(workers[0], rules)
            times = [last_health + self._interval(rules)] * bool(rules.health_interval)
            times += [next_load] * bool(rules.load_interval)
            pause = max(MIN_SECS, min(times) - time.monotonic()) if times else IDLE_PAUSE
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), pause)
            self._hurry.clear()

    def _interval(self, rules: HealthRules) -> float:
        """Seconds from one health probe to the next."""
        suspect = any(worker.status == NOT_READY or worker.breaker.state == OPEN for worker in self._workers())
        return min(rules.health_interval, SUSPECT_SECS) if suspect else rules.health_interval

    async def _probe(self, first: Worker, rules: HealthRules) -> None:
        healthy = False
        with contextlib.suppress(EngineError):
            healthy = (await self.router.lifecycle.admin(first).health(rules.timeout)).healthy
        changed = False
        for worker in self._workers():
            before = worker.status
            self.observe(worker, rules, healthy=healthy)
            self.router.metrics.workers.probed(
                worker.name, worker.worker_type, success=healthy, ready=worker.status == READY
            )
            if worker.status != before:
                log.warning("worker %s is %s", worker.name, worker.status)
                changed = True
        if changed:
            self.router.registry.changed()

    def observe(self, worker: Worker, rules: HealthRules, *, healthy: bool) -> None:
        """Count one probe and move the worker between ready and not ready."""
        if healthy:
            returned = worker.failures > 0
            worker.successes, worker.failures = worker.successes + 1, 0
            if worker.status == NOT_READY:
                returned = worker.successes >= rules.success_threshold
                if returned:
                    worker.status = READY
            # Its requests failed because it was away. One that fails them while it says that it is well stays out.
            if returned and worker.breaker.readmit():
                self.router.metrics.breakers.readmitted(worker.name)
        else:
            worker.failures, worker.successes = worker.failures + 1, 0
            if worker.status == READY and worker.failures >= rules.failure_threshold:
                worker.status = NOT_READY

    async def _poll_load(self, first: Worker, rules: HealthRules) -> None:
        mode = "poll"
        try:
            report = await self.router.lifecycle.admin(first).loads(timeout=rules.timeout)
        except EngineError:
            mode = "fallback"
        else:
            self._take_over(report)
        self.router.metrics.engines.polls.inc(self.url, mode)

    def _take_over(self, report: LoadReport) -> None:
        now = time.monotonic()
        model = ""
        for worker in self._workers():
            worker.reported(report, now)
            model = worker.cards[0].id
        for rank in report.loads:
            values = {
                "running_requests": float(rank.num_running_reqs),
                "waiting_requests": float(rank.num_waiting_reqs),
                "token_usage": rank.token_usage,
                "gen_throughput": rank.gen_throughput,
                "cache_hit_rate": rank.cache_hit_rate,
            }
            self.router.metrics.engines.reported(self.url, model, str(rank.dp_rank), values)
