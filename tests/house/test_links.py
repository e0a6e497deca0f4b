"""Links of our pages to files and headings of this repository lead there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("orchestrator", "recipes", "docker", ".github", "tests")
PAGES = [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings: lower case, punctuation dropped, spaces as hyphens.

    >>> anchors("## Beside other tools, by `us`\\n")
    {'beside-other-tools-by-us'}
    """
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    }


def broken(page: Path) -> list[str]:
    """The links of a page that lead to no file, or to a heading that is not there."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target.read_text(encoding="utf-8")))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_missing_file_and_a_missing_heading_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A, and `b`\n[1](#a-and-b) [2](#a) [3](page.md#a-and-b) [4](none.md) [5](page.md#none) [6](https://a.b/c#d) [7](page.md)\n"
    )
    assert broken(page) == ["#a", "none.md", "page.md#none"]
