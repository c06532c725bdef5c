"""Where tests find the repository's own files."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "tiny-mixtral"
DATA = ROOT / "tests" / "data"
