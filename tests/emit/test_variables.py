"""Variables of TileLang's kernels: each is set before it is read, in a block around the place that reads it."""
import ast
from pathlib import Path

import pytest

from gdn_codegen.runtime.build import Build, render
from gdn_codegen.schedule import varied

GENERATED = sorted((Path(__file__).parents[2] / "generated/tilelang").glob("*.py"))
#: Builds with statements before a loop over chunks that compare rows with columns: the first state of a part's summary is 1.
SUMMARIES = [(page, 64, "float16") for page in ("gated_delta_rule", "delta_rule", "gated_delta_rule.states")]


def early(statements: list[ast.stmt], known: set[str], own: set[str]) -> list[str]:
    """Reads of variables of a kernel that no statement before them has set. known: the variables that are set. own: those that
    the kernel sets anywhere."""
    known, found = set(known), []
    for s in statements:
        blocks = [getattr(s, x) for x in ("body", "orelse") if getattr(s, x, None)]
        inside = {n for b in blocks for x in b for n in ast.walk(x)}
        names = [n for n in ast.walk(s) if isinstance(n, ast.Name) and n not in inside]
        stored = {n.id for n in names if isinstance(n.ctx, ast.Store)} | {
            n.arg for x in ast.walk(s) if isinstance(x, ast.Lambda) for n in x.args.args}
        at_once = stored if isinstance(s, (ast.For, ast.With)) else set()
        found += [f"{n.lineno}: {n.id}" for n in names
                  if isinstance(n.ctx, ast.Load) and n.id in own - known - at_once]
        known |= stored
        for b in blocks:
            found += early(b, known, own)
    return found


def kernels(text: str) -> list[ast.FunctionDef]:
    return [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef) and any(
        isinstance(d, ast.Attribute) and d.attr == "prim_func" for d in x.decorator_list)]


def checked(text: str) -> None:
    found = kernels(text)
    assert found
    for k in found:
        own = {n.id for n in ast.walk(k) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        assert not early(k.body, set(), own), k.name


def test_there_are_generated_modules():
    assert GENERATED


@pytest.mark.parametrize("path", GENERATED, ids=lambda x: x.stem)
def test_generated_kernels(path):
    checked(path.read_text())


@pytest.mark.parametrize("page, K, dtype", SUMMARIES)
def test_kernels_in_parts(page, K, dtype):
    plan = varied("fused_walk", "sm_90a", partition="decay")
    checked(render(Build("tilelang", algorithm=page, schedule=plan, dtype=dtype, head_dim_k=K, head_dim_v=K, arch="sm_90a")))


def test_a_read_before_the_loop_that_sets_it_is_found():
    (k,) = kernels("@T.prim_func\ndef f(x):\n    with g() as i:\n        y = below\n        for j in s(i):\n"
                   "            below = j\n        z = y + below\n")
    assert early(k.body, set(), {"i", "y", "j", "below", "z"}) == ["4: below", "7: below"]
