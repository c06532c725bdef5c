"""The emulated CXL-NDP device: a program of its own that serves without torch and without vLLM."""
