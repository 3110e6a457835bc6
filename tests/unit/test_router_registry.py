"""Registration bodies, the worker list, what is broadcast about it, and the JSON of the workers API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from router_context import NOW, make_worker, report

from smg.messages import TokenizerSource
from smg.router.admin import worker_object
from smg.router.health import HealthRules, polls_load
from smg.router.lifecycle import sampling_defaults
from smg.router.registry import Registry, class_labels
from smg.router.spec import RegistrationError, read_update
from smg.router.worker import DRAINING, NOT_READY, READY, ModelCard, Worker
from smg.settings import Settings


def registry(tmp_path: Path, **settings: Any) -> Registry:
    return Registry(Settings(**settings), tmp_path, lambda: None)


def add(known: Registry, spec: dict[str, Any], **fields: Any) -> Worker:
    worker = known.new_worker(spec, lambda worker, old, new: None)
    for name, value in {"status": READY, "kind": "vllm", **fields}.items():
        setattr(worker, name, value)
    known.add(worker)
    return worker


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "url"),
        ({"url": 7}, "url"),
        ({"url": "GRPC://h:1"}, "scheme"),
        ({"url": "h:1"}, "scheme"),
        ({"url": "http://h:1"}, "HTTP workers are not supported"),
        ({"url": "grpc://h:1", "connection_mode": "http"}, "HTTP workers are not supported"),
        ({"url": "grpc://h:1", "worker_type": "prefill"}, "prefill workers are not supported"),
        ({"url": "grpc://h:1", "worker_type": "big"}, "worker_type"),
        ({"url": "grpc://h:1", "runtime_type": "llamacpp"}, "runtime_type"),
        ({"url": "grpc://h:1", "labels": ["a"]}, "labels"),
        ({"url": "grpc://h:1", "labels": {"a": 1}}, "labels"),
        ({"url": "grpc://h:1", "priority": -1}, "priority"),
        ({"url": "grpc://h:1", "priority": 2**32}, "priority"),
        ({"url": "grpc://h:1", "models": "m"}, "models"),
        ({"url": "grpc://h:1", "models": [{"display_name": "x"}]}, "id"),
        ({"url": "grpc://h:1", "models": [{"id": ""}]}, "id"),
        ({"url": "grpc://h:1", "models": [{"id": "m", "aliases": "x"}]}, "aliases"),
        ({"url": "grpc://h:1", "health": {"check_interval_secs": 0}}, "check_interval_secs"),
        ({"url": "grpc://h:1", "health": {"timeout_secs": 0.001}}, "timeout_secs"),
        ({"url": "grpc://h h:1"}, "url: white space"),
        ({"url": "grpc://h\n:1"}, "url: white space"),
        ({"url": "ipc:///a\0b"}, "control characters"),
        ({"url": f"grpc://{'h' * 254}:1"}, "longer than 253"),
        ({"url": "grpc://me:secret@h:1"}, "user name or password"),
        ({"url": "grpc://h:1?"}, "nothing behind its port"),
        ({"url": "ipc:///"}, "ipc://<path>"),
        ({"url": "ipc:///" + "x" * 110}, "107 bytes"),
        ({"url": "ipc:///" + "x" * 95, "dp_size": 11}, "107 bytes"),
        ({"url": "ipc:///e", "zmq_handshake_address": "x"}, "zmq_handshake_address: the address must be tcp"),
        ({"url": "ipc:///e", "zmq_handshake_address": "tcp://h"}, "tcp://host:port"),
        ({"url": "ipc:///e", "zmq_handshake_address": "tcp://h:99999"}, "Port out of range"),
        ({"url": "ipc:///e", "connection_mode": "grpc"}, "is a zmq worker, not grpc"),
        ({"url": "grpc://h:1", "connection_mode": "zmq"}, "is a grpc worker, not zmq"),
        ({"url": "grpc://h:1", "models": [{"id": "m"}, {"id": "m"}]}, "same id"),
        ({"url": "grpc://h:1", "api_key": "a\nb"}, "api_key"),
        (
            {"url": "grpc://h:1", "models": [{"id": "m", "tool_parser": "nope"}]},
            "worker grpc://h:1 declares unknown tool_parser 'nope' for model 'm'",
        ),
    ],
)
def test_bad_registrations(tmp_path: Path, body: dict[str, Any], reason: str) -> None:
    with pytest.raises(RegistrationError, match=reason) as caught:
        registry(tmp_path).new_worker(body, lambda worker, old, new: None)
    assert caught.value.code == "BAD_REQUEST"


def test_a_registration_with_everything(tmp_path: Path) -> None:
    body = {
        "url": "grpc://h:1", "worker_type": "regular", "runtime": "sglang", "labels": {"zone": "a"}, "priority": 0,
        "cost": 2.5, "api_key": "secret", "unknown": [1], "max_connection_attempts": 3, "kv_connector": "Nixl",
        "models": [
            {"id": "m", "aliases": ["n"], "context_length": 99, "provider": "p", "metadata": {"k": 1}}, {"id": "o"},
        ],
    }  # fmt: skip
    worker = registry(tmp_path).new_worker(body, lambda worker, old, new: None)
    shown = worker_object(worker)
    assert shown.pop("job_status")["status"] == "processing"
    assert shown == {
        "id": worker.id, "model_id": "m", "url": "grpc://h:1", "worker_type": "regular", "connection_mode": "grpc",
        "models": [
            {"id": "m", "aliases": ["n"], "context_length": 99, "provider": "p", "metadata": {"k": 1}}, {"id": "o"},
        ],
        "runtime_type": "sglang", "labels": {"zone": "a"}, "priority": 0, "cost": 2.5, "max_connection_attempts": 3,
        "is_healthy": False, "status": "pending", "load": 0, "http2": True, "kv_connector": "Nixl",
    }  # fmt: skip


def test_addresses_that_can_be_used(tmp_path: Path) -> None:
    bodies = (
        {"url": "grpcs://[::1]:50051", "connection_mode": "grpc", "api_key": "k e-y"},
        {"url": f"grpc://{'h' * 253}"},
        {"url": "ipc:///run/e", "connection_mode": "zmq", "zmq_handshake_address": "tcp://127.0.0.1:20001"},
    )
    for body in bodies:
        assert registry(tmp_path).new_worker(body, lambda worker, old, new: None).url == body["url"]


def test_a_shown_card_names_the_parsers_in_use() -> None:
    cards = [ModelCard("m"), ModelCard("n", tool_parser="json")]
    worker = make_worker(0, cards=cards, labels={"tool_parser": "qwen", "reasoning_parser": "qwen3"})
    assert worker_object(worker)["models"] == [
        {"id": "m", "tool_parser": "qwen", "reasoning_parser": "qwen3"},
        {"id": "n", "tool_parser": "json", "reasoning_parser": "qwen3"},
    ]


def test_worker_object_of_a_rank() -> None:
    worker = make_worker(0, dp_rank=1, dp_size=4)
    report(worker, num_running_reqs=3)  # rank 0 of the report is another worker's
    shown = worker_object(worker)
    assert (shown["url"], shown["dp_rank"], shown["dp_size"]) == ("grpc://w0:1@1", 1, 4)
    assert "engine_load" not in shown and "job_status" not in shown
    worker.dp_rank = 0
    report(worker, num_running_reqs=3)
    assert [rank["num_running_reqs"] for rank in worker_object(worker)["engine_load"]] == [3]


def test_every_card_of_a_worker_is_served(tmp_path: Path) -> None:
    known = registry(tmp_path, model_aliases={"short": "m1"})
    first = add(known, {"url": "grpc://a:1", "models": [{"id": "m1", "aliases": ["x"]}, {"id": "m2"}]})
    second = add(known, {"url": "grpc://b:1", "models": [{"id": "m2"}]}, kind="sglang", status=NOT_READY)
    assert known.by_model == {"m1": [first], "m2": [first, second]}
    models = {model.id: model for model in known.table().models}
    assert models["m1"].aliases == ["short", "x"]
    assert models["m2"].kinds == ["sglang", "vllm"]
    assert (models["m1"].ready_workers, models["m2"].ready_workers) == (1, 1)
    assert (known.table().workers_total, known.table().workers_ready) == (2, 1)


def test_pending_and_draining_workers_serve_nothing(tmp_path: Path) -> None:
    known = registry(tmp_path)
    add(known, {"url": "grpc://a:1", "models": [{"id": "m"}], "runtime_type": "vllm"}, status="pending")
    assert known.table().models == []
    add(known, {"url": "grpc://b:1", "models": [{"id": "m"}]}, status=DRAINING)
    assert known.table().models == []
    assert known.table().workers_total == 1


def test_where_grammars_start_is_said_when_all_workers_agree(tmp_path: Path) -> None:
    known = registry(tmp_path)
    label = {"constrained_decoding_start": "after_reasoning"}
    add(known, {"url": "grpc://a:1", "models": [{"id": "m"}], "labels": label})
    assert known.table().models[0].decoding_start == "after_reasoning"
    add(known, {"url": "grpc://b:1", "models": [{"id": "m"}]})
    assert known.table().models[0].decoding_start == ""


def test_cards_win_over_labels_and_disagreement_takes_the_smallest(tmp_path: Path) -> None:
    known = registry(tmp_path)
    add(
        known, {"url": "grpc://a:1", "models": [{"id": "m", "tool_parser": "qwen"}], "labels": {"tool_parser": "llama"}}
    )
    [model] = known.table().models
    assert model.tool_parser == "qwen"
    add(known, {"url": "grpc://b:1", "models": [{"id": "m"}], "labels": {"tool_parser": "kimik2"}})
    [model] = known.table().models
    assert model.tool_parser == "kimik2"


def test_a_restarted_router_finds_workers_ids_and_tokenizers(tmp_path: Path) -> None:
    known = registry(tmp_path)
    kept = add(known, {"url": "grpc://a:1", "labels": {"zone": "a"}, "api_key": "secret"})
    add(known, {"url": "grpc://b:1"}, status=DRAINING)
    known.tokenizers["t"] = TokenizerSource("t", "/somewhere")
    known.removed_tokenizers.add("gone")
    known.changed()
    assert (tmp_path / "workers.json").stat().st_mode & 0o077 == 0
    again = registry(tmp_path)
    saved = again.saved()
    assert saved == ([kept.spec], [TokenizerSource("t", "/somewhere")], ["gone"])
    assert again.new_worker(kept.spec, lambda worker, old, new: None).id == kept.id


def test_ranks_are_found_by_address_and_keep_their_ids(tmp_path: Path) -> None:
    known = registry(tmp_path)
    ranks = [add(known, {"url": "grpc://a:1"}, dp_rank=rank) for rank in range(2)]
    known.changed()
    assert [known.at("grpc://a:1", rank) for rank in (0, 1, -1)] == [*ranks, None]
    again = registry(tmp_path)
    saved = again.saved()
    assert saved is not None and len(saved[0]) == 1
    first = again.new_worker(saved[0][0], lambda worker, old, new: None)
    second = again.new_worker(saved[0][0], lambda worker, old, new: None, 1)
    assert [first.id, second.id] == [rank.id for rank in ranks]


def test_a_removed_worker_leaves_its_id(tmp_path: Path) -> None:
    known = registry(tmp_path)
    worker = add(known, {"url": "grpc://a:1"})
    known.known_ids[worker.name] = worker.id
    known.remove(worker)
    assert known.new_worker({"url": "grpc://a:1"}, lambda worker, old, new: None).id != worker.id


def test_the_start_up_tokenizer_serves_all_models_but_not_in_gateway_mode(tmp_path: Path) -> None:
    source = TokenizerSource("/tok", "/tok")
    for igw, expected in ((False, "/tok"), (True, "m")):
        known = registry(tmp_path, model_path="/tok", enable_igw=igw)
        known.tokenizers["/tok"] = source
        add(known, {"url": "grpc://a:1", "models": [{"id": "m"}]})
        assert known.table().models[0].tokenizer == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"0": "bad", "1": "good"}, {"0": "bad", "1": "good"}),
        ('{"0": "bad"}', {"0": "bad"}),
        ("{", {}),
        ("", {}),
        (None, {}),
        (["bad"], {}),
        ({"0": 1}, {}),
    ],
)
def test_class_labels(value: object, expected: dict[str, str]) -> None:
    assert class_labels(value) == expected


def test_requests_in_flight_per_detok_process() -> None:
    worker = make_worker(0)
    worker.sent(0, 10, "k")
    worker.sent(0, 20)
    worker.sent(1, 30, "k")
    assert (worker.inflight, worker.tokens_since_report, worker.inflight_of("k")) == (3, 60, 2)
    worker.released(0, "k")
    assert (worker.inflight, worker.inflight_of("k")) == (2, 1)
    worker.forget_detok(1)
    worker.released(1, "k")
    assert (worker.inflight, worker.inflight_of("k")) == (1, 0)
    report(worker, when=NOW)
    assert (worker.tokens_since_report, worker.requests_since_report, worker.processed) == (0, 0, 3)


def test_health_rules_of_a_worker() -> None:
    settings = Settings(health_check_interval_secs=60, load_monitor_interval=10)
    assert HealthRules.of(settings, {}) == HealthRules(60.0, 10.0, 5.0, 3, 2)
    own = {"timeout_secs": 1, "check_interval_secs": 2.5, "success_threshold": 7, "failure_threshold": 8}
    spec = {"health": own, "load_monitor_interval_secs": 4}
    assert HealthRules.of(settings, spec) == HealthRules(2.5, 4.0, 1.0, 8, 7)
    assert HealthRules.of(settings, {"health": {"disable_health_check": True}}).health_interval == 0.0
    off = Settings(disable_health_check=True, disable_load_monitoring=True)
    assert (HealthRules.of(off, {}).health_interval, HealthRules.of(off, {}).load_interval) == (0.0, 0.0)
    assert HealthRules.of(off, {"health": {"disable_health_check": False}}).health_interval == 60.0


@pytest.mark.parametrize(
    ("policy", "metric", "polled"),
    [
        ("least_load", "expected_wait", True),
        ("power_of_two", "expected_wait", True),
        ("power_of_two", "requests", False),
        ("cache_aware", "expected_wait", False),
    ],
)
def test_disabled_load_monitoring_polls_only_for_policies_that_need_it(policy: str, metric: str, polled: bool) -> None:
    settings = Settings(policy=policy, power_of_two_load_metric=metric, disable_load_monitoring=True)
    assert polls_load(settings) is polled
    assert polls_load(Settings(policy=policy, power_of_two_load_metric=metric)) is True


def test_updates_are_checked() -> None:
    assert read_update({"priority": 3, "unknown": 1}).priority == 3
    for member, value in {"url": "grpc://h:1", "model_id": "z"}.items():
        with pytest.raises(RegistrationError, match=f"PATCH cannot change {member}, only labels"):
            read_update({"priority": 3, member: value})
    for member, value in {"cost": "cheap", "api_key": "a\0"}.items():
        with pytest.raises(RegistrationError, match=member):
            read_update({member: value})


def test_sampling_defaults_keep_what_requests_may_leave_unset() -> None:
    text = '{"temperature": 0.6, "top_k": 20, "top_p": true, "max_tokens": 5, "repetition_penalty": 1.05, "min_p": "x"}'
    assert sampling_defaults(text) == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert sampling_defaults("") == sampling_defaults("[1]") == sampling_defaults("{") == {}
