"""Where tests find the repository's own files, and what of a file is in memory."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "tiny-mixtral"
DATA = ROOT / "tests" / "data"


def resident_bytes_of(path: Path) -> int:
    """Bytes of this process's memory that are pages of the file."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            ours = words[-1] == str(path)
        elif ours and words[0] == "Rss:":
            total += int(words[1]) << 10
    return total
