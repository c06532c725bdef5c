"""Write the parts of the docs that follow from something else (`make docs`), or say which are not current (`--check`).

    docs/performance.md     from docs/templates/performance.md.j2 and docs/measured/*.json
    docs/map.md, map.svg    from docs/measured/map.json (map_page.py, map_picture.py)
    docs/decode-step.svg    from docs/measured/decode_step.json (step_picture.py)
    docs/demo.svg           from docs/measured/demo.json (demo_picture.py)
    docs/system.svg         from system_picture.py alone
    docs/families.md        from docs/templates/families.md.j2, docs/measured/families.json and tests/data
    docs/architecture.md    its arrows, from the imports of every file
    docs/compatibility.md   how long installing takes
    docs/gpu.md             what was measured on a GPU, and what a dry run of the same pieces did without one
    docs/faults.md          kinds of faults (faults.toml), kills, memory over time, attacks, a lost device
    docs/distributed.md     its tables of ranks, from docs/measured/ranks_matrix.json and ranks_wall.json
    docs/systems.md         prompts on both sides, from docs/measured/prefill_sides.json
    docs/replica-format.md  its tables of what is lost (quality_uncovered*.json), and what calibration takes
    README.md               the sentences with measured figures

In a hand-written page, the text from `<!-- generated: NAME -->` to `<!-- end -->` is replaced; the rest is prose.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import code_tables
import demo_picture
import family_tables
import fault_figures
import figure_tables
import jinja2
import map_page
import map_picture
import step_picture
import system_picture
from import_graph import ROOT
from measured_figures import about, headline, in_turns, load_measured

BLOCK = re.compile(r"(<!-- generated: (?P<name>[^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(template: str, root: Path = ROOT) -> str:
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root / "docs" / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.globals |= {
        "about": about,
        "headline": headline,
        "in_turns": in_turns,
        "by_sentence": family_tables.by_sentence,
        "by_outcome": family_tables.by_outcome,
    }
    architectures = tomllib.loads((root / "tests" / "data" / "moe-architectures.toml").read_text())
    return templates.get_template(template).render(
        load_measured(root / "docs" / "measured"), architectures=architectures
    )


def blocks(root: Path = ROOT) -> dict[str, Callable[[], str]]:
    return {
        "arrows of ndp_device": lambda: code_tables.room_drawing("ndp_device", root),
        "arrows of vllm_ndp": lambda: code_tables.room_drawing("vllm_ndp", root),
        "ranks": lambda: figure_tables.ranks_matrix(root),
        "measured on a GPU": lambda: figure_tables.gpu_results(root),
        "host time of a layer": lambda: figure_tables.asynchronous_layer(root),
        "compiled kernels": lambda: figure_tables.compiled_kernels(root),
        "dry run without a GPU": lambda: figure_tables.gpu_dry_run(root),
        "faults": lambda: fault_figures.kinds(root),
        "kills": lambda: fault_figures.kills(load_measured(root / "docs" / "measured")),
        "memory over time": lambda: fault_figures.soak(load_measured(root / "docs" / "measured")),
        "prompts on both sides": lambda: figure_tables.prefill_sides(root),
        "ranks, wall time": lambda: figure_tables.ranks_wall(root),
        "calibration memory": lambda: figure_tables.calibration_memory(root),
        "attacks": lambda: fault_figures.hostile(load_measured(root / "docs" / "measured")),
        "degraded": lambda: fault_figures.degraded(load_measured(root / "docs" / "measured")),
        "quality on uncovered subjects": lambda: figure_tables.quality_uncovered(root),
        "install times": lambda: figure_tables.install_times(root),
        "measured": lambda: rendered("readme-measured.md.j2", root),
    }


def filled(page: str, root: Path = ROOT) -> str:
    """The page with every generated block written anew."""
    known = blocks(root)

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in known:
            raise KeyError(f"no block is called {name!r}; there are {', '.join(known)}")
        return f"{match[1]}\n{known[name]().strip()}\n\n{match[3]}"

    return BLOCK.sub(fill, page)


def pages(root: Path = ROOT) -> dict[Path, str]:
    """Every page with generated parts, as it should read."""
    found = {root / "docs" / f"{name}.md": rendered(f"{name}.md.j2", root) for name in ("performance", "families")}
    measured = load_measured(root / "docs" / "measured")
    drawn = measured["map"]
    found[root / "docs" / "map.md"] = map_page.page(drawn)
    found[root / "docs" / "map.svg"] = map_picture.picture(drawn)
    found[root / "docs" / "decode-step.svg"] = step_picture.picture(measured["decode_step"])
    found[root / "docs" / "demo.svg"] = demo_picture.picture(measured["demo"])
    found[root / "docs" / "system.svg"] = system_picture.picture()
    for name in (
        "docs/architecture.md",
        "docs/compatibility.md",
        "docs/distributed.md",
        "docs/faults.md",
        "docs/gpu.md",
        "docs/replica-format.md",
        "docs/systems.md",
        "README.md",
    ):
        path = root / name
        found[path] = filled(path.read_text(), root)
    found[root / "README.md"] = map_page.renewed(found[root / "README.md"], drawn)
    return found


def stale(root: Path = ROOT) -> list[str]:
    """The pages that do not read as they should."""
    return [
        path.relative_to(root).as_posix()
        for path, wanted in pages(root).items()
        if not path.exists() or path.read_text() != wanted
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is not current")
    printed = {
        "files": (code_tables.files_page, "what each file knows"),
        "hooks": (lambda: figure_tables.vllm_hooks(ROOT), "hooks of vLLM, by version"),
        "models": (code_tables.published_models, "published models, and what their GPU side takes"),
        "faults": (lambda: fault_figures.every_fault(ROOT), "faults that tests cover, each with its test"),
        "options": (code_tables.option_answers, "options of vllm serve, and what becomes of each"),
    }
    for name, (_, about_it) in printed.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"print {about_it}; write nothing")
    given = parser.parse_args()
    if asked := [table for name, (table, _) in printed.items() if getattr(given, name)]:
        print(asked[0]())
        return 0
    found = stale()
    if given.check:
        for name in found:
            print(f"{name} does not say what the code and docs/measured/ say: run `make docs`")
        return 1 if found else 0
    for path, text in pages().items():
        path.write_text(text)
    print(f"written: {', '.join(found) or 'nothing, all pages are current'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
