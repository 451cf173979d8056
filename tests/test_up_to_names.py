"""The comparison up to names finds every difference but names, comments and, in C++, where lines break."""
import pytest
from up_to_names import difference

PYTHON = """def kernel(q_ptr, k_ptr):
    # the decay
    G = tl.load(q_ptr + 4)
    D = tl.exp(G - q_ptr)  # of a token
    if D:
        tl.store(k_ptr, D * G)
"""
CPP = """void kernel(half *q) { // a line
  Tile<float> wide(q);
  TADD(dst, G, D);
  /* more */ foo(G);
}"""


@pytest.mark.parametrize("text, other", [
    (PYTHON, PYTHON.replace("G", "total").replace("# of a token", "").replace("kernel", "walk")),
    (PYTHON, PYTHON.replace("G", "other").replace("D", "G").replace("other", "D")),
    (PYTHON, PYTHON.replace("k_ptr, D * G)", "\n            k_ptr,\n            D * G,\n        )")),
    (CPP, CPP.replace("\n", " \n ").replace(" // a line", "")),
    (CPP, CPP.replace("dst", "d").replace("kernel", "other").replace("G, D", "G,\n      D").replace("wide", "w"))])
def test_same(text, other):
    assert not difference(text, other, text is PYTHON)


@pytest.mark.parametrize("text, old, new", [
    (PYTHON, "D * G", "G * D"), (PYTHON, "+ 4", "+ 5"), (PYTHON, "tl.exp", "tl.log"), (PYTHON, "tl.exp", "tm.exp"),
    (PYTHON, "        tl.store", "    tl.store"), (PYTHON, "D * G", "D * D"), (PYTHON, "G - q_ptr", "G - k_ptr"),
    (PYTHON, "D * G)", "D * G)\n    x = 1"), (PYTHON, "if", "while"), (PYTHON, "G = tl", "G: int = tl"),
    (CPP, "G, D", "D, G"), (CPP, "TADD", "TSUB"), (CPP, "foo", "bar"), (CPP, "half", "float"), (CPP, "foo(G);", ""),
    (CPP, "wide(q)", "wide(dst)")])
def test_not_the_same(text, old, new):
    assert old in text and difference(text, text.replace(old, new), text is PYTHON)
    assert difference(text.replace(old, new), text, text is PYTHON)


def test_two_names_do_not_become_one():
    assert difference("def f(a, b):\n    return a + b", "def f(a, b):\n    return a + a")
    assert difference("def f(a, b):\n    return a + a", "def f(a, b):\n    return a + b")
