"""Mistakes on a page with a gate for each channel: the message says what is wrong and names the line, when the page is traced."""
import inspect
import math
import re

import pytest

from gdn_codegen import pages
from gdn_codegen.ir.builder import algorithm, carried, cumsum, decayed_product, exp, last, lower, strictly_lower
from gdn_codegen.ir.ops import TypeRuleError
from gdn_codegen.ir.printer import program_text
from gdn_codegen.tools.cases import Case

DIMS = dict(q="C K", k="C K", v="C V", g="HV C K", S=carried("K V"))


def page(sums="cumsum(g)", output="(exp(G) * q) @ S + decayed_product(q, k, G) @ v",
         state="exp(last(G))[:, None] * S + (exp(last(G)[None, :] - G) * k).T @ v", returned="o, S", **dims):
    """Gated linear attention, with another line or other dims."""
    text = f"def mine(q, k, v, g, S):\n    G = {sums}\n    o = {output}\n    S = {state}\n    return {returned}\n"
    names = dict(cumsum=cumsum, decayed_product=decayed_product, exp=exp, last=last, lower=lower, strictly_lower=strictly_lower)
    exec(compile(text, "mine.py", "exec"), names)
    return algorithm(**{**DIMS, **dims})(names["mine"])


SUMS, OUTPUT, STATE, RETURN = 2, 3, 4, 5  # lines


@pytest.mark.parametrize("line, said, change", [
    (OUTPUT, "mul: shapes float32[C] and float32[C, K] have different ranks; write x[:, None] or x[None, :]", dict(g="C")),
    (STATE, "mul: shapes float32[K] and float32[K, V] have different ranks", dict(state="exp(last(G)) * S + k.T @ v")),
    (STATE, "sub: shapes float32[K] and float32[C, K] have different ranks", dict(state="S + (exp(last(G) - G) * k).T @ v")),
    (STATE, "matmul: contracted dims K and C of float32[C, K] and float32[C, V] differ; transpose one", dict(state="S + k @ v")),
    (STATE, "mul: x.T may only be an operand of @", dict(state="S + k.T * v")),
    (OUTPUT, "decayed_product(a, b, G): G has the running sums of log decays, cumsum(g); got k, which is no sum over tokens",
     dict(output="decayed_product(G, q, k) @ v")),
    (OUTPUT, "G has the running sums of log decays, cumsum(g); got g, which is", dict(output="decayed_product(q, k, g) @ v")),
    (OUTPUT, "decayed_product takes tiles of one shape and dtype; got float32[C, K], float32[C, K], float32[C, V]",
     dict(g="HV C V", output="decayed_product(q, k, G) @ v")),
    (OUTPUT, "decayed_product(a, b, G) takes tiles; got 0", dict(output="decayed_product(q, 0, G) @ v")),
    (OUTPUT, "before has the sums without the token itself, cumsum(g, exclusive=True); got G itself; accepted without before: ",
     dict(output="decayed_product(q, k, G, G) @ v")),
    (OUTPUT, "G has the sums with the token itself, cumsum(g); got sums without it, which are the fourth argument",
     dict(output="decayed_product(q, k, cumsum(g, exclusive=True), G) @ v")),
    (SUMS, "cumsum takes a value with an entry or row for each token, [C] or [C, K]; got float32[K, V]", dict(sums="cumsum(S)")),
    (SUMS, "[C] or [C, K]; got float32[], a number: per_token(x) gives each token an entry", dict(sums="cumsum(g)", g="HV")),
    (STATE, "last takes a value with an entry or row for each token, [C] or [C, K]; got float32[K, V]",
     dict(state="last(S)[None, :] * S")),
    (STATE, "[-1]; accepted: x[:, None] (a column), x[None, :] (a row), and last(x) for", dict(state="exp(G[-1]) * S")),
    (SUMS, "got g < -5: a page runs once", dict(sums="cumsum(max(g, -5))")),
    (SUMS, "got AttributeError: 'Value' object has no attribute 'cumsum'; accepted: operators and", dict(sums="g.cumsum(0)")),
    (RETURN, "return the outputs, then the next of each state (S); got 1 values", dict(returned="o")),
    (RETURN, "return the outputs, then the next of each state (S); got 2.0, which is no tile", dict(returned="o, 2.0")),
    (RETURN, "output 1 is float32[K, V]; an output has an entry or row for each token, as [C] or [C, V]; return the outputs",
     dict(returned="S, o")),
    (RETURN, "output 1 is float32[C, C]; an output has", dict(output="decayed_product(q, k, G)")),
    (RETURN, "the next S is float32[C, V], but S is float32[K, V]; return the outputs, then", dict(returned="o, o"))])
def test_the_line_is_named(line, said, change):
    with pytest.raises(TypeRuleError, match=rf"^mine \(mine\.py, line {line}\): .*{re.escape(said)}"):
        page(**change).trace()


@pytest.mark.parametrize("said, dims", [
    ("q='C M'; dims are C, K and V, after H or HV if given, or HV alone", dict(q="C M")),
    ("q=('C', 'K'); accepted: dims as text, such as \"C K\"", dict(q=("C", "K"))),
    ("q='K C'; an input has C first", dict(q="K C")), ("g='C K V'; after C an input has nothing, K or V", dict(g="C K V")),
    ("g='C C'; after C an input has nothing", dict(g="C C")),
    ("S=carried('C V'); a state has one or two dims, each K or V", dict(S=carried("C V"))),
    ("S=carried('K V K'); a state has", dict(S=carried("K V K"))),
    ("S='K V'; an input has C first, or it is HV, HV K or HV V; a state is carried('K V')", dict(S="K V")),
    ("it names q, k, v, g, S, a, the function takes q, k, v, g, S; numbers of the caller are keyword-only", dict(a="C"))])
def test_the_place_of_the_declaration_is_named(said, dims):
    with pytest.raises(TypeRuleError, match=rf"^@algorithm of mine \(mine\.py, line 1\): {re.escape(said)}"):
        page(**dims)


def test_a_bound_of_other_dims_is_named():
    with pytest.raises(TypeRuleError, match=r"line 1\): forgets='v' is not .* with dims C or C K, but float32\[C, V"):
        page(S=carried("K V", forgets="v")).trace()


@pytest.mark.parametrize("name, change", [
    ("q", dict(output="decayed_product(k, k, G) @ v")), ("g", dict(sums="cumsum(k)", state="S + k.T @ v"))])
def test_an_input_that_no_result_reads_is_named(name, change):
    """Whether the page does not mention it, or computes from it what nothing reads."""
    with pytest.raises(TypeRuleError, match=rf"^@algorithm of mine \(mine\.py, line 1\): got {name}, on which no output"):
        page(**change).trace()


def test_a_number_that_no_result_reads_is_named():
    @algorithm(v="C V", S=carried("V"))
    def sums(v, S, *, scale=1.0):
        scaled = scale * v  # noqa: F841, what nothing reads
        return v, S + last(v)
    with pytest.raises(TypeRuleError, match=r"^@algorithm of sums \(test_mistakes_on_pages\.py, line \d+\): got scale, on"):
        sums.trace()


def test_what_only_the_bound_reads_is_read():
    @algorithm(v="C V", f="C", S=carried("V", forgets="F"))
    def sums(v, f, S):
        F = f * 1  # noqa: F841, a page's value
        return v, S + last(v)
    assert sums.trace().forgets == "F"


# --- mistakes that only values show ------------------------------------------------------------------------------------
def verify(mine, **case):
    pages.verify(mine, (Case((20,), **case),), target="triton", chunk=16, head_dim_k=16, head_dim_v=16, schedule="fused")


@pytest.mark.parametrize("change, said", [
    (dict(output="decayed_product(k, q, G) @ v"), "whose o in a chunk of 16 tokens is off by"),
    (dict(state="exp(last(g))[:, None] * S + k.T @ v"), "whose final_state in a chunk of 16 tokens is off by"),
    (dict(output="(exp(G) * q) @ S + strictly_lower(decayed_product(q, k, G)) @ v"), None),
    (dict(output="q @ S + (q @ k.T) @ v"), "whose o of a token depends on later tokens")])
def test_verify_says_that_a_page_is_no_recurrence(change, said):
    """And not that its kernels are wrong. The third is a recurrence: its output does not read the token's own write."""
    if said is None:
        verify(page(**change))
        return
    with pytest.raises(ValueError, match=f"algorithm: got mine, {said}"):
        verify(page(**change))


def test_lines_are_those_of_a_file_of_ones_own():
    """Of a page that is written, not compiled from text: the line below."""
    @algorithm(**DIMS)
    def mine(q, k, v, g, S):
        G = cumsum(g)
        o = decayed_product(q, k, G) @ v
        S = exp(last(G)) * S + k.T @ v * math.pi
        return o, S
    first = inspect.getsourcelines(mine.fn)[1]
    with pytest.raises(TypeRuleError, match=rf"^mine \(test_mistakes_on_pages\.py, line {first + 4}\): mul"):
        mine.trace()


def test_dims_are_those_of_the_decorator():
    def mine(q, v=None, *, scale=1.0):
        return scale * q
    with pytest.raises(TypeRuleError, match=r'^@algorithm of mine: got no dims; accepted: those of each parameter by name'):
        algorithm(mine)
    with pytest.raises(TypeRuleError, match=r"^@algorithm of mine \(test_mis.*, line \d+\): got a default of v; accepted: "):
        algorithm(q="C K", v="C V")(mine)


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")

    def mine(q):
        return numpy.float32(2) * q * numpy.int64(3)

    def same(q):
        return 2 * q * 3
    a, b = (algorithm(q="C K")(f).trace() for f in (mine, same))
    a, b = (re.sub(r"line=\d+|program.*|source.*", "", program_text(p)) for p in (a, b))
    assert a == b and "q_times_2_times_3" in a
