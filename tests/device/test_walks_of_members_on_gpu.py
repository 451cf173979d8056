"""Members with an inverse on a CUDA GPU in TileLang: calls of many walks, of short sequences and of parts, with K and V of 64 and
128. Run with: pytest -m device

Calls go through the members' ops. So dispatch chooses builds: walks over all of V, persistent ones, halves of V in parts.
"""
import sys
from pathlib import Path

import pytest
import torch
from reference import rms_error
from torch.nn.functional import softplus

from gdn_codegen.algorithms import find
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import varied
from gdn_codegen.schedule.contract import Contract

sys.path.insert(0, str(Path(__file__).parents[1] / "family"))
import members
import problems

pytestmark = [pytest.mark.device, pytest.mark.skipif(not (torch.cuda.is_available() and runs("tilelang", "cuda")),
                                                     reason="needs a CUDA GPU and TileLang")]
PAGES = ("delta_rule", "gated_delta_rule_2", "kimi_delta_attention")
UNEVEN = (130, 64, 1, 70, 200, 96)
#: Lengths, key heads, value heads, and the gates and keys of a case. 192 walks are more than a GPU has multiprocessors.
CALLS = {"walks": (UNEVEN, 32, 32, {}), "shared keys": ((70, 150, 0, 64, 33, 1, 128), 8, 32, {"gates": "mixed"}),
         "short": ((50, 64, 1, 33) * 6, 4, 32, {"gates": "mixed"}), "parts": ((3000, 500), 1, 2, {}),
         "equal keys": (UNEVEN, 32, 32, {"repeat": True})}
#: As many walks of as many tokens as dispatch has walks in turn for, by the form of the gates.
MANY = {"floored": ((1600, 1500, 1450, 1700), 16, 16, {}), "safe": ((400, 500, 390, 450), 24, 24, {})}
WIDE = [(what, dtype, 128, 128) for what in CALLS for dtype in ("bfloat16", "float16")]
NARROW = [("walks", "bfloat16", 64, 64), ("short", "bfloat16", 64, 64), ("walks", "float16", 64, 128),
          ("walks", "float16", 128, 64)]


class Walks:
    """A case of CALLS or one like these, drawn. x: inputs, packed. S: initial states."""

    def __init__(self, page: str, what: str | tuple, dtype: str, K: int, V: int) -> None:
        lengths, H, HV, drawn = CALLS[what] if isinstance(what, str) else what
        self.page, self.case = page, members.Case(lengths, H, HV, **{"gates": "slow", **drawn})
        x = members.drawn(page, self.case, find(page).trace(), {"C": 64, "K": K, "V": V})
        wide = ("g", "S", *(["w"] if page == "rwkv7" else []))  # float32
        self.x = {n: (y.to(getattr(torch, dtype)) if y.ndim == 3 and n not in wide else y).cuda() for n, y in x.items()}
        self.S = self.x.pop("S")
        self.ends = torch.tensor([0, *lengths], device="cuda").cumsum(0)

    def call(self, given=None, **said):
        """What the op gives for the inputs, some of which `given` replaces."""
        x = {n: y[None] if y.ndim > 1 else y for n, y in {**self.x, **(given or {})}.items()}
        return problems.CALLS[self.page](False, x, {"target": "tilelang", "cu_seqlens": self.ends, **said})

    def near(self, run, most=5e-3):
        """Assert that o and states of a run are the recurrence's, and have the same bits five times more."""
        got = run()
        assert all(all(map(torch.equal, got, run())) for _ in range(5))
        want = members.expected(self.page, self.case, {n: y.cpu() for n, y in {**self.x, "S": self.S}.items()})
        errors = [float(rms_error(y.reshape(w.shape).cpu(), w)) for y, w in zip(got, want, strict=True)]
        assert max(errors) < most, errors


@pytest.mark.parametrize("what, dtype, K, V", WIDE + NARROW)
@pytest.mark.parametrize("page", PAGES)
def test_calls(page, what, dtype, K, V):
    x = Walks(page, what, dtype, K, V)
    x.near(lambda: x.call(initial_state=x.S.clone(), output_final_state=True))


@pytest.mark.parametrize("page, chunk, K, V", [
    *((page, n, 128, 128) for page in ("kimi_delta_attention", "gated_delta_rule_2", "gla", "rwkv7") for n in (16, 32)),
    ("kimi_delta_attention", 16, 64, 128)])
def test_short_chunks(page, chunk, K, V):
    """Warp groups with chunks of fewer tokens than rows of a wgmma. Walks of all of V, and parts of halves of V."""
    for what, fields in (("walks", {}), ("parts", {"v_block": 64, **({} if page == "rwkv7" else {"partition": "decay"})})):
        x = Walks(page, what, "bfloat16", K, V)
        run = function(Build("tilelang", chunk, algorithm=page, dtype="bfloat16", head_dim_k=K, head_dim_v=V, arch="sm_90a",
                             schedule=varied("operand_walk", "sm_90a", stages=3, **fields)))
        given = {n: y[None] if y.ndim > 1 else y for n, y in x.x.items()} | {"cu_seqlens": x.ends, "output_final_state": True}
        x.near(lambda run=run, x=x, given=given: run(**given, initial_state=x.S.clone()))


@pytest.mark.parametrize("page, dtype, K, V", [
    *((page, "bfloat16", 128, 128) for page in ("kimi_delta_attention", "gated_delta_rule_2", "gla", "delta_rule", "rwkv7")),
    ("gated_delta_rule", "bfloat16", 128, 128), ("gated_delta_rule", "float16", 128, 128),
    *((page, dtype, K, V) for page in ("kimi_delta_attention", "gated_delta_rule_2")
      for dtype, K, V in (("float16", 128, 128), ("bfloat16", 64, 128), ("bfloat16", 128, 64), ("bfloat16", 64, 64)))])
def test_operand_walks(page, dtype, K, V):
    """Walks over operands of an earlier kernel, over all of V, halves of it, and parts, in packs with ragged tails and empty
    sequences, heads with shared keys, and equal keys."""
    residuals = {"kimi_delta_attention": {"residuals": "@update"}, "rwkv7": {"residuals": "@right_side,@solution"}}.get(page, {})
    cases = [(what, fields) for what in CALLS if what != "parts" for fields in ({}, {"v_block": 64})]
    cases += [("parts", {"v_block": 64}), *([("parts", {"v_block": 64, "partition": "decay"})] if page != "rwkv7" else [])]
    for what, fields in cases:
        x = Walks(page, what, dtype, K, V)
        fields = {"agents": "early_outputs", **fields}
        run = function(Build("tilelang", 64, algorithm=page, dtype=dtype, head_dim_k=K, head_dim_v=V, arch="sm_90a",
                             schedule=varied("operand_walk", "sm_90a", **residuals, **fields)))
        given = {n: y[None] if y.ndim > 1 else y for n, y in x.x.items()} | {"cu_seqlens": x.ends, "output_final_state": True}
        x.near(lambda run=run, x=x, given=given: run(**given, initial_state=x.S.clone()))


@pytest.mark.parametrize("page, dtype, K, V", [
    *((page, "bfloat16", K, V) for page in ("kimi_delta_attention", "gated_delta_rule_2", "gla")
      for K, V in ((128, 128), (64, 128), (128, 64), (64, 64))),
    ("delta_rule", "bfloat16", 128, 128), ("delta_rule", "float16", 64, 64)])
def test_walks_in_turn(page, dtype, K, V):
    """Operands of chunks of 16 computed in the walk's block: walks over all of V and over halves, and parts, in packs with ragged
    tails and empty sequences, heads with shared keys, equal keys, and gates at their bound."""
    accept = Contract(inputs=()) if page == "delta_rule" else Contract(inputs=(("g", "floored"),))
    residuals = {"residuals": "@update"} if page == "kimi_delta_attention" else {}
    cases = [*((what, {}) for what in CALLS if what != "parts"), ("parts", {"partition": "decay"})]
    cases += [("walks", {"by_length": True})]
    cases += [("walks", {"v_block": 64}), ("parts", {"v_block": 64, "partition": "decay"})] if V == 128 else []
    for what, fields in cases:
        x = Walks(page, what, dtype, K, V)
        if "g" in x.x:
            x.x["g"] = x.x["g"].clamp(min=-5)
        run = function(Build("tilelang", 16, algorithm=page, dtype=dtype, head_dim_k=K, head_dim_v=V, arch="sm_90a",
                             contract=accept, schedule=varied("walk_in_turn", "sm_90a", **residuals, **fields)))
        given = {n: y[None] if y.ndim > 1 else y for n, y in x.x.items()} | {"cu_seqlens": x.ends, "output_final_state": True}
        x.near(lambda run=run, x=x, given=given: run(**given, initial_state=x.S.clone()))


@pytest.mark.parametrize("page", ["kimi_delta_attention", "gated_delta_rule_2", "gla"])
def test_norms_in_turn(page):
    """Rows of q and k that the kernel divides by their norms, and gates in 16 bits."""
    x = Walks(page, "shared keys", "bfloat16", 128, 128)
    x.x["g"] = x.x["g"].clamp(min=-5).bfloat16().float()
    norm = {n: (y := (3 * x.x[n]).bfloat16(), y.float() / y.float().norm(dim=-1, keepdim=True)) for n in ("q", "k")}
    given = {**x.x, **{n: y for n, (y, _) in norm.items()}, "g": x.x["g"].bfloat16()}
    x.x |= {n: y for n, (_, y) in norm.items()}
    accept = Contract.parse("g=floored/bfloat16,k=l2norm,q=l2norm")
    run = function(Build("tilelang", 16, algorithm=page, dtype="bfloat16", head_dim_k=128, head_dim_v=128, arch="sm_90a",
                         contract=accept, schedule=varied("walk_in_turn", "sm_90a")))
    given = {n: y[None] if y.ndim > 1 else y for n, y in given.items()} | {"cu_seqlens": x.ends, "output_final_state": True}
    x.near(lambda: run(**given, initial_state=x.S.clone()))


@pytest.mark.parametrize("form", ["safe", "floored"])
def test_calls_with_bounded_gates(form):
    """Many walks of KDA, for which dispatch takes walks in turn. Raw gates, a sigmoid, a pool that is changed in place."""
    x, gen = Walks("kimi_delta_attention", MANY[form], "bfloat16", 128, 128), torch.Generator().manual_seed(5)
    slots, pool = torch.tensor([3, 0, 5, 2]).cuda(), torch.empty((7, *x.S.shape[1:]), device="cuda")
    said = {"initial_state": pool, "state_indices": slots, "safe_gate": True}
    if form == "safe":
        raw, A, bias = (torch.randn(s, generator=gen).cuda() for s in (x.x["g"].shape, x.x["g"].shape[1:2], x.x["g"].shape[1:]))
        x.x["g"] = -5 * torch.sigmoid(A.exp()[:, None] * (raw + bias))
        given = {"g": raw, "beta": torch.log(x.x["beta"] / (1 - x.x["beta"]))}
        said |= {"use_gate_in_kernel": True, "A_log": A, "dt_bias": bias, "lower_bound": -5.0, "use_beta_sigmoid_in_kernel": True}
    else:
        given = {"g": x.x["g"]}
        x.x["g"] = x.x["g"].clamp(min=-5)

    def run():
        pool.fill_(7.0)
        pool[slots] = x.S
        return x.call(given, **said)[0], pool[slots].clone()
    x.near(run)
    assert (pool[[1, 4, 6]] == 7).all()


@pytest.mark.parametrize("dtype, K, V", [("bfloat16", 128, 128), ("float16", 128, 128), ("bfloat16", 64, 64)])
@pytest.mark.parametrize("page", PAGES)
def test_what_engines_pass(page, dtype, K, V):
    """A pool that is changed in place, raw gates, beta before its sigmoid."""
    x, gen = Walks(page, "walks", dtype, K, V), torch.Generator().manual_seed(3)
    slots, HV = torch.randperm(9, generator=gen)[:len(UNEVEN)].cuda(), x.S.shape[1]
    pool = torch.empty((9, *x.S.shape[1:]), device="cuda")
    given, said = {}, {"initial_state": pool, "state_indices": slots}
    if "g" in x.x:
        raw, A, bias = (torch.randn(s, generator=gen).cuda() for s in (x.x["g"].shape, (HV,), x.x["g"].shape[1:]))
        x.x["g"] = -A.exp().view(HV, *[1] * (raw.ndim - 2)) * softplus(raw + bias)
        given["g"], said = raw, {**said, "gate": "raw", "A_log": A, "dt_bias": bias}
    if "beta" in x.x:
        given["beta"], said["beta_form"] = torch.log(x.x["beta"] / (1 - x.x["beta"])), "sigmoid"

    def run():
        pool.fill_(7.0)
        pool[slots] = x.S
        return x.call(given, **said)[0], pool[slots].clone()
    x.near(run)
    kept = torch.ones(9, dtype=torch.bool, device="cuda")
    kept[slots] = False
    assert (pool[kept] == 7).all()
