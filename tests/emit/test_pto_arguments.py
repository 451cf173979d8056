"""What a kernel of PTO is passed: few arguments, and one workspace, whose regions the simulator takes for memory of their own."""
import contextlib
import re
from dataclasses import replace
from math import prod

import pytest
import torch
from reference import call, module, problem

from gdn_codegen import algorithms
from gdn_codegen.emit import pto
from gdn_codegen.pto_sim import PtoSimError
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.schedule import ScheduleError, named
from gdn_codegen.schedule.contract import Contract

#: A launch takes fewer arguments than this, as test_pto_text.py says of plain contracts. Wide ones take up to 29.
LIMIT = 40
WIDE = ("beta=sigmoid/float16,g=raw/bfloat16,k=l2norm,q=l2norm,strided", "state=vk/bfloat16/pool/in_place/checkpoints,strided",
        "state=pool/checkpoints,strided,beta=sigmoid,g=raw", "state=pool/frozen/rows", "state=vk/pool/in_place/slots/accepted")


def arguments(b):
    """The names of the arguments of each launch. None if the build is refused."""
    try:
        kernels = pto.emit(lowered(b), b.layout, b.heads)
    except ValueError:
        return None
    return [k.extra["names"] for k in kernels]


def single(page, schedule, chunk=64, **options):
    return Build("pto", chunk, algorithm=page, schedule=replace(named(schedule), launch="single"), **options)


@pytest.mark.parametrize("contract", WIDE)
def test_one_launch_takes_few_arguments(unchecked, contract):
    """With the widest contracts, too: strides come in the table, which also says where regions lie. Chunks are the largest that
    the contract takes."""
    found = {}
    for page in algorithms.names():
        for schedule in ("staged", "fused"):
            for chunk in (64, 16):
                with contextlib.suppress(ScheduleError):
                    found[page, schedule] = arguments(single(page, schedule, chunk, contract=Contract.parse(contract)))
                if found.get((page, schedule)):
                    break
    taken = [len(names) for launches in found.values() for names in launches or ()]
    assert taken and max(taken) < LIMIT


def test_what_a_contract_lacks_is_no_argument(unchecked):
    """Strides, pools, checkpoints and numbers for heads are there for contracts that have them."""
    (plain,), (more,) = (arguments(single("gated_delta_rule", "fused", contract=Contract.parse(c)))
                         for c in ("", "g=raw,state=pool/checkpoints,strided"))
    assert {"A_log_bytes", "state_indices_bytes", "state_checkpoints_bytes"} < set(more) - set(plain)
    assert not any("stride" in x for x in plain + more if x not in ("initial_state_stride", "final_state_stride"))


# --- regions are memory of their own ----------------------------------------------------------------------------------
SMALL = single("gated_delta_rule", "staged", 16, head_dim_k=16, head_dim_v=16)
LENGTHS = [33, 0, 64, 17]


def run(text):
    """The module's function on sequences that use the last slot of a workspace, and heads that make work for all core groups."""
    call(module(text).chunk_gated_delta_rule, problem(LENGTHS, 4, 8, 16, 16))


def moved(text, n, by):
    """The text with region `n` of the workspace `by` bytes further on."""
    text, found = re.subn(rf"\(workspace \+ table\[{n}\]\)", f"(workspace + table[{n}] + {by})", text)
    assert found
    return text


@pytest.mark.slow
def test_an_access_past_the_end_of_a_region_is_found():
    """Each region lies a tile further on, so that its last tile is past its end. That is no part of the next region."""
    text = render(SMALL)
    run(text)
    for n, (name, (_, dims, dtype)) in enumerate(module(text).REGIONS.items()):
        with pytest.raises(PtoSimError, match=r"bounds\]"):
            run(moved(text, n, prod(dims) * getattr(torch, dtype).itemsize))
            pytest.fail(name)


@pytest.mark.slow
def test_without_gaps_such_an_access_may_be_taken_for_the_next_region(monkeypatch):
    """So that the gaps matter: on an NPU there are none."""
    text = render(SMALL)
    before = text.index("apart = max(")
    close = text[:before] + text[before:].replace("apart = max(tiles.values(), default=0)", "apart = 0", 1)
    assert close != text
    run(close)
    found = []
    for n, (_, dims, dtype) in enumerate(module(text).REGIONS.values()):
        try:
            run(moved(close, n, prod(dims) * getattr(torch, dtype).itemsize))
        except PtoSimError as e:
            found.append("bounds]" in str(e))
    assert not all(found)
