"""Metrics over several real processes: sums, dead processes, removed workers, guards, and the listener."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from smg.telemetry import series
from smg.telemetry.exposition import CONTENT_TYPE, HttpListener, mark_process_dead, render, serve_metrics, serve_probes
from smg.telemetry.metrics import FrontendMetrics
from smg.telemetry.series import Counters, ModelGuard, method_label, worker_label

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

FRONTEND = """
from smg.telemetry.metrics import FrontendMetrics
metrics = FrontendMetrics()
metrics.request_received("POST", "/v1/chat/completions")
metrics.request_received("BREW", "other")
metrics.head_ready("POST", "/v1/chat/completions", 0.3)
metrics.request_finished("/v1/chat/completions", 200, "")
metrics.admission_allowed(3, 1)
metrics.admission_rejected("full")
metrics.connections_active.inc()
metrics.inflight_ages([1, 30, 31, 100000])
"""
ROUTER = """
from smg.telemetry.router_metrics import RouterMetrics
metrics = RouterMetrics()
for url in ("grpc://a:1", "grpc://user:pw@b:1"):
    metrics.worker_registered(url, http2=True)
    metrics.workers.probed(url, "regular", success=True, ready=True)
    metrics.breakers.update(url, "open", 10, 0)
    metrics.workers.sent(url, "m", 2)
    metrics.engines.reported(url, "m", "0", {"running_requests": 5, "token_usage": 0.5})
metrics.breakers.transition("grpc://a:1", "closed", "open")
metrics.routed("regular", "zmq", "m", "chat", streaming=True)
metrics.failed("regular", "zmq", "m", "chat", "engine_error")
metrics.policies.branch("cache_aware", "tree_match")
metrics.policies.branch("random", "anything")
metrics.policies.match_ratio.observe(0.55)
metrics.worker_removed("grpc://a:1")
"""


def run_process(directory: Path, code: str) -> int:
    """Run the code in a process of its own; returns its pid."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory)}
    done = subprocess.run(
        [sys.executable, "-c", code + "\nimport os\nprint(os.getpid())"],
        env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return int(done.stdout)


def samples(text: bytes) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(sorted(labels.items()))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("metrics")
    pids = [run_process(made, FRONTEND), run_process(made, FRONTEND), run_process(made, ROUTER)]
    (made / "pids").write_text(json.dumps(pids))
    return made


def test_two_processes_add_up(directory: Path) -> None:
    found = samples(render(str(directory)))
    chat = "/v1/chat/completions"
    assert found[key("smg_http_requests_total", method="POST", path=chat)] == 2
    assert found[key("smg_http_requests_total", method="other", path="other")] == 2
    assert found[key("smg_http_responses_total", path=chat, status_code="200", error_code="")] == 2
    assert found[key("smg_http_request_duration_seconds_bucket", method="POST", path=chat, le="0.25")] == 0
    assert found[key("smg_http_request_duration_seconds_bucket", method="POST", path=chat, le="0.5")] == 2
    assert found[key("smg_http_request_duration_seconds_sum", method="POST", path=chat)] == pytest.approx(0.6)
    assert found[key("smg_admission_inflight")] == 6
    assert found[key("smg_http_connections_active")] == 2
    assert found[key("smg_http_rate_limit_total", result="rejected")] == 2
    assert found[key("smg_admission_queue_rejected_total", reason="full")] == 2


def test_ages_fall_into_disjoint_buckets(directory: Path) -> None:
    found = samples(render(str(directory)))
    name = "smg_http_inflight_request_age_count"
    assert found[key(name, gt="0", le="30")] == 4
    assert found[key(name, gt="30", le="60")] == 2
    assert found[key(name, gt="60", le="180")] == 0
    assert found[key(name, gt="86400", le="+Inf")] == 2


def test_router_series(directory: Path) -> None:
    found = samples(render(str(directory)))
    labels = {
        "router_type": "grpc",
        "backend_type": "regular",
        "connection_mode": "zmq",
        "model": "m",
        "endpoint": "chat",
    }
    assert found[key("smg_router_requests_total", **labels, streaming="true")] == 1
    assert found[key("smg_router_request_errors_total", **labels, error_type="engine_error")] == 1
    assert found[key("smg_router_request_body_path_total", path="buffered", reason="grpc")] == 1
    assert found[key("smg_cache_aware_policy_branch_total", branch="tree_match")] == 1
    assert found[key("smg_cache_aware_match_ratio_bucket", le="0.5")] == 0
    assert found[key("smg_cache_aware_match_ratio_bucket", le="0.6")] == 1
    assert found[key("smg_worker_cb_state", worker="grpc://b:1")] == 1
    assert found[key("smg_engine_token_usage", worker="grpc://b:1", model="m", dp_rank="0")] == 0.5
    assert found[key("smg_worker_retries_total", worker_type="prefill", endpoint="chat")] == 0


def test_gauges_of_a_removed_worker_vanish_and_its_counters_stay(directory: Path) -> None:
    found = samples(render(str(directory)))
    gone = [name for name, labels in found if ("worker", "grpc://a:1") in labels]
    assert sorted(gone) == [
        "smg_worker_cb_health_readmissions_total",
        "smg_worker_cb_transitions_total",
        "smg_worker_requests_total",
    ]


def test_credentials_of_a_worker_url_are_not_exposed(directory: Path) -> None:
    assert b"pw" not in render(str(directory))


def test_help_and_type_are_given(directory: Path) -> None:
    text = render(str(directory)).decode()
    assert "# TYPE smg_http_requests_total counter" in text
    assert "# HELP smg_http_requests_total Requests received" in text
    assert "# TYPE smg_http_request_duration_seconds histogram" in text


def test_gauges_of_a_dead_process_leave_the_sum_and_counters_stay(directory: Path) -> None:
    first = json.loads((directory / "pids").read_text())[0]
    mark_process_dead(first, str(directory))
    found = samples(render(str(directory)))
    assert found[key("smg_admission_inflight")] == 3
    assert found[key("smg_http_requests_total", method="POST", path="/v1/chat/completions")] == 2


def test_a_file_that_is_being_created_does_not_break_a_scrape(tmp_path: Path) -> None:
    run_process(tmp_path, FRONTEND)
    (tmp_path / "gauge_livesum_1.db").write_bytes(b"\0" * 4096)
    assert b"smg_admission_inflight 3.0" in render(str(tmp_path))


def test_guards() -> None:
    guard = ModelGuard(["m"])
    assert [guard.label("m"), guard.label("x"), guard.label("")] == ["m", "other", "unknown"]
    guard.update(["x"])
    assert [guard.label("m"), guard.label("x")] == ["other", "x"]
    assert [method_label("GET"), method_label("FOO")] == ["GET", "other"]
    assert worker_label("grpc://u:p@h:1@3") == "grpc://h:1@3"
    assert worker_label("grpc://h:1@3") == "grpc://h:1@3"
    assert worker_label("ipc:///run/e0") == "ipc:///run/e0"


def test_label_sets_beyond_the_bound_are_counted_together() -> None:
    family = Counters("bounded_total", "A bounded family", "name", limit=2)
    children = {family.child(name) for name in ("a", "b", "c", "d")}
    assert len(children) == 3
    assert family.child("c") is family.child("d")
    assert family.child("a") is not family.child("c")
    with pytest.raises(ValueError, match="has the labels"):
        family.child("a", "b")


def test_a_forked_child_writes_to_its_own_file(tmp_path: Path) -> None:
    run_process(
        tmp_path,
        "import os\nfrom smg.telemetry.series import Counters\nCounters('a_total', 'A').child().inc()\n"
        "if os.fork() == 0:\n    Counters('a_total', 'A').child().inc(5)\n    os._exit(0)\nos.wait()",
    )
    assert len(list(tmp_path.glob("counter_*.db"))) == 2
    assert b"a_total 6.0" in render(str(tmp_path))


def test_many_label_sets_outgrow_the_first_mapping(tmp_path: Path) -> None:
    run_process(
        tmp_path,
        "from smg.telemetry.series import Counters\nfirst = Counters('a_total', 'A').child()\n"
        "many = Counters('b_total', 'x' * 1000, 'n', limit=3000)\nfor n in range(2000):\n    many.inc(str(n))\n"
        "first.inc(7)\nmany.add(3, '0')",
    )
    found = samples(render(str(tmp_path)))
    assert found[key("a_total")] == 7
    assert (found[key("b_total", n="0")], found[key("b_total", n="1999")]) == (4, 1)


def test_duration_buckets_can_be_replaced() -> None:
    try:
        series.configure([5, 1, 1, float("inf")])
        assert series.duration_buckets() == (1.0, 5.0)
        FrontendMetrics().head_ready("GET", "/health", 2)
    finally:
        series.configure(None)
    assert series.duration_buckets() == series.DURATION_BUCKETS


# The listener ----------------------------------------------------------------------------------------


def with_listener(make: Callable[[socket.socket], HttpListener], *paths: str) -> list[tuple[int, str, bytes]]:
    """Serve on a fresh socket and GET the paths over one connection."""
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    port = sock.getsockname()[1]
    listener = make(sock)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        answers = []
        for path in paths:
            connection.request("GET", path)
            answer = connection.getresponse()
            answers.append((answer.status, answer.headers["content-type"], answer.read()))
        return answers
    finally:
        connection.close()
        listener.close()


def test_only_metrics_is_served(directory: Path) -> None:
    metrics, query, *others = with_listener(
        lambda sock: serve_metrics(sock, str(directory)), "/metrics", "/metrics?a=b", "/", "/health", "/ws/metrics"
    )
    assert metrics[:2] == (200, CONTENT_TYPE)
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"
    assert b"smg_http_requests_total" in metrics[2]
    assert query[0] == 200
    assert [status for status, _, _ in others] == [404, 404, 404]


def test_probes() -> None:
    health, live, ready, other = with_listener(
        lambda sock: serve_probes(sock, lambda: (503, {"status": "not ready"})),
        "/health", "/liveness", "/readiness", "/metrics",
    )  # fmt: skip
    assert (health[0], health[2]) == (200, b"OK")
    assert live[0] == 200
    assert (ready[0], json.loads(ready[2])) == (503, {"status": "not ready"})
    assert other[0] == 404


def test_a_failing_answer_is_500_and_the_listener_lives() -> None:
    def broken() -> tuple[int, dict[str, object]]:
        raise RuntimeError("no")

    first, second = with_listener(lambda sock: serve_probes(sock, broken), "/readiness", "/health")
    assert (first[0], second[0]) == (500, 200)
