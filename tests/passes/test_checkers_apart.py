"""Checkers know by themselves what ops read and write: a pass that forgets an access is caught, not believed."""
import ast
from pathlib import Path

import pytest
from walks import PLANS, SIZES

import gdn_codegen
from gdn_codegen.algorithms import find
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.passes.sync import mbarriers, ring_accesses, synchronise
from gdn_codegen.passes.sync.accesses import accesses
from gdn_codegen.prove.happens_before import RaceError, check_waits
from gdn_codegen.prove.rings import check_rings
from gdn_codegen.schedule import named
from gdn_codegen.targets import lower

PROVE = Path(gdn_codegen.__file__).parent / "prove"


@pytest.mark.parametrize("path", sorted(PROVE.glob("*.py")), ids=lambda p: p.name)
def test_checkers_import_no_pass(path):
    for n in ast.walk(ast.parse(path.read_text())):
        names = [n.module or ""] if isinstance(n, ast.ImportFrom) else []
        names += [a.name for a in n.names] if isinstance(n, ast.Import | ast.ImportFrom) else []
        assert not any("passes" in x.split(".") for x in names), path.name


# --- cores -----------------------------------------------------------------------------------------------------------
def statement(body, path):
    s = body[path[0]]
    for i in path[1:]:
        s = s.body[i]
    return s


def placed(name):
    sizes = {"C": 32, "K": 16, "V": 32}
    return lower(find("gated_delta_rule").trace(), "pto", named(name), sizes, "float16", upto="pack")


def sort(p, o, a):
    """What an access is of: op, reads or writes, scratch, tiles between cores."""
    what = "scratch" if "scratch" in a.value else "channel" if a.space in {t.name for t in p.tensors} else "operand"
    return o.kind, "writes" if a.write else "reads", what


#: What the kernels of `fused` cannot do without; other ops have their operands ordered by what else these wait for.
NEEDED = {*((kind, how, "operand") for kind in ("add", "cast", "exp", "expand", "join", "matmul", "move", "mul")
            for how in ("reads", "writes")),
          ("load", "writes", "operand"), ("store", "reads", "operand"), ("load", "reads", "channel"),
          ("store", "writes", "channel"), ("last", "reads", "operand"), ("valid", "writes", "operand"),
          ("row_sum", "writes", "operand")}


@pytest.mark.slow
def test_what_synchronise_forgets_the_checker_finds(monkeypatch):
    """Each sort of access in turn is left out. Then the waits are as before, or they are refused."""
    p = placed("fused")
    whole = synchronise.synchronise(p, ASCEND_A2)
    check_waits(whole, ASCEND_A2)
    sorts = {sort(p, statement(k.body, path), a) for k in p.kernels for path, found in accesses(p, k, ASCEND_A2).items()
             for a in found}
    assert sorts >= NEEDED
    caught = set()
    for left_out in sorted(sorts):
        def less(p, k, device, left_out=left_out):
            return {path: [a for a in found if sort(p, statement(k.body, path), a) != left_out]
                    for path, found in accesses(p, k, device).items()}
        monkeypatch.setattr(synchronise, "accesses", less)
        done = synchronise.synchronise(p, ASCEND_A2)
        if done != whole:
            with pytest.raises(RaceError):
                check_waits(done, ASCEND_A2)
            caught.add(left_out)
    assert caught >= NEEDED


# --- warp groups -----------------------------------------------------------------------------------------------------
def walk_of(plan):
    page = find("gated_delta_rule").trace()
    return lower(page, "tilelang", PLANS[plan], SIZES, "float16", "sm_90a", upto="async_copies")


def without_reads_by(kind):
    def reads(k):
        real = ring_accesses.reads(k)
        return lambda o: set() if o.kind == kind else real(o)
    return reads


MUTATIONS = {"products read nothing": {"reads": without_reads_by("matmul")},
             "stores read nothing": {"reads": without_reads_by("store")},
             "moves read nothing": {"reads": without_reads_by("move")},
             "transposes read nothing": {"reads": without_reads_by("transpose")},
             "units read nothing": {"by_units": lambda p, o: False}, "threads write nothing": {"by_threads": lambda p, o: False}}


@pytest.mark.parametrize("plan", ["walk", "fused_walk"])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_mbarriers_forgets_the_checker_finds(mutation, plan, monkeypatch):
    p = walk_of(plan)
    for name, f in MUTATIONS[mutation].items():
        monkeypatch.setattr(mbarriers, name, f)
    with pytest.raises(RaceError):
        check_rings(mbarriers.mbarriers(p, SM_90A), SM_90A)
