// Issue of instructions, flags, barriers and cross-core signals: everything that moves a clock.
#include "engine.hpp"

namespace pto_sim {

void join(Clock& into, const Clock& from) {
    uint32_t* a = into.data();
    const uint32_t* b = from.data();
    const size_t n = into.size();
    for (size_t i = 0; i < n; ++i) a[i] = a[i] < b[i] ? b[i] : a[i];
}

static uint32_t& own_time(Core& c, int unit) { return c.clock[unit][c.base + uint32_t(unit) - machine.base]; }

// What is known once everything issued so far to a unit has finished.
static Clock finished_clock(Core& c, int unit) {
    Clock out = c.clock[unit];
    out[c.base + uint32_t(unit) - machine.base] = c.issued[unit];
    return out;
}

static bool has_unit(const Core& c, int unit) {
    if (unit == issue || unit == S || unit == MTE2 || unit == MTE3) return true;
    return c.cube ? unit != V : unit == V;
}

static int unit_of(pipe_t pipe, const char* name, Site site) {
    int unit = -1;
    switch (pipe) {
        case PIPE_S: unit = S; break;
        case PIPE_V: unit = V; break;
        case PIPE_M: unit = M; break;
        case PIPE_MTE1: unit = MTE1; break;
        case PIPE_MTE2: unit = MTE2; break;
        case PIPE_MTE3: unit = MTE3; break;
        case PIPE_FIX: unit = FIX; break;
        default: break;
    }
    if (unit < 0) fail("pipe", "%s: not a pipe (%d)", where(name, site).c_str(), int(pipe));
    if (!has_unit(*core, unit))
        fail("pipe", "%s: a %s core has no pipe %s", where(name, site).c_str(), core->cube ? "cube" : "vector",
             unit_name(unit));
    return unit;
}

static void count_instruction(const char* name, Site site) {
    if (machine.aborted) throw Stop{};
    if ((++machine.instructions & 255) == 0 && std::chrono::steady_clock::now() > machine.deadline)
        fail("timeout", "%s: the run took more than %d s", where(name, site).c_str(), machine.options.timeout_s);
}

Instr begin(const char* name, int unit, Site site) {
    Core& c = *core;
    count_instruction(name, site);
    if (!has_unit(c, unit))
        fail("core", "%s: it runs on pipe %s, which a %s core does not have", where(name, site).c_str(),
             unit_name(unit), c.cube ? "cube" : "vector");
    join(c.clock[unit], c.clock[issue]);
    const uint32_t now = ++c.issued[unit];
    // Other pipes work in order. Vector instructions overlap: what V knows of itself moves at barriers only.
    if (unit != V) own_time(c, unit) = now;
    c.last_site = intern(name, site);
    return {name, unit, c.base + uint32_t(unit) + 1, now, c.last_site, c.clock[unit].data()};
}

// A scalar load holds the scalar unit until its value is there, so what is issued later comes after it.
Instr begin_scalar_read(const char* name, Site site) {
    Core& c = *core;
    count_instruction(name, site);
    join(c.clock[S], c.clock[issue]);
    Clock& seen = c.clock[S];
    const uint32_t now = ++c.issued[issue];
    own_time(c, issue) = now;
    seen[c.base + issue - machine.base] = now;
    seen[c.base + S - machine.base] = c.issued[S];
    c.last_site = intern(name, site);
    return {name, S, c.base + issue + 1, now, c.last_site, seen.data()};
}

void trace(const Instr& in, int rows, int cols, Dtype dtype, int a, int b, int c) {
    if (!machine.options.trace) return;
    TraceRecord r = {};
    r.core = core->block * cores_a_block + (core->cube ? 0 : 1 + core->sub);
    r.unit = in.unit;
    r.rows = rows;
    r.cols = cols;
    r.dtype = int(dtype);
    r.line = machine.sites[in.site].line;
    r.a = a;
    r.b = b;
    r.c = c;
    snprintf(r.name, sizeof r.name, "%s", in.name);
    machine.trace.push_back(r);
}

void trace(const Instr& in, const TileRef& tile) { trace(in, tile.vrow, tile.vcol, tile.dtype); }

static void trace_sync(const char* name, int unit, Site site, int a, int b, int c) {
    if (!machine.options.trace) return;
    const Instr in = {name, unit, 0, 0, intern(name, site), nullptr};
    trace(in, 0, 0, Dtype::u8, a, b, c);
}

// ---- inside a core

static Flag& flag_at(const char* name, pipe_t src, pipe_t dst, int id, Site site, int& s, int& d) {
    count_instruction(name, site);
    if (id < 0 || id >= event_ids) fail("event-id", "%s: event id %d is not 0 to 7", where(name, site).c_str(), id);
    s = unit_of(src, name, site);
    d = unit_of(dst, name, site);
    if (s == d)
        fail("pipe", "%s: a flag from %s to itself; pipe_barrier orders a pipe with itself", where(name, site).c_str(),
             unit_name(s));
    return core->flags[s][d][id];
}

void flag_set(pipe_t src, pipe_t dst, int id, Site site) {
    int s, d;
    Flag& f = flag_at("set_flag", src, dst, id, site, s, d);
    if (f.set)
        fail("flag-set-twice", "%s: the flag from %s to %s, EVENT_ID%d, is still set by %s",
             where("set_flag", site).c_str(), unit_name(s), unit_name(d), id, place(f.site).c_str());
    Core& c = *core;
    join(c.clock[s], c.clock[issue]);
    f.set = true;
    f.site = intern("set_flag", site);
    f.clock = finished_clock(c, s);
    trace_sync("set_flag", s, site, s, d, id);
}

void flag_wait(pipe_t src, pipe_t dst, int id, Site site) {
    int s, d;
    Flag& f = flag_at("wait_flag", src, dst, id, site, s, d);
    if (!f.set)
        fail("wait-without-set", "%s: deadlock: nothing has set the flag from %s to %s, EVENT_ID%d",
             where("wait_flag", site).c_str(), unit_name(s), unit_name(d), id);
    Core& c = *core;
    f.set = false;
    join(c.clock[d], f.clock);
    if (d == S) join(c.clock[issue], f.clock);
    trace_sync("wait_flag", d, site, s, d, id);
}

void barrier(pipe_t pipe, Site site) {
    count_instruction("pipe_barrier", site);
    Core& c = *core;
    if (pipe != PIPE_ALL) {
        const int unit = unit_of(pipe, "pipe_barrier", site);
        own_time(c, unit) = c.issued[unit];
        trace_sync("pipe_barrier", unit, site, unit, unit, 0);
        return;
    }
    for (int u = 0; u < units; ++u) join(c.clock[issue], finished_clock(c, u));
    for (int u = 0; u < units; ++u) join(c.clock[u], c.clock[issue]);
    trace_sync("pipe_barrier", issue, site, -1, -1, 0);
}

// ---- between cores

void cross_base(uint64_t addr, Site site) {
    if (addr != ffts_address)
        fail("ffts-base", "%s: not the address that the launch passed", where("set_ffts_base_addr", site).c_str());
    core->has_base = true;
}

static void deliver(Core& target, int id, Signal&& signal, Site site) {
    if (int(target.counter[id].size()) >= cross_limit)
        fail("ffts-overflow", "%s: cross-core flag %d of %s would exceed %d", where("ffts_cross_core_sync", site).c_str(),
             id, target.label().c_str(), cross_limit);
    target.counter[id].push_back(std::move(signal));
    wake_waiters(target, id);
}

// Every member's next signal, joined, goes to every member once all have one.
static void join_group(const std::vector<Core*>& group, std::deque<Signal> (Core::*queue)[cross_ids], int id, Site site) {
    for (Core* member : group)
        if ((member->*queue)[id].empty()) return;
    Signal all = std::move((group[0]->*queue)[id].front());
    (group[0]->*queue)[id].pop_front();
    for (size_t i = 1; i < group.size(); ++i) {
        join(all.clock, (group[i]->*queue)[id].front().clock);
        (group[i]->*queue)[id].pop_front();
    }
    for (Core* member : group) deliver(*member, id, Signal(all), site);
}

void cross_set(pipe_t pipe, uint64_t config, Site site) {
    const char* name = "ffts_cross_core_sync";
    count_instruction(name, site);
    Core& c = *core;
    const int unit = unit_of(pipe, name, site);
    const int mode = int(config >> 4 & 3), id = int(config >> 8 & 15);
    if (!c.has_base) fail("ffts-base", "%s: set_ffts_base_addr comes first", where(name, site).c_str());
    if ((config & ~uint64_t(0xF30)) != 1 || mode == 3)
        fail("ffts-config", "%s: 0x%llx is not 1 | mode << 4 | id << 8 with mode 0 to 2 and id 0 to 15",
             where(name, site).c_str(), static_cast<unsigned long long>(config));
    join(c.clock[unit], c.clock[issue]);
    Signal signal = {intern(name, site), finished_clock(c, unit)};
    trace_sync(name, unit, site, unit, mode, id);
    const int first = c.index / cores_a_block * cores_a_block;
    auto at = [&](int slot) -> Core& { return *machine.cores[size_t(slot)]; };
    if (mode == 2 && c.cube) {
        deliver(at(first + 1), id, Signal(signal), site);
        deliver(at(first + 2), id, std::move(signal), site);
    } else if (mode == 2) {
        Core& cube = at(first);
        cube.half_way[id][c.sub].push_back(std::move(signal));
        if (int(cube.half_way[id][c.sub].size()) > cross_limit)
            fail("ffts-overflow", "%s: cross-core flag %d of %s would exceed %d", where(name, site).c_str(), id,
                 cube.label().c_str(), cross_limit);
        if (!cube.half_way[id][0].empty() && !cube.half_way[id][1].empty()) {
            Signal both = std::move(cube.half_way[id][0].front());
            join(both.clock, cube.half_way[id][1].front().clock);
            cube.half_way[id][0].pop_front();
            cube.half_way[id][1].pop_front();
            deliver(cube, id, std::move(both), site);
        }
    } else if (mode == 1) {
        if (c.cube) fail("ffts-config", "%s: mode 1 joins the vector cores of a block", where(name, site).c_str());
        c.pairing[id].push_back(std::move(signal));
        join_group({&at(first + 1), &at(first + 2)}, &Core::pairing, id, site);
    } else {
        if (!machine.options.concurrent && machine.options.only < 0 && machine.launch->block_dim > 1)
            fail("ffts-config", "%s: mode 0 joins all blocks, and this launch runs them one after another",
                 where(name, site).c_str());
        c.joining[id].push_back(std::move(signal));
        std::vector<Core*> group;
        for (int i = 0; i < machine.live; ++i)
            if (at(i).cube == c.cube) group.push_back(&at(i));
        join_group(group, &Core::joining, id, site);
    }
}

void cross_wait(int id, Site site) {
    const char* name = "wait_flag_dev";
    count_instruction(name, site);
    Core& c = *core;
    if (id < 0 || id >= cross_ids) fail("ffts-config", "%s: flag %d is not 0 to 15", where(name, site).c_str(), id);
    const uint32_t at = intern(name, site);
    wait_turn_until_counter(id, at);
    join(c.clock[issue], c.counter[id].front().clock);
    join(c.clock[S], c.counter[id].front().clock);
    c.counter[id].pop_front();
    trace_sync(name, S, site, S, -1, id);
}

int block_index() { return core->block; }
int block_count() { return machine.launch->block_dim; }
int sub_index() { return core->sub; }
int sub_count() { return core->cube ? 1 : 2; }

}  // namespace pto_sim
