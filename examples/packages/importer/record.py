from pathlib import Path

rows = [
    f"{r},{t},{layer},{(r + t + layer + k) % 8},0.5"
    for r in range(2)
    for t in range(6)
    for layer in range(2)
    for k in range(2)
]
Path("routing.csv").write_text("\n".join(rows))
