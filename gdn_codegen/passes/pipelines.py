"""The passes of each target, in order. No logic here: a pass takes (program, context) from its neighbours below."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..devices import HOPPER, TRITON, Cores, Device, Groups
from ..devices.ascend_a2 import ASCEND_A2
from ..devices.sm_90a import SM_90A
from ..ir.core import Program
from ..ir.verify import verify
from ..prove.happens_before import check
from ..prove.rings import check_rings
from ..prove.storage import storage
from ..schedule.contract import PLAIN, Contract
from ..schedule.schedule import Schedule
from .abi.caller_inputs import accept
from .abi.caller_states import states
from .abi.memory import memory
from .agents.assign import assign
from .agents.feed import feed
from .agents.operands import operands
from .agents.transfer import transfer
from .agents.warp_groups import groups
from .algebra.accumulate import accumulate
from .algebra.clamp_decay import floor
from .algebra.decompose import decompose
from .algebra.fold_into_inverse import inverses
from .algebra.masks import masks
from .algebra.norms_from_products import diagonal
from .algebra.precision import precision
from .algebra.rewrite import rewrite
from .algebra.row_scales import scale
from .algebra.vectorise import vectorise
from .common import walks
from .cut.decay_bound import forget
from .cut.kernels import cut
from .cut.partition import partition
from .cut.warm_up import early
from .cut.warm_up_bounds import near
from .loops.batch_head_sums import heads
from .loops.batch_heads import together
from .loops.heads_per_block import abreast
from .loops.prefetch_vectors import lookahead
from .loops.transposition import turn
from .storage.arrange import arrange
from .storage.channels import channels
from .storage.descriptors import describe
from .storage.pack import pack
from .storage.place import place
from .storage.rings import rings
from .sync.async_copies import arrive
from .sync.mbarriers import mbarriers
from .sync.single_launch import launch
from .sync.synchronise import synchronise


@dataclass(frozen=True)
class Context:
    """What passes may ask about: the schedule, the device, extents of tiles, the caller's dtype, and what callers pass."""

    schedule: Schedule
    device: Device
    sizes: tuple[tuple[str, int], ...]
    dtype: str
    contract: Contract = PLAIN

    @property
    def cores(self) -> Cores:
        assert isinstance(self.device, Cores), f"{self.device.name} has one agent"
        return self.device

    @property
    def groups(self) -> Groups:
        assert isinstance(self.device, Groups), f"{self.device.name} has no warp groups"
        return self.device


Pass = Callable[[Program, Context], Program]


def _others(p: Program, run: Callable[[Program, Device], Program], device: Device) -> Program:
    """`p` with the kernels that warp groups do not share put through a pass."""
    done = [None if walks(p, k) else run(replace(p, kernels=(k,)), device) for k in p.kernels]
    return replace(p, kernels=tuple(x.kernels[0] if x else k for x, k in zip(done, p.kernels, strict=True)))


FRONT: tuple[tuple[str, Pass], ...] = (
    ("states", lambda p, c: states(p, c.contract)),
    ("accept", lambda p, c: accept(p, c.contract, narrow=not isinstance(c.device, Cores))),
    ("floor", lambda p, c: floor(p)),
    ("scale", lambda p, c: scale(p)),
    ("forget", lambda p, c: forget(p, c.schedule)),
    ("rewrite", lambda p, c: rewrite(p, c.schedule)),
    ("cut", lambda p, c: cut(p, c.schedule, dict(c.sizes), c.device.v_block, apart=isinstance(c.device, Cores))),
    ("near", lambda p, c: near(p, c.device, c.dtype)),
    ("partition", lambda p, c: partition(p, c.schedule, c.device, c.dtype)),
    ("diagonal", lambda p, c: diagonal(p, c.dtype)),
    ("masks", lambda p, c: masks(p)),
    ("precision", lambda p, c: precision(p, c.schedule, c.dtype, c.contract)),
    ("decompose", lambda p, c: decompose(p, c.schedule, c.dtype, c.device.solves, c.device.solves_whole)),
    ("inverses", lambda p, c: inverses(p) if c.device.solves_whole == p.sizes["C"] else p),
    ("accumulate", lambda p, c: accumulate(p)),
)
ONE_AGENT: tuple[tuple[str, Pass], ...] = (
    *FRONT,
    ("turn", lambda p, c: turn(p, c.schedule)),
    ("assign", lambda p, c: assign(p, c.device)),
    ("abreast", lambda p, c: abreast(p, c.device)),
    ("operands", lambda p, c: operands(p, c.device)),
    ("together", lambda p, c: together(p, c.schedule)),
    ("place", lambda p, c: place(p, c.device)),
    ("storage", lambda p, c: storage(p)),
    ("arrive", lambda p, c: arrive(p, c.device)),
    ("synchronise", lambda p, c: synchronise(p, c.device)),
    ("check", lambda p, c: check(p, c.device)),
    ("launch", lambda p, c: launch(p, c.schedule, c.device)),
)
INSTANCES: tuple[tuple[str, Pass], ...] = (
    *FRONT,
    ("turn", lambda p, c: turn(p, c.schedule)),
    ("lookahead", lambda p, c: lookahead(p)),
    ("assign", lambda p, c: assign(p, c.device)),
    ("early", lambda p, c: early(p, c.schedule)),
    ("describe", lambda p, c: describe(p, c.schedule)),
    ("operands", lambda p, c: operands(p, c.device)),
    ("place", lambda p, c: place(p, c.device)),
    ("storage", lambda p, c: storage(p)),
    ("synchronise", lambda p, c: synchronise(p, c.device)),
    ("check", lambda p, c: check(p, c.device)),
    ("launch", lambda p, c: launch(p, c.schedule, c.device)),
)
GROUPS: tuple[tuple[str, Pass], ...] = (
    *FRONT,
    ("turn", lambda p, c: turn(p, c.schedule)),
    ("assign", lambda p, c: groups(_others(p, assign, c.device), c.groups)),
    ("early", lambda p, c: early(p, c.schedule)),
    ("abreast", lambda p, c: abreast(p, c.device)),
    ("operands", lambda p, c: _others(p, operands, c.device)),
    ("together", lambda p, c: together(p, c.schedule)),
    ("place", lambda p, c: rings(_others(p, place, c.device), c.schedule, c.groups)),
    ("storage", lambda p, c: storage(p)),
    ("arrive", lambda p, c: _others(p, arrive, c.device)),
    ("synchronise", lambda p, c: mbarriers(p, c.groups)),
    ("check", lambda p, c: check_rings(p, c.groups)),
    ("launch", lambda p, c: launch(p, c.schedule, c.device)),
)
CORES: tuple[tuple[str, Pass], ...] = (
    *(("decompose", lambda p, c: decompose(p, c.schedule, c.dtype, block=c.schedule.inverse_block)) if name == "decompose" else
      (name, run) for name, run in FRONT if name != "diagonal"),
    ("heads", lambda p, c: heads(p, c.cores)),
    ("vectorise", lambda p, c: vectorise(p)),
    ("assign", lambda p, c: assign(p, c.device)),
    ("transfer", lambda p, c: transfer(p, c.cores)),
    ("feed", lambda p, c: feed(p, c.cores)),
    ("arrange", lambda p, c: arrange(p, c.schedule, c.cores)),
    ("channels", lambda p, c: channels(p, c.schedule.channel_slots)),
    ("pack", lambda p, c: pack(p, c.schedule, c.cores)),
    ("synchronise", lambda p, c: synchronise(p, c.device)),
    ("check", lambda p, c: check(p, c.device)),
    ("launch", lambda p, c: launch(p, c.schedule, c.device)),
)
PIPELINES: dict[str, tuple[tuple[str, Pass], ...]] = {"triton": INSTANCES, "tilelang": ONE_AGENT, "pto": CORES}
DEVICES: dict[str, Device] = {"triton": TRITON, "tilelang": HOPPER, "pto": ASCEND_A2}
#: target, architecture -> passes and device, where a build is for one architecture.
ARCHS: dict[tuple[str, str], tuple[tuple[tuple[str, Pass], ...], Device]] = {("tilelang", "sm_90a"): (GROUPS, SM_90A)}

#: Called after every pass with (name, before, after, context); the tests put their checks here.
observers: list[Callable[[str, Program, Program, Context], None]] = []


def lower(p: Program, target: str, schedule: Schedule, sizes: dict[str, int], dtype: str, arch: str = "",
          contract: Contract = PLAIN) -> Program:
    """A traced program, lowered for `target` (and one architecture of it) by its pipeline; every stage is verified. sizes: C, K
    and V as callers know them."""
    passes, device = ARCHS[target, arch] if arch else (PIPELINES[target], DEVICES[target])
    p = verify(memory(p, sizes, device, contract))
    c = Context(schedule.adapted(p, device.joined), device, p.dims, dtype, contract)
    for name, run in passes:
        before, p = p, verify(run(p, c))
        for see in observers:
            see(name, before, p, c)
    return p
