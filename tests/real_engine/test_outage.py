"""The engine dies under load and comes back: every request ends clearly, and the gateway needs no restart."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

import pytest
from load import Ended, Load
from processes import GatewayProcess, wait_for

# An open circuit breaker tries the worker again after a minute, a health probe comes as often.
RECOVERY_SECS = 150.0
STEADY = 32
FLOWING = 4
# Nobody waits longer than this for the word that the engine is gone.
PROMPT_SECS = 15.0


@pytest.mark.timeout(420)
def test_an_engine_that_dies_under_load_is_taken_back(gateway: GatewayProcess) -> None:
    load = Load(gateway)
    load.start()
    try:
        killed = kill_amid(load)
        gateway.engine.start()
        gateway.engine.wait_ready()
        serving = time.monotonic()
        wait_for(lambda: load.count("answered", begun_after=killed) > 0, RECOVERY_SECS, gateway.engine.alive)
        # What begins from now on finds the engine back.
        back = time.monotonic()
        wait_for(lambda: load.count("answered", begun_after=back) >= STEADY, 60.0)
    finally:
        load.stop()
    before = [e for e in load.endings if e.ended < killed]
    running = [e for e in load.endings if e.begun < killed < e.ended]
    outage = [e for e in load.endings if killed < e.begun < back]
    after = [e for e in load.endings if e.begun > back]
    print(
        f"{gateway.engine.mode}: before {hows(before)}, at the kill {hows(running)}, outage {hows(outage)}, "
        f"after {hows(after)}; slowest {slowest(running + outage, killed):.2f} s; "
        f"the engine is up after {serving - killed:.1f} s, answers come after {back - killed:.1f} s"
    )
    assert [e for e in load.endings if e.how not in ("answered", "refused", "broken")] == []
    assert hows(before).keys() == hows(after).keys() == {"answered"}
    assert hows(running)["broken"] >= FLOWING // 2
    assert slowest(running + outage, killed) < PROMPT_SECS


def kill_amid(load: Load) -> float:
    """Kill the engine while streams flow, and wait until every client has met the outage and asked again. When that
    was (monotonic seconds)."""
    wait_for(lambda: load.count("answered") >= STEADY and len(load.flowing) >= FLOWING, 60.0)
    killed = time.monotonic()
    load.gateway.engine.kill()
    wait_for(lambda: load.count("refused", begun_after=killed) >= 2 * load.clients, 60.0)
    return killed


def hows(endings: Iterable[Ended]) -> Counter[str]:
    return Counter(ending.how for ending in endings)


def slowest(endings: Iterable[Ended], killed: float) -> float:
    """Seconds that a request took to end; what ran before the kill does not count."""
    return max(ending.ended - max(ending.begun, killed) for ending in endings)
