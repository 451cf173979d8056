"""Random calls of every member on a CUDA GPU, forward and backward, beside the token recurrence in float64.

A call draws its target, K and V, dtype, lengths, heads, gates, equal keys, beta to 2, and whether it has initial states. A
failure shows what each call drew. Run with: pytest -m device tests/device/test_random_calls.py

GDN_CODEGEN_RANDOM_SEED: other calls for another number (0). GDN_CODEGEN_RANDOM_SECONDS: how long each test draws (20; it ends the
call that it has begun, which may have to compile).
"""
from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn_codegen.algorithms import names
from gdn_codegen.runtime.targets import runs
from gdn_codegen.targets import OWN

sys.path.insert(0, str(Path(__file__).parents[1] / "family"))
import gradients
import problems
from members import Case
from reference import rms_error

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
HERE = [t for t in OWN if t != "pto" and runs(t, "cuda")]
SEED, SECONDS = (int(os.environ.get(f"GDN_CODEGEN_RANDOM_{n}", x)) for n, x in (("SEED", 0), ("SECONDS", 20)))
#: The largest errors of o and of states.
ACCEPTED = {torch.float32: 3e-3, torch.float16: 3e-3, torch.bfloat16: 8e-3}
#: Of gradients, as in test_gradients_on_gpu.py. With equal keys, beta to 2 and few channels errors of bfloat16 grow with tokens.
BACKWARD = 3e-2


def calls(page: str, sizes: tuple[int, ...], least: int, longest: int) -> Iterator[tuple[dict[str, Any], Case]]:
    """Random calls of a page until the time is over: what is chosen beside the case, and the case. sizes: of K and V. least:
    tokens of a pack. longest: tokens of a sequence."""
    rng, until = random.Random(f"{page} {sizes} {SEED}"), time.monotonic() + SECONDS
    while True:
        heads = rng.choice((1, 2))
        case = Case(tuple(rng.choice((0, 1, rng.randint(2, 64), rng.randint(65, longest))) for _ in range(rng.randint(1, 4))),
                    heads, heads * rng.choice((1, 1, 2, 4)), gates=rng.choice(("mixed", "slow")), repeat=rng.random() < 0.3,
                    strength=rng.choice((1.0, 1.0, 2.0)), initial=rng.random() < 0.7, seed=rng.randrange(2 ** 16))
        chosen = {"target": rng.choice(HERE), "K": rng.choice(sizes), "V": rng.choice(sizes),
                  "dtype": rng.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))}
        if sum(case.lengths) >= least:
            print(chosen, case)  # pytest shows it with a failure
            yield chosen, case
            if time.monotonic() > until:
                return


def problem(page: str, chosen: dict[str, Any], case: Case, monkeypatch: pytest.MonkeyPatch) -> problems.Problem:
    monkeypatch.setattr(problems.Problem, "device", "cuda")
    for n in ("K", "V"):
        monkeypatch.setitem(problems.SIZES, n, chosen[n])
    return problems.Problem(page, chosen["target"], dtype=chosen["dtype"], case=case)


@pytest.mark.parametrize("page", names())
def test_outputs_and_states(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen, case in calls(page, (16, 32, 64, 96, 128, 256), 1, 300):
        p = problem(page, chosen, case, monkeypatch)
        o, final = p.call(initial_state=p.S, output_final_state=True)
        errors = [rms_error(got.reshape(want.shape), want) for got, want in zip((o, final), p.want(), strict=True)]
        assert all(e < ACCEPTED[chosen["dtype"]] for e in errors), (chosen, case, errors)


@pytest.mark.parametrize("page", names())
def test_gradients(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls twice: both have the same bits. If a few tokens forget everything, d_g is a small difference of large numbers. So a
    pack has at least 40 tokens."""
    for chosen, case in calls(page, (16, 48, 64, 128), 40, 150):
        p, gen = problem(page, chosen, case, monkeypatch), torch.Generator().manual_seed(case.seed)
        d_o, d_final = (torch.randn(y.shape, generator=gen).cuda() for y in (p.v, p.S))
        given, found = {**p.x, "S": p.S}, []
        for _ in range(2):
            x = {n: y.clone().requires_grad_() for n, y in given.items()}
            o, final = p.call({n: y for n, y in x.items() if n in p.x}, initial_state=x["S"], output_final_state=True)
            ends = [d_o.to(o.dtype), d_final.to(final.dtype)]
            found.append(torch.autograd.grad([o.reshape(d_o.shape), final], list(x.values()), ends))
        assert all(map(torch.equal, *found)), (chosen, case)
        want = gradients.expected(page, case, given, d_o.to(p.v.dtype), d_final)
        errors = {n: gradients.relative(got.double(), y) for (n, y), got in zip(want.items(), found[0], strict=True)}
        assert all(e < BACKWARD for e in errors.values()), (chosen, case, errors)
