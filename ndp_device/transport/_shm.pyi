"""csrc/shm.cpp; its users (shm.py, sender_thread.py, base.py, codec.py) give the types."""

from typing import Any

def __getattr__(name: str) -> Any: ...
