"""Keys that are alike, as a repeated token gives: no schedule, inverse or target may lose what TileLang's default keeps."""
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from reference import recurrence
from tiers import every

from gdn_codegen.ir import interpret
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.schedule import SCHEDULES, varied
from gdn_codegen.schedule.schedule import INVERSES
from gdn_codegen.tools.verify import rms_error

SIZE = 32
#: beta of each token, and how far keys are from one another.
CASES = [(1.0, 0.02), (1.9, 0.0), (2.0, 0.3)]
BUILDS = [(target, name, {}) for target in ("triton", "tilelang", "pto") for name in SCHEDULES]
BUILDS += [("tilelang", "fused", {"inverse": "doubling"}), ("tilelang", "walk", {"form": "split"}),
           ("triton", "walk", {"form": "unit"}), ("triton", "replay", {"form": "gate-free"}),
           ("pto", "fused", {"inverse_block": 0})]


@cache
def drawn(beta, noise, tokens, dtype, seed):
    gen = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=gen)
    q = F.normalize(normal(tokens, 1, SIZE), dim=-1).to(dtype)
    one, others = (F.normalize(normal(n, 1, SIZE), dim=-1) for n in (1, tokens))
    k = F.normalize(one + noise * others, dim=-1).to(dtype)
    v = normal(tokens, 1, SIZE).to(dtype)
    g, b = torch.zeros(tokens, 1), torch.full((tokens, 1), beta)
    return {"q": q, "k": k, "v": v, "g": g, "beta": b}


@cache
def error(target, name, changes, chunk, dtype, beta, noise, draws=2):
    """RMSE over RMS of o and state, over so many draws."""
    b = Build(target, chunk, schedule=varied(name, **dict(changes)), dtype=dtype, head_dim_k=SIZE, head_dim_v=SIZE)
    p, tokens, squares = lowered(b), 2 * chunk + 7, [0.0, 0.0]
    for seed in range(draws):
        x = drawn(beta, noise, tokens, getattr(torch, dtype), seed)
        got = interpret.interpret(p, interpret.Problem([tokens], 1, 1), x, {"scale": SIZE ** -0.5}, False)
        q, k, v, g, beta_ = (t[:, 0].double() for t in x.values())
        want = recurrence(q, k, v, g, beta_, SIZE ** -0.5, torch.zeros(SIZE, SIZE, dtype=torch.float64))
        for n, (of, y) in enumerate(zip((got["o"], got["final_state"]), want, strict=True)):
            squares[n] += rms_error(of.double().reshape(y.shape), y) ** 2 / draws
    return [s ** 0.5 for s in squares]


@pytest.mark.slow
@pytest.mark.parametrize("target, name, changes, chunk, dtype", every(2, BUILDS, [(32, "float16"), (64, "bfloat16")]),
                         ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else x)
def test_alike_keys_cost_at_most_twice_what_they_cost_tilelangs_default(target, name, changes, chunk, dtype):
    """The interpreter rounds as kernels do. Twice: TileLang's own error differs from draw to draw by as much."""
    for beta, noise in CASES:
        here = error(target, name, tuple(changes.items()), chunk, dtype, beta, noise)
        there = error("tilelang", "fused", (), chunk, dtype, beta, noise)
        assert all(x <= 2 * y for x, y in zip(here, there, strict=True)), (beta, noise, here, there)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("target, name", [(target, name) for target, name, changes in BUILDS if not changes])
def test_every_schedule_and_inverse_at_every_chunk(target, name, inverse, chunk, dtype):
    """By hand: pytest -m long tests/passes/test_alike_keys.py. Four draws: two differ by more than the builds do."""
    for beta in (0.5, 1.0, 1.5, 2.0):
        for noise in (0.0, 0.02, 0.3):
            here = error(target, name, (("inverse", inverse),), chunk, dtype, beta, noise, 4)
            there = error("tilelang", "fused", (), chunk, dtype, beta, noise, 4)
            assert all(x <= 2 * y for x, y in zip(here, there, strict=True)), (beta, noise, here, there)
