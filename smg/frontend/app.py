"""The ASGI application: routes, authentication, admission; the data plane passes bodies on without decoding them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smg.api.errors import ApiError, refused, render_error
from smg.frontend.admission import RefusedError
from smg.frontend.auth import ADMIN, OPEN, SERVING, Authenticator, Denied
from smg.frontend.cors import Cors
from smg.frontend.direct import Direct
from smg.frontend.exchange import AwaitedExchange
from smg.frontend.http import (
    DEFAULT_REQUEST_ID_HEADERS,
    BodyTooLargeError,
    ClientGoneError,
    Receive,
    Request,
    Scope,
    Send,
    choose_request_id,
    log_access,
)  # fmt: skip
from smg.frontend.info import InfoRoutes
from smg.frontend.sessions.conversations import ConversationRoutes
from smg.frontend.sessions.routes import ResponseRoutes
from smg.messages import AdminCall, StreamStart

if TYPE_CHECKING:
    from smg.frontend.process import FrontendProcess
    from smg.frontend.sessions.manager import Sessions


Handler = Callable[[Request], Awaitable[None]]

ID_PREFIXES = {
    "/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-", "/generate": "gnt-", "/v1/messages": "msg_",
    "/v1/responses": "resp-",
}  # fmt: skip
GENERATION_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/classify",
)
FORWARDED_HEADERS = frozenset(
    ("content-type", "x-smg-routing-key", "x-smg-target-worker", "x-smg-parser", "anthropic-version", "anthropic-beta")
)


@dataclass(frozen=True, slots=True)
class Route:
    """What serves one method of a path. ``group`` decides about authentication, ``counted`` about admission."""

    handler: Handler
    group: str
    template: str
    counted: bool = False


class App:
    """``await app(scope, receive, send)`` as ASGI defines it."""

    def __init__(self, process: FrontendProcess) -> None:
        self.process = process
        self.settings = process.settings
        self.auth = Authenticator(self.settings)
        self.cors = Cors(self.settings.cors_allowed_origins)
        self.info = InfoRoutes(process)
        self.id_headers = tuple(h.lower() for h in self.settings.request_id_headers or ()) or DEFAULT_REQUEST_ID_HEADERS
        self.forwarded = FORWARDED_HEADERS | {name.lower() for name in self.settings.routing_key_headers or ()}
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefix: list[tuple[str, dict[str, Route]]] = []
        self._templates: dict[tuple[str, ...], dict[str, Route]] = {}
        self.direct = Direct(self, GENERATION_PATHS, ID_PREFIXES)
        self._build_routes()

    def _build_routes(self) -> None:
        info = self.info
        for path, handler in info.public().items():
            self._add(("GET", "HEAD"), path, handler, OPEN)
        self._add_prefix(("GET", "HEAD"), "/v1/models/", info.model, OPEN, "/v1/models/{id}")
        for path in GENERATION_PATHS:
            self._add(("POST",), path, self._generate, SERVING, counted=True)
        for path in ("/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens", "/rerank", "/v1/rerank"):
            self._add(("POST",), path, self._generate, SERVING)
        for path in ("/tokenize", "/detokenize"):
            self._add(("POST",), path, self._tokenize, SERVING)
        for path in ("/parse/function_call", "/parse/reasoning"):
            self._add(("POST",), path, self._generate, ADMIN)
        for path in ("/flush_cache", "/start_profile", "/stop_profile"):
            self._add(("POST",), path, self._admin, ADMIN)
        self._add(("GET", "HEAD"), "/get_loads", self._admin, ADMIN)
        self._add(("GET", "HEAD"), "/loads", self._admin, OPEN)
        for path in ("/workers", "/v1/tokenizers"):
            self._add(("GET", "HEAD", "POST"), path, self._admin, ADMIN)
        self._add_prefix(
            ("GET", "HEAD", "PUT", "PATCH", "DELETE"), "/workers/", self._admin, ADMIN, "/workers/{worker_id}"
        )
        self._add_prefix(("GET", "HEAD", "DELETE"), "/v1/tokenizers/", self._admin, ADMIN, "/v1/tokenizers/{id}")

    def add_sessions(self, sessions: Sessions) -> None:
        """The routes of multi-turn sessions and their records."""
        self._add_templates(ResponseRoutes(self, sessions).table(), frozenset(("/v1/responses",)))
        self._add_templates(ConversationRoutes(self, sessions).table(), frozenset())

    def _add(self, methods: tuple[str, ...], path: str, handler: Handler, group: str, *, counted: bool = False) -> None:
        entry = self._exact.setdefault(path, {})
        for method in methods:
            entry[method] = Route(handler, group, path, counted)

    def _add_prefix(self, methods: tuple[str, ...], prefix: str, handler: Handler, group: str, template: str) -> None:
        self._prefix.append((prefix, {method: Route(handler, group, template) for method in methods}))

    # One request ---------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        begun = time.time()
        request = Request(scope, receive, send)
        prefix = ID_PREFIXES.get(request.path, "req-")
        request.request_id = choose_request_id(request.headers, self.id_headers, prefix)
        if self.cors.enabled:
            self.cors.wrap(request)
        metrics = self.process.metrics
        route = self._find(request.path, request.method)
        if isinstance(route, Route):
            request.template = route.template
        metrics.request_received(request.method, request.template)
        request.on_head = lambda r: metrics.head_ready(r.method, r.template, time.time() - begun)
        error_code = ""
        try:
            error_code = await self._dispatch(request, route)
        except ClientGoneError:
            request.status, error_code = 499, "client_closed_request"
        except ApiError as error:
            error_code = error.code
            await self.respond_error(request, error)
        metrics.request_finished(request.template, request.status, error_code)
        log_access(request.method, request.template, request.status, request.request_id, begun)

    async def _dispatch(self, request: Request, route: Route | list[str] | None) -> str:
        if route is None:
            raise refused("unknown_url", f"Invalid URL ({request.method} {request.path})", status=404)
        if isinstance(route, list):
            if request.method == "OPTIONS" and self.cors.enabled:
                await self.cors.preflight(request)
                return ""
            error = refused("method_not_allowed", f"Method {request.method} is not allowed here", status=405)
            await self.respond_error(request, error, [("allow", ",".join(route))])
            return error.code
        denied = self.auth.check(route.group, request.method, request.headers.get("authorization"))
        if denied is not None:
            return await self._deny(request, denied)
        if not route.counted:
            await route.handler(request)
            return ""
        admission, metrics = self.process.admission, self.process.metrics
        try:
            if not admission.try_enter():
                await admission.enter()
        except RefusedError as full:
            metrics.admission_rejected(full.reason)
            error = refused(full.code, full.message, status=full.status)
            await self.respond_error(request, error, [("retry-after", "2")])
            return full.code
        metrics.admission_allowed(admission.inflight, admission.waiting)
        try:
            await route.handler(request)
        finally:
            admission.leave()
            metrics.admission_left(admission.inflight, admission.waiting)
        return request.error_code

    def _add_templates(self, table: list[tuple[str, str, Handler]], counted: frozenset[str]) -> None:
        """Routes with parameters in their path; ``counted`` paths take part in admission."""
        for method, template, handler in table:
            methods = ("GET", "HEAD") if method == "GET" else (method,)
            if "{" not in template:
                self._add(methods, template, handler, SERVING, counted=template in counted)
                continue
            entry = self._templates.setdefault(tuple(template.split("/")), {})
            for name in methods:
                entry[name] = Route(handler, SERVING, template)

    def _find_template(self, path: str) -> dict[str, Route] | None:
        parts = path.split("/")
        for template, methods in self._templates.items():
            if len(template) == len(parts) and all(
                part if known.startswith("{") else part == known for known, part in zip(template, parts, strict=True)
            ):
                return methods
        return None

    def _find(self, path: str, method: str) -> Route | list[str] | None:
        """The route, the list of methods the path takes, or None for an unknown path."""
        methods = self._exact.get(path)
        if methods is None:
            for prefix, candidate in self._prefix:
                if path.startswith(prefix) and len(path) > len(prefix):
                    methods = candidate
                    break
            else:
                methods = self._find_template(path)
                if methods is None:
                    return None
        return methods.get(method) or list(methods)

    async def _deny(self, request: Request, denied: Denied) -> str:
        if denied.control_plane:
            await request.respond_text(denied.status, denied.message)
            return "unauthorized"
        challenge = [("www-authenticate", denied.challenge)]
        await self.respond_error(request, ApiError(denied.status, "invalid_api_key", denied.message), challenge)
        return "invalid_api_key"

    async def respond_error(
        self, request: Request, error: ApiError, extra: list[tuple[str, str]] | None = None
    ) -> None:
        """Send an error in the shape of the path's API."""
        status, headers, body = render_error(error, request.path, request.request_id)
        await request.respond(status, headers + (extra or []), body)

    async def read_body(self, request: Request) -> bytes:
        try:
            return await request.read_body(self.settings.max_payload_size)
        except BodyTooLargeError:
            message = f"Request body exceeds the limit of {self.settings.max_payload_size} bytes"
            raise refused("request_body_too_large", message, status=413) from None

    # Data plane ----------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> None:
        await self._exchange(request, request.path, await self.read_body(request))

    async def _tokenize(self, request: Request) -> None:
        """The short forms of the tokenizer routes."""
        request.path = "/v1" + request.path
        await self._generate(request)

    async def _exchange(self, request: Request, path: str, body: bytes) -> None:
        """Send a request around the ring and copy the answer to the client."""
        if self.process.draining:
            raise ApiError(
                503, "shutting_down", "the gateway is shutting down", gateway=True, headers=(("retry-after", "1"),)
            )
        exchange = self.new_exchange(request, path, body)
        try:
            self.process.submit(exchange)
            await self.deliver(request, exchange)
        except BaseException:
            exchange.gone = exchange.gone or not exchange.done.done()
            raise
        finally:
            self.process.forget(exchange)

    def forwarded_headers(self, request: Request) -> dict[str, str]:
        """The headers that the pool or the router act on."""
        return {name: value for name, value in request.headers.items() if name in self.forwarded}

    def new_exchange(self, request: Request, path: str, body: bytes) -> AwaitedExchange:
        now = time.time()
        headers = self.forwarded_headers(request)
        timeout = self.settings.request_timeout_secs
        connection = request.connection
        exchange = AwaitedExchange(
            0, path, request.request_id, headers, body, connection, self.settings.stream_buffer_bytes, now,
            now + timeout if timeout else 0.0,
        )  # fmt: skip
        if connection is not None:
            connection.exchange = exchange
            if connection.transport.is_closing():
                exchange.client_gone()
        return exchange

    async def deliver(self, request: Request, exchange: AwaitedExchange) -> None:
        head = await exchange.head
        if head is None:
            raise ClientGoneError
        if not isinstance(head, StreamStart):
            await request.respond(head.status, head.headers, head.body)
            request.error_code = dict(head.headers).get("x-smg-error-code", "")
            return
        await request.start(200, head.headers)
        await request.send({"type": "http.response.body", "body": head.body, "more_body": True})
        exchange.body = b""
        exchange.streaming(time.time())
        await exchange.done
        if exchange.gone:
            if exchange.connection is not None:
                exchange.connection.transport.abort()
            raise ClientGoneError
        await request.send({"type": "http.response.body", "body": exchange.take_pending()})
        request.error_code = exchange.error_code

    # Control plane -------------------------------------------------------------------------------

    async def _admin(self, request: Request) -> None:
        """The router answers."""
        body = await self.read_body(request) if request.method in ("POST", "PUT", "PATCH") else b""
        exchange = self.new_exchange(request, request.path, body)
        query = request.scope["query_string"].decode("latin-1")
        method = "GET" if request.method == "HEAD" else request.method
        try:
            self.process.send_admin(
                exchange,
                lambda seq: AdminCall(seq, self.process.index, method, request.path, query, body, request.request_id),
            )
            await self.deliver(request, exchange)
        finally:
            self.process.forget(exchange)
