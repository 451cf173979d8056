"""What emitters and templates may know: ops, not algorithms, and not each other."""
import ast
import importlib
import io
import re
import tokenize
from pathlib import Path

import pytest

from gdn_codegen import algorithms
from gdn_codegen.emit.base import EmitError, wrapped
from gdn_codegen.ir.core import Loop, Op, walk
from gdn_codegen.ir.ops import OPS
from gdn_codegen.ir.stages import is_decomposed
from gdn_codegen.passes.pipelines import CORES, FRONT, GROUPS, ONE_AGENT
from gdn_codegen.targets import OWN

ROOT = Path(__file__).parents[2]
EMIT = ROOT / "gdn_codegen" / "emit"
FILES = sorted(EMIT.rglob("*.py"))
TEMPLATES = sorted((ROOT / "templates").rglob("*.j2"))
NAMES = lambda p: "/".join(p.parts[-2:])
#: Words of the family that are not names on a page.
WORDS = {"gdn", "delta", "kkt", "wy", "decay", "gate", "gates"}
#: Values whose names are ordinary words of kernels too: loop variables, dims, a head index.
PLAIN = {"scale", "each"}


def page_names():
    out = set()
    for n in algorithms.names():
        page = algorithms.find(n)
        loop = next(s for s in page.trace().kernels[0].body if isinstance(s, Loop))
        lines = " ".join(text for _, text in page.trace().source)
        out |= {o.out for o in loop.body if isinstance(o, Op) and re.search(rf"\b{o.out} =", lines)} | set(page.inputs)
    return out


@pytest.mark.parametrize("target", OWN)
def test_each_op_has_a_rule_or_a_pass_that_removes_it(target):
    rules = importlib.import_module(f"gdn_codegen.emit.{target}").rule
    for kind in OPS:
        assert (kind in rules.table) != bool(rules.removed_by(kind)), kind
    passes = {name for kinds in (FRONT, ONE_AGENT, GROUPS, CORES) for name, _ in kinds}
    assert {rules.removed_by(kind) for kind in OPS} <= {"", *passes}
    assert not [kind for kind in rules.removed if is_decomposed(kind)], "the op table says it"


@pytest.mark.parametrize("target", OWN)
def test_a_missing_rule_names_op_target_and_pass(target):
    rules = importlib.import_module(f"gdn_codegen.emit.{target}").rule
    for kind, by in (*rules.removed.items(), ("row_norm", "decompose"), ("unit_lower_inverse", "decompose")):
        with pytest.raises(EmitError, match=rf"{target} has no rule for {kind} .*pass {by} should have removed it"):
            rules.of(Op(kind, "x"))


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_emitter_imports_another(path):
    own = path.relative_to(EMIT).with_suffix("").parts[0]
    others = {t for t in OWN if t != own}
    for node in ast.walk(ast.parse(path.read_text())):
        if own != "__init__" and isinstance(node, ast.ImportFrom | ast.Import):
            names = {a.name for a in node.names} | {getattr(node, "module", "") or ""}
            assert not {n.split(".")[-1] for n in names} & others


def words(path):
    text = path.read_text()
    if path.suffix == ".py":  # code, comments and strings, split into words
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        text = " ".join(t.string for t in tokens)
    return set(re.findall(r"[A-Za-z][A-Za-z0-9]*", text))


@pytest.mark.parametrize("path", [*FILES, *TEMPLATES], ids=NAMES)
def test_no_emitter_or_template_names_a_value(path):
    names = page_names()
    assert {"beta", "Tinv", "G", "A", "U", "o"} <= names
    names = {n for n in names if len(n) > 1}  # letters are words of their own
    found = words(path)
    assert not found & (names - PLAIN), f"{path.name} names {sorted(found & (names - PLAIN))}"
    # The installed package's name and its variables stand in templates; nothing else of the family does.
    found = {w.lower() for w in re.findall(r"[A-Za-z]+", re.sub(r"(?i)gdn_(codegen|debug)\w*", "", path.read_text()))}
    assert not found & WORDS, f"{path.name} says {sorted(found & WORDS)}"


@pytest.mark.parametrize("path", [*TEMPLATES, ROOT / "docs" / "adding_a_target.md"], ids=NAMES)
def test_a_template_includes_prints_and_loops_only(path):
    text = path.read_text()
    assert set(re.findall(r"\{%-?\s*(\w+)", text)) <= {"include", "for", "endfor"}
    for expression in re.findall(r"\{[{%](.*?)[%}]\}", text, re.S):
        outside_strings = re.sub(r'"[^"]*"', "", expression).strip().strip("-")
        assert not re.search(r"[*/+=<>]|//| - |\b(?:if|else|and|or|not|loop)\b", outside_strings), expression
        assert set(re.findall(r"\|\s*(\w+)", outside_strings)) <= {"join", "tojson"}, expression
        assert "ops" not in outside_strings.split() and ".body." not in outside_strings


def test_a_page_of_ones_own_needs_no_rule():
    """The example's op row_norm is in no emitter's way."""
    page = algorithms.find(f"{ROOT}/examples/my_linear_attention.py:decayed_linear_attention")
    assert any(o.kind == "row_norm" for o in walk(page.trace().kernels[0].body))


@pytest.mark.parametrize("text", [
    "x = tl.load(p + (row * H + h) * K, mask=valid[:, None], other=0.0).to(OPERAND)",
    "out[b, row + i, hv] = T.if_then_else(i < rows, (first_value + second_value) * (third_value - fourth_value), 0)",
    "x = (first_value + second_value + third_value) * y[index_of_the_first + index_of_the_second]",
    "x = function(of_one_operand + which_is_long_enough + to_fill_more_than_a_line)"])
def test_a_long_line_of_python_means_the_same_wrapped(text):
    lines = wrapped(text, 40)
    assert len(lines) > 1
    assert ast.dump(ast.parse("\n".join(lines))) == ast.dump(ast.parse(text))
    assert wrapped(text, len(text)) == [text]
