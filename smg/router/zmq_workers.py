"""The ZMQ workers of a router, and the messages of the detok processes about them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from smg.engines.base import EngineError
from smg.engines.zmq.codecs import zmq_kind
from smg.messages import EngineAnswer, EngineCall, EngineLink, EngineLoad, Peer, RingMessage
from smg.router.worker import Worker
from smg.router.zmq_admin import ZmqAdmin

if TYPE_CHECKING:
    from smg.router.process import RouterProcess

_encode = msgspec.msgpack.Encoder().encode


class ZmqWorkers:
    """All ZMQ workers of a router, and the messages about them."""

    def __init__(self, router: RouterProcess) -> None:
        self.router = router
        self._admins: dict[str, ZmqAdmin] = {}
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}

    def admin(self, worker: Worker) -> ZmqAdmin:
        """The management side of a worker, made on first use. Raises ``ValueError``."""
        admin = self._admins.get(worker.url)
        if admin is None:
            admin = self._admins[worker.url] = ZmqAdmin(self, worker)
        return admin

    def forget(self, admin: ZmqAdmin) -> None:
        if self._admins.get(admin.url) is admin:
            del self._admins[admin.url]

    def owner_of(self, address: str, asking: ZmqAdmin) -> str:
        """URL of another worker with this handshake address, "" if there is none."""
        others = (admin for admin in self._admins.values() if admin is not asking)
        return next((admin.url for admin in others if admin.address == address), "")

    def detoks(self) -> Iterable[int]:
        return sorted(self.router.links.of("detok"))

    def send(self, detok: int, message: RingMessage) -> None:
        self.router.links.send("detok", detok, message)

    def on_peers(self, appeared: list[Peer], vanished: list[Peer]) -> None:
        """Detok processes came or went."""
        for admin in self._admins.values():
            for peer in vanished:
                if peer.role == "detok":
                    admin.detok_vanished(peer.index)
            for peer in appeared:
                if peer.role == "detok":
                    admin.detok_appeared(peer.index)

    def on_link(self, message: EngineLink) -> None:
        admin = self._admins.get(message.url)
        if admin is not None:
            admin.on_link(message)

    def on_load(self, message: EngineLoad) -> None:
        admin = self._admins.get(message.url)
        if admin is not None:
            admin.on_load(message)

    async def call(
        self, detok: int, admin: ZmqAdmin, rank: int, method: str, arguments: tuple[Any, ...], timeout: float
    ) -> Any:
        """The value an engine's method returns. Raises ``EngineError``."""
        number = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        self.send(detok, EngineCall(admin.url, zmq_kind(admin.engine), rank, number, method, _encode(arguments)))
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise EngineError("DEADLINE_EXCEEDED", f"the engine did not answer {method}") from None
        finally:
            del self._calls[number]

    def on_answer(self, message: EngineAnswer) -> None:
        future = self._calls.get(message.call_id)
        if future is None or future.done():
            return
        if message.failure:
            future.set_exception(EngineError("FAILED_PRECONDITION", message.failure))
        else:
            future.set_result(msgspec.msgpack.decode(message.value))
