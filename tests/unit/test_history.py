"""Every history backend against one contract, and the bounds of those that forget.

The database servers are started here, on a private directory, where their programs are installed; else those cases are
skipped."""

from __future__ import annotations

import asyncio
import glob
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from smg.api.errors import ApiError
from smg.flags import ConfigError
from smg.history.base import History, StoredConversation, StoredItem, StoredResponse, items_of
from smg.history.factory import make_history
from smg.history.memory import Bounds, MemoryHistory
from smg.history.sqlite import TRIM_EVERY, SqliteHistory
from smg.settings import Settings

BACKENDS = ["memory", "sqlite", "postgres", "redis"]
START_SECS = 30.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def program(name: str) -> str:
    found = shutil.which(name) or next(iter(sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"))), "")
    if not found:
        pytest.skip(f"{name} is not installed")
    return found


def await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + START_SECS
    while time.monotonic() < limit and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError("the server did not start")


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("redis")
    port = free_port()
    words = (program("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--daemonize", "no")
    process = subprocess.Popen(words, cwd=tmp_path_factory.mktemp("redis"), stdout=subprocess.DEVNULL)
    try:
        await_port(port, process)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        stop(process)


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    pytest.importorskip("asyncpg")
    initdb, server = program("initdb"), program("postgres")
    # The server refuses to run as root, and another user cannot reach into pytest's private directories.
    user: dict[str, Any] = {"user": "nobody"} if os.geteuid() == 0 else {}
    port, directory = free_port(), Path(f"/tmp/smgt-pg-{os.getpid()}")
    directory.mkdir(mode=0o700)
    if user:
        shutil.chown(directory, "nobody")
    process = None
    try:
        data = str(directory / "data")
        words = (initdb, "-D", data, "-U", "smg", "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C")
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd="/", **user)
        options = ("-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", str(directory), "-c", "fsync=off")
        process = subprocess.Popen((server, *options), stderr=subprocess.DEVNULL, cwd="/", **user)
        await_port(port, process)
        yield f"postgresql://smg@127.0.0.1:{port}/postgres"
    finally:
        if process is not None:
            stop(process)
        shutil.rmtree(directory)


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], History]:
    kind: str = request.param
    fields: dict[str, Any] = {"history_backend": kind, "frontend_procs": 1}
    if kind == "sqlite":
        fields["history_sqlite_path"] = str(tmp_path / "records.db")
    elif kind == "postgres":
        fields["postgres_db_url"] = request.getfixturevalue("postgres_url")
    elif kind == "redis":
        fields["redis_url"] = request.getfixturevalue("redis_url")
    return lambda: make_history(Settings(**fields), tmp_path)


def run(history: History, test: Callable[[History], Awaitable[None]]) -> None:
    async def body() -> None:
        await history.open()
        try:
            await test(history)
        finally:
            await history.close()

    asyncio.run(asyncio.wait_for(body(), 60))


_numbers = iter(range(10**9))


def name(prefix: str) -> str:
    """A name that no other test uses."""
    return f"{prefix}_{os.getpid()}_{next(_numbers)}"


def item(text: str) -> dict[str, Any]:
    return {"id": name("msg"), "type": "message", "role": "user", "content": text}


def response(text: str = "x", *, status: str = "completed", scope: str = "", **fields: Any) -> StoredResponse:
    given, output = item(text), item(text + "!")
    key = fields.pop("id", None) or name("resp")
    return StoredResponse(
        id=key,
        scope=scope,
        created_at=fields.pop("created_at", time.time()),
        status=status,
        body=orjson.dumps({"id": key, "status": status, "output": [output]}),
        input=orjson.dumps([given]),
        item_ids=[given["id"], output["id"]],
        **fields,
    )


def test_responses(make: Callable[[], History]) -> None:
    async def test(history: History) -> None:
        first = response("é\0", scope="a")
        await history.put_response(first)
        found = await history.get_response("a", first.id)
        assert found is not None
        assert (found.body, found.input, found.status, found.previous) == (first.body, first.input, "completed", None)
        assert found.created_at == pytest.approx(first.created_at)
        assert await history.get_response("b", first.id) is None
        assert await history.get_response("a", "resp_\0") is None
        assert [orjson.loads(body)["content"] for body in items_of(found)] == ["é\0", "é\0!"]
        for item_id, body in zip(first.item_ids, items_of(first), strict=True):
            assert await history.find_item("a", item_id) == body
            assert await history.find_item("b", item_id) is None
        assert not await history.delete_response("b", first.id)
        assert await history.delete_response("a", first.id)
        assert not await history.delete_response("a", first.id)
        assert await history.find_item("a", first.item_ids[0]) is None
        assert await history.find_item("a", "nothing") is None

    run(make(), test)


def test_chains(make: Callable[[], History]) -> None:
    async def test(history: History) -> None:
        names: list[str] = []
        for number in range(5):
            record = response(str(number), previous=names[-1] if names else None)
            await history.put_response(record)
            names.append(record.id)
        chain = await history.chain("", names[-1], 100)
        assert [record.id for record in chain] == names[::-1]
        assert [record.id for record in await history.chain("", names[-1], 2)] == names[:-3:-1]
        await history.delete_response("", names[1])
        assert [record.id for record in await history.chain("", names[-1], 100)] == names[:1:-1]
        assert await history.chain("", "resp_0", 100) == []
        own = response("loop")
        own.previous = own.id
        await history.put_response(own)
        assert len(await history.chain("", own.id, 7)) <= 7

    run(make(), test)


def test_running_responses(make: Callable[[], History]) -> None:
    async def test(history: History) -> None:
        queued = response("q", status="queued", lease=5.0)
        await history.put_response(queued)
        assert await history.renew([queued.id, "resp_0"], 9.5) == {queued.id}
        found = await history.get_response("", queued.id)
        assert found is not None
        assert found.lease == 9.5
        working = response("w", id=queued.id, status="in_progress")
        assert await history.replace_running(working)
        assert await history.replace_running(response("c", id=queued.id, status="cancelled"))
        assert not await history.replace_running(response("d", id=queued.id))
        found = await history.get_response("", queued.id)
        assert found is not None
        assert found.status == "cancelled"
        assert await history.renew([queued.id], 10.0) == set()
        await history.delete_response("", queued.id)
        assert not await history.replace_running(working)

    run(make(), test)


def test_conversations(make: Callable[[], History]) -> None:
    async def test(history: History) -> None:
        made = StoredConversation(id=name("conv"), scope="a", created_at=time.time(), metadata={"k": "ü"})
        await history.put_conversation(made)
        assert await history.get_conversation("a", made.id) == made
        assert await history.get_conversation("b", made.id) is None
        items = [StoredItem(id=name("msg"), body=b'{"n":%d}' % number) for number in range(7)]
        await history.append_items("b", made.id, items)
        assert (await history.list_items(made.id, newest_first=False, limit=10)).items == []
        await history.append_items("a", made.id, items[:3])
        await history.append_items("a", made.id, items[2:])
        page = await history.list_items(made.id, newest_first=False, limit=7)
        assert (page.items, page.has_more) == (items, False)
        page = await history.list_items(made.id, newest_first=True, limit=3)
        assert (page.items, page.has_more) == (items[:3:-1], True)
        page = await history.list_items(made.id, newest_first=True, limit=3, after=page.items[-1].id)
        assert page.items == items[3:0:-1]
        page = await history.list_items(made.id, newest_first=False, limit=9, after=items[4].id)
        assert (page.items, page.has_more) == (items[5:], False)
        assert (await history.list_items(made.id, newest_first=False, limit=2, after="none")).items == items[:2]

        assert await history.get_item(made.id, items[1].id) == items[1]
        assert await history.find_item("a", items[1].id) == items[1].body
        assert await history.find_item("b", items[1].id) is None
        for _ in range(2):
            await history.delete_item(made.id, items[1].id)
        assert await history.get_item(made.id, items[1].id) is None
        made.metadata = {"k": "v", "n": 1}
        await history.put_conversation(made)
        assert await history.get_conversation("a", made.id) == made
        assert len((await history.list_items(made.id, newest_first=False, limit=10)).items) == 6
        assert not await history.delete_conversation("b", made.id)
        assert await history.delete_conversation("a", made.id)
        assert not await history.delete_conversation("a", made.id)
        assert (await history.list_items(made.id, newest_first=False, limit=10)).items == []

    run(make(), test)


def test_writes_side_by_side(make: Callable[[], History]) -> None:
    async def test(history: History) -> None:
        records = [response(str(number)) for number in range(60)]
        await asyncio.gather(*(history.put_response(record) for record in records))
        found = await asyncio.gather(*(history.get_response("", record.id) for record in records))
        assert [record.body for record in found if record is not None] == [record.body for record in records]

    run(make(), test)


def test_a_database_that_does_not_answer(tmp_path: Path) -> None:
    async def body() -> None:
        for backend, field in (("postgres", "postgres_db_url"), ("redis", "redis_url")):
            url = f"{'postgresql' if backend == 'postgres' else 'redis'}://127.0.0.1:{free_port()}/0"
            fields: dict[str, Any] = {"history_backend": backend, field: url}
            with pytest.raises(ConfigError):
                await make_history(Settings(**fields), tmp_path).open()

    asyncio.run(body())


@pytest.mark.parametrize("backend", ["postgres", "redis"])
def test_calls_are_bounded_in_time(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The server accepts and then says nothing: a proxy that swallows what comes back."""
    url: str = request.getfixturevalue(f"{backend}_url")
    host, _, port = url.rpartition("/")[0].rpartition("@")[2].removeprefix("redis://").rpartition(":")

    async def body() -> None:
        silent = False

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool) -> None:
            while data := await reader.read(65536):
                if not (back and silent):
                    writer.write(data)
            writer.close()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(pump(reader, far_writer, back=False), pump(far_reader, writer, back=True))

        proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
        through = url.replace(f":{port}", f":{proxy.sockets[0].getsockname()[1]}")
        fields: dict[str, Any] = {
            "history_backend": backend, "postgres_db_url": through, "redis_url": through,
            "postgres_op_timeout_secs": 1, "redis_op_timeout_secs": 1,
        }  # fmt: skip
        history = make_history(Settings(**fields), tmp_path)
        await history.open()
        assert await history.get_response("", "resp_0") is None
        silent = True
        with pytest.raises(ApiError) as refusal:
            await history.put_response(response())
        assert (refusal.value.status, refusal.value.code) == (503, "storage_unavailable")
        proxy.close()
        await history.close()

    asyncio.run(asyncio.wait_for(body(), 30))


# Bounds --------------------------------------------------------------------------------------------------


def test_memory_keeps_the_newest_ten_thousand() -> None:
    async def test(history: History) -> None:
        assert isinstance(history, MemoryHistory)
        records = [response("x" * 200) for _ in range(30_000)]
        for record in records:
            await history.put_response(record)
        assert await history.counts() == (10_000, 0, 20_000)
        assert history.size == sum(record.size for record in records[-10_000:])
        assert await history.get_response("", records[-10_001].id) is None
        assert await history.get_response("", records[-10_000].id) is not None
        assert await history.find_item("", records[0].item_ids[0]) is None
        for record in records:
            await history.delete_response("", record.id)
        assert await history.counts() == (0, 0, 0)
        assert history.size == 0

    run(MemoryHistory(Bounds(responses=10_000, items=100_000)), test)


def test_memory_keeps_copies_of_exact_size() -> None:
    """Ten thousand responses and items as an encoder makes them take about as much memory as they are long."""

    async def test(history: History) -> None:
        encoded = orjson.dumps({"text": "x" * 1500})
        kept = response()
        kept.body = kept.input = encoded
        await history.put_response(kept)
        conversation = StoredConversation(id="conv_1", scope="", created_at=time.time())
        await history.put_conversation(conversation)
        await history.append_items("", conversation.id, [StoredItem(id="i", body=encoded)])
        found = await history.get_response("", kept.id)
        item = await history.get_item(conversation.id, "i")
        assert found is not None and item is not None
        assert found.body == found.input == item.body == encoded
        assert all(content is not encoded for content in (found.body, found.input, item.body))

    run(MemoryHistory(Bounds()), test)


def bounded(kind: str, bounds: Bounds, path: Path) -> History:
    if kind == "memory":
        return MemoryHistory(bounds)
    return SqliteHistory(path / "records.db", bounds, durable=False, shared=True)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_bounds_on_items(kind: str, tmp_path: Path) -> None:
    async def test(history: History) -> None:
        conversation = StoredConversation(id="conv_1", scope="", created_at=time.time())
        await history.put_conversation(conversation)
        last = None
        for _ in range(4 * TRIM_EVERY):
            last = response()
            await history.put_response(last)
            await history.append_items("", "conv_1", [StoredItem(id=name("msg"), body=b"{}")])
        assert last is not None
        responses, _, items = await history.counts()
        assert items <= 100 + 3 * TRIM_EVERY
        assert responses < 4 * TRIM_EVERY
        assert await history.get_response("", last.id) is not None
        assert (await history.list_items("conv_1", newest_first=True, limit=5)).items

    run(bounded(kind, Bounds(items=100), tmp_path), test)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_bounds_on_bytes(kind: str, tmp_path: Path) -> None:
    async def test(history: History) -> None:
        last = None
        for _ in range(4 * TRIM_EVERY):
            last = response("y" * 10_000)
            await history.put_response(last)
        assert last is not None
        responses, _, _ = await history.counts()
        assert 0 < responses * last.size <= 1_000_000 + TRIM_EVERY * last.size
        assert await history.get_response("", last.id) is not None

    run(bounded(kind, Bounds(size=1_000_000), tmp_path), test)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_retention(kind: str, tmp_path: Path) -> None:
    async def test(history: History) -> None:
        old = response(created_at=time.time() - 100)
        await history.put_response(old)
        for _ in range(TRIM_EVERY):
            await history.put_response(response())
        assert await history.get_response("", old.id) is None
        assert (await history.counts())[0] == TRIM_EVERY

    run(bounded(kind, Bounds(retention=50.0), tmp_path), test)


def test_one_failing_write_does_not_take_others_with_it(tmp_path: Path) -> None:
    async def test(history: History) -> None:
        assert isinstance(history, SqliteHistory)
        good, bad = response(), response()
        bad.status = None  # type: ignore[assignment]
        outcomes = await asyncio.gather(history.put_response(good), history.put_response(bad), return_exceptions=True)
        assert outcomes[0] is None
        assert isinstance(outcomes[1], ApiError)
        assert await history.get_response("", good.id) is not None
        assert await history.get_response("", bad.id) is None

    run(SqliteHistory(tmp_path / "records.db", Bounds(), durable=True, shared=False), test)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    path.write_text("no database " * 1000)
    with pytest.raises(ConfigError, match="history database"):
        asyncio.run(SqliteHistory(path, Bounds(), durable=True, shared=False).open())
