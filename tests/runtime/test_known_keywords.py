"""Keywords that calls repeat: a compiled function gives what the translation gives, and takes nothing else for the same."""
import shutil
from pathlib import Path

import pytest
import torch

from gdn_codegen import fused_recurrent_gated_delta_rule
from gdn_codegen.runtime.call import foreign_keywords, known_keywords, native_launcher
from gdn_codegen.runtime.call.arguments import Options, Tensors

pytestmark = [pytest.mark.slow,  # the first compiles the library
              pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")]
Q, POOL, ROWS = (torch.zeros(*shape) for shape in ((1, 4, 2, 16), (9, 2, 16, 16), (2, 4, 1)))
SLOTS, ENDS = torch.arange(4), torch.arange(3)
T = Tensors(*[Q] * 5, *[None] * (len(Tensors._fields) - 5))
X = Options(False, False, False, None, "log", "given", False, False, None, None, "auto", None)
GATES = T._replace(A_log=Q, dt_bias=SLOTS)
#: (tensors, keywords, chunk, whether our own keywords are among them): what servers say, and one of each kind of keyword.
SAID = {
    "FLA": (GATES, dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True), 0, False),
    "FLA without a gate": (GATES, dict(use_gate_in_kernel=False), 0, False),
    "vLLM": (GATES, dict(ssm_state_indices=SLOTS, inplace_final_state=True, num_accepted_tokens=ENDS, use_gate_in_kernel=True,
                         initial_state=POOL), 16, True),
    "SGLang": (T._replace(cu_seqlens=ENDS),
               dict(initial_state_source=POOL, initial_state_indices=SLOTS, intermediate_states_buffer=ROWS, cache_steps=4,
                    retrieve_parent_token=None, disable_state_update=True, disable_output_calculation=False), 16, True),
    "FlashInfer": (T, dict(state=POOL, output=Q, softplus_beta=1.0, gk=None, checkpoint_every_n_tokens=128), 0, False),
    "transformers": (T._replace(cu_seqlens=ENDS),
                     dict(seq_idx=SLOTS, cu_seqlens_cpu=ENDS, position_ids=[1], max_length_k=7), 0, False),
    "lengths": (T._replace(cu_seqlens=ENDS), dict(max_seqlen=4, max_length_q=9), 0, False),
    "the same slots": (T._replace(state_indices=SLOTS),
                       dict(output_state_indices=SLOTS, core_attn_out=torch.zeros(200)), 0, False),
}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    native_launcher.ready(Path("nothing was compiled ahead"), wait=True)
    native_launcher._library(Path("nothing was compiled ahead"))
    monkeypatch.setattr(known_keywords, "recent", ())


def same(a, b):
    tensors = all(x is y or (isinstance(x, torch.Tensor) and x.data_ptr() == y.data_ptr() and x.shape == y.shape)
                  for x, y in zip(a[0], b[0], strict=True))
    return tensors and tuple(a[1]) == tuple(b[1]) and [*map(type, a[1])] == [*map(type, b[1])]


def another(x):
    return torch.nn.Parameter(x.clone(), False) if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("form", SAID)
def test_what_is_known_is_what_the_translation_gives(form, monkeypatch):
    t, others, chunk, ours = SAID[form]
    want = known_keywords.spelled(t, X, others, chunk, ours)
    assert len(known_keywords.recent) == 1
    translated = known_keywords._translated
    monkeypatch.setattr(known_keywords, "_translated", lambda *x: pytest.fail("translated again"))
    assert same(known_keywords.spelled(tuple(t), tuple(X), dict(others), chunk, ours), want)
    seen = {}  # a tensor in two places stays one
    change = lambda x: seen.setdefault(id(x), another(x))
    others = {n: change(x) for n, x in others.items()}
    t = tuple(map(change, t))
    got = known_keywords.spelled(t, X, others, chunk, ours)
    assert same(got, translated(t, X, others, chunk, ours)) and not same(got, want)


def test_other_lengths_are_not_translated_again(monkeypatch):
    """Each prefill of an engine has others."""
    t = T._replace(cu_seqlens=ENDS)
    known_keywords.spelled(t, X, {"max_seqlen": 4})
    monkeypatch.setattr(known_keywords, "_translated", lambda *x: pytest.fail("translated again"))
    for longest in (4, 2, 9):
        said, x = known_keywords.spelled(t, X, {"max_seqlen": longest})
        assert said[0] is Q and x == tuple(X._replace(longest=longest))


#: A form, and how the next call differs: its keywords, tensors, options, chunk; and the error that it must raise, if any.
OTHER = [
    ("FLA", dict(others=dict(use_gate_in_kernel=1)), "use_gate_in_kernel: got 1"),
    ("FLA", dict(others=dict(use_gate_in_kernel=torch.ones(2))), "use_gate_in_kernel: got Tensor"),
    ("FLA", dict(x=dict(gate="linear")), "use_gate_in_kernel: got True with gate='linear'"),
    ("FLA", dict(others=dict(num_warps=4)), None),
    ("FLA", dict(x=dict(target="triton")), None),
    ("FLA without a gate", dict(others=dict(use_gate_in_kernel=True)), None),
    ("vLLM", dict(t=dict(state_indices=SLOTS)), "ssm_state_indices: got both"),
    ("vLLM", dict(ours=False), "only chunk_gated_delta_rule has"),
    ("vLLM", dict(others=dict(num_accepted_tokens=None)), None),
    ("vLLM", dict(others=dict(inplace_final_state=None)), None),
    ("SGLang", dict(others=dict(cache_steps=5)), "cache_steps: got 5; accepted: 4"),
    ("SGLang", dict(others=dict(intermediate_states_buffer=torch.zeros(2, 5, 1))), "cache_steps: got 4; accepted: 5"),
    ("SGLang", dict(others=dict(disable_state_update=False)), None),
    ("SGLang", dict(others=dict(retrieve_parent_token=SLOTS)), None),
    ("FlashInfer", dict(chunk=-1), "checkpoint_every_n_tokens: got 128"),
    ("FlashInfer", dict(chunk=16), None),
    ("FlashInfer", dict(others=dict(softplus_beta=2.0)), "softplus_beta: got 2.0"),
    ("FlashInfer", dict(others=dict(gk=Q)), "gk: got Tensor"),
    ("transformers", dict(others=dict(max_length_k=9, position_ids=None)), None),
    ("lengths", dict(others=dict(max_seqlen=2)), None),
    ("lengths", dict(others=dict(max_seqlen=None)), None),
    ("lengths", dict(others=dict(max_seqlen=torch.tensor(4))), "max_seqlen: got Tensor"),
    ("lengths", dict(others=dict(max_seqlen=True)), "max_seqlen: got True"),
    ("lengths", dict(others=dict(max_length_q=torch.tensor(9))), None),
    ("lengths", dict(t=dict(cu_seqlens=None)), "max_seqlen: got 4; accepted: cu_seqlens as well"),
    ("lengths", dict(t=dict(cu_seqlens=5 * ENDS)), "max_seqlen: got 4; accepted: at least 5"),
    ("transformers", dict(t=dict(cu_seqlens=None)), "seq_idx|cu_seqlens_cpu"),
    ("transformers", dict(others=dict(cu_seqlens_cpu=ENDS + 1)), "cu_seqlens_cpu"),
    ("the same slots", dict(others=dict(output_state_indices=SLOTS.clone())), "output_state_indices"),
    ("the same slots", dict(others=dict(core_attn_out=torch.zeros(1, 4, 2, 16))), None)]


@pytest.mark.parametrize("form, changed, error", OTHER)
def test_what_differs_is_translated_anew_or_refused(form, changed, error):
    t, others, chunk, ours = SAID[form]
    for _ in range(2):
        known_keywords.spelled(t, X, others, chunk, ours)
    call = (t._replace(**changed.get("t", {})), X._replace(**changed.get("x", {})), {**others, **changed.get("others", {})},
            changed.get("chunk", chunk), changed.get("ours", ours))
    for _ in range(2):
        if error:
            with pytest.raises(ValueError, match=error):
                known_keywords.spelled(*call)
        else:
            assert same(known_keywords.spelled(*call), known_keywords._translated(*call))


def test_every_keyword_has_a_meaning_apart_from_tensors_or_is_looked_at():
    """A function of MEANT that asks a tensor for more than whether it is there must be named in LOOKED_AT or OF_SHAPE."""
    for name in (*foreign_keywords.MEANT, *foreign_keywords.ALIASES):
        for t in (T, T._replace(cu_seqlens=ENDS), T._replace(state_indices=SLOTS, initial_state=POOL)):
            for value in (None, Q, POOL, SLOTS, True, False, 4, 0, 64):
                call = t, X, {name: value}, 0, False
                try:
                    want = known_keywords._translated(*call)
                except ValueError:
                    continue
                for _ in range(2):
                    assert same(known_keywords.spelled(*call), want), call


def test_only_the_last_few_are_kept():
    for n in range(3 * known_keywords.RECENT):
        known_keywords.spelled(T, X._replace(chunk_size=n), dict(num_warps=1))
    assert len(known_keywords.recent) == known_keywords.RECENT


def test_the_op_says_what_is_wrong_after_calls_that_were_right():
    x = dict(q=Q, k=Q, v=Q, g=torch.zeros(1, 4, 2), beta=torch.ones(1, 4, 2))
    for _ in range(2):
        fused_recurrent_gated_delta_rule(**x, target="tilelang", transpose_state_layout=True)
    with pytest.raises(ValueError, match=r"transpose_state_layout: got 1|state_v_first"):
        fused_recurrent_gated_delta_rule(**x, target="tilelang", transpose_state_layout=1)
    with pytest.raises(ValueError, match="gv"):
        fused_recurrent_gated_delta_rule(**x, target="tilelang", transpose_state_layout=True, gv=Q)
