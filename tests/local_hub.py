"""A model hub that is a directory of this machine, behind the HTTP that huggingface_hub speaks. For tests.

    DIR/org/name/...        the files of a repository's one revision

Serves listing, file heads and files, as far as the client asks for them. Give clients `HF_ENDPOINT` and
`HF_HUB_DISABLE_XET=1`.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REVISION = "1" * 40


class _Hub(BaseHTTPRequestHandler):
    root: Path
    seen: list[str]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        words = self._words()
        if words[:2] == ["api", "models"] and len(words) >= 4:
            repo = "/".join(words[2:4])
            if not (self.root / repo).is_dir():
                self._missing("RepoNotFound")
            elif "tree" in words:
                self._json([self._entry(repo, path) for path in self._files(repo)])
            else:
                siblings = [{"rfilename": path} for path in self._files(repo)]
                self._json({"id": repo, "modelId": repo, "sha": REVISION, "siblings": siblings, "private": False})
        elif len(words) > 4 and words[2] == "resolve":
            self._file("/".join(words[:2]), "/".join(words[4:]))
        else:
            self._missing("EntryNotFound")

    do_HEAD = do_GET

    def _words(self) -> list[str]:
        self.seen.append(f"{self.command} {self.path}")
        return [unquote(word) for word in urlsplit(self.path).path.split("/") if word]

    def _files(self, repo: str) -> list[str]:
        folder = self.root / repo
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

    def _entry(self, repo: str, path: str) -> dict[str, Any]:
        content = (self.root / repo / path).read_bytes()
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _file(self, repo: str, name: str) -> None:
        path = self.root / repo / name
        if not path.is_file():
            self._missing("EntryNotFound" if (self.root / repo).is_dir() else "RepoNotFound")
            return
        content = path.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": REVISION,
            "Accept-Ranges": "bytes",
        }
        self._send(200, content, "application/octet-stream", headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), "application/json", {})

    def _missing(self, code: str) -> None:
        self._send(404, b"{}", "application/json", {"X-Error-Code": code})

    def _send(self, code: int, body: bytes, kind: str, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Hub:
    """`environment` is what clients need; `seen` what they asked, as "GET /path"."""

    def __init__(self, address: str, root: Path, cache: Path, seen: list[str]) -> None:
        self.root, self.seen = root, seen
        self.environment = {
            "HF_ENDPOINT": address,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "hf_a_token_of_this_test",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }


@contextmanager
def local_hub(root: Path, cache: Path) -> Iterator[Hub]:
    """Serve the directory `root`; clients keep what they fetch in `cache`."""
    seen: list[str] = []
    handler = type("Handler", (_Hub,), {"root": root, "seen": seen})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_port}", root, cache, seen)
    finally:
        server.shutdown()
        server.server_close()
