"""What plug-ins share: refusals, the fall-back, and the record of calls."""
import weakref

import pytest
import torch

from gdn_codegen import chunk_gated_delta_rule, chunk_kda, integrations


@pytest.fixture(autouse=True)
def nothing_recorded():
    integrations.reset()
    yield
    integrations.reset()


def inputs(T=5, K=32, V=32, dtype=torch.float32):
    q, k, v = (torch.randn(1, T, 2, n, dtype=dtype) for n in (K, K, V))
    return q, k, v, -torch.rand(1, T, 2), torch.rand(1, T, 2)


@pytest.mark.parametrize("change, wanted", [
    ({}, ""), ({"cp_context": object()}, "cp_context: got"), ({"cu_seqlens": torch.tensor([0, 2, 5])}, ""),
    ({"use_qk_l2norm_in_kernel": 1}, "use_qk_l2norm_in_kernel: got 1"), ({"gk": torch.ones(1)}, "gk: got"),
    ({"state_dtype": torch.int32}, "state_dtype: got"), ({"no_such_word": True}, "no_such_word")])
def test_a_refusal_is_the_op_s_error(change, wanted):
    args = inputs()
    found = integrations.refusal(chunk_gated_delta_rule, *args, **change)
    assert found.startswith(wanted) and bool(found) == bool(wanted)
    assert integrations.refusal(chunk_gated_delta_rule, *args, **change) == found, "the second answer is a look-up"
    if wanted:
        with pytest.raises(ValueError) as error:
            chunk_gated_delta_rule(*args, **change)
        assert str(error.value) == found


def test_a_refusal_tells_kinds_apart():
    q, k, v, g, beta = inputs()
    assert integrations.refusal(chunk_gated_delta_rule, q, k, v, g, beta) == ""
    assert integrations.refusal(chunk_gated_delta_rule, q.double(), k, v, g, beta).startswith("q: got torch.float64")
    assert integrations.refusal(chunk_kda, q, k, v, g, beta).startswith("g: got")
    out = torch.empty_like(v)
    assert integrations.refusal(chunk_gated_delta_rule, q, k, v, g, beta, out=out) == ""
    q.requires_grad_()
    assert integrations.refusal(chunk_gated_delta_rule, q, k, v, g, beta, out=out).startswith("out: got")
    with torch.no_grad():
        assert integrations.refusal(chunk_gated_delta_rule, q, k, v, g, beta, out=out) == ""


def test_a_refusal_keeps_no_object_alive():
    class Context:
        pass
    context = Context()
    gone = weakref.ref(context)
    assert integrations.refusal(chunk_gated_delta_rule, *inputs(), cp_context=context).startswith("cp_context: got")
    del context
    assert gone() is None


def test_a_refusal_follows_the_environment(monkeypatch):
    said = dict(state_dtype=torch.float16, output_final_state=True)
    assert integrations.refusal(chunk_gated_delta_rule, *inputs(), **said) == ""
    monkeypatch.setenv("GDN_CODEGEN_BATCH_INVARIANT", "1")
    assert integrations.refusal(chunk_gated_delta_rule, *inputs(), **said).startswith("state_dtype: got torch.float16 with batch")


def test_calls_that_ours_refuses_go_to_the_host(monkeypatch, capfd):
    monkeypatch.setenv("GDN_DEBUG", "1")
    heard = []

    def theirs(x, *, word=None):
        """The host's."""
        heard.append((x, word))
        return "theirs"

    def ours(x, *, word=None):
        if word == "broken":
            raise KeyError(word)
        if word is not None:
            raise ValueError(f"word: got {word}; accepted: None")
        return "ours"

    op = integrations.falling_back("a host", "op", ours, theirs)
    assert (op.__name__, op.__doc__) == ("theirs", "The host's.")
    assert [op(1), op(2, word="a"), op(3, word="a"), op(4)] == ["ours", "theirs", "theirs", "ours"]
    assert heard == [(2, "a"), (3, "a")]
    with pytest.raises(KeyError):
        op(5, word="broken")
    assert integrations.report() == ("a host: op: served: 2\na host: op: left to the host (word: got a; accepted: None): 2")
    assert integrations.report("another") == ""
    assert capfd.readouterr().err.splitlines() == [
        "gdn_codegen: a host: op: served", "gdn_codegen: a host: op: left to the host (word: got a; accepted: None)"]


def test_reasons_are_bounded():
    for n in range(200):
        integrations.record("a host", "op", f"T: got {n}")
    lines = integrations.report().splitlines()
    assert len(lines) <= 65 and lines[-1] == f"a host: op: left to the host (other reasons): {200 - 64}"


def test_marks_of_the_host_s_function_do_not_lead_torch_to_it():
    """torch.compiler.disable leaves the function that it wraps in an attribute, and calls that where it comes again."""
    op = integrations.falling_back("a host", "op", lambda x: "ours", torch.compiler.disable(lambda x: "theirs"))
    assert torch.compiler.disable(op)(1) == op(1) == "ours"
