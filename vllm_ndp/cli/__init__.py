"""The commands of `vllm-ndp`: what they are called, which options they take, how they print and how they end."""

from vllm_ndp.cli.app import main

__all__ = ["main"]
