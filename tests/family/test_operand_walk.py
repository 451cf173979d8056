"""operand_walk: a kernel over chunks computes all that depends on no state, so that Hopper's warp groups walk any member."""
import pytest
from members import MEMBERS
from tiers import every

from gdn_codegen.algorithms import find
from gdn_codegen.ir.ops import ORDER
from gdn_codegen.ir.types import BYTES
from gdn_codegen.passes.algebra import decayed_products
from gdn_codegen.passes.storage.live_bytes import live_bytes, packed_bytes
from gdn_codegen.passes.storage.stored_values import StoredValues
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.call import choose
from gdn_codegen.runtime.call.device import Facts
from gdn_codegen.runtime.call.size import size_of
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.schedule import ScheduleError, varied

pytestmark = pytest.mark.slow

CHANNELS = ("gla", "kimi_delta_attention", "gated_delta_rule_2", "rwkv7")
#: What a kernel over chunks computes for a walk. A page with one number for each token has its decays in the walk, as vectors.
EARLIER = {"cumsum", "to_middle", "pairs", "diag_inverse", "eye"}


def build(page, K=128, dtype="bfloat16", chunk=64, **fields):
    return Build("tilelang", chunk, algorithm=page, schedule=varied("operand_walk", "sm_90a", **fields), dtype=dtype,
                 head_dim_k=K, head_dim_v=K, arch="sm_90a")


def states(walk):
    """The values of a walk that depend on a state."""
    (loop,) = [s for s in walk.body if not hasattr(s, "kind")]
    found = {c.name for c in loop.carried}
    for o in walk.ops:
        found |= {o.out} if found & set(o.args) else set()
    return found


@pytest.mark.parametrize("K, page", every(2, [128, 64], MEMBERS))
def test_every_member_fits_and_walks_what_depends_on_a_state(page, K):
    """Each product of the walk reads a state, or adds to one that does: its columns are of V, and it accumulates."""
    earlier, walk = lowered(build(page, K, v_block=64)).kernels
    assert (earlier.grid, walk.grid) == ("chunks", "sequences") and not earlier.agents
    assert [(a.name, a.threads) for a in walk.agents] == [("state", 128), ("loader", 32), ("store", 32)]
    kinds = {o.kind for o in walk.ops}
    assert not kinds & EARLIER and (page not in CHANNELS or "exp" not in kinds)
    depends = states(walk)
    accumulators = {o.args[2] for o in walk.ops if o.kind == "matmul" and o.args[2:]}
    for o in walk.ops:
        assert o.kind != "matmul" or depends & set(o.args) or o.out in accumulators or read_by(walk, o.out) <= depends, o


@pytest.mark.parametrize("page", every(3, MEMBERS))
@pytest.mark.parametrize("chunk", [16, 32])
def test_every_member_fits_in_short_chunks(page, chunk):
    """Products of the state have as many columns as a chunk has tokens. A copy unit writes vectors at multiples of 128 bytes."""
    earlier, walk = lowered(build(page, chunk=chunk, v_block=64, stages=3)).kernels
    assert earlier.grid == "chunks" and [a.name for a in walk.agents] == ["state", "loader", "store"]
    assert any(b.shape == (64, chunk) for b in walk.buffers if b.space == "fragment")
    rings = [b for b in walk.buffers if b.space == "shared" and len(b.dims) == 1 and b.slots > 1]
    assert all((b.shape[0] + b.pad) * BYTES[b.dtype] % 128 == 0 for b in rings)
    assert chunk > 16 or page not in ("gated_delta_rule", "kimi_delta_attention") or any(b.pad for b in rings)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("n", [16, 32])
@pytest.mark.parametrize("page", ["gated_delta_rule", "kimi_delta_attention"])
def test_rows_of_keys_as_short_as_a_chunk_are_refused(page, n):
    """What counts is the dim, not its extent: tiles of K have rows of 128 bytes."""
    b = Build("tilelang", n, algorithm=page, schedule=varied("operand_walk", "sm_90a"), dtype="bfloat16", head_dim_k=n,
              head_dim_v=64, arch="sm_90a")
    with pytest.raises(ScheduleError, match=r"multiples of 64, or of 16 tokens.* K and V of 64 or 128"):
        lowered(b)


@pytest.mark.parametrize("page, ending", [("gated_delta_rule", "operand_gradient"), ("kimi_delta_attention", "channel_gradient")])
@pytest.mark.parametrize("chunk", [16, 32])
def test_walks_back_have_chunks_of_64(page, ending, chunk):
    b = Build("tilelang", chunk, algorithm=f"{page}.gradient", schedule=varied(ending, "sm_90a"), dtype="bfloat16", arch="sm_90a")
    with pytest.raises(ScheduleError, match=r"C=64|tiles of 64 columns"):
        lowered(b)


def test_tiles_of_short_chunks_lie_as_results_of_products():
    """Threads move them to shared memory in this order, whatever else a loop reads."""
    walk = lowered(build("kimi_delta_attention", chunk=16, v_block=64)).kernels[1]
    moved = {o.args[0] for o in walk.ops if o.kind in ("move", "transpose") and o.args[0].startswith("o")}
    assert moved and all(o.attr(ORDER) == "sums" for o in walk.ops if o.out in moved)


def read_by(k, name):
    return {o.out for o in k.ops if name in o.args}


def test_the_operands_of_kimi_delta_attention():
    """The tiles that its products read, and the vector that the state decays by."""
    from gdn_codegen.passes.cut.roles import roles
    found = roles(find("kimi_delta_attention").trace())["operand"]
    assert len(found) == 6 and "Tinv" in found and "chunk_decay" in found


def test_fragments_do_not_stay_live_over_later_products(monkeypatch):
    """The sums of levels are computed as soon as their products are, and tiles in shared memory are cast again for each level.
    With neither, a thread of 128 would hold more than 300 registers of fragments. So where warps do not compute the products."""
    monkeypatch.setattr(decayed_products, "by_op", lambda *args: (0, None))
    def live():
        return live_bytes(lowered(build("kimi_delta_attention")).kernels[0], "fragment") // 512
    lowered.cache_clear()
    assert live() <= 192
    for name in ("frees", "cast_again"):
        monkeypatch.setattr(StoredValues, name, lambda v, o: False)
    lowered.cache_clear()
    assert live() > 300
    monkeypatch.undo()
    lowered.cache_clear()


@pytest.mark.parametrize("page, K, threads, blocks", [
    ("kimi_delta_attention", 128, 256, 2), ("kimi_delta_attention", 64, 256, 2), ("gated_delta_rule_2", 128, 256, 2),
    ("gla", 128, 128, 0), ("simple_gla", 128, 128, 0), ("delta_rule", 128, 128, 8), ("rwkv7", 128, 512, 0)])
def test_threads_and_blocks_follow_from_the_fragments_that_are_live_at_once(page, K, threads, blocks):
    k = lowered(build(page, K, v_block=64)).kernels[0]
    assert (k.threads, k.blocks_per_sm) == (threads, blocks)


def test_the_mbarriers_of_a_block_have_room():
    """An H100 refused a kernel with 231680 bytes of tiles: the mbarriers take a KiB."""
    with pytest.raises(ScheduleError, match=r"shared has 231424 bytes, \d+ are needed: .*; stages=3 fits"):
        lowered(build("kimi_delta_attention", v_block=64, stages=4))


def test_what_only_outputs_read_has_one_slot_where_rings_do_not_fit():
    """It is loaded while the state is computed. The two steps of Gated DeltaProduct then have two stages."""
    def slots(page, **fields):
        walk = lowered(build(page, v_block=64, **fields)).kernels[1]
        loads = {o.out for o in walk.ops if o.kind == "load"}
        return {b.name: b.slots for b in walk.buffers if b.space == "shared" and b.name in loads}
    assert {n for n, k in slots("gated_delta_product").items() if k == 1} == {"q", "q_k1T_D", "q_k2T_D_beta2"}
    assert {*slots("kimi_delta_attention").values()} == {2}
    three = slots("kimi_delta_attention", stages=3)
    assert {n for n, k in three.items() if k == 1} == {"exp_G_q", "operand_of_o"} and {*three.values()} == {1, 3}


def agents_of(page, walks):
    """The assignment for so many walks, their class, where no GPU is known. `gla` has no inverse."""
    return "early_outputs" if walks < 6 and page != "gla" else "operand_walk"


#: What dispatch asks for, as errors would be the largest without it.
RESIDUALS = {"gla": "@state,@pair", "rwkv7": "@right_side,@solution",
             "kimi_delta_attention": "@update", "gated_delta_rule_2": "@update"}


@pytest.mark.parametrize("page, walks, want", [
    ("kimi_delta_attention", 4, {"v_block": 64}), ("kimi_delta_attention", 8, {}), ("gla", 8, {}), ("rwkv7", 8, {}),
    ("gated_delta_product", 8, {"v_block": 64})])
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.usefixtures("unchecked")
def test_dispatch_takes_it_where_other_walks_do_not_fit(page, walks, want, few):
    """walks: the power of two nearest to their number. Few walks have halves of V; so has a page whose tiles leave no room."""
    options = choose.modelled(Build("tilelang", algorithm=page, dtype="bfloat16"), "sm_90a", few, (0, walks, 13), None)
    found = next(b for b, _ in options if choose.fits(b) and not b.plan.partition)
    agents, residuals = agents_of(page, walks), RESIDUALS.get(page, "")
    assert found.plan == varied("operand_walk", "sm_90a", agents=agents, residuals=residuals, **want)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("walks, v_block, early", [
    (16, 64, True), (33, 64, True), (34, 64, False), (49, 64, False), (50, 0, True), (66, 0, True), (67, 0, False),
    (132, 0, False)])
def test_halves_of_v_are_for_few_walks_of_a_gpu(walks, v_block, early):
    """Each half loads the tiles with columns of K, so that halves of many walks wait for memory. Then outputs come last."""
    extent, on = Extent(walks, walks, 1, 8192), Facts("cuda", ("NVIDIA H200",), "sm_90a", 132)
    size = size_of(extent, "tilelang", on)
    b = Build("tilelang", algorithm="kimi_delta_attention", dtype="bfloat16")
    options = choose.modelled(b, "sm_90a", False, size.shape_class, None, **size.asked)
    plan = next(b for b, _ in options if choose.fits(b)).plan
    assert (plan.v_block, plan.agents) == (v_block, "early_outputs" if early else "operand_walk")


@pytest.mark.parametrize("page, walks, tokens", [
    ("gated_delta_product", 5, 11), ("gla", 4, 11), ("kimi_delta_attention", 4, 11), ("gated_delta_rule_2", 3, 15)])
@pytest.mark.usefixtures("unchecked")
def test_dispatch_splits_few_walks(page, walks, tokens):
    """Of more walks, halves of V occupy most multiprocessors. The bound of channels pays from 1449 tokens on."""
    def parts(*shape_class):
        options = choose.modelled(Build("tilelang", algorithm=page, dtype="bfloat16"), "sm_90a", True, (0, *shape_class), None)
        found = next(b for b, _ in options if choose.fits(b)).plan
        block = 64 if shape_class[0] < 6 or page == "gated_delta_product" else 0
        agents = "operand_walk" if found.partition else agents_of(page, shape_class[0])
        assert found == varied("operand_walk", "sm_90a", v_block=block, partition=found.partition, agents=agents,
                               residuals=RESIDUALS.get(page, ""))
        return found.partition
    assert (parts(walks, tokens), parts(6, 15)) == ("decay", None)
    if page != "gated_delta_product":
        assert (parts(4, 10), parts(5, 15)) == (None, None)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("few", [True, False])
def test_dispatch_keeps_to_chunks_of_64(few):
    """A schedule, or a row of a table, may ask for short chunks on warp groups."""
    for chunk in (16, 32):
        b = Build("tilelang", chunk, algorithm="kimi_delta_attention", dtype="bfloat16")
        assert not next(b for b, _ in choose.modelled(b, "sm_90a", few, (0, 4, 13), chunk) if choose.fits(b)).arch


def test_a_page_that_bounds_no_token_is_not_split():
    options = choose.modelled(Build("tilelang", algorithm="rwkv7", dtype="bfloat16"), "sm_90a", True, (0, 3, 15), None)
    plan = next(b for b, _ in options if choose.fits(b)).plan
    assert plan == varied("operand_walk", "sm_90a", v_block=64, agents="early_outputs", residuals=RESIDUALS["rwkv7"])


def test_the_bound_of_channels_is_computed_first():
    """What only it reads leaves its place in shared memory to later tiles, so that two blocks share a multiprocessor. A block had
    512 threads otherwise, and took 1207 us on an H100 where it took 690 without the bound."""
    def shared(**fields):
        k = lowered(build("kimi_delta_attention", v_block=64, **fields)).kernels[0]
        assert k.threads == 256
        return packed_bytes(k)
    assert shared() <= shared(partition="decay") < 1.2 * shared() < 100 * 1024


def test_the_largest_of_a_vector_is_an_array_of_one():
    """TileLang's macros write no plain variable."""
    k = lowered(build("gla", v_block=64, partition="decay")).kernels[0]
    (bound,) = (o for o in k.ops if o.kind == "row_max")
    assert next(b for b in k.buffers if b.name == bound.buffer).space == "sum"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page, walks, tokens, sizes, want", [
    ("gated_delta_rule", 16, 512, 128, ("operand_walk", None)), ("gated_delta_rule", 33, 512, 128, ("operand_walk", None)),
    ("gated_delta_rule", 16, 1024, 128, ("operand_walk", "decay")), ("gated_delta_rule", 8, 4096, 128, ("operand_walk", "decay")),
    ("gated_delta_rule", 34, 512, 128, ("fused_walk", None)), ("gated_delta_rule", 32, 2048, 128, ("walk", "decay")),
    ("gated_delta_rule", 16, 8192, 128, ("walk", "decay")), ("gated_delta_rule", 16, 512, 64, ("fused_walk", None)),
    ("delta_rule", 16, 512, 128, ("fused_walk", None))])
def test_few_walks_with_one_gate_for_a_head(page, walks, tokens, sizes, want):
    """In halves of V with early outputs, where walks times tokens are few. A page that keeps all it holds was not timed."""
    extent, on = Extent(walks, walks, 1, tokens), Facts("cuda", ("NVIDIA H200",), "sm_90a", 132)
    size = size_of(extent, "tilelang", on)
    b = Build("tilelang", algorithm=page, dtype="bfloat16", head_dim_k=sizes, head_dim_v=sizes)
    options = choose.modelled(b, "sm_90a", size.few, size.shape_class, None, **size.asked)
    plan = next(b for b, _ in options if choose.fits(b)).plan
    assert (plan.name, plan.partition) == want
    assert plan.name != "operand_walk" or (plan.v_block, plan.agents) == (64, "early_outputs")
