"""The order of all passes: one list for each kind of device. A target names its list.

An entry has the name of its pass, to which it passes parts of the context. `run_passes` runs a list, and verifies the program
after each pass.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..devices import Cores, Device, Groups
from ..ir.core import Program
from ..ir.verify import verify, verify_stage
from ..schedule.contract import PLAIN, Contract
from ..schedule.schedule import Schedule
from .abi.caller_inputs import caller_inputs
from .abi.caller_states import caller_states
from .abi.memory import memory
from .agents.assign import assign
from .agents.feed import feed
from .agents.operands import operands
from .agents.transfer import transfer
from .agents.warp_groups import warp_groups
from .algebra.accumulate import accumulate
from .algebra.across_rows import across_rows
from .algebra.bounds import bounds
from .algebra.canonical import canonical
from .algebra.check_exponents import check_exponents
from .algebra.clamp_decay import clamp_decay
from .algebra.decayed_products import decayed_products
from .algebra.decompose import decompose
from .algebra.early_terms import early_terms
from .algebra.fewer_exponentials import fewer_exponentials
from .algebra.fold_into_inverse import fold_into_inverse
from .algebra.masks import masks
from .algebra.moved_rows import moved_rows
from .algebra.norms_from_products import norms_from_products
from .algebra.operand_scales import operand_scales
from .algebra.partial_sums import partial_sums
from .algebra.precision import precision
from .algebra.recent_rows import recent_rows
from .algebra.residuals import residuals
from .algebra.reuse_products import reuse_products
from .algebra.rewrite import rewrite
from .algebra.row_scales import row_scales
from .algebra.shared_tiles import shared_tiles
from .algebra.single_token import single_token
from .algebra.split_sums import split_sums
from .algebra.stacked_inverse import stacked
from .algebra.vectorise import vectorise
from .algebra.whole_vectors import whole_vectors
from .cut.boundaries import boundaries
from .cut.comments import comments
from .cut.decay_bound import decay_bound
from .cut.if_declined import if_declined
from .cut.kernels import cut
from .cut.last_chunk import last_chunk
from .cut.partition import partition
from .cut.warm_up import warm_up
from .cut.warm_up_bounds import warm_up_bounds
from .heads.added_rows import added_rows
from .heads.columns import heads_by_columns
from .heads.key_head import heads_by_key_head
from .heads.threads import heads_by_threads
from .launch.block_threads import block_threads
from .launch.by_length import by_length
from .launch.chosen_parts import chosen_parts
from .launch.instance_warps import instance_warps
from .launch.overlapping import overlapping
from .launch.persistent import persistent
from .launch.side_by_side import side_by_side
from .launch.zero_products import zero_products
from .loops.column_loop import column_loop
from .loops.column_pieces import column_pieces
from .loops.middle_rows import middle_rows
from .loops.prefetch_parts import prefetch_parts
from .loops.prefetch_tokens import prefetch_tokens
from .loops.prefetch_vectors import prefetch_vectors
from .loops.register_room import register_room
from .loops.row_pieces import row_pieces
from .loops.token_groups import token_groups
from .loops.transposition import transpose
from .loops.warm_up_loop import warm_up_loop
from .storage.arrange import arrange
from .storage.channels import channels
from .storage.descriptors import descriptors
from .storage.layouts import layouts
from .storage.pack import pack
from .storage.place import place
from .storage.rings import rings
from .storage.unfilled import unfilled
from .sync.async_copies import async_copies
from .sync.mbarriers import mbarriers
from .sync.proofs import check_rings, check_storage, check_waits
from .sync.reused_memory import reused_memory
from .sync.single_launch import single_launch
from .sync.synchronise import synchronise


@dataclass(frozen=True)
class Context:
    """What passes know besides the program: schedule, device, extents of tiles, dtype of q, k and v, and contract."""

    schedule: Schedule
    device: Device
    sizes: tuple[tuple[str, int], ...]
    dtype: str
    contract: Contract = PLAIN

    @property
    def cores(self) -> Cores:
        """The device, as one whose cores share no memory."""
        assert isinstance(self.device, Cores), f"{self.device.name} has one agent"
        return self.device

    @property
    def groups(self) -> Groups:
        """The device, as one with warp groups."""
        assert isinstance(self.device, Groups), f"{self.device.name} has no warp groups"
        return self.device


Pass = Callable[[Program, Context], Program]
#: Names and passes, in the order in which they run.
Passes = tuple[tuple[str, Pass], ...]


FRONT: Passes = (
    ("boundaries", lambda p, c: boundaries(p, c.schedule)),
    ("canonical", lambda p, c: canonical(p, c.schedule)),
    ("check_exponents", lambda p, c: check_exponents(p)),
    ("reuse_products", lambda p, c: reuse_products(p)),
    ("partial_sums", lambda p, c: partial_sums(p)),
    ("operand_scales", lambda p, c: operand_scales(p, c.schedule)),
    ("early_terms", lambda p, c: early_terms(p, c.schedule)),
    ("split_sums", lambda p, c: split_sums(p, c.schedule)),
    ("caller_states", lambda p, c: caller_states(p, c.contract)),
    ("caller_inputs", lambda p, c: caller_inputs(p, c.contract, narrow=not isinstance(c.device, Cores))),
    ("recent_rows", lambda p, c: recent_rows(p, c.device)),
    ("clamp_decay", lambda p, c: clamp_decay(p)),
    ("decayed_products", lambda p, c: decayed_products(p, c.dtype, isinstance(c.device, Groups), c.device.decayed_block_rows)),
    ("row_scales", lambda p, c: row_scales(p)),
    ("decay_bound", lambda p, c: decay_bound(p, c.schedule)),
    ("rewrite", lambda p, c: rewrite(p, c.schedule)),
    ("residuals", lambda p, c: residuals(p, c.schedule, c.dtype)),
    ("shared_tiles", lambda p, c: shared_tiles(p)),
    ("cut", lambda p, c: cut(p, c.schedule, dict(c.sizes), c.device.v_block, apart=isinstance(c.device, Cores))),
    ("last_chunk", lambda p, c: last_chunk(p)),
    ("warm_up_bounds", lambda p, c: warm_up_bounds(p, c.schedule, c.device, c.dtype)),
    ("partition", lambda p, c: partition(p, c.schedule, c.device, c.dtype)),
    ("if_declined", lambda p, c: if_declined(p, c.schedule, c.device)),
    ("norms_from_products", lambda p, c: norms_from_products(p, c.schedule, c.dtype)),
    ("fewer_exponentials", lambda p, c: fewer_exponentials(p, c.schedule)),
    ("single_token", lambda p, c: single_token(p, c.schedule, c.device)),
    ("masks", lambda p, c: masks(p)),
    ("comments", lambda p, c: comments(p)),
    ("precision", lambda p, c: precision(p, c.schedule, c.dtype, c.contract, (
        "matmul", *(("unit_lower_inverse",) if stacked(p.sizes["C"], c.schedule, c.dtype, c.device) else ())))),
    ("decompose", lambda p, c: decompose(p, c.schedule, c.dtype, c.device)),
    ("fold_into_inverse", lambda p, c: fold_into_inverse(p, c.device.solves_whole)),
    ("accumulate", lambda p, c: accumulate(p)),
)
#: Threads and layouts of a thread block, after `place` has chosen the buffers.
BLOCKS: Passes = (
    ("block_threads", lambda p, c: block_threads(p, c.device)),
    ("side_by_side", lambda p, c: side_by_side(p, c.device)),
    ("layouts", lambda p, c: layouts(p, c.device)),
)
ONE_AGENT: Passes = (
    *FRONT,
    ("bounds", lambda p, c: bounds(p)),
    ("transpose", lambda p, c: transpose(p, c.schedule)),
    ("assign", lambda p, c: assign(p, c.device)),
    ("token_groups", lambda p, c: token_groups(p, c.schedule)),
    ("operands", lambda p, c: operands(p, c.device)),
    ("heads_by_threads", lambda p, c: heads_by_threads(p, c.schedule, c.device)),
    ("heads_by_key_head", lambda p, c: heads_by_key_head(p, c.schedule, c.device)),
    ("place", lambda p, c: place(p, c.schedule, c.device)),
    ("async_copies", lambda p, c: async_copies(p, c.device)),
    *BLOCKS,
    ("check_storage", lambda p, c: check_storage(p)),
    ("synchronise", lambda p, c: synchronise(p, c.device)),
    ("reused_memory", lambda p, c: reused_memory(p, c.device)),
    ("check_waits", lambda p, c: check_waits(p, c.device)),
    ("single_launch", lambda p, c: single_launch(p, c.schedule, c.device)),
)
INSTANCES: Passes = (
    *FRONT,
    ("bounds", lambda p, c: bounds(p)),
    ("transpose", lambda p, c: transpose(p, c.schedule)),
    ("prefetch_parts", lambda p, c: prefetch_parts(p)),
    ("row_pieces", lambda p, c: row_pieces(p)),
    ("middle_rows", lambda p, c: middle_rows(p)),
    ("column_loop", lambda p, c: column_loop(p, c.schedule)),
    ("register_room", lambda p, c: register_room(p, c.schedule)),
    ("prefetch_tokens", lambda p, c: prefetch_tokens(p)),
    ("prefetch_vectors", lambda p, c: prefetch_vectors(p)),
    ("assign", lambda p, c: assign(p, c.device)),
    ("warm_up", lambda p, c: warm_up(p, c.schedule)),
    ("descriptors", lambda p, c: descriptors(p, c.schedule)),
    ("operands", lambda p, c: operands(p, c.device)),
    ("place", lambda p, c: place(p, c.schedule, c.device)),
    ("instance_warps", lambda p, c: instance_warps(p, c.schedule)),
    ("check_storage", lambda p, c: check_storage(p)),
    ("synchronise", lambda p, c: synchronise(p, c.device)),
    ("warm_up_loop", lambda p, c: warm_up_loop(p)),
    ("check_waits", lambda p, c: check_waits(p, c.device)),
    ("single_launch", lambda p, c: single_launch(p, c.schedule, c.device)),
)
GROUPS: Passes = (
    *FRONT,
    ("bounds", lambda p, c: bounds(p, c.schedule.in_turns)),
    ("transpose", lambda p, c: transpose(p, c.schedule)),
    ("prefetch_parts", lambda p, c: prefetch_parts(p)),
    ("assign", lambda p, c: assign(p, c.device)),
    ("warp_groups", lambda p, c: warp_groups(p, c.schedule, c.groups)),
    ("warm_up", lambda p, c: warm_up(p, c.schedule)),
    ("operands", lambda p, c: operands(p, c.device)),
    ("heads_by_threads", lambda p, c: heads_by_threads(p, c.schedule, c.device)),
    ("heads_by_key_head", lambda p, c: heads_by_key_head(p, c.schedule, c.device)),
    ("rings", lambda p, c: rings(p, c.schedule, c.groups)),
    ("place", lambda p, c: place(p, c.schedule, c.device)),
    ("async_copies", lambda p, c: async_copies(p, c.device)),
    ("unfilled", lambda p, c: unfilled(p)),
    *BLOCKS,
    ("by_length", lambda p, c: by_length(p, c.schedule)),
    ("chosen_parts", lambda p, c: chosen_parts(p, c.groups)),
    ("persistent", lambda p, c: persistent(p, c.schedule, c.groups)),
    ("zero_products", lambda p, c: zero_products(p)),
    ("check_storage", lambda p, c: check_storage(p)),
    ("mbarriers", lambda p, c: mbarriers(p, c.groups)),
    ("reused_memory", lambda p, c: reused_memory(p, c.device)),
    ("warm_up_loop", lambda p, c: warm_up_loop(p)),
    ("check_rings", lambda p, c: check_rings(p, c.groups)),
    ("single_launch", lambda p, c: single_launch(p, c.schedule, c.device)),
    ("overlapping", lambda p, c: overlapping(p, c.groups)),
)
CORES: Passes = (
    *FRONT,
    ("column_pieces", lambda p, c: column_pieces(p, c.schedule)),
    ("heads_by_columns", lambda p, c: heads_by_columns(p, c.schedule, c.cores)),
    ("moved_rows", lambda p, c: moved_rows(p)),
    ("whole_vectors", lambda p, c: whole_vectors(p)),
    ("across_rows", lambda p, c: across_rows(p)),
    ("vectorise", lambda p, c: vectorise(p)),
    ("assign", lambda p, c: assign(p, c.device)),
    ("transfer", lambda p, c: transfer(p, c.cores)),
    ("feed", lambda p, c: feed(p, c.cores)),
    ("added_rows", lambda p, c: added_rows(p, c.cores)),
    ("arrange", lambda p, c: arrange(p, c.schedule, c.cores)),
    ("channels", lambda p, c: channels(p, c.schedule.channel_slots)),
    ("pack", lambda p, c: pack(p, c.schedule, c.cores)),
    ("synchronise", lambda p, c: synchronise(p, c.device)),
    ("check_waits", lambda p, c: check_waits(p, c.device)),
    ("single_launch", lambda p, c: single_launch(p, c.schedule, c.device)),
)
#: Functions that are called after every pass with (name, before, after, context). Tests add their checks here.
observers: list[Callable[[str, Program, Program, Context], None]] = []


def run_passes(p: Program, passes: Passes, device: Device, schedule: Schedule, sizes: dict[str, int], dtype: str,
               contract: Contract = PLAIN, upto: str = "") -> Program:
    """The traced program `p` after `passes` for `device`. `verify` checks the program after each pass. `targets.lower` calls this
    with the passes of a target.

    sizes: C, K and V as callers know them. upto: the last pass to run, "" for all passes.
    """
    p = verify(memory(p, sizes, device, contract))
    c = Context(schedule.adapted(p), device.with_shared(schedule.shared_kib), p.dims, dtype, contract)
    for name, run in passes:
        before, p = p, run(p, c)
        if p == before:  # many passes leave programs for other targets or schedules as they are
            pass
        elif replace(p, stage=before.stage) == before:
            verify_stage(p)
        else:
            verify(p, before)
        for see in observers:
            see(name, before, p, c)
        if name == upto:
            break
    return p
