"""The commands of `vllm-ndp` that serve: which options they take, how they print and how they end."""
