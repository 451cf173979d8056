"""event_ids: gives each pair of a signal and a wait an event id, or a counter between agents.

Signals share an id only if each is set after the wait for the one before. A counter takes more signals of one pipe, up to its
limit. Both follow from the clocks of a traversal: the signalling pipe must know that the wait is complete. Where counters do not
suffice, further pairs share one (`_may_share`).
"""
from __future__ import annotations

from ...schedule.schedule import ScheduleError
from .traversal import Traversal
from .waits import Pair, Place

#: The signals of a pair that use one of its ids: the pair, the number of its ids, the index of this one.
_Part = tuple[Pair, int, int]


def number(found: Traversal, name: str) -> dict[str, Place]:
    """Set the ids of all pairs of a complete traversal. name: of the kernel, for errors.

    Returns nothing if the device has enough event ids. Otherwise: agent -> the place where a barrier over it makes an id free.
    Raises ScheduleError if the device has too few counters.
    """
    _counters(found, [x for x in found.waits.pairs if x.crosses], name)
    groups: dict[tuple[int, int], list[Pair]] = {}
    for x in found.waits.pairs:
        if not x.crosses:
            groups.setdefault((x.src, x.dst), []).append(x)
    full: dict[str, Place] = {}
    for (src, _), pairs in groups.items():
        agent = found.trace.pipes.names[src][0]
        clash = _events(found, sorted(pairs, key=lambda x: found.of[x][0][0])) if agent not in full else None
        if clash is not None:
            full[agent] = clash
    return full


def _counters(found: Traversal, pairs: list[Pair], name: str) -> None:
    """Give each pair between agents a counter. Pairs within an iteration share one while its limit allows it."""
    device = found.trace.device
    counters: list[list[_Part]] = []
    shared: dict[tuple[int, int], int] = {}  # (signalling pipe, waiting pipe) -> the counter that pairs share
    for x in pairs:
        n = shared.get((x.src, x.dst), -1) if x.iteration is None else -1
        if n < 0 or _clash(found, [*counters[n], (x, 1, 0)], device.flag_limit):
            n = len(counters)
            counters.append([])
        counters[n].append((x, 1, 0))
        if x.iteration is None:
            shared[x.src, x.dst] = n
    joins = any(o.attr("scope") == "cores" for o in found.trace.kernel.ops)  # these have a flag of their own
    counters = _reused(found, counters, device.flags - joins)
    needed = len(counters) + joins
    if needed > device.flags:
        fewer = "; set value_heads=1" if found.trace.kernel.batch.heads > 1 else ""
        raise ScheduleError(f"{name}: it needs {needed} cross-core flags, {device.name} has {device.flags}{fewer}")
    for n, parts in enumerate(counters):
        for x, *_ in parts:
            x.ids = (n,)


def _reused(found: Traversal, counters: list[list[_Part]], most: int) -> list[list[_Part]]:
    """The counters with as many joined to an earlier one as are too many. Those that `_may_share` become one."""
    kept: list[list[_Part]] = []
    for n, parts in enumerate(counters):
        spare = len(kept) + len(counters) - n - most  # how many are too many yet
        to = next((c for c in kept if _may_share(found, [*c, *parts])), None) if spare > 0 else None
        if to is None:
            kept.append(parts)
        else:
            to += parts
    return kept


def _may_share(found: Traversal, parts: list[_Part]) -> bool:
    """Whether a wait on a counter of these pairs takes the signal of its own pair.

    Either each signal comes after the wait for the one before. Or one pipe signals, so that signals arrive in the order in which
    it sets them, and this is the order of the waits.
    """
    pairs = [x for x, *_ in parts]
    if len({x.dst for x in pairs}) > 1:
        return False
    if _clash(found, parts) is None:
        return True
    if len({x.src for x in pairs}) > 1 or _clash(found, parts, found.trace.device.flag_limit):
        return False
    events = sorted(((e[0], n, e[3] is None) for n, x in enumerate(pairs) for e in found.of[x][0]))
    signals, waits = ([n for _, n, waits in events if waits == kind] for kind in (False, True))
    return signals == waits


def _events(found: Traversal, pairs: list[Pair]) -> Place | None:
    """Give pairs between the same two pipes event ids. The id that the fewest pairs use comes first. Returns the place of the
    first signal for which no id is free, None if ids suffice."""
    events = found.trace.device.events
    used: list[list[_Part]] = [[] for _ in range(events)]
    for x in pairs:
        x.ids = ()
        ways = x.slots if _clash(found, [(x, 1, 0)]) else 1
        for way in range(ways):
            part, clash = (x, ways, way), None
            for e in sorted(range(events), key=lambda e: (len(used[e]), e)):
                clash = _clash(found, [*used[e], part])
                if clash is None:
                    used[e].append(part)
                    x.ids = (*x.ids, e)
                    break
            if clash is not None:
                return clash
    return None


def _clash(found: Traversal, parts: list[_Part], limit: int = 1) -> Place | None:
    """The place of the first signal that could leave more than `limit` signals of one id without a wait. None if there is
    none."""
    if not parts[1:] and parts[0][1] == 1:
        events = found.of[parts[0][0]][0]
    else:
        events = sorted([e for x, ways, way in parts for e in found.of[x][0] if e[1] % ways == way])
    of, waiter = found.trace.pipes, parts[0][0].dst
    done: list[int] = []
    sets = 0
    for _, _, what, place in events:
        if place is None:
            done.append(what)
            continue
        due = sets - limit  # the number of the wait that must be known to be complete
        if due >= 0 and (len(done) <= due or of.entry(what, waiter) < done[due]):
            return place
        sets += 1
    return None
