"""Ask a running device one thing at a time and wait for the answer: for people, scripts and start-up checks.

vllm_ndp/device_client/client.py is for the serving host: it never waits longer than its deadline and reconnects.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from ndp_device.common.errors import DeviceError, DeviceUnavailable, RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport import connect
from ndp_device.transport.shm import Sound


class Probe:
    """A connection that says Hello only when asked to."""

    def __init__(self, address: str, *, timeout_s: float = 5.0, keys: Path | None = None) -> None:
        """keys: the file that keygen made for this host, for a device that wants one."""
        self._address, self._timeout_s = address, timeout_s
        self._transport = connect(address, keys)
        self._last_id = 0

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def ask(self, request: msg.Message, tensors: codec.Tensors | None = None) -> tuple[msg.AnyReply, codec.Tensors]:
        """The answer to `request`. Raises DeviceError for a refusal, DeviceUnavailable when none comes in time."""
        deadline = time.monotonic() + self._timeout_s
        frames = codec.encode(request, tensors)
        while not self._transport.send(frames):
            self._wait(deadline, 0.02)
        while True:
            reply = self._wait(deadline, deadline - time.monotonic())
            if reply is None:
                continue
            message, answer = codec.decode_reply(reply[0], reply[1])
            if isinstance(message, msg.Refusal):
                raise DeviceError(message.code, message.message, retryable=message.retryable)
            if message.id == request.id:
                return message, answer

    def hello(self) -> msg.Welcome:
        reply, _ = self.ask(msg.Hello(self.next_id(), versions=(msg.VERSION, msg.VERSION), client="ndp-device"))
        if not isinstance(reply, msg.Welcome):
            raise RemoteProtocolError(f"Hello must be answered by Welcome, got {type(reply).__name__}")
        return reply

    def describe(self) -> msg.Description:
        reply, _ = self.ask(msg.Describe(self.next_id()))
        if not isinstance(reply, msg.Description):
            raise RemoteProtocolError(f"Describe must be answered by Description, got {type(reply).__name__}")
        return reply

    def _wait(self, deadline: float, timeout_s: float) -> codec.Frames | None:
        if time.monotonic() >= deadline:
            raise DeviceUnavailable(f"no device answered at {self._address} within {self._timeout_s:g} s")
        received = self._transport.receive(max(timeout_s, 0.0))
        assert not isinstance(received, Sound)  # it comes by shared memory only, and none was attached
        return received
