"""columns: where beta, which has moved through the inverse, is multiplied."""
import pytest

from gdn_codegen.algorithms import find
from gdn_codegen.ir.core import walk
from gdn_codegen.passes.algebra.rewrite import rewrite
from gdn_codegen.schedule import Schedule


def readers(page, form):
    """The products that read U, and those that read what beta multiplies to give U."""
    p = rewrite(find(page).trace(), Schedule("own", (("@output", "@state"),), form=form))
    ops = [o for o in walk(p.kernels[0].body) if o.out]
    return [[o.out for o in ops if o.kind in ("matmul", "decayed_product") and n in o.args] for n in ("U", "U_unscaled")]


@pytest.mark.parametrize("form", ["split", "unit"])
@pytest.mark.parametrize("page", ["delta_rule", "kimi_delta_attention"])
def test_all_readers_read_u_where_one_has_to(page, form):
    """k^T U has no vector of tokens that beta could multiply. The scores would be rounded once more, and U twice."""
    of_u, of_unscaled = readers(page, form)
    assert len(of_u) == 2 and of_unscaled == []


@pytest.mark.parametrize("form", ["split", "unit"])
def test_no_reader_reads_u_where_none_has_to(form):
    """The decay to the end of the chunk is a vector of tokens."""
    of_u, of_unscaled = readers("gated_delta_rule", form)
    assert of_u == [] and len(of_unscaled) == 1
