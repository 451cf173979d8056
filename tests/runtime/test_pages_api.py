"""gdn_codegen.pages: an algorithm that lies in no file is shown, built, called and verified."""
import re

import pytest
import torch

from gdn_codegen import pages
from gdn_codegen.cli import main
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule.contract import Contract
from gdn_codegen.targets import OWN
from gdn_codegen.tools.cases import Case
from gdn_codegen.tools.verify import check_page, rms_error

HERE = [t for t in OWN if runs(t, "cpu")]
SMALL = dict(chunk=16, head_dim_k=16, head_dim_v=16)
CASES = (Case((20, 0, 3)),)


@algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
def mine(q, k, v, g, S):
    """Token t: S <- exp(g) S + k v^T; o = S^T q."""
    G = cumsum(g)
    D = exp(lower(G[:, None] - G[None, :], fill=-float("inf")))
    o = exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ v
    S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * v)
    return o, S


@algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
def looks_ahead(q, k, v, S):
    o = q @ S + (q @ k.T) @ v
    S = S + k.T @ v
    return o, S


def recurrence(q, k, v, g, S):
    o = torch.empty_like(v)
    for t in range(len(q)):
        S = torch.exp(g[t]) * S + torch.outer(k[t], v[t])
        o[t] = q[t] @ S
    return o, S


@pytest.mark.slow
@pytest.mark.parametrize("accept", ["state=vk/bfloat16", "state=float16/checkpoints", "state=positions",
                                    "state=pool/positions/vk"])
def test_verify_of_states_in_other_forms(accept):
    """Final states in 16 bits are not as near as those in float32, while the output is. Rows of checkpoints are made up."""
    (errors,) = pages.verify(mine, CASES, target="triton", dtype="float32", contract=Contract.parse(accept), **SMALL)
    assert errors["o"] < 1e-6 and max(errors.values()) < (5e-3 if "float" in accept else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_a_page_without_a_file_is_built_called_and_verified(target):
    (errors,) = pages.verify(mine, CASES, target=target, **SMALL)
    assert {"o"} < set(errors) and max(errors.values()) < 5e-3
    op = pages.compile(mine, target=target, **SMALL)
    assert op is pages.compile(mine, target=target, **SMALL) and op.__name__ == "chunk_mine"
    x = torch.randn(1, 5, 1, 16).half()
    o, S = op(x, x, x, torch.zeros(1, 5, 1), output_final_state=True)
    want, state = recurrence(*(x[0, :, 0].double(),) * 3, torch.zeros(5), torch.zeros(16, 16, dtype=torch.float64))
    assert rms_error(o[0, :, 0], want) < 5e-3 and rms_error(S[0, 0], state) < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
def test_torch_compile_calls_a_generated_function_as_it_is(target):
    """It breaks the graph at a generated function, because it cannot trace launches, and takes a page's op whole. The first call
    is no exception."""
    x, g = torch.randn(2, 1, 5, 1, 16).half() / 4, torch.zeros(1, 5, 1)
    op = pages.compile(mine, target=target, **SMALL)
    other = function(Build(target, algorithm=mine, dtype="bfloat16", **SMALL))
    for fn, y in ((op, x), (other, x.bfloat16())):
        compiled = torch.compile(lambda q: 3 * fn(2 * q, q, q, g)[0], backend="aot_eager")
        assert all(torch.equal(compiled(q), 3 * fn(2 * q, q, q, g)[0]) for q in y) and compiled(y[0]).any()
        whole = torch.compile(lambda q: fn(q, q, q, g)[0], fullgraph=True, backend="aot_eager")
        if fn is op:
            assert torch.equal(whole(y[0]), fn(y[0], y[0], y[0], g)[0])
            continue
        with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
            whole(y[0])
    if target in OWN:
        q, again = (x[0].clone().requires_grad_() for _ in range(2))
        torch.compile(lambda q: op(2 * q, q, q, g)[0], backend="aot_eager")(q).float().square().sum().backward()
        op(2 * again, again, again, g)[0].float().square().sum().backward()
        assert q.grad is not None and q.grad.any() and torch.equal(q.grad, again.grad)


def test_it_is_shown_and_printed():
    assert "matmul" in pages.show(mine, target="pto", **SMALL)
    text = pages.source(mine, **SMALL)
    compile(text, "mine.py", "exec")
    assert "algorithm=mine" in text or "--algorithm mine" in text


def test_a_recurrence_of_ones_own_is_what_it_is_held_against():
    pages.verify(mine, CASES, reference=recurrence, **SMALL)
    with pytest.raises(AssertionError, match=r"o: RMSE over RMS is .*; Case"):
        pages.verify(mine, CASES, reference=lambda g, **x: recurrence(g=2 * g, **x), **SMALL)
    with pytest.raises(ValueError, match=re.escape("reference: got (16, 20) for o; accepted: (20, 16)")):
        pages.verify(mine, CASES, reference=lambda **x: [y.T for y in recurrence(**x)], **SMALL)


@pytest.mark.parametrize("reference, said", [
    (3, "got int; accepted: a function of q, k, v, g, S"),
    (lambda q, k: q, r"got a function that does not take .* \(got an unexpected .* 'v'\); accepted: a function of q"),
    (lambda **x: x["v"], "got Tensor as its results; accepted: a tuple of 2: o, final_state"),
    (lambda **x: recurrence(**x)[:1], "got 1 as its results; accepted: a tuple of 2: o, final_state")])
def test_a_reference_of_another_kind_is_refused(reference, said):
    with pytest.raises(ValueError, match=f"^reference: {said}"):
        pages.verify(mine, CASES, reference=reference, **SMALL)


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device: got 'cuda'; accepted: cpu, since torch sees no GPU here"):
        pages.verify(mine, CASES, device="cuda", **SMALL)


@pytest.mark.slow
def test_a_reference_may_write_to_what_it_gets():
    def in_place(q, k, v, g, S):
        results = recurrence(q, k, v, g, S)
        q.zero_()  # which both value heads of the key head read
        return results
    pages.verify(mine, CASES, reference=in_place, target=HERE[0], **SMALL)


def test_a_page_of_results_that_are_not_finite_is_told_so():
    @algorithm(q="C K", v="C V", S=carried("K V"))
    def divided(q, v, S):
        return (q @ S + v) / 0, S
    with pytest.raises(ValueError, match=r"algorithm: got divided, whose \w+ is not finite in float64 for inputs as verify"):
        check_page(Build("triton", algorithm=divided, **SMALL))


def test_a_page_that_is_not_causal_is_told_so():
    with pytest.raises(ValueError, match="algorithm: got looks_ahead, whose o of a token depends on later tokens"):
        pages.verify(looks_ahead, CASES, **SMALL)


@pytest.mark.parametrize("wrong, said", [
    (dict(target="cuda"), "target: got 'cuda'; accepted"),
    (dict(chunks=16), "chunks: got it as an option; accepted: target, chunk"),
    (dict(algorithm="simple_gla"), "algorithm: got it as an option"),
    (dict(contract="q=l2norm"), "contract: got 'q=l2norm'; accepted: a Contract, as Contract.parse"),
    (dict(schedule=3), "schedule: got 3; accepted: a name, or a Schedule"),
    (dict(heads="2/4"), r"heads: got '2/4'; accepted: \(H, HV\), or None"),
    (dict(heads=(2, 3)), "heads: got H = 2, HV = 3; accepted: HV a multiple of H, both at least 1")])
def test_options_that_are_none_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        pages.source(mine, **wrong)


def test_what_is_no_page_is_refused():
    with pytest.raises(ValueError, match="page: got function; accepted: a function under @algorithm"):
        pages.source(recurrence)

    def simple_gla(q, v, S):
        return q @ S + v, S
    other = algorithm(q="C K", v="C V", S=carried("K V"))(simple_gla)
    with pytest.raises(ValueError, match=r"simple_gla.*rename it"):
        pages.source(other)


FILE = '''import torch
def ours(q, k, v, g, S, scale):
    o = torch.empty_like(v)
    for t in range(len(q)):
        S = torch.exp(g[t]) * S + torch.outer(k[t], v[t])
        o[t] = scale * (q[t] @ S)
    return o, S
def off(**x):
    o, S = ours(**x)
    return 1.1 * o, S
number = 3
'''


def test_the_command_line_takes_a_recurrence(tmp_path, capsys):
    path = tmp_path / "reference.py"
    path.write_text(FILE)
    words = ["verify", "--target", "triton", "--algorithm", "simple_gla", "--chunk", "16", "--head-dim-k", "16",
             "--head-dim-v", "16", "--quick", "--reference"]
    assert main([*words, f"{path}:ours"]) == 0
    assert main([*words, f"{path}:off"]) == 1 and "FAILED" in capsys.readouterr().out
    for wrong in (f"{path}:number", f"{path}:nothing", f"{tmp_path}/none.py:f", "word"):
        assert main([*words, wrong]) == 2 and "reference: got" in capsys.readouterr().err
