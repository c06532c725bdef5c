"""Computes an expert at its width: native.py, and the C++ behind it."""
