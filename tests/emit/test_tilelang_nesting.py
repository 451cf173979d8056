"""Kernels for TileLang nest no deeper than Python compiles: 20 blocks, of which TileLang makes two for each `if`."""
import ast

import pytest

from gdn_codegen.runtime.build import Build, render
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract

ALL = Contract.parse("beta=twice_sigmoid/float16,g=raw,k=l2norm,q=l2norm,state=bfloat16/pool/checkpoints,strided")
#: Blocks of Python around a kernel's statements, less one for what TileLang puts around them.
DEEPEST = 19


def depth(body, blocks=0):
    """Blocks that TileLang's text of these statements nests."""
    inner = [blocks]
    for s in body:
        if isinstance(s, ast.With | ast.For):
            inner.append(depth(s.body, blocks + 1))
        elif isinstance(s, ast.If):
            inner += [depth(s.body, blocks + 2), depth(s.orelse, blocks + 2)]
    return max(inner)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "fields"), [
    ("walk", {"value_heads": 4, "partition": "decay"}), ("fused_walk", {"v_block": 64, "partition": "decay"}),
    ("walk", {"v_block": 64, "value_heads": 4, "partition": "decay"})])
def test_kernels_nest_no_deeper_than_python_allows(schedule, fields):
    """K and V are padded, and the contract asks for all that adds a condition."""
    sizes = {"head_dim_k": 96, "head_dim_v": 96}
    text = render(Build("tilelang", schedule=varied(schedule, "sm_90a", **fields), arch="sm_90a", contract=ALL, **sizes))
    functions = [f for f in ast.walk(ast.parse(text)) if isinstance(f, ast.FunctionDef)]
    kernels = [f for f in functions if "T.prim_func" in map(ast.unparse, f.decorator_list)]
    assert kernels
    assert {f.name: depth(f.body) for f in kernels if depth(f.body) > DEEPEST} == {}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"v_block": 16}])
def test_products_of_16_columns_have_one_warp_group(fields):
    """TileLang gives each of two groups 8 columns, and says "Not a canonical GMMA_MN layout"."""
    sizes = {"head_dim_k": 160, "head_dim_v": 160 if fields else 16}
    text = render(Build("tilelang", 128, schedule=varied("fused", **fields), dtype="bfloat16", **sizes))
    assert "threads=128)" in text and "threads=256)" not in text
