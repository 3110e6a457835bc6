"""Settings that are accepted, stored and named in one start-up warning, but have no effect in this version.

They exist so that command lines written for the established flag set keep starting. Fields of tier "refused" stop
start-up when they are set, because ignoring them would weaken security.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from smg.flags import group

_worker = group("Worker Configuration", "later")
_policy = group("Routing Policy", "later")
_rl = group("RL Control Plane", "later")
_pd = group("PD/EPD Disaggregation", "later")
_mm = group("Jobs, load monitor, multimodal", "later")
_k8s = group("Service Discovery (Kubernetes)", "later")
_file = group("Service Discovery (File)", "later")
_profiling = group("Profiling", "later")
_request = group("Request Handling", "later")
_priority = group("Priority Scheduler", "later")
_tenant = group("Tenant Rate Limit", "later")
_health = group("Health Checks", "later")
_tokenizer = group("Tokenizer", "later")
_backend = group("Backend", "later")
_oracle = group("Oracle Database", "later")
_trace = group("Tracing (OpenTelemetry)", "later")
_auth = group("Control Plane Authentication", "refused")
_mesh = group("Mesh Server", "later")
_mesh_tls = group("Mesh Server", "refused")


class LaterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Accepted without effect; see ``smg.settings.Settings``, which extends it."""

    upstream_http2: Annotated[bool, _worker("HTTP/2 to HTTP workers that answer it")] = False
    upstream_pool_idle_timeout_secs: Annotated[int, _worker("idle lifetime of pooled worker connections")] = 3

    encode_policy: Annotated[
        str | None, _policy("policy for encode workers", choices=("random", "round_robin", "consistent_hashing"))
    ] = None
    balance_token_usage_threshold: Annotated[float, _policy("KV-usage spread above which affinity is dropped")] = 1.0
    overload_token_usage_threshold: Annotated[float, _policy("KV-usage ceiling that sheds affinity")] = 1.0
    worker_overload_waiting_requests: Annotated[int, _policy("queued requests at which a worker leaves routing")] = 8
    worker_overload_token_usage: Annotated[float, _policy("KV usage at which a worker leaves routing")] = 0.8
    worker_overload_protection: Annotated[bool, _policy("kept for old command lines")] = False
    disable_worker_overload_protection: Annotated[bool, _policy("switch both overload thresholds off")] = False
    worker_overload_shed: Annotated[bool, _policy("answer 503 when every candidate is overloaded")] = False
    kv_index: Annotated[str, _policy("structure of the KV-event index: positional or chain")] = "positional"
    worker_stall_secs: Annotated[int, _policy("silence after which a transport failure excludes a worker")] = 2
    worker_wedge_secs: Annotated[int, _policy("seconds without progress before a worker is skipped")] = 3
    worker_stale_secs: Annotated[int, _policy("silence allowed from a worker that pushes load records")] = 15
    worker_warmup_secs: Annotated[int, _policy("how long a new worker gets a slice of cache misses")] = 60
    worker_warmup_share: Annotated[float, _policy("share of misses offered to warming workers")] = 0.25
    worker_warmup_blocks: Annotated[int, _policy("index growth that ends warm-up")] = 1024
    worker_warmup_thin_ratio: Annotated[float, _policy("index share below which a worker counts as thin")] = 0.5
    worker_warmup_divert_every: Annotated[int, _policy("one cache hit in this many goes to a thin worker")] = 8
    selection_policy: Annotated[str, _policy("only cache-aware-default")] = "cache-aware-default"
    selection_accounting_ttl_ms: Annotated[int, _policy("lifetime of optimistic dispatch bookings")] = 0
    overlap_decay: Annotated[float, _policy("discount overlap by waiting prefill backlog")] = 0.0
    selection_temperature: Annotated[float, _policy("softmax over scores instead of the best one")] = 0.0
    bucket_adjust_interval_secs: Annotated[int, _policy("bucket policy: boundary recalculation period")] = 5
    cache_boundaries: Annotated[list[int], _policy("token positions of reusable engine state", form="comma")] = []
    cache_index: Annotated[str, _policy("cache_aware under-layer", choices=("tree", "hash"))] = "tree"
    cache_ttl_secs: Annotated[int, _policy("lifetime of a hash placement")] = 180
    max_buffered_request_bytes: Annotated[int, _policy("HTTP proxy: largest body kept for retries")] = 1048576
    pd_admission_wait_secs: Annotated[int, _policy("wait for a decode slot before shedding")] = 30
    stream_body_stall_timeout_secs: Annotated[int, _policy("HTTP proxy: abort a stalled request body")] = 300
    dp_minimum_tokens_scheduler: Annotated[bool, _policy("choose the DP rank with the fewest tokens")] = False

    enable_rl: Annotated[bool, _rl("mount /v1/rl")] = False
    rl_control_timeout_secs: Annotated[int, _rl("timeout of a proxied RL control call")] = 600
    rl_fanout_concurrency: Annotated[int, _rl("parallel calls in one RL fan-out")] = 32

    epd_disaggregation: Annotated[bool, _pd("encode/prefill/decode mode")] = False
    encode: Annotated[list[tuple[str, int | None]], _pd("encode URL [bootstrap port or none]", form="words")] = []
    prefill_max_inflight_requests_per_worker: Annotated[int, _pd("cap on prefill requests per worker")] = -1
    prefill_queue_size: Annotated[int | None, _pd("prefill admission queue")] = None
    prefill_queue_timeout_secs: Annotated[int | None, _pd("prefill admission wait")] = None

    multimodal_tensor_transport: Annotated[
        str | None, _mm("transport of media tensors", choices=("inline", "shm", "auto", "rdma"))
    ] = None
    multimodal_shm_min_bytes: Annotated[int | None, _mm("smallest tensor sent through shared memory")] = None
    multimodal_max_inflight_bytes: Annotated[int | None, _mm("budget of preprocessed media")] = None
    mm_per_request_image_limit: Annotated[int | None, _mm("image cap per request")] = None
    mm_processing: Annotated[
        str | None, _mm("where media is processed", choices=("auto", "router", "worker"), env="SMG_MM_PROCESSING")
    ] = None
    mm_pixel_cache_mb: Annotated[
        int | None, _mm("pixel cache size; 0 = off", non_negative=True, env="SMG_MM_PIXEL_CACHE_MB")
    ] = None
    mm_pixel_rdma: Annotated[bool, _mm("serve cached pixels over RDMA", env="SMG_MM_PIXEL_RDMA")] = False
    mm_allowed_media_domains: Annotated[
        list[str] | None, _mm("hosts media may be fetched from (comma list)", form="comma")
    ] = None
    mm_allow_private_media_hosts: Annotated[
        bool, _mm("allow media URLs on private addresses", env="SMG_MM_ALLOW_PRIVATE_MEDIA_HOSTS")
    ] = False
    rdma_listen_ip: Annotated[str | None, _mm("RDMA metadata listener address", env="SMG_RDMA_LISTEN_IP")] = None
    rdma_slot_ttl_s: Annotated[int | None, _mm("RDMA slot lease", non_negative=True, env="SMG_RDMA_SLOT_TTL_S")] = None
    log_mm_timing: Annotated[bool, _mm("log media timings", env="SMG_LOG_MM_TIMING")] = False

    service_discovery: Annotated[bool, _k8s("Kubernetes discovery (old spelling)")] = False
    discovery_provider: Annotated[str | None, _k8s("source of discovered workers", choices=("kubernetes", "file"))] = (
        None
    )
    selector: Annotated[list[str] | None, _k8s("pod label selector", at_least_one=True)] = None
    service_discovery_port: Annotated[int, _k8s("port of discovered pods")] = 80
    service_discovery_namespace: Annotated[str | None, _k8s("namespace to watch")] = None
    kv_connector_annotation: Annotated[str, _k8s("pod annotation naming the KV connector")] = "smg.ai/kv-connector"
    kv_engine_id_annotation: Annotated[str, _k8s("pod annotation with the KV engine id")] = "smg.ai/kv-engine-id"
    encode_selector: Annotated[list[str] | None, _k8s("labels of encode pods", at_least_one=True)] = None
    prefill_selector: Annotated[list[str] | None, _k8s("labels of prefill pods", at_least_one=True)] = None
    decode_selector: Annotated[list[str] | None, _k8s("labels of decode pods", at_least_one=True)] = None
    router_selector: Annotated[list[str] | None, _k8s("labels of peer router pods", at_least_one=True)] = None
    model_id_from: Annotated[str | None, _k8s("namespace, label:<k> or annotation:<k>")] = None

    discovery_file: Annotated[str | None, _file("JSON manifest of workers")] = None
    discovery_check_interval_secs: Annotated[int | None, _file("re-read period of the manifest")] = None

    jemalloc_prof_dir: Annotated[str | None, _profiling("heap profiles")] = None

    storage_context_headers: Annotated[list[str], _request("HEADER=key pairs passed to storage hooks")] = []
    trust_tenant_header: Annotated[bool, _request("take the tenant from a header")] = False
    tenant_header_name: Annotated[str, _request("that header")] = "x-smg-tenant-id"

    priority_scheduler_enabled: Annotated[bool, _priority("priority admission instead of the plain bound")] = False
    priority_scheduler_default_max_class: Annotated[str, _priority("highest class for unlisted tenants")] = "default"
    priority_scheduler_config: Annotated[str | None, _priority("YAML of class overrides and tenants")] = None
    priority_scheduler_tenant_metric_top_n: Annotated[int, _priority("tenant label cap")] = 32

    tenant_rate_limit_enabled: Annotated[bool, _tenant("per-tenant token/request limits")] = False
    tenant_rate_limit_config: Annotated[str | None, _tenant("their YAML; required when enabled")] = None

    remove_unhealthy_workers: Annotated[
        bool | None,
        _health(
            "drop unhealthy workers so that discovery adds them again",
            aliases=("--worker-auto-recovery",),
            negatable=True,
        ),
    ] = None

    parser: Annotated[str, _tokenizer("parser tables", choices=("legacy", "symphony"))] = "legacy"

    enable_wasm: Annotated[bool, _backend("WASM plugins")] = False
    storage_hook_wasm_path: Annotated[str | None, _backend("WASM storage hook", tier="refused")] = None
    schema_config: Annotated[str | None, _backend("table/column remapping YAML")] = None

    oracle_wallet_path: Annotated[str | None, _oracle("wallet directory", env="ATP_WALLET_PATH")] = None
    oracle_tns_alias: Annotated[str | None, _oracle("TNS alias (wins over the descriptor)", env="ATP_TNS_ALIAS")] = None
    oracle_connect_descriptor: Annotated[str | None, _oracle("connect descriptor", env="ATP_DSN")] = None
    oracle_username: Annotated[str | None, _oracle("user", env="ATP_USER")] = None
    oracle_password: Annotated[str | None, _oracle("password", env="ATP_PASSWORD", secret=True)] = None
    oracle_external_auth: Annotated[bool, _oracle("external authentication", env="ATP_EXTERNAL_AUTH")] = False
    oracle_pool_min: Annotated[int, _oracle("smallest pool", env="ATP_POOL_MIN")] = 1
    oracle_pool_max: Annotated[int, _oracle("largest pool", env="ATP_POOL_MAX")] = 16
    oracle_pool_timeout_secs: Annotated[int, _oracle("pool wait", env="ATP_POOL_TIMEOUT_SECS")] = 30

    enable_trace: Annotated[bool, _trace("OpenTelemetry traces")] = False
    otlp_traces_endpoint: Annotated[str, _trace("collector address")] = "localhost:4317"

    control_plane_audit_enabled: Annotated[bool, _auth("audit log of control-plane calls")] = False
    jwt_issuer: Annotated[str | None, _auth("OIDC issuer; needs an audience")] = None
    jwt_audience: Annotated[str | None, _auth("expected audience")] = None
    jwt_jwks_uri: Annotated[str | None, _auth("JWKS address, else discovered")] = None
    jwt_role_mapping: Annotated[list[str], _auth("idp_role=gateway_role pairs")] = []

    enable_mesh: Annotated[bool, _mesh("several gateways share state")] = False
    mesh_server_name: Annotated[str | None, _mesh("node name")] = None
    mesh_host: Annotated[str, _mesh("bind address")] = "0.0.0.0"  # noqa: S104
    mesh_advertise_host: Annotated[str | None, _mesh("address told to peers")] = None
    mesh_port: Annotated[int, _mesh("port")] = 39527
    mesh_peer_urls: Annotated[list[str], _mesh("peers to join")] = []
    mesh_tls_ca_cert: Annotated[str | None, _mesh_tls("CA of the peers")] = None
    mesh_tls_cert: Annotated[str | None, _mesh_tls("node certificate")] = None
    mesh_tls_key: Annotated[str | None, _mesh_tls("node key")] = None
