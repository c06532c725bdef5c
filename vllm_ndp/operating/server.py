"""A running `vllm serve`, asked over HTTP by the address that its clients use; what goes wrong is one sentence."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from ndp_device.common.errors import ConfigError, DeviceUnavailable

DECODE_KINDS = ("hot", "spilled", "warm", "cold", "fallback")
"""Kinds of pairs of decode rows. `hot`: in hot slots. `spilled`: of hot experts, on the device to save time. `warm`: on
the host's CPU. `cold`: on the device. `fallback`: computed here because the device did not answer."""
PROMPT_KINDS = ("prefill", "prefill_device", "prefill_fallback")
"""Pairs of prompt rows: here, on the device, and here because the device did not answer."""
PAIR_KINDS = DECODE_KINDS + PROMPT_KINDS
"""Each pair is of one kind, so the kinds of a phase add up to its rows x top-k x layers."""
_MOST_BYTES = 64 << 20


class ServerRefusal(ConfigError):
    """An answer that is none, by its HTTP code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def wants_key(self) -> bool:
        return self.code in (401, 403)


class Server:
    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        """api_key: as clients give it; only paths below /v1 get it."""
        self.name = url.rstrip("/").removesuffix("/v1")
        self._api_key, self._timeout_s = api_key, timeout_s

    def text(self, path: str, body: dict[str, Any] | None = None) -> str:
        """The answer. Raises ServerRefusal, or DeviceUnavailable where nobody is."""
        request = urllib.request.Request(self.name + path, None if body is None else json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        if self._api_key and path.startswith("/v1"):
            request.add_header("Authorization", f"Bearer {self._api_key}")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                return str(answer.read(_MOST_BYTES).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                says = f"{self.name} wants its key: give --api-key, or set VLLM_API_KEY"
            else:
                says = f"{self.name}{path} answers {error.code} ({_reason(error)}): is this the address of vllm serve?"
            raise ServerRefusal(error.code, says) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise DeviceUnavailable(f"no server answers at {self.name} ({reason})") from None

    def json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            return json.loads(self.text(path, body))
        except json.JSONDecodeError:
            raise ConfigError(f"{self.name}{path} answers no JSON: is this the address of vllm serve?") from None


def _reason(error: urllib.error.HTTPError) -> str:
    text = error.read(10_000).decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:200] or str(error.reason)
