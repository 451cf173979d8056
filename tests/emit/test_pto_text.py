"""What stands in the text of PTO's kernels, for every page under every schedule: nothing unused, few arguments, flags and pipes
as PTO-ISA has them."""
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from reference import check, problem

from gdn_codegen import algorithms
from gdn_codegen.devices.ascend_a2 import ASCEND_A2
from gdn_codegen.emit import pto
from gdn_codegen.emit.pto.declarations import pruned
from gdn_codegen.emit.pto.values import OWN
from gdn_codegen.ir.core import map_ops
from gdn_codegen.ir.verify import verify
from gdn_codegen.passes.sync.single_launch import single_launch
from gdn_codegen.prove.happens_before import RaceError, check_waits
from gdn_codegen.runtime import load
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import SCHEDULES, named

#: The gradient of one page has what those of the others have.
GRADIENTS = [pytest.param(f"{n}.gradient", marks=pytest.mark.slow if n == "kimi_delta_attention" else pytest.mark.long)
             for n in algorithms.names()]
PAGES = [*algorithms.names(), "causal_conv1d", *GRADIENTS]
#: Those that show what others do.
ALIKE = "gated_delta_product", "gated_delta_rule_2", "simple_gla", "rwkv7"
LONG = [pytest.mark.slow, pytest.mark.long]
#: The pipes from which PTO-ISA signals to other cores (include/pto/npu/a2a3: SyncAll.hpp, custom/TSync_Custom.hpp, TPush.hpp).
PIPES = {"FIX", "MTE2", "MTE3"}
#: A launch takes fewer arguments than this. Plain contracts take up to 25.
LIMIT = 40


def launches(page):
    """(program, kernel text) of each launch under every schedule that takes the page, each also as one launch. The last pass
    makes that one, so a program is lowered for both at once."""
    for schedule in SCHEDULES:
        b = Build("pto", 64, algorithm=page, schedule=schedule)
        try:
            p = lowered(b)
        except ValueError:
            continue
        for one in (p, verify(single_launch(p, single(schedule), b.device))):
            for k in pto.emit(one, b.layout, b.heads):
                yield one, k


def single(schedule):
    """The named schedule as one launch."""
    return replace(named(schedule), launch="single")


def test_lowering_for_one_launch_differs_in_the_last_pass(unchecked):
    """Which `launches` relies on."""
    for schedule in ("staged", "fused", "walk"):
        p, one = (lowered(Build("pto", 64, schedule=s)) for s in (schedule, single(schedule)))
        assert one == single_launch(p, single(schedule), ASCEND_A2) != p


def sections(body):
    """The text for each agent."""
    return re.findall(r"^ *#if defined\(__DAV.*?\n(.*?)^ *#endif", body, re.S | re.M)


def unused(section):
    """Numbers, pointers and tiles that a section declares, and names nowhere else but to give a tile its address."""
    text = re.sub(r"//.*", "", section)
    found = re.findall(r"__gm__ \w+ \*(\w+) =|(?:^|[ (,])(?:\w+<[^;]*>|int64_t|float|auto) (\w+)(?=[ ;(])", text)
    found += re.findall(r"()(?<=, )(\w+)(?= = )", text)
    uses = Counter(re.findall(r"\w+", re.sub(r"TASSIGN\(\w+,|\+\+(\w+);", "", text)))
    return {a or b for a, b in found if uses[a or b] <= [a or b for a, b in found].count(a or b)}


@pytest.mark.parametrize("page", [pytest.param(x, marks=LONG) if x in ALIKE else x for x in PAGES])
def test_text_of_every_schedule(unchecked, page):
    """Nothing is unused, and a launch takes few arguments. Signals between cores come from PTO-ISA's pipes. Kernels use the flags
    that it gives them; the barrier between kernels has others."""
    seen = 0
    for p, k in launches(page):
        here = sections(k.body)
        seen += len(here)
        assert len(k.extra["names"]) < LIMIT
        for section in here:
            assert unused(section) == set(), k.name
        pointers = [x.split("*")[-1] for x in k.extra["device_params"] if "*" in x]
        assert set(pointers) <= set(re.findall(r"\w+", k.body)), k.name
        signals = re.findall(r"ffts_cross_core_sync\(PIPE_(\w+), (group|all)_flag\((\d+)\)", k.body)
        assert {pipe for pipe, *_ in signals} <= PIPES
        of_kernels = {o.attr("id") for one in p.kernels for o in one.ops if o.kind == "signal" and "." in o.attr("src")}
        assert of_kernels <= set(range(13)) and {int(n) for *_, n in signals} <= of_kernels | {12, 13, 14, 15}
    assert seen


def test_a_section_without_work_is_no_loop(unchecked):
    """In one launch the cube core takes part in the barrier after [G], and does nothing else there."""
    (k,) = pto.emit(lowered(Build("pto", 64, schedule=single("staged"))), "bthd")
    first = sections(k.body)[0]
    assert "for (" not in first and "pipe_barrier(PIPE_ALL);" in first


def test_what_is_pruned():
    """Declarations, addresses of tiles and counts go, with what they alone used; a name in another line stays."""
    lines = ["const int64_t a = 1, b = f(a, 2), c = 3;  // c", "UbTile<float, 1, 8> x;", "TASSIGN(x, c);", "int64_t n = 0;",
             "++n;", "auto z = tile_at<UbTile<float, 1, 8>>(c);", "auto y = tile_at<UbPart<float, 1, 8>>(0x0, b, 8);",
             "TLOAD(y, from);"]
    assert pruned(lines) == ["const int64_t a = 1, b = f(a, 2);", *lines[6:]]


def test_blocks_of_the_inverse_are_gone_through_by_loops(unchecked):
    """Blocks that lie evenly: eight diagonal blocks of 16, four pairs of 32. With each written out the kernel had 1431 lines."""
    text = next(k.body for k in pto.emit(lowered(Build("pto", 128, schedule="staged")), "bthd") if k.name == "Tinv")
    assert len(text.splitlines()) < 790
    assert "insert_blocks<16, 128, 8>(Tinv_blocks_16, " in text
    assert re.search(r"extract_blocks<TileLeft<half, 16, 16>, 4>\(0x\w+, A_cube, 16, 0, 32, 32\);", text)


def test_no_value_has_the_name_of_a_function():
    """A value would hide it."""
    shared = (Path(__file__).parents[2] / "templates/pto/shared.hpp.j2").read_text()
    functions = set(re.findall(r"^AICORE inline .*?(\w+)\(", shared, re.M))
    assert {"view", "tile_at", "part_of", "add_rows"} <= functions <= OWN


ODD = """from math import inf
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower

@algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V", forgets="g"))
def odd(q, k, v, g, S, *, scale="K ** -0.5"):
    get_block_idx = cumsum(g)
    PIPE_V = exp(lower(get_block_idx[:, None] - get_block_idx[None, :], fill=-inf))
    TADD = q @ S
    UbTile = (q @ k.T) * PIPE_V
    place = exp(get_block_idx)[:, None] * TADD
    o = scale * (place + UbTile @ v)
    i = exp(last(get_block_idx) - get_block_idx)
    S = exp(last(get_block_idx)) * S + k.T @ (i[:, None] * v)
    return o, S
"""


@pytest.mark.slow
def test_values_may_have_names_of_pto_isa(tmp_path):
    """Instructions, types and functions of its headers, and of the text's own."""
    (tmp_path / "page.py").write_text(ODD)
    b = Build("pto", 32, algorithm=f"{tmp_path / 'page.py'}:odd", schedule="staged", head_dim_k=32, head_dim_v=32)
    check(load.function(b), problem([33, 0, 17], 1, 2, 32, 32), delta=False)


@pytest.mark.slow
@pytest.mark.parametrize("page, schedule", [("gated_delta_rule", "staged"), ("gated_delta_product", "staged"), ("rwkv7", "walk"),
                                            ("kimi_delta_attention", "fused"), ("gla", "replay")])
def test_no_barrier_over_a_core_is_redundant(unchecked, page, schedule):
    """Without any one of them the checker refuses the kernel."""
    p = lowered(Build("pto", 64, algorithm=page, schedule=schedule))
    for k in p.kernels:
        every = [o for o in k.ops if o.kind == "barrier" and o.attr("scope") == "ALL"]
        for n in range(len(every)):
            left = iter(range(len(every)))
            body = map_ops(k.body, lambda o, left=left, n=n: [] if (o.kind, o.attr("scope")) == ("barrier", "ALL") and
                           next(left) == n else [o])
            with pytest.raises(RaceError):
                check_waits(replace(p, kernels=(replace(k, body=body),)), ASCEND_A2)
