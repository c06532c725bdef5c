"""Stands in for torchvision, which our set-up removes, where vLLM's module of a multimodal family imports it by name.

Qwen3.5-MoE's text model computes nothing with it, but without it its module cannot be imported. On PYTHONPATH of the
program that test_integration_families.py starts for that family, of no other. Every name is there; none can be used.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.0.0+stand-in"


class _Names(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Unusable(metaclass=_Names):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("this torchvision is a stand-in of the tests: nothing in it computes")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Unusable


class _Submodules(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = __getattr__  # type: ignore[method-assign]


sys.meta_path.append(_Submodules())
