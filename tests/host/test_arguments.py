"""host/arguments.py by itself: what a generated module, and the package's ops, take of arguments."""
import pytest
import torch

from gdn_codegen.host import arguments as t

INPUTS = (("q", "H", (8,), "float16"), ("v", "HV", (4,), "float16"), ("g", "HV", (), "float32"))
HEAD_INPUTS = (("A_log", None, (), "float32"), ("dt_bias", 0.0, (), "float32"))
CPU = torch.device("cpu")


def given(**other):
    x = {"q": torch.zeros(2, 5, 2, 8).half(), "v": torch.zeros(2, 5, 4, 4).half(), "g": torch.zeros(2, 5, 4),
         "A_log": torch.zeros(4), "dt_bias": None}
    return list((x | other).values())


def check(layout="bthd", compiled=None, batched=1, **other):
    return t._check_inputs(given(**other), INPUTS, HEAD_INPUTS, layout, compiled or {}, batched)


def test_sizes_are_those_of_the_inputs():
    assert check() == (2, 5, 2, 4, CPU)
    turned = {n: x.transpose(1, 2) for n, x in zip("qvg", given(), strict=False)}
    assert check("bhtd", **turned) == (2, 5, 2, 4, CPU)
    assert check(g=torch.zeros(2, 5, 4, dtype=torch.bfloat16), compiled={"H": 2, "HV": 4}, batched=2)[3] == 4


@pytest.mark.parametrize("other, said", [
    ({"q": None}, "q: got NoneType; accepted: a torch.Tensor"),
    ({"q": torch.zeros(2, 5, 2, 8)}, "q: got torch.float32; accepted: torch.float16"),
    ({"g": torch.zeros(2, 5, 4, dtype=torch.int32)}, "g: got torch.int32; accepted: torch.float16, torch.bfloat16, torch.fl"),
    ({"v": torch.zeros(2, 5, 4, dtype=torch.half)}, "v: got rank 3; accepted: rank 4"),
    ({"v": torch.zeros(2, 5, 4, 5, dtype=torch.half)}, r"v: got shape \(2, 5, 4, 5\); accepted: last dim 4"),
    ({"v": torch.zeros(2, 6, 4, 4, dtype=torch.half)}, r"v: got shape .*; accepted: T = 5"),
    ({"g": torch.zeros(2, 5, 3)}, r"g: got shape .*; accepted: HV = 4"),
    ({"v": torch.zeros(2, 5, 3, 4, dtype=torch.half), "g": torch.zeros(2, 5, 3)}, "heads: got H = 2, HV = 3"),
    ({"v": torch.zeros(2, 5, 4, 4, dtype=torch.half, device="meta")}, "v: got device meta; accepted: device cpu, that of q"),
    ({"A_log": None}, "A_log: got NoneType"), ({"A_log": torch.zeros(3)}, r"A_log: got shape \(3,\); accepted: shape \(4,\)"),
    ({"dt_bias": torch.zeros(4, device="meta")}, "dt_bias: got device meta"),
    ({"compiled": {"H": 4, "HV": 4}}, "q: got shape .*; accepted: H = 4 heads"),
    ({"batched": 4}, "heads: got H = 2, HV = 4; accepted: HV a multiple of 4 H")])
def test_what_does_not_fit_is_refused_by_name(other, said):
    with pytest.raises(ValueError, match=said):
        check(**other)


@pytest.mark.parametrize("x, said", [
    ([0, 1], "got list"), (torch.zeros(3), "got torch.float32"), (torch.zeros(1, dtype=torch.int32), r"shape \(1,\)"),
    (torch.zeros(3, dtype=torch.int32, device="meta"), "device meta")])
def test_ends_of_sequences(x, said):
    with pytest.raises(ValueError, match=f"cu_seqlens: .*{said}|cu_seqlens: {said}"):
        t._check_sequences(x, 1, CPU)


@pytest.mark.parametrize("ends, good", [([0, 3, 3, 7], True), ([0, 8], False), ([1, 3], False), ([0, 3, 2], False)])
def test_values_of_ends(ends, good):
    if good:
        return t._check_ends(torch.tensor(ends), 7)
    with pytest.raises(ValueError, match=r"cu_seqlens: got .*; accepted: values that start at 0, never fall and end"):
        t._check_ends(torch.tensor(ends), 7)


def test_a_pool_has_dense_slots_that_may_lie_apart():
    pool = torch.zeros(3, 40)[:, :32].unflatten(1, (2, 4, 4))
    assert t._check_pool("S", pool, (2, 4, 4), CPU, torch.float32) == 40
    for bad in (pool.transpose(2, 3)[:, :, :, :3].expand(3, 2, 4, 3), torch.zeros(3, 33)[:, :32].unflatten(1, (2, 4, 4)),
                torch.zeros(3, 2, 4, 8)[..., ::2]):
        with pytest.raises(ValueError, match="S: got "):
            t._check_pool("S", bad, (2, 4, 4), CPU, torch.float32)


def test_slots_that_are_written_are_each_ones_own():
    t._check_slots([2, -1, 2], "state_indices", 3, False)
    for seen, written in (([2, 0, 2], True), ([3], False), ([-2], False)):
        with pytest.raises(ValueError, match="state_indices: got "):
            t._check_slots(seen, "state_indices", 3, written)


@pytest.mark.parametrize("check, good, bad", [
    (t._check_flag, [True, False], [(1, "got 1; accepted: True or False"), (torch.ones(1), "got Tensor; accepted: True or")]),
    (t._check_number, [1, 0.5], [(True, "got bool; accepted: a number, or"), (float("nan"), "got nan; accepted: a number that"),
                                 (10**400, "got an int of 401 digits; accepted: a number that float32 holds")]),
    (lambda n, x: t._check_chunks(n, x, 1), [1, 2**31 - 1], [(0, "got 0; accepted: a number of chunks from 1 to 2147483647"),
                                                            (True, "got True; accepted"), (2**31, "got 2147483648; accepted")])])
def test_options(check, good, bad):
    for x in good:
        check("x", x)
    for x, said in bad:
        with pytest.raises(ValueError, match=f"^x: {said}"):
            check("x", x)


def test_a_tensor_that_requires_grad_is_named():
    x = torch.zeros(1, requires_grad=True)
    t._check_given([("q", torch.zeros(1)), ("S", None)])
    with pytest.raises(ValueError, match="S: got a tensor that requires grad; accepted: inference only"):
        t._check_given([("q", torch.zeros(1)), ("S", x)])
    with torch.no_grad():
        t._check_given([("S", x)])


@pytest.mark.parametrize("x, said", [
    (torch._neg_view(torch.ones(2)), "a view with torch's negative bit"),
    (torch.ones(2).to_sparse(), "torch.sparse_coo"),
    (torch.nested.nested_tensor([torch.ones(2)]), "a nested tensor")])
def test_what_kernels_would_read_in_another_way_is_refused(x, said):
    with pytest.raises(ValueError, match=f"^S: got {said}; accepted"):
        t._check_given([("q", torch.ones(2)), ("S", x)])
