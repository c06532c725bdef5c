"""Differences where the hot experts lie on a GPU: layers that do not wait, copies beside them, limits of vLLM."""
