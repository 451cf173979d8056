"""Device functions: what a module has of them, and what they may use."""
import ast
import builtins
import math
import re

import pytest

from gdn_codegen.emit.base import EmitError
from gdn_codegen.emit.device_functions import definitions, needed, texts, used
from gdn_codegen.emit.tilelang import functions as tilelang
from gdn_codegen.emit.triton import functions as triton
from gdn_codegen.runtime.build import Build, render
from gdn_codegen.schedule import varied

TILELANG = sorted(x for x in tilelang.FOLDER.glob("*.py") if x.name != "headers.py")
#: What a module has without them: its imports, and the text of its CUDA headers.
GIVEN = {tilelang: {"T", "tilelang", "math", "HELPERS"}, triton: {"triton", "tl"}}
FILES = {tilelang: TILELANG, triton: [triton.FILE]}
BUILDS = [Build("tilelang"), Build("tilelang", schedule="staged", dtype="float32"), Build("tilelang", dtype="bfloat16"),
          Build("tilelang", schedule=varied("walk", value_heads=4, partition="decay")),
          Build("tilelang", schedule="fused_walk", arch="sm_90a"), Build("tilelang", schedule="walk", arch="sm_90a"),
          Build("tilelang", head_dim_k=100, head_dim_v=100),
          Build("triton"), Build("triton", schedule="staged", dtype="bfloat16"),
          Build("triton", schedule=varied("walk", partition="decay"))]


def signature(text):
    (function,) = ast.parse(text).body
    return [x.arg for x in function.args.args] if isinstance(function, ast.FunctionDef) else None


def free(text):
    """The names that a definition reads and does not bind."""
    nodes = list(ast.walk(ast.parse(text)))
    bound = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    bound |= {x.arg for x in nodes if isinstance(x, ast.arg)}
    return {x.id for x in nodes if isinstance(x, ast.Name)} - bound - set(vars(builtins))


def test_what_is_needed_is_found_through_calls(tmp_path):
    file = tmp_path / "f.py"
    file.write_text('import x\n\nfirst = x.y\n\n\n@x.decorated(\n    1)\ndef second(a):  # two\n    return first(a)\n\n\n'
                    'def third():\n    return second\n\n\ndef other():\n    return third()\n')
    known = definitions(file)
    assert needed(known, ["third", "range"]) == ["first", "second", "third"] and needed(known, ["first"]) == ["first"]
    assert texts(known, ["third"]) == ["first = x.y", "@x.decorated(\n    1)\ndef second(a):  # two\n    return first(a)",
                                       "def third():\n    return second"]
    assert texts(known, []) == []


def test_what_a_kernel_uses():
    text = "def kernel(x: t.wide):\n    # t.not_this\n    for i in t.parallel(n):\n        y[i] = find(t.x[i]) + 't.nor_that'"
    assert {x for x in used(text) if "." in x} == {"t.wide", "t.parallel", "t.x"} and "find" in used(text)


@pytest.mark.parametrize("target", FILES, ids=lambda m: m.__name__.split(".")[-2])
def test_functions_use_what_modules_have(target):
    known = definitions(*FILES[target])
    assert len(known) == sum(len(definitions(x)) for x in FILES[target])  # a name is defined once
    for name, x in known.items():
        assert free(x.text) - {name} <= GIVEN[target] | set(known), name


def test_each_function_that_calls_into_a_header_has_it():
    callers = {n for n, x in definitions(*TILELANG).items() if "HELPERS" in x.names}
    assert callers == set().union(*tilelang.HEADERS.values())
    assert set(tilelang.HEADERS) == {x.name for x in tilelang.FOLDER.glob("*.cuh")}


def test_forms_of_a_function_take_the_same():
    """A form for CUDA may take more: what kernels with warp groups give, which run nowhere else."""
    known = definitions(*TILELANG)
    forms = [n.removesuffix("_cpu") for n in known if n.endswith("_cpu")]
    assert "gemm" in forms
    for n in forms:
        cpu, cuda = signature(known[f"{n}_cpu"].text), signature(known[f"{n}_cuda"].text)
        assert cpu is None or cuda is None or cuda[:len(cpu)] == cpu, n
        assert cpu is None or cuda is None or cuda[len(cpu):] in ([], ["thread", "threads"], ["thread", "warp"]), n
    of_hopper = {n: n.removesuffix("_sm_90a") for n in known if n.endswith("_sm_90a")}
    assert of_hopper and all(signature(known[n].text) == signature(known[f"{x}_cuda"].text) for n, x in of_hopper.items())


@pytest.mark.parametrize("b", BUILDS, ids=lambda b: f"{b.target}-{b.name}")
def test_a_module_has_the_functions_that_it_uses_and_no_others(b):
    text = render(b)
    head = text[:text.index("# --- host")]
    known = definitions(*FILES[{"tilelang": tilelang, "triton": triton}[b.target]])
    defined = {n.name for n in ast.parse(head).body if isinstance(n, ast.FunctionDef)} & set(known)
    defined |= {n for n in known if re.search(rf"^{n} = ", head, re.M)}
    assert defined or (b.target, b.plan.name) == ("triton", "fused")
    for n in known:
        assert (n in defined) == (len(re.findall(rf"\b{n}\b", head)) > 1), n
    if b.target == "tilelang":
        assert any(n.endswith("_cpu") for n in defined) == (not b.arch)
        kernels = head[head.index("# --- kernels"):]
        for n in set(re.findall(r"\bt\.(\w+)", kernels)):
            assert len(re.findall(rf"\b{n}={n}(?:_cpu|_cuda|_sm_90a)?\b", head)) == (1 if b.arch else 2), n


def test_a_function_that_no_device_has_is_refused():
    with pytest.raises(EmitError, match="tilelang has no device function nowhere; emit/tilelang/device should have it"):
        tilelang.module_texts({"gemm", "nowhere"}, ("cuda", "cpu"))
    with pytest.raises(EmitError, match="no device function as_sums"):
        tilelang.module_texts({"as_sums"}, ("cpu",))


@pytest.mark.parametrize("rows, columns, threads", [
    (64, 128, 128), (64, 64, 256), (64, 128, 256), (64, 64, 512), (16, 32, 128), (16, 96, 256), (32, 192, 512)])
def test_each_entry_has_a_register_of_its_own_and_a_row_one_warp(rows, columns, threads):
    class T:
        @staticmethod
        def Fragment(shape, forward):
            return [[forward(i, j) for j in range(shape[1])] for i in range(shape[0])]
    found = {"T": T, "math": math}
    exec(definitions(tilelang.FOLDER / "maxima.py")["rows_of_warps"].text, found)
    tile = found["rows_of_warps"](rows, columns, threads)
    places = {x for row in tile for x in row}
    assert places == {(t, n) for t in range(threads) for n in range(rows * columns // threads)}
    assert all(len({t // 32 for t, _ in row}) == 1 for row in tile)


@pytest.mark.parametrize("rows, columns, threads", [(64, 64, 256), (128, 64, 256), (64, 64, 512), (64, 128, 128), (64, 32, 128)])
def test_each_column_is_in_one_warp(rows, columns, threads):
    """So no sum of a column crosses warps."""
    layouts = {}

    class T:
        @staticmethod
        def alloc_fragment(shape, dtype):
            return "x"

        @staticmethod
        def annotate_layout(of):
            layouts.update(of)

    class Layout:
        class layout:
            @staticmethod
            def Fragment(shape, forward):
                return [[forward(i, j) for j in range(shape[1])] for i in range(shape[0])]
    found = {"T": T, "tilelang": Layout}
    exec(definitions(tilelang.FOLDER / "memory.py")["columns_cuda"].text, found)
    found["columns_cuda"]((rows, columns), "float32", threads)
    tile = layouts["x"]
    assert {x for row in tile for x in row} == {(t, n) for t in range(threads) for n in range(rows * columns // threads)}
    assert all(len({row[j][0] // 32 for row in tile}) == 1 for j in range(columns))
    assert all(row[j][0] == row[j + 1][0] for row in tile for j in range(0, columns, 2)), "a thread has two columns side by side"
