"""A steady load on the gateway that keeps account of every request."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from processes import MODEL, GatewayProcess
from prompts import CHAT, COMPLETIONS

# Silence of so many seconds is hanging: the gateway is done with trying again long before.
PATIENCE = 30.0
# Between two requests of a client: refusals come at once, and nobody floods a server that is down.
PAUSE = 0.05


@dataclass(frozen=True)
class Ended:
    """One request: when it was begun and ended (monotonic seconds), and how: "answered", "refused" (a status with an
    error object), "broken" (an error event in the stream) or what must not be."""

    how: str
    begun: float
    ended: float
    detail: str = ""


@dataclass
class Load:
    """``clients`` that ask one request after the other until ``stop``. ``flowing``: those in the middle of a stream."""

    gateway: GatewayProcess
    clients: int = 8
    endings: list[Ended] = field(default_factory=list)
    flowing: set[int] = field(default_factory=set)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for number in range(self.clients):
            thread = threading.Thread(target=self._client, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """No new requests; waits for the running ones."""
        self._over.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive(), "a request hangs"

    def count(self, how: str, *, begun_after: float = 0.0) -> int:
        return sum(ending.how == how and ending.begun > begun_after for ending in self.endings)

    def _client(self, number: int) -> None:
        turn = number
        with httpx.Client(base_url=f"http://127.0.0.1:{self.gateway.port}", timeout=PATIENCE) as client:
            while not self._over.wait(PAUSE):
                begun = time.monotonic()
                how, detail = self._outcome(client, number, *_request(turn))
                self.flowing.discard(number)
                self.endings.append(Ended(how, begun, time.monotonic(), detail))
                turn += self.clients + 1

    def _outcome(self, client: httpx.Client, number: int, path: str, body: dict[str, Any]) -> tuple[str, str]:
        try:
            if "stream" in body:
                return self._streamed(client, number, path, body)
            answer = client.post(path, json=body)
            if answer.status_code != 200:
                return _refused(answer.status_code, answer.content)
            return _complete(answer.json()["usage"], body)
        except httpx.TimeoutException as error:
            return "hung", repr(error)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            return "lost", repr(error)

    def _streamed(self, client: httpx.Client, number: int, path: str, body: dict[str, Any]) -> tuple[str, str]:
        with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                return _refused(response.status_code, response.read())
            usage = error = None
            last = ""
            for line in response.iter_lines():
                last = line or last
                if line.startswith("data: {"):
                    self.flowing.add(number)
                    event = json.loads(line[6:])
                    usage, error = event.get("usage") or usage, event.get("error") or error
        if last != "data: [DONE]":
            return "lost", f"ends with {last}"
        return ("broken", str(error)) if error else _complete(usage, body)


def _request(turn: int) -> tuple[str, dict[str, Any]]:
    """Three of four are streams; chat and completions alternate; lengths differ, so that some always flow."""
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 60 + 37 * turn % 240, "ignore_eos": True}
    if turn % 4:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if turn % 2:
        return CHAT, body | {"messages": [{"role": "user", "content": f"Question {turn}"}]}
    return COMPLETIONS, body | {"prompt": f"Sentence {turn}"}


def _refused(status: int, body: bytes) -> tuple[str, str]:
    error = json.loads(body)["error"]
    clear = status >= 500 and error["message"] and error["code"]
    return ("refused" if clear else "unclear"), f"{status} {error}"


def _complete(usage: Any, body: dict[str, Any]) -> tuple[str, str]:
    tokens = usage["completion_tokens"] if usage else None
    return ("answered", "") if tokens == body["max_tokens"] else ("cut", f"{tokens} tokens")
