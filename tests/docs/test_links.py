"""What the documents name exists: files, pages and headings that they link to, and names of the package in backticks."""
import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / n for n in ("README.md", "CONTRIBUTING.md"))]
TOP = {"docs", "examples", "tests", "templates", "benchmarks", "generated", "gdn_codegen"}
#: A path with a word in capitals stands for several.
PATTERN = re.compile(r"\b(NAME|TARGET|ALGORITHM_)|VERSIONS|DIGEST")
#: What dotted names of other packages and of instruction sets begin with.
FOREIGN = {"T", "torch", "triton", "tl", "t", "x", "ldmatrix", "stmatrix", "ex2", "bar"}
#: Files of other libraries that docs/contract.md quotes.
THEIRS = {"gdn_triton.py"}
FILE = re.compile(r"[\w.]+\.(py|cc|cpp|cuh|csv|j2|json|md|so|toml|txt)")
SOURCES = sorted((ROOT / "gdn_codegen").rglob("*.py"))


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


def defined(body):
    """Names that statements define: functions, classes, imports, assignments, also to attributes of self in methods."""
    for s in body:
        if isinstance(s, ast.FunctionDef | ast.ClassDef):
            yield s.name
        elif isinstance(s, ast.ImportFrom | ast.Import):
            yield from (a.asname or a.name for a in s.names)
        elif isinstance(s, ast.If):  # what is imported late, TYPE_CHECKING says
            yield from defined(s.body)
        for n in ast.walk(s) if not isinstance(s, ast.ClassDef) else ():
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self":
                yield n.attr
            elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                yield n.id


@cache
def members():
    """By name of a class or a module of the package, what it defines. A package has its modules; several of one name are one."""
    out, bases = {"gdn_codegen": {p.stem for p in (ROOT / "gdn_codegen").iterdir()}}, {}
    for path in SOURCES:
        tree, stem = ast.parse(path.read_text()), path.parent.name if path.stem == "__init__" else path.stem
        inner = {p.stem for p in path.parent.iterdir()} if path.stem == "__init__" else set()
        out.setdefault(stem, set()).update(defined(tree.body), inner)
        for c in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)):
            out.setdefault(c.name, set()).update(defined(c.body))
            bases.setdefault(c.name, []).extend(ast.unparse(b).split(".")[-1] for b in c.bases)
    for name in bases:
        for base in bases[name]:
            out[name] |= out.get(base, set())
    return out


@cache
def files():
    """The names of what is in the repository."""
    return {p.name for p in [*ROOT.iterdir(), *(x for n in TOP for x in (ROOT / n).rglob("*"))]}


def missing_names(page):
    """Dotted names in backticks that the package does not define, and names of files that are not in the repository."""
    text = page.read_text()
    for said in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)+)(?:\(.*?\))?`", text):
        first, *rest = said.split(".")
        if FILE.fullmatch(said):
            if not (said in files() | THEIRS or PATTERN.search(said) or f"File `{said}`:" in text):
                yield said
        elif first not in FOREIGN and not re.search(rf"^(class {first}\b|{first} = )", text, re.M):  # defined on the page itself
            for owner, name in zip([first, *rest], rest, strict=False):
                if name not in members().get(owner, ()):
                    yield said
                    break


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_paths_and_names(page):
    assert list(dead_links(page)) == []
    assert list(missing_paths(page)) == []
    assert list(missing_names(page)) == []


def test_names_in_docstrings():
    found = {str(path.relative_to(ROOT)): [*missing_names(path), *missing_paths(path)] for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}


def test_dead_ones_are_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](#one) [b](#two) [c](other.md) `gdn_codegen/ops.py` `ir/ops.py` `passes/gone.py`\n")
    assert list(dead_links(page)) == ["#two", "other.md"]
    assert list(missing_paths(page)) == ["passes/gone.py"]


def test_dead_names_are_seen(tmp_path):
    page = tmp_path / "page.md"
    good = ["choose.PORTABLE", "Kernel.batch", "Cores.extents", "gdn_codegen.targets.register", "ir.ops.op", "torch.gone",
            "ops.py", "Host.prepare()", "NAME_DIGEST.json"]
    bad = ["dispatch.PORTABLE", "choose.GONE", "Kernel.gone", "gdn_codegen.gone.register", "gone.py"]
    page.write_text(" ".join(f"`{x}`" for x in good + bad))
    assert list(missing_names(page)) == bad


def test_a_term_of_the_glossary_is_defined_once():
    text = (ROOT / "docs" / "glossary.md").read_text()
    lines = [x for x in text.splitlines() if x.startswith("- **")]
    terms = [t for x in lines for t in re.findall(r"\*\*([^*]+)\*\*", x)]
    assert len(terms) > 40 and {t for t in terms if terms.count(t) > 1} == {"slot", "view"}  # with what each is of
