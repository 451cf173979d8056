"""Random calls of the op, all of the contract at once, against a recurrence in float64.

Two thousand of them: `pytest -m long tests/properties/test_calls.py -n 2` (GDN_CODEGEN_CALLS=n for another number).
"""
import os
from itertools import pairwise

import pytest
import torch
from calls import checked, drawn, elsewhere, flat, made

from gdn_codegen import chunk_gated_delta_rule, recurrent_gated_delta_rule
from gdn_codegen.runtime.targets import runs

pytestmark = pytest.mark.slow

FEW = {"triton": 12, "tilelang": 2, "pto": 3}
MANY = int(os.environ.get("GDN_CODEGEN_CALLS", "2000"))
#: Of a hundred calls, how many each target has where many run: those that compile have fewer.
SHARE = {"triton": 90, "tilelang": 4, "pto": 6}


def op(c):
    return recurrent_gated_delta_rule if c.decode else chunk_gated_delta_rule


def run(seed, target):
    if not runs(target, "cpu"):
        pytest.skip(f"{target} does not run here")
    c = drawn(seed, target, small=target != "triton")
    try:
        checked(c, op(c))
    except AssertionError as e:
        raise AssertionError(f"{c}: {e}") from e


@pytest.mark.parametrize("target", FEW)
def test_a_few(target):
    for seed in range(FEW[target]):
        run(seed, target)


@pytest.mark.long
@pytest.mark.parametrize("block", range(-(-MANY // 100)))
def test_many(block):
    at = 0
    for target, share in SHARE.items():
        for _ in range(share):
            run(1000 + 100 * block + at, target)
            at += 1


@pytest.mark.parametrize("seed", [11, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 26))])
def test_calls_on_another_device_are_held_to_the_same(seed):
    """What tests/device does on a GPU, with the CPU for one."""
    c = drawn(seed)
    checked(c, elsewhere(op(c), "cpu"))


# --- the comparison can fail ----------------------------------------------------------------------------------------
def spoiled(how):
    """The op with something wrong that callers would notice late."""
    def fn(**said):
        if how == "gates":
            said["g"] = said["g"].flip(-1) * 0.5
        if how == "slots" and said.get("state_indices") is not None:
            said["state_indices"] = said["state_indices"].flip(0)
        if how == "inputs":
            said["k"][..., :1] *= 2
        results = chunk_gated_delta_rule(**said)
        if how == "tail":
            results[0].reshape(-1)[-1] += 1
        return results
    return fn


@pytest.mark.parametrize("how", ["gates", "slots", "inputs", "tail"])
def test_the_comparison_refuses(how):
    fits = lambda c: not c.decode and sum(c.lengths) > 20 and c.HV > 1 and (
        (c.pool == "in place" and not c.skipped and len(c.lengths) > 1) if how == "slots" else not c.skipped and not c.extra_rows)
    c = next(c for c in map(drawn, range(4000)) if fits(c) and c.K * c.V <= 4096)
    checked(c, chunk_gated_delta_rule)
    with pytest.raises(AssertionError):
        checked(c, spoiled(how))


# --- sequences apart --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", FEW)
def test_same_bits_in_any_place_of_the_batch_and_nan_stays(target):
    """Packed in another order each sequence has the same bits; one of NaN changes no other."""
    if not runs(target, "cpu"):
        pytest.skip(f"{target} does not run here")
    fits = lambda c: not (c.batched or c.decode or c.pool or c.in_place or c.extra_rows or c.views or c.checkpoints) and (
        c.initial and c.layout == "bthd" and len([n for n in c.lengths if n]) >= 3 and c.l2norm and c.gate == "raw")
    c = next(c for c in (drawn(s, target, small=True) for s in range(4000)) if fits(c))
    c.out = False
    said, _ = made(c)
    o, S = chunk_gated_delta_rule(**said)[:2]
    ends = said["cu_seqlens"].tolist()
    pieces = [slice(a, b) for a, b in pairwise(ends)]
    order = list(range(len(pieces)))[::-1]
    turned = {n: torch.cat([said[n][:, pieces[i]] for i in order], 1) for n in ("q", "k", "v", "g", "beta")}
    lengths = torch.tensor([0, *(c.lengths[i] for i in order)]).cumsum(0)
    o2, S2 = chunk_gated_delta_rule(**{**said, **turned, "initial_state": said["initial_state"][order],
                                       "cu_seqlens": lengths.to(said["cu_seqlens"].dtype)})[:2]
    at = lengths.tolist()
    for place, i in enumerate(order):
        assert torch.equal(o2[:, at[place]:at[place + 1]], o[:, pieces[i]]) and torch.equal(S2[place], S[i])
    bad = max(order, key=lambda i: c.lengths[i])
    for name in ("q", "k", "v", "g", "beta"):
        said[name] = said[name].clone()
        said[name][:, pieces[bad]] = float("nan")
    o3, S3 = chunk_gated_delta_rule(**said)[:2]
    for i in order:
        same = torch.equal(o3[:, pieces[i]], o[:, pieces[i]]) and torch.equal(S3[i], S[i])
        assert same == (i != bad) or not c.lengths[i]
    assert flat(c, o3)[pieces[bad]].isnan().all()
