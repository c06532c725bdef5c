"""The live page: one self-contained HTML file that asks /v1/ndp/ again and again."""

from __future__ import annotations


def render() -> str:
    return "<!doctype html><title>vllm-ndp</title>"
