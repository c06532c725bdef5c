"""Our paths on every `vllm serve … --quantization ndp`.

    GET /ndp/                    the live page (page.html), to which /, /ndp and /v1/ndp lead; it holds no data
    GET /v1/ndp/status           what is effective, totals, device, requests now and lately
    GET /v1/ndp/experts          who is hot where, and bits
    GET /v1/ndp/requests/ID      reports of one request, by the id that the client got

Everything comes from the workers by `collective_rpc`, so it works with several front ends and without vLLM's stats.
Since vLLM puts `--middleware` outside of its own authentication, the same class guards our data here.
"""

from __future__ import annotations

import json
import multiprocessing
import shlex
from http import HTTPStatus
from pathlib import Path
from typing import Any

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

PREFIX, LIVE = "/v1/ndp/", "/ndp/"
_TO_LIVE = ("/", "/ndp", "/v1/ndp", PREFIX)
FORMAT = 1
"""Version of the JSON that /v1/ndp/status answers; docs/serving.md lists its fields. Fields may be added under one
number."""
_ENDS_WITHIN_S = 2.0


PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
"""Asks for the key where the server wants one. `/ndp/#KEY` gives it; what follows the # never leaves the browser by
itself."""


class NdpRoutes:
    """Nothing in a server of another model."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        paths = [
            Route(PREFIX + "status", _status),
            Route(PREFIX + "experts", _experts),
            Route(PREFIX + "requests/{request_id:path}", _request),
        ]
        self._ours = ExceptionMiddleware(Router(paths, redirect_slashes=False), {HTTPException: _unknown})
        self._guarded: ASGIApp | None = None  # the same behind the server's keys, which a request leads to

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _method(scope) != METHOD:
            await self._app(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, _saying_where(scope["app"].state.args, send))
        elif scope["type"] == "http" and _path(scope).startswith(PREFIX) and _path(scope) != PREFIX:
            await self._behind_keys(scope)(scope, receive, send)
        elif scope["type"] == "http" and _path(scope) == LIVE and scope["method"] == "GET":
            await HTMLResponse(PAGE)(scope, receive, send)
        elif scope["type"] == "http" and _path(scope) in _TO_LIVE and scope["method"] == "GET":
            await RedirectResponse(f"{scope.get('root_path', '')}{LIVE}")(scope, receive, send)
        else:
            await self._app(scope, receive, send)

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
        f"live page {where}{LIVE}, metrics {where}/metrics, all settings {where}{PREFIX}status",
        f"try: curl {where}/v1/completions -H 'Content-Type: application/json'{key} -d {body}",
    ]


class NdpEndpoints:
    """Entry point `vllm.endpoint_plugins`: the same routes without `--middleware`, where VLLM_PLUGINS names `ndp`, as
    it does in a server with the plugin (plugin.py)."""

    name = METHOD
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """app: vLLM's FastAPI, before it has started."""
        app.add_middleware(NdpRoutes)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Do nothing: the routes find the engine's client in the application's state."""


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
    finished: dict[str, Any] = {}
    running = set[str]()  # the same on every rank, different with data parallelism
    for told in await _ask(request.app, "ndp_requests", request_id):
        finished |= told["finished"]
        running |= set(told["running"])
    if not finished and not running:
        error = f"no request {request_id!r} runs or is among the last that ended"
        return _refusal(404, error)
    return JSONResponse({"id": request_id, "finished": finished, "running": sorted(running)})


async def _unknown(request: Request, error: Exception) -> Response:
    """Answer a path that the plugin does not have, or a method that the path does not have."""
    assert isinstance(error, HTTPException)
    said = f"{error.detail}: {request.method} {request.url.path}"
    return _refusal(error.status_code, said, dict(error.headers or {}))


def _refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Answer in vLLM's own form of an error."""
    error = {"message": message, "type": HTTPStatus(status).phrase, "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


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
