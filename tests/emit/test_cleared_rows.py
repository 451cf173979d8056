"""Rows of o that no sequence covers, in generated kernels: what the tests of numbers look at can be wrong."""
import pytest
from reference import check, module, problem

from gdn_codegen.runtime.build import Build, render
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("schedule", ["fused", "staged", "prepared", "replay", "walk"])
def test_rows_past_the_end_are_zero(schedule, layout):
    if not runs("triton", "cpu"):
        pytest.skip("triton does not run here")
    fn = function(Build("triton", 16, layout, schedule=schedule, head_dim_k=32, head_dim_v=36))
    for lengths, rest in (([5, 0, 20], 40), ([16], 1), ([0, 0], 17)):
        check(fn, problem(lengths, 1, 2, 32, 36), layout=layout, rest=rest)


@pytest.mark.parametrize("schedule", ["fused", "staged"])
@pytest.mark.parametrize("old, new", [("clear_o != 0", "clear_o == 7"), ("n == N - 1", "n == N"),
                                      ("clear_begin, clear_end, C", "clear_begin + C, clear_end, C"),
                                      ("T - start, length", "T - start - 1, length"),
                                      ("clear_end - rest", "clear_end - rest - 1")])
def test_without_a_part_of_it_they_are_not(schedule, old, new):
    text = render(Build("triton", 16, schedule=schedule, head_dim_k=32, head_dim_v=32))
    assert old in text
    with pytest.raises(AssertionError, match="rows of no sequence are not zero"):
        check(module(text.replace(old, new)).chunk_gated_delta_rule, problem([5, 0, 20], 1, 2, 32, 32), rest=40)
