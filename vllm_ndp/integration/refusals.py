"""How a start of `vllm serve … --quantization ndp` that cannot be ends: `vllm-ndp: SENTENCE`, exit code 2, no stack.

vLLM prints the stack of each of its processes, the cause between them. Here the process that knows the cause writes it,
past vLLM's prefixes, and none shows a stack. VLLM_LOGGING_LEVEL=DEBUG leaves everything as vLLM has it. Other programs
than that server get exceptions, as ever. Knows Python's hooks and how vLLM's processes end; not why.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from ndp_device.common.errors import NdpError

_USAGE = 2
_NO_NEWS = (
    r"Triton|LD_PRELOAD|SSM cache|KVConnectorBase_V1|custom scheduler class|^.shutdown. Process manager|^Inductor "
    r"|set_num_threads|leaving Torch threads|NUM_OF_RESERVED_CPU|^Initializing a V1 LLM engine|^Supported tasks"
)
_NO_NEWS_FROM = (
    r"vllm\.(plugins|compilation|config\.kernel|distributed|model_executor\.model_loader|utils\.ompmultiprocessing"
    r"|v1\.attention|renderers|entrypoints\.launchers\.launcher|entrypoints\.scale_out)\b"
)
"""Loggers whose words below a warning are about vLLM's own making."""


def no_platform() -> None:
    """Entry point `vllm.platform_plugins`: adds none. vLLM asks for one before it looks for Triton, and warns of what
    it finds before it has a log whose handlers `filter_log` could filter."""
    if serves_ndp(sys.argv) and is_brief():
        logging.getLogger("vllm.triton_utils.importing").addFilter(_is_news)


def end_in_one_sentence() -> None:
    """In each process of such a server, before it does anything else."""
    if not (serves_ndp(sys.argv) and is_brief()):
        return
    sys.excepthook = _hook
    filter_log()
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of processes that start later


def is_brief() -> bool:
    """Whether nobody has asked for everything."""
    return os.environ.get("VLLM_LOGGING_LEVEL", "").upper() != "DEBUG"


def filter_log() -> None:
    """Once more after vLLM has set up its log anew, which it does once it has read the command line. Our own warnings
    come as vLLM's do, with process and time."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("vllm_ndp")
    for handler in theirs.handlers:
        handler.addFilter(_without_stack)
        handler.addFilter(_is_news)
    ours.handlers, ours.propagate = [*theirs.handlers], not theirs.handlers


def serves_ndp(words: Sequence[str]) -> bool:
    """Whether this command line starts a server with the plugin; processes that it starts have the same one."""
    if Path(words[0]).name != "vllm" or words[1:2] != ["serve"]:
        return False
    asked = [word.partition("=")[2] or after for word, after in zip(words, [*words[1:], ""], strict=True)
             if word.partition("=")[0] in ("--quantization", "-q")]  # fmt: skip
    return "ndp" in asked


def sentence_of(error: BaseException) -> str:
    """The cause, in one sentence; empty where another process has written it."""
    for one in _chain(error):
        if isinstance(one, NdpError):
            return str(one)
    for one in _chain(error):
        if isinstance(one, OSError) and one.errno == errno.EADDRINUSE:
            return "another program listens at this server's port: end it, or give another --port"
        if isinstance(one, MemoryError):
            return f"there is not enough memory: {one or 'free some'}"
    said = str(error)
    if killed := re.search(r"Failed core proc\(s\): \{.*?: (-\d+)", said):
        return f"the engine's process ended by signal {killed[1][1:]}: of 9, look for too little memory first"
    if said.startswith("Engine core initialization failed"):
        return ""
    if isinstance(error, ValueError | OSError | RuntimeError):
        return words_of(error)
    return f"unexpected {type(error).__name__}: {words_of(error)} (VLLM_LOGGING_LEVEL=DEBUG shows where)"


def words_of(error: BaseException) -> str:
    """What an exception says, in one line; a failed check of pydantic without pydantic's words around it."""
    errors, said = getattr(error, "errors", None), str(error)
    if callable(errors) and (listed := errors()):
        said = str(listed[0].get("msg", said)).removeprefix("Value error, ")
    return " ".join(said.split())


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _write(sentence: str) -> None:
    sys.stderr.flush()
    os.write(2, f"vllm-ndp: {sentence}\n".encode())


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
    if isinstance(error, KeyboardInterrupt):
        sys.exit(130)
    if sentence := sentence_of(error):
        _write(sentence)
    sys.exit(_USAGE)


def _without_stack(record: logging.LogRecord) -> bool:
    """vLLM's engine and its workers log what ended their start, and Python prints it once more as they end."""
    ended = record.exc_info and re.match(r"(EngineCore|WorkerProc) failed to start", record.getMessage())
    if not ended or record.exc_info is None or record.exc_info[1] is None:
        return True
    if sentence := sentence_of(record.exc_info[1]):
        _write(sentence)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until this process has ended)
    return False


def _is_news(record: logging.LogRecord) -> bool:
    """Not what vLLM says of parts that this build never has, of the plugin's own parts, or of how its own are made."""
    if record.levelno > logging.WARNING:
        return True
    said = record.msg if isinstance(record.msg, str) else ""
    is_inside = record.levelno < logging.WARNING and re.match(_NO_NEWS_FROM, record.name) is not None
    return not is_inside and not re.search(_NO_NEWS, said)
