"""Which worker gets a request: models, routing headers, prefixes, batches."""

from __future__ import annotations

from gateway import Gateway, gateway
from router_calls import add, code_of, metric, named_worker, run, served_by
from sim_worker import worker


def test_several_models_and_several_cards() -> None:
    async def test() -> None:
        async with (
            named_worker("alpha") as first,
            named_worker("beta") as second,
            gateway(first, second, flags=("--enable-igw",)) as gw,
        ):
            models = {model["id"] for model in (await gw.http.get("/v1/models")).json()["data"]}
            assert models == {"alpha", "beta"}
            assert await served_by(gw, 3, model="alpha") == {first: 3}
            assert await served_by(gw, 3, model="beta") == {second: 3}
            assert await served_by(gw, 1, model="gamma") == {(404, "model_not_found"): 1}
            answer = await gw.chat(model="gamma")
            assert answer.status_code == 404
            async with named_worker("base") as third:
                await add(gw, third, models=[{"id": "one", "aliases": ["uno"]}, {"id": "two"}])
                for model in ("one", "two", "uno"):
                    assert await served_by(gw, 1, model=model) == {third: 1}, model
            sizes = await metric(gw, "smg_worker_pool_size")
            assert sum(sizes.values()) == 4.0

    run(test)


def test_routing_headers() -> None:
    async def test() -> None:
        async with worker("vllm") as (_one, first), worker("vllm") as (_two, second):
            urls = [first, second]
            async with gateway(*urls, flags=("--policy", "consistent_hashing")) as gw:

                async def chosen(headers: dict[str, str]) -> str:
                    body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
                    answer = await gw.http.post("/v1/chat/completions", json=body, headers=headers)
                    return answer.headers.get("x-smg-routed-worker-id") or f"{answer.status_code} {code_of(answer)}"

                homes = {key: await chosen({"x-smg-routing-key": key}) for key in "abcdefgh"}
                assert set(homes.values()) == set(urls)
                assert {key: await chosen({"x-smg-routing-key": key}) for key in "abcdefgh"} == homes
                targets = [await chosen({"x-smg-target-worker": str(index)}) for index in range(3)]
                assert sorted(targets[:2]) == sorted(urls)
                assert targets[2] == "503 no_available_workers"
                assert await chosen({"x-smg-target-worker": "first"}) == "503 no_available_workers"
            flags = (
                "--policy",
                "round_robin",
                "--routing-key-override",
                "--routing-key-headers",
                "X-Session",
                "x-user",
            )
            async with gateway(*urls, flags=flags) as gw:
                assert len({await chosen({}) for _ in range(4)}) == 2
                for headers in ({"x-session": "s"}, {"x-user": "u"}):
                    assert len({await chosen(headers) for _ in range(4)}) == 1
                assert len({await chosen({"x-smg-routing-key": "k"}) for _ in range(4)}) == 2
                turns = [await gw.chat(rid=f"conv_t{turn}", max_tokens=1) for turn in range(4)]
                assert len({answer.headers["x-smg-routed-worker-id"] for answer in turns}) == 1
                sources = await metric(gw, "smg_routing_key_source_total")
                assert sources == {'{source="header"}': 8.0, '{source="rid"}': 4.0}

    run(test)


def test_cache_aware_routing_follows_the_prefix() -> None:
    async def test() -> None:
        async with worker("vllm") as (_, first), worker("vllm") as (_, second), gateway(first, second) as gw:
            homes = {}
            for topic in ("whales", "bread", "rivers", "moons", "trains", "glass"):
                text = f"Tell me about {topic}. " * 20
                homes[topic] = {await routed(gw, text + f"Part {part}?") for part in range(4)}
            assert all(len(home) == 1 for home in homes.values()), homes
            branches = await metric(gw, "smg_cache_aware_policy_branch_total")
            assert branches['{branch="tree_match"}'] >= 18.0

    run(test)


def test_prompts_of_a_batch_are_spread() -> None:
    async def test() -> None:
        flags = ("--disable-load-monitoring",)
        async with (
            worker("vllm") as (_, first),
            worker("vllm") as (_, second),
            gateway(first, second, flags=flags) as gw,
        ):
            body = {"model": "sim", "prompt": ["one", "two", "three", "four"], "max_tokens": 1}
            assert (await gw.http.post("/v1/completions", json=body)).status_code == 200
            sent = await metric(gw, "smg_worker_requests_total")
            assert sorted(sent.values()) == [2.0, 2.0]
            assert await metric(gw, "smg_engine_load_polls_total") == {}

    run(test)


async def routed(gw: Gateway, text: str) -> str:
    return str((await gw.chat(text, max_tokens=1)).headers["x-smg-routed-worker-id"])
