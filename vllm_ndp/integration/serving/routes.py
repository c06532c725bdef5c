"""Our paths, and reports in answers that ask for them: `VLLM_PLUGINS=ndp`, or `--middleware` with `NdpRoutes` by name.

    GET /v1/ndp/                 the live page (page.py)
    GET /v1/ndp/status           what is effective, totals, device, requests now and lately
    GET /v1/ndp/experts          who is hot where, and bits
    GET /v1/ndp/requests/ID      reports of one request, by the id that the client got
    POST /v1/ndp/devices         {"address": ...}: one device more joins the running engine; needs a server with keys
    X-NDP-Report: 1              on a completion or chat: the reports come with the answer, streamed or not

Everything comes from the workers by `collective_rpc`, so it works with several front ends and without vLLM's stats.
Since vLLM puts `--middleware` outside of its own authentication, the same class guards our paths here. An endpoint
plugin stands inside of it, so that a browser without the key meets vLLM's refusal in place of our login. Knows HTTP
and vLLM's engine client; does not know what a report holds.
"""

from __future__ import annotations

import asyncio
import json
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_ndp.integration.plugin import METHOD

PREFIX = "/v1/ndp/"
DEVICES = PREFIX + "devices"
HEADER = "X-NDP-Report"
CHUNK = "ndp.report"
FORMAT = 1
"""Version of the JSON that /v1/ndp/status answers; docs/serving.md lists its fields. Fields may be added under one
number."""
_DONE = b"data: [DONE]\n\n"
_SEEN = "vllm_ndp.routes"
"""Key of a scope that has met our routes: a server may have them in both ways."""
_MOST_BODY_BYTES = 4096  # of what we are sent: an address
_ASK_AGAIN_S, _MOST_QUESTIONS = 0.005, 40
"""The worker learns of a finished request with the step after it, a few milliseconds later."""
_adding = asyncio.Lock()
"""Held while a device is being added."""


LOGIN = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>vllm-ndp</title></head>
<body style="font:15px system-ui;margin:40px"><form><label>This server wants its API key:
<input type="password" name="key" autofocus></label> <button>Open</button></form><p id="said"></p><script>
async function open(key) {
  const answer = await fetch(location.pathname, {headers: {Authorization: 'Bearer ' + key}});
  if (!answer.ok) { document.getElementById('said').textContent = 'It says: ' + answer.status; return; }
  const page = await answer.text();
  window.ndpKey = key;
  history.replaceState(null, '', location.pathname);
  document.open(); document.write(page); document.close();
}
document.forms[0].onsubmit = event => { event.preventDefault(); open(document.forms[0].key.value); };
if (location.hash.length > 1) open(decodeURIComponent(location.hash.slice(1)));
</script></body></html>
"""
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
            Route(DEVICES, _add_device, methods=["POST"]),
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
            if _path(scope) == DEVICES and guarded is self._ours:  # else anybody could have experts computed elsewhere
                error = "devices are added on a server with keys only: start it with --api-key"
                guarded = _refusal(403, error)
            await guarded(scope, receive, send)
        elif scope["type"] == "http" and HEADER in Headers(scope=scope):
            scope[_SEEN] = True
            await self._app(scope, receive, _WithReports(scope, send))
        else:
            await self._app(scope, receive, send)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = _method(scope)
        if self._is_asked_for and method != METHOD:
            sentence = f"--middleware {__name__}.NdpRoutes needs --quantization ndp, got {method}: drop one of the two"
            await receive()
            await send({"type": "lifespan.startup.failed", "message": sentence})
            return
        await self._app(scope, receive, send)

    def _behind_keys(self, scope: Scope) -> ASGIApp:
        if self._guarded is None:
            from vllm import envs

            try:
                from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
            except ImportError:  # its place in vLLM 0.26
                from vllm.entrypoints.serve.utils.server_utils import AuthenticationMiddleware

            given = scope["app"].state.args.api_key or [envs.VLLM_API_KEY]
            keys = [key for key in given if key]
            self._guarded = AuthenticationMiddleware(self._ours, keys) if keys else self._ours
        return self._guarded


class NdpEndpoints:
    """Entry point `vllm.endpoint_plugins`: the same routes without `--middleware`, where VLLM_PLUGINS names `ndp`.

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
    """Sends an answer on, with the reports of its request: a chunk before [DONE], or the field `ndp` of a JSON body."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._start: Message | None = None  # of an answer whose length changes
        self._body = bytearray()

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
            if message.get("body", b"").endswith(_DONE):
                message = {**message, "body": message["body"][: -len(_DONE)] + await self._chunk() + _DONE}
        await self._send(message)

    async def _collect(self, start: Message, message: Message) -> None:
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        answer = json.loads(self._body)
        if isinstance(answer, dict):
            answer["ndp"] = (await self._reports())[1]
        body = json.dumps(answer).encode()
        kept = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        await self._send({**start, "headers": [*kept, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})

    async def _chunk(self) -> bytes:
        request_id, reports = await self._reports()
        chunk = {"id": request_id, "object": CHUNK, "choices": [], "ndp": reports}
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    async def _reports(self) -> tuple[str, dict[str, Any]]:
        """The client's id, and the reports of everything that was made of it."""
        metadata = self._scope.get("state", {}).get("request_metadata")
        if metadata is None:  # a path that makes no request of the engine
            return "", {}
        found: dict[str, Any] = {}
        for _ in range(_MOST_QUESTIONS):
            found, running = await _find(self._scope["app"], metadata.request_id)
            if found and not running:
                break
            await asyncio.sleep(_ASK_AGAIN_S)
        return metadata.request_id, found


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


async def _add_device(request: Request) -> Response:
    body = b""
    async for part in request.stream():  # as far as an address can need: a server holds no more of it
        if len(body := body + part) > _MOST_BODY_BYTES:
            return _refusal(413, f"the body may have {_MOST_BODY_BYTES} bytes")
    try:
        address = json.loads(body)["address"]
    except (ValueError, KeyError, TypeError, RecursionError):
        address = None
    if not isinstance(address, str):
        return _refusal(400, 'the body must be {"address": "tcp://..."}')
    if _adding.locked():  # the engine waits while a device is met: for one at a time
        return _refusal(429, "another device is being added: try again")
    async with _adding:
        answers = await _ask(request.app, "ndp_add_device", address)
    refusals = [answer["refused"] for answer in answers if answer["refused"]]
    return JSONResponse({"workers": answers}, status_code=409 if refusals else 200)


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
