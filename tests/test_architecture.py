"""No circle anywhere in the two packages: every file can be read after the files that it imports."""

from __future__ import annotations

from pathlib import Path

import import_graph


def test_no_module_reaches_itself_again() -> None:
    """Imports inside functions and under TYPE_CHECKING count: a reader has to follow them too."""
    assert import_graph.circles(import_graph.module_arrows()) == []


def test_no_room_reaches_itself_again() -> None:
    assert import_graph.circles(import_graph.room_arrows()) == []


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)


def test_a_circle_under_type_checking_or_inside_a_function_is_found(tmp_path: Path) -> None:
    """a -> b (in a function), b -> c (relative), c -> a (under TYPE_CHECKING); d only looks on."""
    write(
        tmp_path,
        ndp_device__a="def late():\n    from ndp_device import b\n",
        ndp_device__b="from . import c\n",
        ndp_device__c="if TYPE_CHECKING:\n    from ndp_device.a import late\n",
        vllm_ndp__d="import ndp_device.a\n",
    )
    arrows = import_graph.module_arrows(tmp_path)
    assert arrows["vllm_ndp.d"] == {"ndp_device.a"}
    assert import_graph.circles(arrows) == [["ndp_device.a", "ndp_device.b", "ndp_device.c"]]


def test_a_package_that_lists_its_files_makes_no_circle_of_them(tmp_path: Path) -> None:
    """The `__init__` imports one and two; one imports two through the package's name, not through its `__init__`."""
    write(
        tmp_path,
        ndp_device__room__one="from ndp_device.room import two\nfrom ndp_device.room.two import value\n",
        ndp_device__room__two="value = 1\n",
        vllm_ndp__other="from ndp_device.room import one\n",
    )
    (tmp_path / "ndp_device" / "room" / "__init__.py").write_text("from ndp_device.room.one import value\n")
    arrows = import_graph.module_arrows(tmp_path)
    assert arrows["ndp_device.room.one"] == {"ndp_device.room.two"}
    assert import_graph.circles(arrows) == []
    assert import_graph.room_arrows(tmp_path)["vllm_ndp/other"] == {"ndp_device/room/"}
