"""How the package's code is written: rules that a reader relies on and that its linter does not know."""
import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gdn_codegen"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = lambda p: str(p.relative_to(PACKAGE))
parsed = cache(ast.parse)  # of a text; each file is parsed once, by the first test that asks


def tree(path):
    return parsed(path.read_text())


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
    return [n.lineno for n in ast.walk(parsed(text))
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "id"]


def chosen_by_arithmetic(text):
    """Products that choose text: of text and what is no count, or of a list and a truth."""
    return [n.lineno for n in ast.walk(parsed(text)) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)
            for x, y in ((n.left, n.right), (n.right, n.left))
            if (is_text(x) and not is_count(y)) or (isinstance(x, ast.List | ast.Tuple | ast.Constant | ast.JoinedStr)
                                                    and not isinstance(getattr(x, "value", None), int | float) and is_truth(y))]


def attributes_replaced(text):
    """Calls replace(o, attrs=...) with something other than (): `Op.with_attrs` is the way."""
    return [n.lineno for n in ast.walk(parsed(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
            and n.func.id == "replace" for k in n.keywords if k.arg == "attrs" and ast.unparse(k.value) != "()"]


RULES = {keys_by_identity: ["x = {id(o): 1}", "f(id(o))"],
         chosen_by_arithmetic: ["'s' * (n != 1)", "f'a{b}' * bool(c)", "['x'] * optional", "[y] * (not z)", "' ' * any(x)",
                                "(n > 0) * 'el'"],
         attributes_replaced: ["replace(o, attrs=tuple(sorted(x)))"]}
FINE = ("'  ' * depth", "['-'] * (len(x) - 3)", "[0] * n", "3 * (a != b)", "[y] * 2", "o.with_attrs(a=1)", "replace(o, attrs=())")


# --- docstrings and sizes --------------------------------------------------------------------------------------------
SCRIPTS = sorted(p for n in ("benchmarks", "examples") for p in (PACKAGE.parent / n).rglob("*.py"))
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def documented_methods():
    """By class: its bases, and which of its methods have a docstring."""
    return {c.name: ([ast.unparse(b).split(".")[-1] for b in c.bases],
                     {f.name for f in c.body if isinstance(f, FUNCTION) and ast.get_docstring(f)})
            for path in [*FILES, *SCRIPTS] for c in ast.walk(tree(path)) if isinstance(c, ast.ClassDef)}


def inherits(name, method):
    """Whether a base class documents the method."""
    classes = documented_methods()
    bases, _ = classes.get(name, ([], ()))
    return any(method in classes[b][1] or inherits(b, method) for b in bases if b in classes and b != name)


def lines(node):
    return node.end_lineno - node.lineno + 1


def is_rule(f):
    """Whether `f` is an emitter's rule, which is named after its op: the op table says what that does."""
    return any(ast.unparse(d).startswith(("rule(", "turn_rule(")) for d in f.decorator_list)


def undocumented(node, of=None, public=True, name=""):
    """Functions over ten lines and public functions that have no docstring. The docstring of a base's method covers that of its
    subclasses."""
    for x in ast.iter_child_nodes(node):
        if isinstance(x, FUNCTION):
            said = ast.get_docstring(x) or (of and inherits(of.name, x.name))
            open_ = public and not x.name.startswith("_") and not is_rule(x)
            if not said and (lines(x) > 10 or open_):
                yield name + x.name
            yield from undocumented(x, None, False, f"{name}{x.name}.")
        elif isinstance(x, ast.ClassDef):
            yield from undocumented(x, x, public and not x.name.startswith("_"), f"{name}{x.name}.")
        else:
            yield from undocumented(x, of, public, name)


def test_functions_say_what_they_do():
    """In scripts only those of more than ten lines."""
    found = [f"{path}: {name}" for path in [*FILES, *SCRIPTS] for name in undocumented(tree(path), public=path in FILES)]
    assert not found, f"without a docstring: {', '.join(found)}"


def test_what_has_no_docstring_is_found():
    methods = ("def public(self): pass", "def _short(self): pass", "def _long(self):" + "\n        0" * 10,
               "def __init__(self):" + "\n        0" * 10)
    assert list(undocumented(ast.parse("\n    ".join(["class A:", *methods])))) == ["A.public", "A._long", "A.__init__"]
    said = [x.replace("pass", "'Says.'").replace("):\n", "):\n        'Says.'\n") for x in methods]
    assert list(undocumented(ast.parse("\n    ".join(["class A:", *said])))) == []
    assert list(undocumented(ast.parse("\n    ".join(["class A:", *methods])), public=False)) == ["A._long", "A.__init__"]
    assert list(undocumented(ast.parse("@rule('exp')\ndef exp(w, o): pass\ndef _f():\n  def inner(): pass"))) == []


MOST = {"file": 300, "pass": 150, "function": 60}
#: What may be longer: (file, function or "" for the file itself) -> why.
LONG = {
    ("ir/interpret.py", ""): "the meaning of each op that moves data, one method a kind",
    ("ir/ops.py", ""): "the op table, with the type rules of its rows",
    ("passes/pipelines.py", ""): "the order of all passes, a line for each",
}


def too_long(path):
    """What of a file is longer than MOST says: "" for the file itself, else functions by name."""
    a_pass = path.parts[len(PACKAGE.parts)] == "passes"
    if len(path.read_text().splitlines()) > MOST["pass" if a_pass else "file"]:
        yield ""
    yield from (f.name for f in ast.walk(tree(path)) if isinstance(f, FUNCTION) and lines(f) > MOST["function"])


def test_files_and_functions_are_short_but_for_the_exceptions():
    found = {(NAMES(path), n) for path in FILES for n in too_long(path)}
    assert found == set(LONG), f"longer than {MOST}: {found - set(LONG)}; no longer: {set(LONG) - found}"


#: Where a rule does not hold: with_attrs itself.
EXCEPT = {attributes_replaced: ["ir/core.py"]}


@pytest.mark.parametrize("rule", RULES, ids=lambda f: f.__name__)
def test_the_package_keeps_the_rule(rule):
    assert [NAMES(path) for path in FILES if rule(path.read_text())] == EXCEPT.get(rule, []), rule.__doc__


@pytest.mark.parametrize("rule", RULES, ids=lambda f: f.__name__)
def test_a_rule_sees_what_it_forbids_and_nothing_else(rule):
    assert all(map(rule, RULES[rule]))
    assert not any(map(rule, FINE))


#: Folders of the compiler -> what else of the package their files import.
BELOW = {"devices": set(), "ir": set(), "algorithms": {"ir"}, "schedule": {"ir", "input_forms"}, "prove": {"ir", "devices"},
         "passes": {"ir", "devices", "schedule", "prove", "input_forms"}, "emit": {"ir"}, "host": {"devices"},
         "targets": {"ir", "devices", "schedule", "passes", "emit"}}
#: Folders whose functions may import what is above, when they are called.
LATE = ("targets",)


def imported(path, tree):
    """The folders and files of the package, other than its own, that a file imports, for folders of LATE not within functions."""
    here = path.relative_to(PACKAGE).parts
    for n in (n for n in (tree.body if here[0] in LATE else ast.walk(tree)) if isinstance(n, ast.ImportFrom) and n.level):
        base = here[:len(here) - n.level]
        yield from {(*base, *(n.module.split(".") if n.module else [a.name]))[0] for a in n.names} - {here[0]}


@pytest.mark.parametrize("folder", BELOW)
def test_imports_point_down(folder):
    found = {NAMES(path): set(imported(path, tree(path))) - BELOW[folder] for path in sorted((PACKAGE / folder).rglob("*.py"))}
    assert found and not any(found.values()), {path: above for path, above in found.items() if above}


def test_an_import_that_points_up_is_seen():
    text = "from ...targets import find\nfrom ..match import a\ndef f(): from ... import runtime"
    path = PACKAGE / "passes" / "cut" / "x.py"
    assert set(imported(path, ast.parse(text))) == {"targets", "runtime"}
    late = "from ..ir import core\ndef f(): from .. import tools"
    assert set(imported(PACKAGE / "targets" / "x.py", ast.parse(late))) == {"ir"}


@pytest.mark.slow
def test_long_tests_are_slow_too():
    """Of `-m "not slow"`, the fast tier, none is long."""
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "not slow", "passes/test_alike_keys.py"]
    listed = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert listed.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, listed.stdout + listed.stderr


def test_no_two_test_modules_have_one_name():
    """pytest imports test modules by file name: of two with one name it collects the first only, and `from NAME import` may take
    the other one."""
    names = [p.stem for p in Path(__file__).parent.rglob("*.py") if p.stem != "conftest"]
    assert sorted(set(names)) == sorted(names), [n for n in set(names) if names.count(n) > 1]
