"""How the package's code is written: rules that a reader relies on and that its linter does not know."""
import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gdn_codegen"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = lambda p: str(p.relative_to(PACKAGE))
#: Calls whose result is true or false.
TRUTHS = ("bool", "any", "all", "isinstance", "hasattr")


def is_truth(x):
    return isinstance(x, ast.Compare) or (isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.Not)) \
        or (isinstance(x, ast.BoolOp) and any(map(is_truth, x.values))) \
        or (isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id in TRUTHS)


def is_text(x):
    """Whether `x` is spelled as text, or as a list or tuple that holds some; indentation is none."""
    if isinstance(x, ast.Constant):
        return isinstance(x.value, str) and bool(x.value.strip())
    return isinstance(x, ast.JoinedStr) or (isinstance(x, ast.List | ast.Tuple) and any(map(is_text, x.elts)))


def is_count(x):
    """Whether `x` surely is a number: a literal, a length, or made of such."""
    if isinstance(x, ast.BinOp):
        return is_count(x.left) and is_count(x.right)
    return isinstance(x, ast.Constant) or (isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id == "len")


def keys_by_identity(text):
    """Calls of id() anywhere: whatever is looked up by one is lost when the object is made again."""
    return [n.lineno for n in ast.walk(ast.parse(text))
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "id"]


def chosen_by_arithmetic(text):
    """Products that choose text: of text and what is no count, or of a list and a truth."""
    return [n.lineno for n in ast.walk(ast.parse(text)) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)
            for x, y in ((n.left, n.right), (n.right, n.left))
            if (is_text(x) and not is_count(y)) or (isinstance(x, ast.List | ast.Tuple | ast.Constant | ast.JoinedStr)
                                                    and not isinstance(getattr(x, "value", None), int | float) and is_truth(y))]


def attributes_replaced(text):
    """Calls replace(o, attrs=...) with something other than (): `Op.with_attrs` is the way."""
    return [n.lineno for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
            and n.func.id == "replace" for k in n.keywords if k.arg == "attrs" and ast.unparse(k.value) != "()"]


RULES = {keys_by_identity: ["x = {id(o): 1}", "f(id(o))"],
         chosen_by_arithmetic: ["'s' * (n != 1)", "f'a{b}' * bool(c)", "['x'] * optional", "[y] * (not z)", "' ' * any(x)",
                                "(n > 0) * 'el'"],
         attributes_replaced: ["replace(o, attrs=tuple(sorted(x)))"]}
FINE = ("'  ' * depth", "['-'] * (len(x) - 3)", "[0] * n", "3 * (a != b)", "[y] * 2", "o.with_attrs(a=1)", "replace(o, attrs=())")


#: Where a rule does not hold: with_attrs itself.
EXCEPT = {attributes_replaced: ["ir/core.py"]}


@pytest.mark.parametrize("rule", RULES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_package_keeps_the_rule(path, rule):
    broken = bool(rule(path.read_text()))
    assert broken == (NAMES(path) in EXCEPT.get(rule, [])), f"{NAMES(path)}: {rule.__doc__}"


@pytest.mark.parametrize("rule", RULES, ids=lambda f: f.__name__)
def test_a_rule_sees_what_it_forbids_and_nothing_else(rule):
    assert all(map(rule, RULES[rule]))
    assert not any(map(rule, FINE))
