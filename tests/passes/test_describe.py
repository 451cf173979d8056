"""describe: which loads of a walk go by descriptors of a sequence's rows."""
from dataclasses import replace

import pytest

from gdn_codegen.algorithms import find
from gdn_codegen.ir.core import Op, walk
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.ir.verify import VerifyError, verify
from gdn_codegen.schedule import named
from gdn_codegen.schedule.contract import PLAIN, Contract
from gdn_codegen.targets import lower


def lowered(schedule="walk", target="triton", contract=PLAIN, K=128, V=128, **changes):
    plan = replace(named(schedule), **{"descriptors": True, **changes})
    return lower(find("gated_delta_rule").trace(), target, plan, {"C": 32, "K": K, "V": V}, "float16", contract=contract)


def described(p):
    return {(k.name, o.attr("tensor")) for k in p.kernels for o in walk(k.body) if o.attr("described")}


@pytest.mark.slow
def test_rows_as_wide_as_their_tensor_in_walks_alone():
    assert described(lowered()) == {("o_S", "q"), ("o_S", "k")}  # v comes in blocks; [G Tinv_scaled] has no walk
    assert described(lowered(v_block=128)) == {("o_S", "q"), ("o_S", "k"), ("o_S", "v")}
    assert described(lowered(partition="decay")) == {(k, "k") for k in ("S_offset", "S_factor", "o_S")} | {("o_S", "q")}
    assert described(lowered("prepared")) == {("S_U", "k")}  # the kernel of o has no walk


@pytest.mark.slow
def test_no_other_load():
    assert not described(lowered(descriptors=False))
    assert not described(lowered(target="tilelang"))
    assert not described(lowered(contract=Contract(strided=True))), "rows may begin anywhere"
    assert not described(lowered(K=100)), "rows of 200 bytes"


@pytest.mark.parametrize("lost, text", [
    (("tensor", "Tinv_scaled_ws"), "no descriptor of Tinv_scaled_ws"), (("transposed", True), "no descriptor of q"),
    (("ahead", 1), "no descriptor of q")])
def test_what_no_descriptor_serves_is_refused(lost, text):
    p = lowered()

    def changed(o):
        attrs = {"tensor": o.attr("tensor"), "described": True, **dict([lost])}
        tile = p.tensor(attrs["tensor"]).moved(transposed="transposed" in attrs)
        return replace(o, attrs=tuple(sorted(attrs.items())), type=tile)

    kernels = tuple(replace(k, body=tuple(
        x if isinstance(x, Op) else replace(x, body=tuple(changed(o) if o.kind == "load" and o.attr("tensor") == "q" else o
                                                          for o in x.body)) for x in k.body)) for k in p.kernels)
    with pytest.raises(VerifyError, match=text):
        verify(replace(p, kernels=kernels))


def test_the_mark_is_printed_and_read():
    p = lowered()
    assert "described" in program_text(p) and parse_program(program_text(p)) == p
