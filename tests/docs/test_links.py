"""What the documents name exists: files of the repository, pages they link to, headings within them."""
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / n for n in ("README.md", "CONTRIBUTING.md"))]
TOP = {"docs", "examples", "tests", "templates", "benchmarks", "generated", "gdn_codegen"}
#: A path with a word in capitals stands for several.
PATTERN = re.compile(r"\b(NAME|TARGET|ALGORITHM_)")


def anchors(text):
    """The names that GitHub gives to headings."""
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.M)}


def dead_links(page):
    for link in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", page.read_text()):
        path, _, place = link.partition("#")
        other = (page.parent / path) if path else page
        if not other.exists() or (place and place not in anchors(other.read_text())):
            yield link


def missing_paths(page):
    """Paths in backticks that begin with a folder of the repository or of the package, and are not there."""
    inner = {p.name for p in (ROOT / "gdn_codegen").iterdir() if p.is_dir()}
    for said in re.findall(r"`([\w./]+/[\w./]*)`", page.read_text()):
        first = said.split("/")[0]
        here = any((base / said).exists() for base in (ROOT, ROOT / "gdn_codegen"))
        if first in TOP | inner and not here and not PATTERN.search(said):
            yield said


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths(page):
    assert list(dead_links(page)) == []
    assert list(missing_paths(page)) == []


def test_dead_ones_are_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](#one) [b](#two) [c](other.md) `gdn_codegen/ops.py` `ir/ops.py` `passes/gone.py`\n")
    assert list(dead_links(page)) == ["#two", "other.md"]
    assert list(missing_paths(page)) == ["passes/gone.py"]


def test_a_term_of_the_glossary_is_defined_once():
    text = (ROOT / "docs" / "glossary.md").read_text()
    lines = [x for x in text.splitlines() if x.startswith("- **")]
    terms = [t for x in lines for t in re.findall(r"\*\*([^*]+)\*\*", x)]
    assert len(terms) > 40 and {t for t in terms if terms.count(t) > 1} == {"slot"}  # of a workspace, a pool and a ring
