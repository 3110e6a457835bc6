"""Engines are slow to start: each mode runs once per session, the reference first, then each transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from answers import Outcome, ask
from processes import BIN, MODEL, Engine, GatewayProcess, log_dir
from prompts import Request, for_engine, requests, with_stops


@pytest.fixture(scope="session")
def logs() -> Path:
    if not (BIN and MODEL):
        pytest.skip("SMG_TEST_ENGINE_BIN and SMG_TEST_ENGINE_MODEL are not set")
    return log_dir()


@pytest.fixture(scope="session")
def reference(logs: Path) -> dict[str, tuple[Request, Outcome]]:
    """Requests and outcomes by name, from the engine's own HTTP server."""
    engine = Engine("http", logs)
    engine.start()
    try:
        engine.wait_ready()
        with httpx.Client(base_url=engine.url, timeout=120.0) as client:
            cases = dict(requests())
            outcomes = {name: ask(client, path, for_engine(body)) for name, (path, body) in cases.items()}
            known = outcomes["many-tokens"]["choices"][0]
            stops = with_stops(known["token_ids"], known["text"])
            outcomes |= {name: ask(client, path, for_engine(body)) for name, (path, body) in stops.items()}
        return {name: (request, outcomes[name]) for name, request in (cases | stops).items()}
    finally:
        engine.stop()


@pytest.fixture(scope="session", params=["zmq", "grpc"])
def gateway(request: pytest.FixtureRequest, reference: object, logs: Path) -> Iterator[GatewayProcess]:
    """A gateway in front of a running engine. The reference's engine has ended before: two do not fit the machine."""
    engine = Engine(request.param, logs)
    gateway = GatewayProcess(engine, logs)
    gateway.start()
    engine.start()
    try:
        engine.wait_ready()
        gateway.wait_ready()
        yield gateway
    finally:
        gateway.stop()
        engine.stop()
