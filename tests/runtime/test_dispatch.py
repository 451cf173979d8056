"""Which build serves a call: rows of tables by class of shape, the model outside of them, and the reasons."""
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from choices import a_call
from devices import H200, passes_for
from reference import call, expected, problem, rms_error

from gdn_codegen import chunk_gated_delta_rule, targets
from gdn_codegen.runtime.build import Build
from gdn_codegen.runtime.call import choose, launch, size, tables
from gdn_codegen.runtime.call.device import Facts, described, facts
from gdn_codegen.runtime.call.request import ANY_BATCH
from gdn_codegen.runtime.call.tables import Extent, Row
from gdn_codegen.schedule import Schedule, ScheduleError, changes, varied
from gdn_codegen.schedule.contract import PLAIN, Contract

BASE = Build("tilelang")
PARTS = Build("tilelang", schedule=varied("walk", "sm_90a", partition="decay", part_chunks=32), arch="sm_90a")
#: The same of another class: the length of parts was measured for its own.
ANY_PARTS = replace(PARTS, schedule=replace(PARTS.plan, part_chunks=0))
STAGES = Build("tilelang", schedule=varied("walk", "sm_90a", stages=3), arch="sm_90a")
LONG = Extent(16, 16, 1, 32768)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A CPU that passes for an H200 with no tables but those that a test gives."""
    passes_for(monkeypatch, H200)
    monkeypatch.setenv("GDN_CODEGEN_CACHE", str(tmp_path))
    found = []
    monkeypatch.setattr(tables, "rows", lambda devices, target: tuple(r for r in found if r.about.target == target))
    return found


def ask(extent=LONG, target="tilelang", chunk=None, schedule=None, dtype=torch.float16, contract=PLAIN, K=128, V=128,
        layout="bthd", algorithm="gated_delta_rule"):
    return choose.choice(a_call(extent, dtype, "meta", (K, V), contract, target=target, chunk_size=chunk, layout=layout,
                                schedule=schedule, algorithm=algorithm))


def row(b=PARTS, extent=LONG, ms=0.3, model_ms=0.4, source=tables.PACKAGE, device="NVIDIA H200"):
    return Row(device, b, extent, ms, model_ms, source, "sm_90 x 132", b.target)


@pytest.mark.parametrize("n, want", [(0, 0), (1, 0), (2, 1), (3, 2), (5, 2), (6, 3), (45, 5), (46, 6), (32768, 15)])
def test_the_nearest_power_of_two_by_ratio(n, want):
    assert tables.power(n) == want


@pytest.mark.slow
def test_a_row_serves_its_class_and_those_one_step_away(gpu):
    gpu.append(row())
    assert ask().build == PARTS
    for same in (Extent(16, 16, 1, 40000), Extent(8, 8, 2, 65536)):
        assert ask(same).build == PARTS, same
    for near in (Extent(16, 16, 1, 65536), Extent(32, 32, 1, 32768)):
        assert "chosen by table" in str(ask(near)) and ask(near).build == ANY_PARTS, near
    # two steps: value heads a query head and walks; or four times as long
    for far in (Extent(16, 32, 1, 32768), Extent(16, 16, 1, 131072), Extent(4, 16, 1, 32768)):
        assert "chosen by model" in str(ask(far)), far


@pytest.mark.slow
def test_the_nearest_row_wins_then_the_users_then_the_larger_gain(gpu):
    twice = Extent(16, 16, 1, 65536)
    gpu += [row(PARTS, LONG), row(STAGES, twice)]
    assert ask(LONG).build == PARTS and ask(twice).build == STAGES
    gpu.append(row(STAGES, LONG, ms=0.1))
    assert ask(LONG).build == STAGES
    gpu.append(row(PARTS, twice, ms=0.39, source=tables.USER))
    assert ask(LONG).build == ANY_PARTS and ask(twice).build == PARTS


def test_rows_of_the_device_come_before_those_of_its_kind_which_still_serve(gpu):
    gpu.append(row(PARTS, device="NVIDIA H100"))
    assert ask().build == PARTS and "the package's table of NVIDIA H100" in str(ask())
    gpu.append(row(STAGES, Extent(16, 16, 1, 65536), ms=0.39))
    assert ask().build == STAGES
    assert [row(device=d).known(H200.names) for d in ("NVIDIA H200", "NVIDIA H100", "sm_90")] == [0, 1, 1]
    assert Row("sm_90", PARTS, LONG, 0.3).known(H200.names) == 2 and Row("x", PARTS, LONG, 0.3).known(H200.names) == 3


@pytest.mark.slow
@pytest.mark.parametrize("other", [dict(dtype=torch.float32), dict(V=64), dict(layout="bhtd"), dict(target="triton"),
                                   dict(chunk=32)])
def test_rows_are_for_their_inputs_alone(gpu, other):
    gpu.append(row())
    assert "table" not in str(ask(**other))


@pytest.mark.slow
def test_rows_for_16_bit_serve_both_dtypes_and_those_for_unit_keys_what_normalises_them(gpu):
    gpu += [row(), row(replace(PARTS, contract=tables.UNIT), ms=0.1)]
    found = ask(dtype=torch.bfloat16)
    assert found.build.dtype == "bfloat16" and "table" in str(found)
    assert "0.1 ms" in str(ask(contract=Contract.parse("k=l2norm,q=l2norm"))) and "0.1 ms" not in str(ask())


@pytest.mark.slow
def test_outside_of_tables_the_model_chooses_and_says_why(gpu):
    few, many = ask(Extent(16, 16, 1, 8192)), ask(Extent(16, 16, 8, 32768))
    assert few.build.name == "gdn_c64_bthd_decay_sm90a" and "chosen by model: parts take less time than whole walks" in str(few)
    assert ask().build.name == "gdn_c64_bthd_fused_walk_decay_sm90a" and "and are many" in str(ask())
    assert ask(Extent(4, 8, 1, 32768)).build.name == "gdn_c64_bthd_fused_walk_decay_sm90a"
    assert ask(Extent(4, 8, 1, 16384)).build.name == "gdn_c64_bthd_decay_sm90a"
    assert many.build.name == "gdn_c64_bthd_fused_walk_sm90a"
    parts = varied("walk", partition="decay", longest_first=True, stages=3, descriptors=True)
    assert ask(target="triton").build == Build("triton", 32, schedule=parts)
    whole = varied("walk", stages=3, descriptors=True)
    assert ask(Extent(16, 16, 8, 32768), target="triton").build == Build("triton", 32, schedule=whole)
    assert ask(Extent(16, 16, 8, 32768), target="triton", chunk=64).build == Build("triton", 64, schedule=varied("walk"))
    assert ask(target="triton", chunk=64).build.plan.descriptors
    assert ask(target="triton", chunk=128).build == Build("triton", 128)
    assert ask(target="triton", K=256, V=256).build.plan.v_block == 64


def test_triton_without_a_gpu_is_one_kernel_of_the_usual_chunk(gpu, monkeypatch):
    passes_for(monkeypatch, replace(H200, units=0))
    assert ask(target="triton").build == Build("triton")


@pytest.mark.slow
def test_only_parts_that_begin_early_ask_for_the_promise_of_unit_keys(gpu):
    unit = Contract.parse("k=unit")
    assert ask(contract=unit).build.contract == unit
    assert ask(Extent(16, 16, 8, 32768), contract=unit).build.name == "gdn_c64_bthd_fused_walk_sm90a"
    assert ask(contract=unit, schedule=varied("walk", partition="exact")).build.contract == Contract()
    both = Contract.parse("beta=sigmoid,k=unit,q=l2norm")
    assert str(ask(contract=both, target="triton", chunk=128).build.contract) == "beta=sigmoid,q=l2norm"


def test_a_schedule_that_is_asked_for_is_taken(gpu):
    gpu.append(row())
    asked = ask(schedule="staged", chunk=32)
    assert asked.build == Build("tilelang", 32, schedule="staged")
    assert asked.why == (("schedule", "asked for"), ("chunk", "asked for"))


@pytest.mark.slow
def test_a_chunk_left_open_is_the_rows_or_the_models(gpu):
    assert ask().build.chunk == 64 and ask(target="triton").build.chunk == 32
    gpu.append(row(Build("triton", 16, schedule="replay")))
    assert ask(target="triton").build.chunk == 16 and ask(target="triton", chunk=64).build.chunk == 64


def test_lengths_of_one_class_share_a_choice():
    asked = lambda tokens, **x: choose.choice(a_call(Extent(16, 16, 1, tokens), target="triton", **x))
    choose.kept_choice.cache_clear()
    assert asked(1000) is asked(1001) and asked(1000) is not asked(1000, chunk_size=32)
    assert asked(1000) is not asked(9000) and choose.kept_choice.cache_info().misses == 3


def test_no_parts_in_a_process_that_wants_none(gpu, monkeypatch):
    gpu.append(row())
    monkeypatch.setenv("GDN_CODEGEN_PARTITION", "0")
    assert ask().build.name == "gdn_c64_bthd_fused_walk_sm90a"


@pytest.mark.slow
def test_what_does_not_fit_is_passed_over_with_its_reason(gpu):
    gpu.append(row(replace(STAGES, dtype="float32")))
    got = ask(dtype=torch.float32)
    assert got.build.arch == "" and got.why[0][0] == f"not {gpu[0].about.name}" and "chosen by model" in str(got)


def test_candidates_are_tried_in_order(gpu, monkeypatch):
    passes_for(monkeypatch, replace(H200, arch=""))
    refused = {"fused": "too large", "fused64": "also too large"}
    monkeypatch.setattr(choose, "unfit", lambda b: refused.get(b.plan.name + str(b.plan.v_block or ""), ""))
    got = ask()
    assert got.build.plan == varied("fused", v_block=32)
    assert [reason for what, reason in got.why if what.startswith("not ")] == ["too large", "also too large"]


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("target, dtype, K, V", [("triton", torch.float16, 256, 256), ("triton", torch.float32, 132, 32),
                                                 ("tilelang", torch.float32, 256, 256)])
def test_what_has_no_room_on_hopper_is_refused_with_the_chunks_that_would(gpu, monkeypatch, target, dtype, K, V):
    x = dict(target=target, dtype=dtype, K=K, V=V)
    said = rf"^chunk_size: got 128, with K = {K}, V = {V} in {str(dtype)[6:]}; accepted: 16, 32, 64 \(.* bytes"
    with pytest.raises(ValueError, match=said):
        ask(chunk=128, **x)
    assert choose.fits(ask(chunk=64, **x).build)
    assert (ask(chunk=1, **x).build.chunk, ask(chunk=1, **x).build.plan.v_block) == (1, 16)
    assert ask(chunk=128, schedule="staged", **x).build.chunk == 128  # what is asked for is not looked at
    passes_for(monkeypatch, replace(H200, arch=""))  # another GPU or a CPU: building says what is wrong
    assert ask(chunk=128, **x).build.chunk == 128


@pytest.mark.parametrize("capability, hip, want", [((9, 0), None, "sm_90a"), ((9, 0), "7.0", ""), ((10, 0), None, "")])
def test_which_gpus_are_hopper(capability, hip, want, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=108))
    name = "sm_{}{}".format(*capability)
    assert facts.__wrapped__(torch.device("cuda")) == Facts("cuda", ("a GPU", f"{name} x 108", name), want, 108)


def test_a_device_need_not_be_here():
    """What a call gets there follows from its words alone."""
    call = a_call(LONG, device="cuda", target="tilelang")
    parts, whole = (choose.choice(call, described(x)).build for x in ("sm_90 x 132", "sm_90 x 16"))
    assert (parts.plan.partition, whole.plan.partition) == ("decay", None) and parts.arch == whole.arch == "sm_90a"
    assert choose.choice(call, described("sm_80 x 108")).build.arch == ""
    assert "table of NVIDIA H200" in str(choose.choice(call, H200))
    assert described("cpu") == facts(torch.device("cpu")) == Facts("cpu", ("cpu",))
    for words in ("H200", "sm_90", "sm_90 x 0", "sm_90a x 132", ""):
        with pytest.raises(ValueError, match=rf"^device: got '{words}'; accepted: NVIDIA H200, .* \(sm_90 x 132\), or cpu$"):
            described(words)


def test_where_no_chunk_fits_the_sizes_are_said(gpu, monkeypatch):
    monkeypatch.setattr(choose, "unfit", lambda b: "too large")
    with pytest.raises(ValueError, match=r"V = 128 in float16; accepted: none for these K and V \(too large"):
        ask()
    passes_for(monkeypatch, replace(H200, arch=""))
    assert ask().build == BASE


def test_rows_for_the_contract_come_before_plain_ones_which_still_serve(gpu):
    raw = Contract.parse("beta=sigmoid")
    gpu += [row(PARTS, ms=0.1), row(replace(STAGES, contract=raw))]
    devices, cls = H200.names, LONG.shape_class
    order = tables.nearest(devices, replace(BASE, contract=raw), cls, None)
    assert [r.about.contract for r in order] == [raw, Contract()]
    assert [r.about.contract for r in tables.nearest(devices, BASE, cls, None)] == [Contract()]
    first = next(choose.measured(replace(BASE, contract=raw), "sm_90a", devices, cls, None))[0]
    assert first.contract == raw


@pytest.mark.parametrize("shared, want", [(4, 4), (2, 2), (1, 0)])
def test_a_row_takes_as_many_value_heads_together_as_a_key_head_has(gpu, shared, want):
    """A class of shapes has 3 value heads a key head beside 4."""
    gpu.append(row(replace(PARTS, schedule=replace(PARTS.plan, value_heads=4))))
    chosen = next(choose.measured(BASE, "sm_90a", H200.names, LONG.shape_class, None, shared))[0]
    assert chosen.plan == replace(PARTS.plan, value_heads=want)
    assert [tables.Extent(h, hv, 1, 64).shared for h, hv in ((1, 1), (1, 3), (2, 4), (1, 6), (4, 16), (1, 8), (1, 12))] == \
        [1, 1, 2, 2, 4, 4, 4]


@pytest.mark.parametrize("x, want", [
    (Extent(16, 16, 1, 2048), True), (Extent(16, 16, 1, 300), False), (Extent(1, 1, 1, 255), False),
    (Extent(16, 16, 8, 8192), False),  # a GPU runs 128 walks of 16 chunks at a time
    (Extent(16, 16, 4, 4096, packed=True), True),  # one of these may have all 64 chunks
    (Extent(16, 16, 8, 65536, packed=True), True), (Extent(16, 16, 9, 16384, packed=True), True),
    (Extent(16, 32, 40, 65536, packed=True), True), (Extent(16, 32, 40, 40960, packed=True), False),  # long: any number of walks
    (Extent(16, 16, 8, 8192, packed=True), False),  # short: a wave of whole walks
    (Extent(2, 2, 60, 60000, packed=True), True), (Extent(2, 2, 60, 4000, packed=True), False),  # it may have a long one
    (Extent(64, 128, 4, 1 << 20, packed=True), False)])  # its heads fill the GPU
def test_sequences_are_split_where_parts_take_less_time(gpu, x, want):
    """By the model of their cost, with a GPU of 132 multiprocessors. Triton splits if walks fill at most half of it."""
    assert (ask(x).build.plan.partition is not None) == want
    assert (ask(x, "triton").build.plan.partition is not None) == (2 * x.walks <= 132)
    if x.tokens < 256:
        gpu.append(row(extent=x))
        assert ask(x).build.plan.partition is None  # nor by a row, whose class longer calls share


@pytest.mark.parametrize("x, want", [
    (Extent(8, 64, 63, 63 * 56, packed=True), True), (Extent(16, 32, 20, 20 * 300), True),
    (Extent(8, 8, 16, 16 * 56), False),  # 128 walks, a block for each
    (Extent(16, 32, 20, 20 * 512), True), (Extent(16, 32, 20, 20 * 512, packed=True), False),  # of one length, and of any
    (Extent(16, 32, 20, 20 * 512, packed=True, longest=1024), True), (Extent(16, 32, 8, 8 * 4096), False)])
def test_many_short_sequences_take_persistent_walks(gpu, x, want):
    found = ask(x)
    assert (found.build.plan.name, found.build.plan.persistent) == ("fused_walk", want)
    assert ("many short sequences" in str(found)) == want
    assert not ask(replace(x, sequences=ANY_BATCH, tokens=ANY_BATCH)).build.plan.persistent  # a call that says no size
    assert ask(x, K=64, V=64).build.plan.persistent == want
    assert not ask(x, K=64).build.plan.persistent  # not timed


@pytest.mark.parametrize("x, want", [
    (Extent(8, 8, 16, 65536, True), True), (Extent(8, 8, 16, 16384, True, 1024), False),
    (Extent(8, 8, 16, 16384, True, 12288), True),
    (Extent(16, 32, 40, 40960, True), False), (Extent(16, 32, 40, 40960, True, 32768), True)])
def test_the_longest_sequence_decides_where_the_host_knows_it(gpu, x, want):
    """Equal sequences stay whole. With a long one among short ones there may be more walks than multiprocessors."""
    assert (ask(x).build.plan.partition is not None) == want


@pytest.mark.parametrize("x, want", [
    (Extent(8, 8, 16, 65536, True), "fused_walk"), (Extent(8, 8, 16, 65536, True, 32768), "fused_walk"),
    (Extent(8, 8, 16, 32768, True, 16384), "walk"),
    (Extent(16, 16, 1, 65536, True, 65536), "fused_walk"), (Extent(16, 16, 16, 131072, True, 65536), "fused_walk")])
def test_long_parts_of_uneven_sequences_read_inverses(gpu, x, want):
    """Warm-ups of `fused_walk` would compute inverses again. One sequence is even, and so are long packs of many walks."""
    plan = ask(x).build.plan
    assert (plan.name, plan.partition) == (want, "decay")


def test_rows_do_not_serve_a_pack_that_is_known_to_be_uneven(gpu):
    gpu.append(row(STAGES, Extent(8, 8, 16, 16384)))
    for longest, want in ((0, True), (1024, True), (2048, True), (12288, False)):
        assert (ask(Extent(8, 8, 16, 16384, True, longest)).build == STAGES) == want


def test_debug_prints_one_line_a_kind_of_call(gpu, monkeypatch, capsys):
    gpu.append(row())
    monkeypatch.setenv("GDN_DEBUG", "1")
    ask()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (f"gdn_codegen: tilelang {PARTS.name}: chosen by table: the package's table of NVIDIA H200: 0.3 ms at "
                    "1 sequence, 32768 tokens, heads 16/16; chunk: left open")


# --- tables ----------------------------------------------------------------------------------------------------------
def test_rows_survive_json():
    own = varied("walk", form="direct", kernels=(("G", "Tinv", "beta"), ("o", "S")))
    rows = (row(), row(STAGES), row(replace(STAGES, contract=Contract.parse("g=raw"))), row(replace(STAGES, schedule=own)))
    table = {"device": "NVIDIA H200", "kind": "sm_90 x 132", "target": "tilelang", "versions": {},
             "rows": [tables.as_json(r) for r in rows]}
    assert tables.from_json(json.loads(json.dumps(table)), tables.PACKAGE) == rows


@pytest.mark.slow
def test_the_packages_tables_can_be_read_and_name_builds_that_fit():
    paths = sorted(tables.PACKAGED.glob("*.json"))
    assert paths
    for path in paths:
        for r in tables.from_json(json.loads(path.read_text()), tables.PACKAGE):
            assert not choose.unfit(r.about), r


def test_a_table_that_is_broken_costs_a_warning_and_no_call(tmp_path):
    path = tmp_path / "table.json"
    row = tables.as_json(tables.Row("x", Build("tilelang"), tables.Extent(2, 4, 1, 64), 1.0))
    head = dict(device="x", target="tilelang")
    path.write_text(json.dumps({**head, "rows": [row]}))
    assert len(tables.read(path, tables.USER)) == 1
    bad = [dict(ms="fast"), dict(ms=None), dict(ms=0), dict(model_ms=float("nan")), dict(H="1"), dict(HV=-2), dict(tokens=40.5)]
    for text in ("{", "[]", "[" * 100000, *(json.dumps({**head, "rows": [x]}) for x in ({}, *(row | y for y in bad)))):
        path.write_text(text)
        with pytest.warns(UserWarning, match=r"table\.json is no table of choices"):
            assert tables.read(path, tables.USER) == ()


def test_a_users_table_serves_the_op_from_its_second_start(tmp_path, monkeypatch, capsys):
    """By device and versions: what was measured under other versions is not found."""
    monkeypatch.setenv("GDN_CODEGEN_CACHE", str(tmp_path))
    monkeypatch.setenv("GDN_DEBUG", "1")
    x = problem([40], 1, 2, 32, 32)
    b = Build("triton", 16, schedule=varied("staged", v_block=16), head_dim_k=32, head_dim_v=32)
    r = Row("cpu", b, Extent(1, 2, 1, 40), 1.0)

    def start():
        launch.forget()
        choose.kept_choice.cache_clear()
        tables.rows.cache_clear()

    def run():
        start()
        o, _ = call(lambda *a, **k: chunk_gated_delta_rule(*a, target="triton", **k), x)
        assert rms_error(o, expected(x)[0]) < 5e-3
        return capsys.readouterr().err

    assert "chosen by model" in run()
    path = tables.own_path("cpu", "triton")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"device": "cpu", "target": "triton", "rows": [tables.as_json(r)]}))
    assert f"{b.name}: chosen by table: the user's table of cpu" in run()
    monkeypatch.setattr(tables, "versions", lambda target: {"torch": "another"})
    assert "chosen by model" in run()
    start()


# --- schedules with changed fields -----------------------------------------------------------------------------------
def test_names_and_commands_tell_changed_fields_apart(tmp_path):
    from gdn_codegen.cli import main
    assert changes(PARTS.plan, "sm_90a") == {"partition": "decay", "part_chunks": 32}
    assert changes(replace(PARTS.plan, name="mine")) == {}
    assert PARTS.name == "gdn_c64_bthd_decay32_sm90a" and STAGES.name == "gdn_c64_bthd_walk_stages3_sm90a"
    assert main(["build", "--target", "triton", "--set", "v_block=32", "--set", "inverse=doubling", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("*.py")
    assert path.stem == "gdn_c32_bthd_walk_doubling_vblock32_stages3"
    assert "--set v_block=32" in path.read_text() and "--set inverse=doubling" in path.read_text()


def test_kernels_are_a_field_like_others_and_the_command_in_a_module_rebuilds_it(tmp_path):
    from gdn_codegen.cli import main
    words = ["--schedule", "walk", "--set", "kernels=G,Tinv,beta/o,S", "--set", "form=direct"]
    assert main(["build", "--target", "triton", *words, "--out", str(tmp_path / "a")]) == 0
    (path,) = tmp_path.rglob("*.py")
    assert path.stem == "gdn_c64_bthd_walk_GTinvbeta_oS_direct" and "G_Tinv_beta_kernel" in path.read_text()
    made = re.search(r"^Made by: gdn_codegen (.*)", path.read_text(), re.M)[1].split()
    assert main([*made, "--out", str(tmp_path / "b")]) == 0
    assert (tmp_path / "b" / "triton" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("word", ["kernels=", "kernels=G,/o,S", "kernels=G//o,S", "kernels=G o,S"])
def test_kernels_that_are_no_groups_of_names(word, capsys):
    from gdn_codegen.cli import main
    assert main(["build", "--target", "triton", "--set", word]) == 2
    assert f"set: got '{word}'" in capsys.readouterr().err


def test_parts_of_so_many_chunks_need_parts():
    with pytest.raises(ScheduleError, match="part_chunks=4"):
        Schedule("mine", (("o", "S"),), part_chunks=4)
    with pytest.raises(ScheduleError, match="part_chunks=-1"):
        varied("walk", partition="decay", part_chunks=-1)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("target, page, dtype", [("triton", "kimi_delta_attention", torch.bfloat16),
                                                 ("tilelang", "gla", torch.float32), ("triton", "gla", torch.float32)])
def test_calls_that_give_no_chunk_get_a_smaller_one_beside_wide_states(gpu, monkeypatch, target, page, dtype):
    x = dict(target=target, dtype=dtype, K=256, V=256, algorithm=page)
    assert ask(**x).build.chunk == 32
    with pytest.raises(ValueError, match=r"^chunk_size: got 64, with K = 256, V = 256 in .*; accepted: 16, 32 \("):
        ask(chunk=64, **x)


@pytest.mark.parametrize("x, want", [
    (Extent(4, 12, 15, 17040, True), False), (Extent(4, 12, 15, 34080, True), True),  # equal lengths: 1.34 and 1.17 times as long
    (Extent(4, 4, 27, 32278, True), True), (Extent(4, 44, 27, 32278, True), False),  # one long one: up to 27 times, and 3
    (Extent(4, 132, 4, 1 << 20, True), False)])  # the heads of one sequence fill the GPU
def test_parts_of_packs_of_unknown_lengths_pay_where_the_odds_are_good(x, want):
    assert size.worth_it(x, 132, targets.find("tilelang").splits) == want
