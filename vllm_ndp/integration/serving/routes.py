"""Our paths, and reports in answers that ask for them, on every `vllm serve … --quantization ndp`.

    GET /v1/ndp/                 the live page (page.py), to which / and /v1/ndp lead
    GET /v1/ndp/status           what is effective, totals, device, requests now and lately
    GET /v1/ndp/experts          who is hot where, and bits
    GET /v1/ndp/requests/ID      reports of one request, by the id that the client got
    X-NDP-Report: 1              on a request for text: the reports come with the answer, streamed or not

Everything comes from the workers by `collective_rpc`, so it works with several front ends and without vLLM's stats.
Since vLLM puts `--middleware` outside of its own authentication, the same class guards our paths here. An endpoint
plugin stands inside of it, so that a browser without the key meets vLLM's refusal in place of our login.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import shlex
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm import envs

from vllm_ndp.device_client.process import remove_abandoned
from vllm_ndp.integration.compat import say
from vllm_ndp.integration.plugin import METHOD
from vllm_ndp.operating.server import FORCED

PREFIX = "/v1/ndp/"
HEADER = "X-NDP-Report"
EVENT = "ndp.report"
"""Of a stream of named events (Anthropic's Messages)."""
_ANSWERED = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate")
"""Paths whose answers carry reports."""
_NOT_ASKED = ("", "0", "false", "no", "off")
"""Values of the header that ask for none."""
FORMAT = 1
"""Version of the JSON that /v1/ndp/status answers; docs/serving.md lists its fields. Fields may be added under one
number."""
_DATA, _DONE = b"data: ", b"data: [DONE]"
_LAST_MESSAGE, _LAST_OF_RESPONSE = b"event: message_stop", b"event: response.completed\n"
_SEEN = "vllm_ndp.routes"
"""Key of a scope that has met our routes: a server may have them in both ways."""
_ASK_AGAIN_S, _MOST_QUESTIONS = 0.005, 40
"""The worker learns of a finished request with the step after it, a few milliseconds later."""
_ENDS_WITHIN_S = 2.0
"""Held while a device is being added."""


LOGIN = Path(__file__).with_name("login.html").read_text(encoding="utf-8")
"""Without the key: a form. `/v1/ndp/#KEY` fills it in; what follows the # never leaves the browser by itself."""


class NdpRoutes:
    def __init__(self, app: ASGIApp, *, is_asked_for: bool = True) -> None:
        """is_asked_for: by this server's command line, so that an engine without the plugin is an error."""
        self._app, self._is_asked_for = app, is_asked_for
        paths = [
            Route(PREFIX, _page),
            Route(PREFIX + "status", _status),
            Route(PREFIX + "experts", _experts),
            Route(PREFIX + "requests/{request_id:path}", _request),
        ]
        self._ours = ExceptionMiddleware(Router(paths, redirect_slashes=False), {HTTPException: _unknown})
        self._guarded: ASGIApp | None = None  # the same behind the server's keys, which a request leads to

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
        elif scope.get(_SEEN) or not (self._is_asked_for or _method(scope) == METHOD):
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and _path(scope).startswith(PREFIX):
            guarded = self._behind_keys(scope)
            if _path(scope) == PREFIX and guarded is not self._ours and "authorization" not in Headers(scope=scope):
                guarded = HTMLResponse(LOGIN, status_code=401)  # a browser cannot send a key before it is asked for one
            await guarded(scope, receive, send)
        elif scope["type"] == "http" and _path(scope) in ("/", PREFIX.rstrip("/")) and scope["method"] == "GET":
            await RedirectResponse(f"{scope.get('root_path', '')}{PREFIX}")(scope, receive, send)
        elif scope["type"] == "http" and _path(scope) in _ANSWERED:
            scope[_SEEN] = True
            body = await _body(receive)
            if refused := _refused_arguments(body, scope):
                await _refusal(400, refused)(scope, receive, send)
                return
            if Headers(scope=scope).get(HEADER, "").strip().lower() not in _NOT_ASKED:
                send = _WithReports(scope, send)
            await self._app(scope, _again(body, receive), send)
        else:
            await self._app(scope, receive, send)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = _method(scope)
        if self._is_asked_for and method != METHOD:
            sentence = f"--middleware {__name__}.NdpRoutes needs --quantization ndp, got {method}: drop one of the two"
            await receive()
            await send({"type": "lifespan.startup.failed", "message": sentence})
            return
        await self._app(scope, receive, _saying_where(scope["app"].state.args, send) if method == METHOD else send)

    def _behind_keys(self, scope: Scope) -> ASGIApp:
        if self._guarded is None:
            try:
                from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
            except ImportError:  # its place in vLLM 0.26
                from vllm.entrypoints.serve.utils.server_utils import AuthenticationMiddleware

            given = scope["app"].state.args.api_key or [envs.VLLM_API_KEY]
            keys = [key for key in given if key]
            self._guarded = AuthenticationMiddleware(self._ours, keys) if keys else self._ours
        return self._guarded


def _saying_where(args: Any, send: Send) -> Send:
    """As the server starts to answer: its addresses, and a line that asks it something. At its end, what is left."""

    async def sent(message: Message) -> None:
        await send(message)
        if message["type"] == "lifespan.startup.complete":
            for line in addresses(args):
                say(line)
        if message["type"] == "lifespan.shutdown.complete":
            # vLLM has killed the engine and its device, so that neither removes the device's directory
            for engine in multiprocessing.active_children():
                engine.join(_ENDS_WITHIN_S)  # it holds the directory until its last thread has ended
            remove_abandoned()

    return sent


def addresses(args: Any) -> list[str]:
    """What a person does next with a server of these arguments; nothing where it listens at no port."""
    if getattr(args, "uds", None):
        return []
    # nobody can ask at the address that means all of a machine's: what is printed has to work
    host = args.host if args.host not in (None, "", "0.0.0.0", "::") else "localhost"
    name = f"[{host}]" if ":" in host else host
    where = f"http{'s' if args.ssl_certfile else ''}://{name}:{args.port}{args.root_path or ''}"
    model = (args.served_model_name or [args.model])[0]
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if args.api_key or envs.VLLM_API_KEY else ""
    body = shlex.quote(json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 24}))
    return [
        f"live page {where}{PREFIX}, metrics {where}/metrics, all settings: vllm-ndp top {where} --count 1 --all",
        f"try: curl {where}/v1/completions -H 'Content-Type: application/json'{key} -d {body}",
    ]


class NdpEndpoints:
    """Entry point `vllm.endpoint_plugins`: the same routes without `--middleware`, where VLLM_PLUGINS names `ndp`, as
    it does in a server with the plugin (plugin.py).

    Servers of other models keep their answers.
    """

    name = METHOD
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """app: vLLM's FastAPI, before it has started."""
        app.add_middleware(NdpRoutes, is_asked_for=False)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Do nothing: the routes find the engine's client in the application's state."""


class _WithReports:
    """Sends an answer on, with the reports of its request in a field `ndp`.

    Of a JSON body; of a stream's chunk with the usage, or else of one more chunk before [DONE], which has all that its
    readers look at; of an event before Anthropic's last one; of the Response that its stream's last event holds.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._start: Message | None = None  # of an answer whose length changes
        self._body = bytearray()
        self._chunk: dict[str, Any] = {}  # the last one of a stream
        self._is_told = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            if message["status"] == 200 and kind.startswith("application/json"):
                self._start = message
                return
        elif message["type"] == "http.response.body":
            if self._start is not None:
                await self._collect(self._start, message)
                return
            if not self._is_told and (body := message.get("body", b"")):
                message = {**message, "body": b"\n\n".join([await self._told(event) for event in body.split(b"\n\n")])}
        await self._send(message)

    async def _collect(self, start: Message, message: Message) -> None:
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        answer = json.loads(self._body)
        if isinstance(answer, dict):
            answer["ndp"] = await self._reports()
        body = _json(answer)
        kept = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        await self._send({**start, "headers": [*kept, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})

    async def _told(self, event: bytes) -> bytes:
        """One event of a stream, with the reports where they belong."""
        if event.startswith(_LAST_MESSAGE):
            self._is_told = True
            told = {"type": EVENT, "ndp": await self._reports()}
            return b"event: " + EVENT.encode() + b"\n" + _DATA + _json(told) + b"\n\n" + event
        if event.startswith(_LAST_OF_RESPONSE):
            self._is_told = True
            name, data = event.split(b"\n" + _DATA, 1)
            completed = json.loads(data)
            completed["response"]["ndp"] = await self._reports()
            return name + b"\n" + _DATA + _json(completed)
        if event == _DONE and self._chunk:
            self._is_told = True
            chat = "delta" in (self._chunk.get("choices") or [{"delta": {}}])[0]
            choice: dict[str, Any] = {"index": 0, "delta": {}} if chat else {"index": 0, "text": ""}
            kept: dict[str, Any] = {
                name: self._chunk[name] for name in ("id", "object", "created", "model") if name in self._chunk
            }
            told = kept | {"choices": [choice | {"finish_reason": None}], "ndp": await self._reports()}
            return _DATA + _json(told) + b"\n\n" + event
        if event.startswith(_DATA + b"{"):
            try:
                self._chunk = json.loads(event[len(_DATA) :])
            except ValueError:  # an event in several parts, which vLLM does not send
                return event
            if self._chunk.get("choices") == [] and self._chunk.get("usage"):
                self._is_told = True
                return _DATA + _json(self._chunk | {"ndp": await self._reports()})
        return event

    async def _reports(self) -> dict[str, Any]:
        """The reports of everything that was made of the client's request."""
        metadata = self._scope.get("state", {}).get("request_metadata")
        if metadata is None:  # a path that makes no request of the engine
            return {}
        found: dict[str, Any] = {}
        for _ in range(_MOST_QUESTIONS):
            found, running = await _find(self._scope["app"], metadata.request_id)
            if found and not running:
                break
            await asyncio.sleep(_ASK_AGAIN_S)
        return found


async def _body(receive: Receive) -> list[Message]:
    """The messages of a request's body, which vLLM reads whole as well."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _again(messages: list[Message], receive: Receive) -> Receive:
    left = iter(messages)

    async def received() -> Message:
        return next(left, None) or await receive()

    return received


def _refused_arguments(messages: list[Message], scope: Scope) -> str:
    """Why the plugin's part of `vllm_xargs`, which vLLM ignores, would have no effect; empty where it has."""
    body = b"".join(message.get("body", b"") for message in messages)
    if b'"ndp_' not in body:
        return ""
    try:
        given = json.loads(body)["vllm_xargs"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    asked = sorted(name for name in given if name.startswith("ndp_")) if isinstance(given, dict) else []
    if unknown := [name for name in asked if name != FORCED]:
        return f"vllm_xargs has {unknown[0]}, which the plugin does not know: it knows {FORCED}"
    config = scope["app"].state.engine_client.vllm_config.model_config
    named = " ".join(map(str, getattr(config, "logits_processors", None) or ()))
    if asked and not ("ForcedTokens" in named or "TracedTokens" in named):
        return (
            f"vllm_xargs has {FORCED}, which nothing on this server reads: start it with --logits-processors "
            "vllm_ndp.integration.forced_tokens:ForcedTokens"
        )
    return ""


def _json(value: Any) -> bytes:
    """As vLLM writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


# -- our paths -----------------------------------------------------------------------------------------------------


async def _status(request: Request) -> Response:
    workers = [live for live in await _ask(request.app, "ndp_live") if live is not None]
    # stages of one engine know the same requests, engines beside each other know different ones
    finished = {name: {"id": name} | report for worker in workers for name, report in worker.pop("finished")}
    running = {one["id"]: one for worker in workers for one in worker.pop("running")}
    model = request.app.state.engine_client.vllm_config.model_config.served_model_name
    answer = {"format": FORMAT, "model": model, "workers": workers}
    return JSONResponse(answer | {"running": list(running.values()), "finished": list(finished.values())})


async def _experts(request: Request) -> Response:
    workers = [live for live in await _ask(request.app, "ndp_experts") if live is not None]
    return JSONResponse({"format": FORMAT, "workers": workers})


async def _request(request: Request) -> Response:
    request_id = request.path_params["request_id"]
    finished, running = await _find(request.app, request_id)
    if not finished and not running:
        error = f"no request {request_id!r} runs or is among the last that ended"
        return _refusal(404, error)
    return JSONResponse({"id": request_id, "finished": finished, "running": running})


async def _unknown(request: Request, error: Exception) -> Response:
    """Answer a path that the plugin does not have, or a method that the path does not have."""
    assert isinstance(error, HTTPException)
    said = f"{error.detail}: {request.method} {request.url.path}"
    return _refusal(error.status_code, said, dict(error.headers or {}))


def _refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Answer in vLLM's own form of an error."""
    error = {"message": message, "type": HTTPStatus(status).phrase, "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


async def _page(request: Request) -> Response:
    return HTMLResponse(await asyncio.to_thread(_rendered_page))


@lru_cache(maxsize=1)
def _rendered_page() -> str:
    from vllm_ndp.integration.serving.page import render  # Bokeh takes a second to import, where the page is looked at

    return render()


async def _find(app: Any, request_id: str) -> tuple[dict[str, Any], list[str]]:
    """Reports of what has ended, ids of what runs; the same on every rank, different with data parallelism."""
    finished: dict[str, Any] = {}
    running: list[str] = []
    for answer in await _ask(app, "ndp_requests", request_id):
        finished |= answer["finished"]
        running += answer["running"]
    return finished, sorted(set(running))


async def _ask(app: Any, method: str, *arguments: Any) -> list[Any]:
    """Return what every worker answers, of every engine behind this front end."""
    client = app.state.engine_client
    if (ask_all := getattr(client.engine_core, "call_utility_all_async", None)) is not None:
        answers: list[list[Any]] = await ask_all("collective_rpc", method, None, arguments, None)
        return [answer for engine in answers for answer in engine]
    return list(await client.collective_rpc(method, args=arguments))


def _method(scope: Scope) -> str | None:
    """How the engine behind this server is quantized."""
    method: str | None = scope["app"].state.engine_client.vllm_config.model_config.quantization
    return method


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
