"""Shared parts of the command lines `ndp-device` and `vllm-ndp`: examples in every help, and how commands end.

A command prints its result: a table, to terminals, pipes and files alike, or with `--json` one JSON object and nothing
else. A command without a table prints the object. An error is one sentence on stderr and exit code 2. The subject of a
command (a trace, a model, the address of a device) is an argument. A choice of how it works is an option. Knows typer,
and imports nothing that takes time, so that a help appears at once. Knows no command.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args, get_type_hints

import typer
from typer.models import ParameterInfo

from ndp_device.common.errors import ConfigError, NdpError
from ndp_device.common.outputs import Output, check_outputs

Function = Callable[..., None]

_OURS = ("ndp_device.", "vllm_ndp.")
_SETUP = "run make setup, or pip install vllm-ndp again"


@dataclasses.dataclass(frozen=True)
class Written:
    """How a field of a record is written on the command line, where that is not its value: typer reads a `kind`, which
    `read` turns into the value. Stands in the field's Annotated."""

    read: Callable[[Any], Any]
    default: Any
    kind: Any = str


HardwareOption = Annotated[str, typer.Option(help="Hardware preset (see ndp-device time hardware).")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change a value of the hardware.")
]


def program(summary: str, examples: Sequence[str], **options: Any) -> typer.Typer:
    """Make an application, or a group of commands within one.

    Its help is plain text: boxes break the examples where a line is long, and cost as much time as everything else.
    """
    return typer.Typer(
        help=summary,
        epilog=_epilog(examples),
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=False,
        **options,
    )


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
_json_goes_to: TextIO | None = None
"""Where a command that was given --json prints its object; what else it prints goes nowhere."""


def command(
    app: typer.Typer, name: str, *, examples: Sequence[str], shows: bool = False
) -> Callable[[Function], Function]:
    """Register a function as the command `name`. shows: its result is a table, and --json asks for the object.

    A parameter whose type is a frozen dataclass becomes one option per field with typer.Option in its Annotated; other
    fields keep their defaults.
    """

    def register(function: Function) -> Function:
        app.command(name, epilog=_epilog(examples))(_ungrouped(function, shows))
        return function

    return register


def run(app: typer.Typer, name: str) -> None:
    """Run the command that sys.argv asks for and end the process: whatever fails is one sentence on stderr, exit 2.

    Only Python's development mode (PYTHONDEVMODE=1) shows where an error came from that nobody foresaw.
    """
    _keep_standard_files_open()
    try:
        status = app(args=sys.argv[1:] or ["--help"], prog_name=name, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.exit(status)
    except typer.TyperException as error:  # typer could not read the command line
        context = getattr(error, "ctx", None)
        see = f" (see {context.command_path} --help)" if context is not None else ""
        sentence = " ".join(error.format_message().split()).rstrip(".") + see
    except NdpError as error:
        sentence = str(error)
    except typer.Abort:
        sentence = "interrupted"
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        sentence = _sentence_of(error)
    print(f"{name}: {sentence}", file=sys.stderr)
    sys.exit(2)


def _sentence_of(error: Exception) -> str:
    """What ended a command, where the command itself does not say."""
    if isinstance(error, ImportError) and (sentence := _not_compiled(error)):
        return sentence
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'} cannot be used: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"there is not enough memory: {str(error) or 'free some, or take a smaller input'}"
    if isinstance(error, KeyError | RuntimeError) and ("getpwuid" in str(error) or "home directory" in str(error)):
        return f"this system does not know user {os.getuid()}: set HOME and USER in the environment"
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # of pathlib
        return f"{error}: give a path that leads to a file"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return str(
        NdpError(
            f"unexpected {type(error).__name__} in {Path(place.filename).name} line {place.lineno}: {error}. Please "
            "report this sentence; PYTHONDEVMODE=1 shows more"
        )
    )


class _StandardOutput(io.FileIO):
    """Names itself where it takes no more; Python leaves open which file was meant."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # for what waits to be written
            raise OSError(error.errno, error.strerror, "standard output") from None


def _keep_standard_files_open() -> None:
    """Else the next file that is opened becomes standard output. Say nothing of an input that nobody reads."""
    is_closed = sys.stdout is None
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
    if is_closed:
        print("standard output is closed: send it somewhere, if only > /dev/null", file=sys.stderr)
        sys.exit(2)
    if type(sys.stdout) is io.TextIOWrapper:
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_StandardOutput(sys.stdout.fileno(), "w", closefd=False)),
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            line_buffering=sys.stdout.line_buffering,
        )


def _not_compiled(error: ImportError) -> str:
    """Say what to do where an import fails since native modules are absent or older than the sources; else nothing."""
    compiled = (error.name or "").rpartition(".")[2].startswith("_")
    if not (compiled and (error.name or "").startswith(_OURS)):
        return ""
    what = "is not compiled" if error.path is None else "was compiled from older sources than these"
    return f"{error.name} {what}: {_SETUP}"


def print_json(result: Mapping[str, Any], *, shown: bool = False) -> None:
    """Print the result of a command as one line. shown: as a table already, so only with --json."""
    if not shown or _json_goes_to is not None:
        print(json.dumps(result, allow_nan=False), file=_json_goes_to, flush=True)


@contextmanager
def _only_json(asked: bool) -> Iterator[None]:
    global _json_goes_to
    if not asked:
        yield
        return
    _json_goes_to = sys.stdout
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        _json_goes_to = None


def assignments(pairs: Sequence[str] | None, option: str, form: str = "name=value") -> dict[str, str]:
    """Read the values of an option that is given as `--set name=value`, any number of times."""
    read = {}
    for pair in pairs or ():
        name, _, value = pair.partition("=")
        if not (name and value):
            raise ConfigError(f"{option} needs {form}, got {pair!r}")
        read[name] = value
    return read


def _epilog(examples: Sequence[str]) -> str:
    """Lay out one example a line; "\\b" keeps the lines as they are."""
    return "Examples:\n\n\b\n" + "\n".join(f"$ {example}" for example in examples)


def _ungrouped(function: Function, shows: bool) -> Function:
    """Give typer a signature in which every dataclass has been replaced by its fields, with --json where one shows."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters = []
    fields: dict[str, dict[str, Written | None]] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY))
            continue
        group = groups[parameter.name]
        kinds = get_type_hints(group, include_extras=True)
        asked = fields[parameter.name] = {}
        for field in dataclasses.fields(group):
            marks = get_args(kinds[field.name])[1:]
            if not any(isinstance(mark, ParameterInfo) for mark in marks):
                continue
            written = asked[field.name] = next((mark for mark in marks if isinstance(mark, Written)), None)
            default = parameter.empty if field.default is dataclasses.MISSING else field.default
            annotation = kinds[field.name]
            if written is not None:
                default, annotation = written.default, Annotated[written.kind, *marks]
            parameters.append(
                inspect.Parameter(field.name, parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )

    if shows:
        parameters.append(
            inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption)
        )
    outputs = {one.name: mark for one in parameters if (mark := _output(one.annotation)) is not None}

    @functools.wraps(function)
    def call(**values: Any) -> None:
        _check_paths(values, outputs)
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"--{name.replace('_', '-')} must be a number, got {value}")
        for name, group in groups.items():
            given = {field: values.pop(field) for field in fields[name]}
            read = {field: written.read for field, written in fields[name].items() if written is not None}
            values[name] = group(**{field: read[field](one) if field in read else one for field, one in given.items()})
        try:
            with _only_json(shows and values.pop("as_json")):
                function(**values)
            sys.stdout.flush()
        except BrokenPipeError as error:  # which typer would end without a word
            raise ConfigError(_sentence_of(error)) from None

    call.outputs = outputs  # type: ignore[attr-defined]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _output(annotation: Any) -> Output | None:
    return next((mark for mark in get_args(annotation) if isinstance(mark, Output)), None)


def _check_paths(values: Mapping[str, Any], outputs: Mapping[str, Output]) -> None:
    """Every other path is read, and so is a checkpoint that may be named by an id as well."""
    given = [one for name, value in values.items() if name not in outputs for one in _each(value)]
    read = [Path(one) for one in given if isinstance(one, Path) or Path(one, "config.json").exists()]
    check_outputs([(values[name], mark) for name, mark in outputs.items() if values[name] is not None], read)


def _each(value: Any) -> list[Path | str]:
    several = value if isinstance(value, list | tuple) else str(value).split(",") if isinstance(value, str) else [value]
    return [one for one in several if isinstance(one, Path | str) and one != "" and "\0" not in str(one)]
