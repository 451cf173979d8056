"""Value heads of one key head as one instance: numbers on the CPU, what is shared, what is refused."""
import re
import shutil
from dataclasses import replace

import pytest
from reference import check, problem

from gdn_codegen.ir.core import Batch, Op
from gdn_codegen.passes.storage import place, shared_buffers
from gdn_codegen.prove.storage import OverwrittenError
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.roofline import costs
from gdn_codegen.schedule import SCHEDULES, ScheduleError
from gdn_codegen.tools import check_tilelang

pytest.importorskip("tilelang")


def build(name, heads, chunk=64, K=32, V=32, dtype="float16", **fields):
    return Build("tilelang", chunk, schedule=replace(SCHEDULES[name], value_heads=heads, **fields), head_dim_k=K, head_dim_v=V,
                 dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name, heads, chunk, fields", [
    ("walk", 4, 64, {}), ("walk", 2, 32, {"partition": "decay"}), ("replay", 2, 32, {}), ("staged", 2, 16, {}),
    ("prepared", 2, 32, {"v_block": 16})])
def test_numbers(name, heads, chunk, fields):
    b = build(name, heads, chunk, **fields)
    fn = function(b)
    for n, lengths in enumerate(([130, 0, 65], [1], [64])):
        for H, HV in ((1, heads), (2, 2 * heads)):
            check(fn, problem(lengths, H, HV, 32, 32, gate=-0.1, seed=n))


@pytest.mark.slow
@pytest.mark.parametrize("H, HV", [(2, 2), (2, 4), (1, 6)])
def test_value_heads_that_share_no_key_head_are_refused(H, HV):
    x = problem([70], H, HV, 32, 32)
    with pytest.raises(ValueError, match=f"heads: got H = {H}, HV = {HV}; accepted: HV a multiple of 4 H"):
        check(function(build("walk", 4)), x)


def test_what_is_of_the_key_head_is_loaded_and_multiplied_once():
    b = build("walk", 4)
    k = next(k for k in lowered(b).kernels if k.grid == "chunks")
    ops = [o for o in k.body if isinstance(o, Op)]
    loads = [o.attr("tensor") for o in ops if o.kind == "load"]
    assert k.batch == Batch(4, "key_head") and sorted(loads) == ["beta"] * 4 + ["g"] * 4 + ["k"]
    assert [o.kind for o in ops].count("matmul") == 1 and [o.kind for o in ops].count("diag_inverse") == 4
    one, four = (costs(lowered(x), [256], 1, 4)[k.name] for x in (build("walk", 1), b))
    assert four.bytes == one.bytes and four.flops * 4 == one.flops and four.asked < one.asked
    text = render(b)
    four_each = r"t\.whole_inverses\(\s*\(\w+(?:, \w+){3}\),\s*\(\w+(?:, \w+){3}\),?\s*\)"
    assert re.search(four_each, text) and "t.cumsums(" in text


def test_what_runs_side_by_side_overwrites_nothing_that_is_read_there(monkeypatch):
    """Sums of one head may not take the place of what another warp still sums. In the page's order they would."""
    monkeypatch.setattr(shared_buffers, "SIDE_BY_SIDE", ())
    monkeypatch.setattr(place, "late", lambda k, sizes: k)
    lowered.cache_clear()
    with pytest.raises(OverwrittenError, match=r"overwrites .* side by side with it"):
        render(build("walk", 4))
    lowered.cache_clear()


def test_what_has_no_room_is_refused():
    with pytest.raises(ScheduleError, match="shared of hopper has 232448 bytes"):
        lowered(build("walk", 4, 128, dtype="float32"))


def test_other_numbers_of_heads_are_refused():
    with pytest.raises(ScheduleError, match="value_heads=3; accepted are 0, 1, 2, 4"):
        build("walk", 3)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc of a CUDA toolkit")
@pytest.mark.parametrize("heads", [pytest.param(2, marks=pytest.mark.long), 4])
def test_it_compiles_for_hopper_without_spills(heads, tmp_path):
    b = build("walk", heads, K=128, V=128)
    (tmp_path / f"{b.name}.py").write_text(render(b))
    (found,) = check_tilelang.compiled(tmp_path / f"{b.name}.py", ["G_Tinv_scaled"])
    assert not found.error and not found.spills and found.wgmma and found.registers <= {2: 64, 4: 80}[heads]
