"""What does the demo's table show?

    python benchmarks/demo_table.py [--json docs/measured/demo.json]

Runs `vllm-ndp demo` and keeps the cells of its table. docs/demo_picture.py draws docs/demo.svg from them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from measured import ROOT, Measurement, add_json_option

BORDERS = "│┃"


def cells_of(text: str) -> list[list[str]]:
    """Rows of the last table in `text`; a header of two lines is joined."""
    lines = [line for line in text.splitlines() if line[:1] in BORDERS and len(line) > 1]
    split = [[cell.strip() for cell in line.strip(BORDERS).replace("┃", "│").split("│")] for line in lines]
    columns = len(split[-1])
    head = [row for row, line in zip(split, lines, strict=True) if line[0] == "┃" and len(row) == columns]
    body = [row for row, line in zip(split, lines, strict=True) if line[0] == "│" and len(row) == columns]
    return [[" ".join(filter(None, parts)) for parts in zip(*head, strict=True)], *body]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    given = parser.parse_args()
    measurement = Measurement(__doc__ or "")
    program = Path(sys.executable).parent / "vllm-ndp"
    done = subprocess.run([program, "demo"], cwd=ROOT, capture_output=True, text=True, check=True)
    head, *rows = cells_of(done.stdout)
    caption = next(line.strip() for line in done.stdout.splitlines() if line.startswith("measured: "))
    measurement.end({"head": head, "rows": rows, "caption": " ".join(caption.split())}, given.json)


if __name__ == "__main__":
    main()
