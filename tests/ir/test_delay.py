"""delay, advance and latest: type rules, meaning across chunks and packed sequences, derivatives, and text of a page."""
from dataclasses import replace

import pytest
import torch

from gdn_codegen.ir.builder import algorithm, apply, carried, delay, latest
from gdn_codegen.ir.differentiate import chunk_states, differentiate, saving
from gdn_codegen.ir.interpret import Interpreter, Problem, interpret
from gdn_codegen.ir.ops import OPS, TypeRuleError, infer
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.ir.texts import advance
from gdn_codegen.ir.types import Tile
from gdn_codegen.ir.verify import verify

K, HEADS = 4, 2
#: Lengths below, at and above a chunk, and none.
LENGTHS = [1, 0, 7, 8, 9, 2, 0, 21]


@algorithm(x="HV C K", a="HV C K", r=carried("K"), s=carried("K"), u=carried("K"))
def moved(x, a, r, s, u):
    """o_t = x_(t-1) + a_t x_(t-2) + a_(t-1) x_(t-1). The states are x_(t-1), x_(t-2) and a_(t-1) x_(t-1)."""
    one = delay(x, r)
    y = a * x
    o = one + a * delay(x, s, r) + delay(y, u)
    return o, latest(x), latest(one), latest(y)


def drawn():
    gen = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, HEADS, K, generator=gen, dtype=torch.float64)
    return draw(sum(LENGTHS)), draw(sum(LENGTHS)), draw(len(LENGTHS)), draw(len(LENGTHS)), draw(len(LENGTHS))


def by_hand(x, a, r, s, u):
    """o [T, heads, K], and the three final states, token by token."""
    o, final, start = [], [], 0
    for n, length in enumerate(LENGTHS):
        one, two, last = r[n], s[n], u[n]
        for t in range(start, start + length):
            o.append(one + a[t] * two + last)
            one, two, last = x[t], one, a[t] * x[t]
        final.append(torch.stack([one, two, last]))
        start += length
    return torch.stack(o), *torch.stack(final, 1)


def page(C):
    return verify(replace(moved.trace(), dims=(("C", C), ("K", K), ("V", K))))


def given(values):
    return dict(zip(("x", "a", "initial_r", "initial_s", "initial_u"), values, strict=True))


@pytest.mark.parametrize("C", [1, 2, 8, 16])
def test_rows_cross_chunks_and_no_start_of_a_sequence(C):
    got = interpret(page(C), Problem(LENGTHS, HEADS, HEADS), given(drawn()), {})
    for n, want in zip(("o", "final_r", "final_s", "final_u"), by_hand(*drawn()), strict=True):
        assert torch.equal(got[n], want), n


def test_the_first_rows_are_what_the_page_gives():
    x, a, b = torch.arange(8.0).reshape(4, 2), torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0])
    assert torch.equal(OPS["delay"].evaluate({}, x, a, b), torch.stack([a, b, x[0], x[1]]))
    assert torch.equal(OPS["delay"].evaluate({}, x[:1], a, b), a[None])  # a delay that is longer than the chunk
    assert torch.equal(OPS["advance"].evaluate({"by": 3}, x), torch.stack([x[3], *3 * [0 * a]]))
    assert eval(advance(type("", (), {"attr": lambda _, n: 3})(), ["x"]), {"x": x, "torch": torch}).equal(
        OPS["advance"].evaluate({"by": 3}, x))


def test_a_page_prints_and_parses():
    p = page(8)
    assert parse_program(program_text(p)) == p


@pytest.mark.parametrize("bad, text", [
    (lambda: infer("delay", (Tile(("C", "K")),)), "a row for each token"),
    (lambda: infer("delay", (Tile(("C", "K")), Tile(("V",)))), "rows of its width"),
    (lambda: infer("delay", (Tile(("C",)), Tile(()))), "a row for each token"),
    (lambda: infer("advance", (Tile(("C",)),), (("by", 1),)), "rank 2"),
    (lambda: infer("latest", (Tile(()),)), "rows"),
])
def test_type_rules(bad, text):
    with pytest.raises(TypeRuleError, match=text):
        bad()


@pytest.mark.parametrize("wrong, text", [
    (lambda q, S: delay(S, S), r"delay takes a value with an entry or row for each token"),
    (lambda q, S: latest(S), r"latest takes a value with an entry or row for each token"),
    (lambda q, S: latest(apply("row_sum", q)), r"latest takes a tile with a row for each token; got float32\[C\]"),
])
def test_what_a_page_may_not_move(wrong, text):
    @algorithm(q="HV C K", S=carried("K"))
    def bad(q, S):
        return q + wrong(q, S)[None, :], latest(q)
    with pytest.raises(TypeRuleError, match=text):
        bad.trace()


def test_gradients():
    """By the inputs and the initial states, with those of the output and the final states given."""
    p, leaves = page(8), [y.requires_grad_() for y in drawn()]
    gen, results = torch.Generator().manual_seed(1), by_hand(*leaves)
    seeds = [torch.randn(y.shape, generator=gen, dtype=torch.float64) for y in results]
    wants = torch.autograd.grad(results, leaves, seeds)
    programs = saving(moved.trace(), outputs=False), differentiate(moved.trace())
    forward, backward = (verify(replace(q, dims=p.dims)) for q in programs)
    assert parse_program(program_text(backward)) == backward
    x, problem = {n: y.detach() for n, y in given(leaves).items()}, Problem(LENGTHS, HEADS, HEADS)
    states = Interpreter(forward, problem, {}).run(x)
    names = [chunk_states(n) for n in "rsu" if chunk_states(n) in states]
    d = dict(zip(("d_o", "d_final_r", "d_final_s", "d_final_u"), seeds, strict=True))
    got = Interpreter(backward, problem, {}).run({**{n: x[n] for n in "xa"}, **{n: states[n] for n in names}, **d})
    for n, want in zip(given(leaves), wants, strict=True):
        assert (got[f"d_{n}"] - want).abs().max() < 1e-12, n
