"""Bring a result file of bench_lm_head.py into pages and a picture. Needs the file alone: no GPU, no kernels.

The tables are made by lm_head_tables.py, the picture by lm_head_picture.py; here is what goes where.
"""

from __future__ import annotations

from pathlib import Path

from cli import read_text, refuse
from lm_head_file import load
from lm_head_picture import draw
from lm_head_tables import make_markdown

MARKER = "<!-- lm_head table -->"
README_IMPLS = (  # the short tables: the floor, ours, and each peer's best
    "bare GEMM, whole T, bf16 (floor)",
    "fastgrpo",
    "Liger fused linear CE, 16 x chunk",
    "Liger SM90",
    "Liger SM90 + torch loss",
    "Liger fused linear GRPO, TF32",
    "CCE filtered + torch loss",
    "CCE, no entropy",
    "torch.compile'd chunks",
    "torch, whole logits",
)


def render(path: Path, page: Path | None = None) -> str:
    """Markdown of the file's tables. Writes the picture beside it, and between the markers in `page` the tables; in a
    file called README.md only those of both passes, with the peers in README_IMPLS. Refuses, with nothing written,
    what is not as it should be in either file."""
    content = load(path)
    markdown = make_markdown(content)
    if page:
        short = make_markdown(shortened(content)) if page.name == "README.md" else markdown
        text = between_markers(page, short)
    draw(content, path.with_suffix(".png"))
    if page:
        page.write_text(text)
    return markdown


def check_page(page: Path) -> None:
    """Refuses a page without a place for the tables."""
    between_markers(page, "")


def shortened(content: dict) -> dict:
    rows = [row for row in content["rows"] if row["op"] in ("train", "ce", "nograd") and row["impl"] in README_IMPLS]
    return content | {"rows": rows}


def between_markers(page: Path, markdown: str) -> str:
    """The text of `page` with what stands between its two markers replaced."""
    parts = read_text(page).split(MARKER)
    if len(parts) != 3:
        refuse(f"{page} needs {MARKER} twice, around the table's place; it is there {len(parts) - 1} times")
    return f"{parts[0]}{MARKER}\n{markdown}\n{MARKER}{parts[2]}"
