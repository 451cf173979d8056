"""Comments of emitted kernels: the page's lines, or what is computed there after rewriting."""
import re
from math import inf

from gdn_codegen.ir.builder import algorithm, carried, cumsum, exp, last, lower, row_sum
from gdn_codegen.ir.core import walk
from gdn_codegen.ir.parser import parse_program
from gdn_codegen.ir.printer import program_text
from gdn_codegen.passes.cut.comments import comments
from gdn_codegen.passes.cut.kernels import cut
from gdn_codegen.runtime.build import Build, lowered, render
from gdn_codegen.schedule import Schedule, varied
from gdn_codegen.targets import lower as lowered_by


def told(b):
    """Kernel -> what its comments say instead of the page's lines."""
    return {k.name: [text for _, text in k.comments] for k in lowered(b).kernels}


def test_a_page_that_is_computed_as_it_stands_keeps_its_lines():
    for target in ("triton", "tilelang", "pto"):
        assert not any(told(Build(target, schedule="fused", chunk=32, head_dim_k=32, head_dim_v=32)).values())
    assert "# U = Tinv @ (beta[:, None] * (v - exp(G)[:, None] * (k @ S)))" in render(Build("triton"))


def test_a_line_that_several_kernels_share_says_the_part_of_each():
    found = told(Build("triton", schedule="staged"))
    assert found["S_U"] == ["U = U_offset - U_weight @ S"] and not found["G"]
    assert found["o"] == ["exp_G = exp(G)"]
    assert found["U_weight_U_offset"] == ["U_offset = Tinv @ (beta[:, None] * v)",
                                          "U_weight = Tinv @ (beta[:, None] * (exp(G)[:, None] * k))"]


def test_a_rewritten_line_says_what_is_computed():
    b = Build("tilelang", arch="sm_90a", schedule="walk")
    walk = told(b)["o_S"]
    assert walk[1:5] == ["exp_G = exp(G)", "v_minus_exp_G_k_S = v - exp_G[:, None] * (k @ S)",
                         "U_unscaled = v_minus_exp_G_k_S + Tinv_below @ v_minus_exp_G_k_S",
                         "o = scale * (exp_G[:, None] * (q @ S) + ((q @ k.T) * D_beta) @ U_unscaled)"]
    body = render(b)
    body = body[body.index("def o_S_kernel"):body.index("# --- host")]
    assert "# U_unscaled = v_minus_exp_G_k_S + Tinv_below @ v_minus_exp_G_k_S" in body and "# U = Tinv" not in body


def test_a_statement_stands_over_the_ops_that_compute_it():
    """Not over others of its line, nor over a copy or rounding of another value."""
    text = render(Build("tilelang", schedule="staged"))

    def order(kernel, *marks):
        body = text[text.index(f"def {kernel}_kernel(t)"):]
        found = [body.index(x) for x in marks]
        assert found == sorted(found), dict(zip(marks, found, strict=True))

    order("A", "# A = beta[:, None] * (k @ k.T) * D\n", "t.gemm(k, k, k_kT", "A_ws[slot, hv, i, j] = ")
    order("Tinv", "t.copy(A, A_f16)", "# Tinv = unit_lower_inverse(A)", "t.whole_inverses(")
    order("U_weight_U_offset", "# U_offset = Tinv @ (beta[:, None] * v)\n", "beta_v_f16[i, j] = ", ", U_offset)",
          "# U_weight = Tinv @ ", "exp_G[i] = T.exp(G[i])", "beta_exp_G_k_f16[i, j] = ", ", U_weight)")
    order("o", "# o = scale * ", ", q_S)", "# exp_G = exp(G)\n", "exp_G[i] = T.exp(G[i])")


def test_the_text_of_a_line_is_read_as_python():
    """Signs, quotients, numbers and parentheses mean what the page means."""
    @algorithm(q="C K", k="C K", v="C V", g="C", S=carried("K V"))
    def page(q, k, v, g, S):
        G = cumsum(g)
        D = exp(lower(G[:, None] - G[None, :], fill=-inf))
        x = (2 - -v) / (3 + exp(-row_sum(v)))[:, None] - (v - v * 0.5)
        o = ((q @ k.T) * D) @ x + exp(G)[:, None] * (q @ S)
        S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * x)
        return o, S

    plan, sizes = Schedule("one", (("o", "S"),)), {"C": 16, "K": 16, "V": 16}
    p = comments(cut(page.trace(), plan, sizes))
    assert p.source and not any(k.comments for k in p.kernels)
    p = lowered_by(page.trace(), "triton", plan, sizes, "float16", upto="comments")  # in canonical form
    assert [text for _, text in p.kernels[0].comments] == ["x = (2.0 + v) / (3.0 + exp(-row_sum(v)))[:, None] + 0.5 * v - v",
                                                           "o = exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ x"]


def test_the_ops_of_a_rewritten_line_keep_its_number_and_have_that_of_their_statement():
    p = lowered(Build("triton", schedule="staged"))
    (k,) = (k for k in p.kernels if k.name == "U_weight_U_offset")
    number = next(n for n, text in p.source if text.startswith("U = "))
    assert [line for line, _ in k.comments] == [(number, 0), (number, 1)]
    assert {("U_offset", (number, 0)), ("U_weight", (number, 1))} <= {(o.out, o.line) for o in walk(k.body)}
    assert {str(line) for line, _ in k.comments} == {f"line {number}"}  # in messages
    assert parse_program(program_text(p)) == p and f"line={number}, statement=1" in program_text(p)


def test_long_statements_take_several_lines():
    b = Build("triton", schedule=varied("walk", partition="decay"))
    texts = [line for line in render(b).splitlines() if line.lstrip().startswith("# ")]
    assert texts and max(map(len, texts)) <= 120 and any(re.match(r" +# (o|S) = ", x) for x in texts)
