"""The IR: type rules, verifier, printer and parser, interpreter."""
import ast
import cProfile
import inspect
import sys
from dataclasses import replace

import pytest
import torch
from reference import problem

from gdn_codegen.algorithms import find
from gdn_codegen.ir import interpret as interpreter
from gdn_codegen.ir.body import Body
from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, valid
from gdn_codegen.ir.core import Kernel, Program
from gdn_codegen.ir.interpret import Problem, interpret
from gdn_codegen.ir.ops import OPS, TypeRuleError, infer
from gdn_codegen.ir.parser import ParseError, parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.ir.types import Tensor, Tile
from gdn_codegen.ir.verify import VerifyError, verify


def sized(name, C, K=16, V=8):
    return replace(find(name).trace(), dims=(("C", C), ("K", K), ("V", V)))


def test_values_have_the_pages_names():
    ops = {o.out for o in find("gated_delta_rule").trace().kernels[0].body[1].body}
    assert {"G", "D", "A", "Tinv", "U", "o"} <= ops


@pytest.mark.parametrize("bad, text", [
    (lambda: infer("matmul", (Tile(("C", "K")), Tile(("C", "K")))), "transpose one operand"),
    (lambda: infer("add", (Tile(("C",)), Tile(("C", "C")))), r"x\[:, None\]"),
    (lambda: infer("add", (Tile(("C",), "float16"), Tile(("C",)))), "cast one"),
    (lambda: infer("lower", (Tile(("C", "K")),)), "square"),
    (lambda: infer("nothing", ()), "unknown"),
    (lambda: infer("exp", (Tile(),), (("to", 1),)), "attribute to"),
])
def test_type_rules_say_how_to_fix(bad, text):
    with pytest.raises(TypeRuleError, match=text):
        bad()


def test_a_page_that_branches_on_data_is_refused():
    with pytest.raises(TypeRuleError, match="cannot compare or branch"):
        @algorithm(q="C K", S=carried("K K"))
        def bad(q, S):
            return (q if q else -q), S
        bad.trace()


def test_a_page_with_a_wrong_state_is_refused():
    @algorithm(q="C K", S=carried("K K"))
    def bad(q, S):
        return q, q
    with pytest.raises(TypeRuleError, match="next S"):
        bad.trace()


def test_gates_that_are_not_zero_on_padding_need_valid():
    def page(clean):
        @algorithm(x="C K", a="C", S=carried("K K"))
        def raw(x, a, S):
            g = -exp(a)
            G = cumsum(valid(g) if clean else g)
            return exp(G)[:, None] * (x @ S), exp(last(G)) * S
        return raw.trace()
    verify(page(True))
    with pytest.raises(VerifyError, match=r"use valid\(g\)"):
        verify(page(False))


@pytest.mark.parametrize("clean", [(True,), (False,), (True, False), (True, True)])
def test_a_workspace_is_zero_on_padding_if_everything_stored_to_it_is(clean):
    tensors = tuple(Tensor(n, role, index, "HV", ("C",)) for n, role, index in (
        ("a", "input", "token"), ("w", "workspace", "slot"), ("o", "output", "token")))
    one, two = (Body({t.name: t for t in tensors}) for _ in range(2))
    for c in clean:
        g = one.op("exp", one.op("load", tensor="a"))
        one.op("store", one.op("valid", g) if c else g, tensor="w")
    two.op("store", two.op("cumsum", two.op("load", tensor="w", name="g")), tensor="o")
    kernels = tuple(Kernel(n, "chunks", b.finish()) for n, b in (("one", one), ("two", two)))
    p = Program("p", "cut", tensors, kernels, dims=(("C", 16),))
    if all(clean):
        verify(p)
    else:
        with pytest.raises(VerifyError, match=r"kernel two.*use valid\(g\)"):
            verify(p)


def test_round_trip_and_parse_errors():
    p = sized("gated_delta_rule", 16)
    assert parse_program(program_text(p)) == p
    with pytest.raises(ParseError, match="not in the table"):
        parse_program(program_text(p).replace("cumsum(", "frobnicate("))
    with pytest.raises(ParseError, match="before it is defined"):
        parse_program(program_text(p).replace("G = cumsum(g", "G2 = cumsum(g"))


def broken(change):
    """The gated delta rule with one op of its walk changed."""
    p = sized("gated_delta_rule", 16)
    loop = p.kernels[0].body[1]
    body = tuple(c for o in loop.body for c in change(o))
    first, _, last_store = p.kernels[0].body
    return replace(p, kernels=(replace(p.kernels[0], body=(first, replace(loop, body=body), last_store)),))


@pytest.mark.parametrize("change, text", [
    (lambda o: () if o.out == "G" else (o,), "G is read before"),
    (lambda o: (o, o) if o.out == "G" else (o,), "defined twice"),
    (lambda o: (replace(o, type=Tile(("C", "C"))),) if o.out == "G" else (o,), "operands give"),
    (lambda o: () if o.kind == "store" else (o,), "written by no kernel"),
    (lambda o: (replace(o, attrs=(("tensor", "v"),)),) if o.kind == "store" else (o,), "to the input v"),
    (lambda o: (replace(o, buffer="nowhere"),) if o.out == "G" else (o,), "buffer"),
])
def test_verifier(change, text):
    with pytest.raises((VerifyError), match=text):
        verify(broken(change))


def test_every_op_has_a_doc_and_pure_ones_a_meaning():
    in_interpreter = {"const", "scalar", "full", "eye", "expand", "row_max", "valid", "cast", "of_token", "latest"}
    for o in OPS.values():
        assert o.doc
        assert o.effect != "pure" or o.evaluate is not None or o.name in in_interpreter, o.name


@pytest.mark.parametrize("size", [1, 4, 16])
def test_diag_inverse_takes_each_block_alone(size):
    a = torch.randn(16, 16, dtype=torch.float64).tril(-1)
    got = OPS["diag_inverse"].evaluate({"size": size}, a)
    blocks = torch.block_diag(*[torch.ones(size, size)] * (16 // size)).bool()
    assert torch.allclose(got, torch.linalg.inv(torch.eye(16, dtype=torch.float64) + a.where(blocks, 0.0)))
    assert OPS["diag_inverse"].evaluate({"size": size, "strict": True}, a).equal(got - torch.eye(16, dtype=torch.float64))
    assert got.where(blocks, 0.0).equal(got) and OPS["diag_inverse"].evaluate({"size": size}, a.half()).dtype == torch.float16


def test_the_interpreter_reads_no_annotation():
    """conftest interprets one of several programs that differ only in these."""
    read = {n.attr if n.attr != "slots" else ast.unparse(n) for n in ast.walk(ast.parse(inspect.getsource(interpreter)))
            if isinstance(n, ast.Attribute)}
    assert not read & {"line", "agent", "agents", "buffer", "buffers", "slices", "threads", "registers",
                       "blocks_per_sm", "lanes", "piece", "stage", "source", "launch", "forgets", "scales", "c.slots"}


def test_outputs_start_as_nan():
    p = sized("gated_delta_rule", 16)
    x = problem([20], 1, 1, 16, 8, torch.float64)
    loop = p.kernels[0].body[1]
    skip = replace(p, kernels=(replace(p.kernels[0], body=(p.kernels[0].body[0], replace(loop, body=tuple(
        o for o in loop.body if o.kind != "store")), *p.kernels[0].body[2:])),))
    given = {**{n: x[n].double() for n in ("q", "k", "v", "g", "beta")}, "initial_state": None}
    assert interpret(skip, Problem([20], 1, 1), given, {"scale": 1.0})["o"].isnan().all()


def test_tracing_leaves_profilers_and_tracers_alone():
    profiler, seen = cProfile.Profile(), []
    tracer = lambda frame, event, arg: seen.append(event)
    before = sys.gettrace()
    profiler.enable()
    sys.settrace(tracer)
    try:
        p = find("simple_gla").trace()
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
        profiler.disable()
    assert "G" in {o.out for o in p.kernels[0].body[1].body} and profiler.getstats()
