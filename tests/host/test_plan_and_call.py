"""host/host.py and host/plan.py by themselves: what tables of a build make of a call, with launches recorded."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdn_codegen.devices.sm_90a import SM_90A
from gdn_codegen.host import call as call_module
from gdn_codegen.host.host import Host
from gdn_codegen.host.parts import _split_parts
from gdn_codegen.host.plan import Plan
from gdn_codegen.host.tables import Tables
from gdn_codegen.runtime.tables import arguments, literal, signature

TABLES = Tables(
    "small", "f", 4, "bthd", "float16", inputs=(("q", "H", (8,), "float16"), ("g", "HV", (), "float32")),
    outputs=(("o", (8,), "float16"),), workspaces=(("W_ws", (4, 8), "float16"),), initial=(("S", (8, 8)),),
    final=(("S_end", (8, 8)),), scalars={"scale": 0.5, "low": None}, ints={"W": (), "o": ("has_S", "has_S_end")},
    kernels=(("W", "chunks", 1, ("q", "W_ws"), ()), ("o", "sequences", 2, ("g", "W_ws", "S", "o", "S_end"), ("scale",))))


def hosted(tables=TABLES, **fields):
    """A host, and what it launches: kernel, instances, whole numbers, tensors, ends, numbers."""
    seen = []
    host = Host(tables, lambda name, n, sizes, ints, device: lambda tensors, ends, numbers: seen.append(
        (name, n, ints, tensors, ends.tolist(), numbers)))
    for n, x in fields.items():
        setattr(host, n, x)
    return host, seen


def called(host, tokens=6, state=None, out=None, ends=None, final=None, wanted=False, numbers=(None, 1.0)):
    given = torch.zeros(1, tokens, 2, 8).half(), torch.zeros(1, tokens, 4)
    return given, host(given, numbers, (state,), (out,), ends, (final,), wanted)


def test_kernels_get_their_tensors_instances_and_numbers():
    host, seen = hosted()
    (q, g), (o, final) = called(host, wanted=True, numbers=(2, 1.0))
    (w, w_count, w_ints, w_tensors, ends, w_numbers), (name, count, ints, tensors, _, numbers) = seen
    assert (w, w_count, w_ints, w_numbers, ends) == ("W", 2 * 4, [], [], [0, 6]) and w_tensors[0] is q
    assert (name, count, ints, numbers) == ("o", 1 * 4 * 2, [0, 1], [2.0]) and tensors[0] is g and tensors[1] is w_tensors[1]
    assert w_tensors[1].shape == (2, 4, 4, 8) and tensors[2].shape == (0, 4, 8, 8)
    assert o is tensors[3] and o.shape == (1, 6, 4, 8) and final is tensors[4] and final.shape == (1, 4, 8, 8)


def test_a_launcher_hears_of_all_kernels_of_a_call_before_the_first():
    """And of none that the call does not launch."""
    said = []

    class Launcher:
        def together(self, names, device):
            said.append((names, device))

        def __call__(self, name, *about):
            said.append(name)
            return lambda tensors, ends, numbers: None
    row = TABLES.kernels[1]
    more = (*TABLES.kernels, ("folded", *row[1:]), ("none", row[1], 0, *row[3:]))
    host, _ = hosted(replace(TABLES, kernels=more, summaries=("folded",), ints={**TABLES.ints, "folded": (), "none": ()}))
    host.launcher = Launcher()
    for tokens in (6, 6, 0):
        called(host, tokens)
    cpu = torch.device("cpu")
    assert said == [(("W", "o"), cpu), "W", "o", (("W", "o"), cpu), "W", "o"]


def test_a_kind_of_call_is_prepared_once_and_a_final_state_that_nobody_wants_is_none():
    host, seen = hosted()
    for tokens in (6, 6, 9):
        assert called(host, tokens)[1][1] is None
    assert len(host.plans) == 2 and [row[2] for row in seen if row[0] == "o"] == 3 * [[0, 0]]


def test_memory_of_the_caller_is_written_where_it_lies_or_copied_back():
    host, _ = hosted(replace(TABLES, kernels=TABLES.kernels[1:]))
    host.launcher = lambda *about: lambda tensors, ends, numbers: (tensors[3].fill_(3), tensors[4].fill_(4))
    for out, final in ((torch.zeros(1, 6, 4, 8).half(), torch.zeros(1, 4, 8, 8)),
                       (torch.zeros(1, 6, 4, 9).half()[..., 1:], torch.zeros(1, 4, 9, 8)[:, :, 1:])):
        _, (o, S) = called(host, out=out, final=final)
        assert o is out and S is final and bool((out == 3).all()) and bool((final == 4).all())


def test_a_counter_is_made_for_each_call_and_blocks_are_as_many_as_run_at_a_time(monkeypatch):
    """What it holds, a kernel clears: for tests it is no zero."""
    kernels = (("W", "chunks", 1, ("q", "W_ws", "o_items"), ()), ("o", "sequences", 2, ("o", "o_items"), ()))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    host, seen = hosted(replace(TABLES, kernels=kernels, counters=(("o_items",),), ints={"W": (), "o": ("blocks_at_a_time",)}),
                        poison=True)
    for _ in range(2):
        called(host)
    first, second = ([row[3][-1] for row in seen[n:n + 2]] for n in (0, 2))
    assert first[0] is first[1] and second[0] is second[1] and first[0] is not second[0]
    assert first[0].dtype == torch.int32 and first[0].tolist() == [-1] and seen[1][2] == [132]


def test_rows_of_no_sequence_are_zero_and_the_rest_is_nan_for_tests():
    host, seen = hosted(poison=True)
    _, (o, _) = called(host, ends=torch.tensor([0, 2, 5]), wanted=True)
    assert bool((o == 0).all()) and bool(seen[0][3][1].isnan().all()) and seen[0][4] == [0, 2, 5]


ZEROED = replace(TABLES, saved=("W_ws",), zeroed=("W_ws",))


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("ends", [None, torch.tensor([0, 2, 5])])
def test_what_callers_add_up_over_all_slots_starts_as_zeros(ends, poison, monkeypatch):
    """Slots without a chunk stay so. What other workspaces hold at first is not known."""
    monkeypatch.setattr(call_module, "_new", lambda x: torch.full_like(x, float("nan")))
    host, seen = hosted(ZEROED, poison=poison)
    _, (_, _, shares) = called(host, ends=ends, wanted=True)
    assert shares is seen[0][3][1] and not shares.any()
    host, seen = hosted(poison=poison)
    called(host, ends=ends, wanted=True)
    assert seen[0][3][1].isnan().all()


@pytest.mark.parametrize("change, said", [
    ({"numbers": (None, None)}, "low: got None; accepted: a number"), ({"numbers": (True, 1.0)}, "scale: got bool"),
    ({"numbers": (1e39, 1.0)}, "scale: got 1e\\+39"), ({"wanted": 1}, "output_final_state: got 1; accepted: True or False"),
    ({"ends": torch.tensor([0, 7])}, "cu_seqlens: got .*at most at T = 6"), ({"state": torch.zeros(2, 4, 8, 8)}, "S: got "),
    ({"out": torch.zeros(1, 6, 4, 8)}, "out: got torch.float32"), ({"final": torch.zeros(1, 4, 8, 7)}, "S_end: got "),
    ({"state": torch.zeros(1, 4, 8, 8, requires_grad=True)}, "S: got a tensor that requires grad")])
def test_what_is_bad_is_refused_by_name(change, said):
    host, seen = hosted()
    with pytest.raises(ValueError, match=said):
        called(host, **change)
    assert not seen


def test_a_native_call_exists_if_nothing_is_copied_or_checked():
    host, _ = hosted()
    about = (None,), (None,), None, (None,), True
    given = torch.zeros(1, 6, 2, 8).half(), torch.zeros(1, 6, 4)
    call = host.prepare(given, *about).native
    assert [kind for kind, *_ in call.sources] == ["given", "given", "fixed", "result", "result", "workspace"]
    assert [at for _, at, _ in call.launches] == [[0, 5], [1, 5, 2, 4, 3]] and call.rows().tolist() == [0, 6]
    assert host.prepare((given[0], given[1].half()), *about).native is None
    assert hosted(ZEROED)[0].prepare(given, *about).native is None


IN_PARTS = replace(TABLES, chunk=64, most=8, summaries=("N",), warm_ups=True, part_cost=SM_90A.part_cost, initial=(), final=(),
                   scalars={}, kernels=(("N", "parts", 4, ("q",), ()), ("o", "parts", 1, ("q", "o"), ())),
                   ints=dict.fromkeys(("N", "o"), ("summed", "part_instances", "units")))


def in_parts(monkeypatch, lengths, packed=True, value_heads=4, tables=IN_PARTS, **fields):
    """Instances and whole numbers of the kernel `o` of a call on a GPU with 132 multiprocessors, and its `Plan`."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    host, seen = hosted(tables, **fields), {}
    host[0].launcher = lambda name, n, sizes, ints, device: seen.update({name: (n, ints)})
    rows = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    q, g = torch.empty(*rows, 1, 8, device="meta").half(), torch.empty(*rows, value_heads, device="meta")
    ends = torch.empty(len(lengths) + 1, device="meta", dtype=torch.int32) if packed else None
    plan = Plan(host[0], (q, g), (), (None,), ends, (), False, longest=fields.get("longest", 0))
    return *seen["o"], plan


@pytest.mark.parametrize("lengths, packed, fields", [
    ([65536], True, {}), ([16384] * 4, False, {}), ([64] * 257, True, {}), ([4096] * 4, True, {"part_chunks": 8}),
    ([4096] * 4, True, {"partition": False})])
def test_parts_are_the_hosts_where_lengths_are_known_or_many(lengths, packed, fields, monkeypatch):
    instances, (_, of_part, units), plan = in_parts(monkeypatch, lengths, packed, **fields)
    assert (of_part, units) == (4, 0) and plan.span == plan.host.span(sum(lengths), len(lengths), 4, plan.device, packed)
    assert instances == 4 * plan.parts == 4 * (sum(lengths) // (64 * plan.span) + len(lengths))


@pytest.mark.parametrize("lengths, value_heads, finest", [
    ([16384] * 4, 4, 32), ([64] * 12, 4, 1), ([16384] * 8, 64, 331), ([2048] * 3, 64, 32)])
def test_of_packs_kernels_choose_parts_and_get_instances_for_the_shortest(lengths, value_heads, finest, monkeypatch):
    """As many as run at a time, or three times as many if they are long."""
    instances, (_, of_part, units), plan = in_parts(monkeypatch, lengths, value_heads=value_heads)
    assert (of_part, units, plan.span) == (value_heads, 132, finest)
    assert instances == value_heads * (sum(lengths) // (64 * finest) + len(lengths))


def test_summaries_are_launched_where_a_sequence_may_need_them(monkeypatch):
    """The host may know that none is so long. Kernels then choose parts that need none, whatever the lengths are."""
    assert in_parts(monkeypatch, [16384] * 4, value_heads=8)[1][0] == 1
    assert in_parts(monkeypatch, [4096] * 4, value_heads=16)[1][0] == 1
    assert in_parts(monkeypatch, [4096] * 4, value_heads=16, longest=4096)[1][0] == 0
    assert in_parts(monkeypatch, [1024] * 4, value_heads=16, longest=262144)[1][0] == 0  # more than all tokens


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=40), st.sampled_from((16, 32, 64)), st.integers(1, 20), st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine may stall
def test_parts_of_split_sequences_are_no_more_than_the_host_counts(lengths, chunk, least, data):
    """However long the parts are that kernels choose."""
    span = data.draw(st.integers(least, 3 * least))
    split = [-(-chunks // span) for chunks in (-(-n // chunk) for n in lengths) if chunks > span]
    parts = sum(lengths) // (chunk * least) + len(lengths)
    assert sum(split) <= _split_parts(parts, sum(lengths), chunk * least) <= max(parts, 1)


@pytest.mark.parametrize("fields, parts, split", [(dict(longest=32768), 47, 12), (dict(part_chunks=135), 47, 47)])
def test_summaries_and_bounds_are_of_split_sequences_where_kernels_choose(fields, parts, split, monkeypatch):
    tables = replace(IN_PARTS, bounds=("b",), kernels=(("b", "parts", 2, ("q",), ()), *IN_PARTS.kernels),
                     ints={**IN_PARTS.ints, "b": ()})
    *_, plan = in_parts(monkeypatch, [512] * 40 + [32768], value_heads=64, tables=tables, **fields)
    seen = {}
    plan.host.launcher = lambda name, n, sizes, ints, device: seen.update({name: (n, *sizes[6:])})
    plan.launched()
    assert plan.parts == parts and plan.span == 135
    assert seen == {"b": (2 * 64 * split, split, 135), "N": (4 * 64 * split, split, 135), "o": (64 * parts, parts, 135)}


@pytest.mark.parametrize("lengths, chooses", [([16384] * 4, True), ([65536], False), ([64] * 257, False)])
def test_places_of_parts_are_four_integers_each_and_those_of_the_choice(lengths, chooses, monkeypatch):
    tables = replace(IN_PARTS, places=(("part_places",),))
    *_, plan = in_parts(monkeypatch, lengths, tables=tables)
    assert [shape for shape, dtype in plan.made if dtype == torch.int32] == [(4 + 4 * plan.parts * chooses,)]
    assert plan.ints["least_span"] == plan.span and bool(plan.ints["units"]) == chooses


def test_workspaces_have_a_tile_a_chunk_and_one_a_sequence():
    assert hosted()[0].workspace_bytes(tokens=8, sequences=3, value_heads=4) == (2 + 3) * 4 * 4 * 8 * 2


def test_tables_are_printed_as_python_that_makes_them():
    assert eval(literal(TABLES), {"Tables": Tables}) == TABLES
    assert signature(TABLES) == ("q, g, scale=None, low=None, S=None, output_final_state=False, cu_seqlens=None, S_end=None, "
                                 "out=None")
    assert arguments(TABLES) == "(q, g), (scale, low), (S,), (out,), cu_seqlens, (S_end,), output_final_state"
