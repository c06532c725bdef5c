"""Context-aware Mixture-of-Experts placement and precision for vLLM, with an emulated CXL-NDP device beside it."""

__version__ = "0.1.0"  # the one place: pyproject.toml reads it here
