"""Running sums of several heads as additions of rows: which ops they become, and the barriers between them."""
from dataclasses import replace

import pytest
import torch

from gdn_codegen.algorithms import find
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.ir.body import Body
from gdn_codegen.ir.core import Loop, walk
from gdn_codegen.ir.ops import OPS, TypeRuleError, infer
from gdn_codegen.ir.types import Tile
from gdn_codegen.passes.heads.added_rows import added_rows
from gdn_codegen.passes.storage.core_values import CoreValues
from gdn_codegen.prove.happens_before import RaceError, check_waits, without_barrier
from gdn_codegen.schedule import named
from gdn_codegen.targets import lower


def lowered(chunk, **options):
    return lower(find("gated_delta_rule").trace(), "pto", named("staged"), {"C": chunk, "K": 16, "V": 16}, "float16", **options)


def of_sums(p):
    return next(k for k in p.kernels if k.name == "G")


@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
def test_sums_in_few_steps(chunk):
    """A step for each row of a group, one for each group, and one for what is before a row's group."""
    ops = list(walk(of_sums(lowered(chunk)).body))
    steps = [o for o in ops if o.kind == "add_rows"]
    assert len(steps) == (chunk // 8 - 1) + 7 + 1 and not any(o.kind == "cumsum" for o in ops)
    assert len({o.buffer for o in steps}) == 1, "they work in place"


def test_each_barrier_is_derived_and_needed():
    p = lowered(32)
    g = of_sums(p)
    barriers = sum(o.kind == "barrier" for o in walk(g.body))
    assert barriers > sum(o.kind == "add_rows" for o in walk(g.body))
    for n in range(barriers):
        broken = without_barrier(g, n)
        with pytest.raises(RaceError):
            check_waits(replace(p, kernels=(broken,)), ASCEND_A2)


def test_two_sums_of_a_tile_have_a_copy_each():
    """Additions work in place, and must not change what the other sum reads."""
    p = lowered(32, upto="feed")
    g = of_sums(p)
    (sums,) = (o for o in walk(g.body) if o.kind == "cumsum")
    (items,) = g.body
    store = next(o for o in items.body if o.kind == "store")
    other = replace(sums, out="H", attrs=tuple(x for x in sums.attrs if x[0] != "least"))
    both = (*(o for o in items.body if o is not store), other, store, replace(store, args=("H",)))
    g = replace(g, body=(Loop("item", (), both),))
    (done,) = added_rows(replace(p, kernels=(g,)), ASCEND_A2).kernels
    copies = [o.out for o in walk(done.body) if o.kind == "move"]
    read = [o.args[0] for o in walk(done.body) if o.kind in ("exp", "maximum", "add_rows")]
    assert len(copies) == len(set(copies)) == 2 and set(copies) < set(read)
    assert sums.args[0] not in read


def test_a_core_has_its_columns_of_each_value():
    k = of_sums(lowered(32, upto="added_rows"))
    v = CoreValues(lowered(32, upto="added_rows"), k, ASCEND_A2)
    shapes = {v.shape(o) for o in walk(k.body) if o.out and v.type[o.out].rank == 2}
    assert shapes == {(32, 8), (8, 32)}


def test_what_add_rows_means():
    x = torch.arange(16.0).reshape(8, 2)
    attrs = {"to": 1, "of": 0, "width": 2, "count": 2, "step": 4}
    want = x.clone()
    want[[1, 2, 5, 6]] += x[[0, 0, 4, 4]]
    assert torch.equal(OPS["add_rows"].evaluate(attrs, x), want)


@pytest.mark.parametrize("change", [{"of": 1}, {"of": 2}, {"of": 5}, {"width": 4}, {"width": 5}])
def test_no_row_is_read_and_written_or_written_twice(change):
    b = Body(types={"x": Tile(("C", 16))})
    places = {"to": 1, "of": 0, "width": 2, "count": 2, "step": 4}
    b.op("add_rows", "x", **places)
    with pytest.raises(TypeRuleError, match="reads rows that it writes"):
        infer("add_rows", (Tile(("C", 16)),), tuple((places | change).items()))
