// Runs a kernel: a thread a core, one of them at a time, handed on where a core waits for another. Order between cores
// is judged by clocks, so one fixed interleaving finds what any interleaving would, and gives the same message each time.
#include "engine.hpp"

#include <cstdarg>

namespace pto_sim {

Machine machine;
thread_local Core* core = nullptr;

static const char* const unit_names[units] = {"S", "S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"};

const char* unit_name(int unit) { return unit_names[unit]; }

static std::string core_label(int block, bool cube, int sub) {
    return "block " + std::to_string(block) + (cube ? " cube" : " vector " + std::to_string(sub));
}

std::string Core::label() const { return core_label(block, cube, sub); }

void fail(const char* category, const char* format, ...) {
    char text[3000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (machine.error.empty()) machine.error = std::string("pto_sim [") + category + "] " + text;
    throw Stop{};
}

uint32_t intern(const char* name, Site site) {
    // Site 0 is "none". A small cache in front of the list: an instruction in a loop asks again and again.
    struct Slot {
        const char* file;
        int line;
        const char* name;
        uint32_t site;
    };
    static Slot slots[512];
    const size_t at = (size_t(site.line) * 31 + (reinterpret_cast<size_t>(name) >> 3)) % 512;
    Slot& slot = slots[at];
    if (slot.site && slot.file == site.file && slot.line == site.line && slot.name == name) return slot.site;
    if (machine.sites.empty()) machine.sites.push_back({"", 0, ""});
    machine.sites.push_back({site.file, site.line, name});
    slot = {site.file, site.line, name, uint32_t(machine.sites.size() - 1)};
    return slot.site;
}

static std::string short_file(const char* file) {
    const char* slash = strrchr(file, '/');
    return slash ? slash + 1 : file;
}

std::string place(uint32_t site) {
    const SiteInfo& at = machine.sites[site];
    return std::string(at.name) + " at " + short_file(at.file) + ":" + std::to_string(at.line);
}

std::string where(const char* name, Site site) {
    return std::string(name) + " at " + short_file(site.file) + ":" + std::to_string(site.line) +
           (core ? " (" + core->label() + ")" : "");
}

std::string at(const Instr& in) { return place(in.site) + " (" + core->label() + ")"; }

void bad_valid(int rows, int cols, int vrow, int vcol) {
    fail("shape", "a tile of %d x %d cannot have %d x %d valid elements (%s)", rows, cols, vrow, vcol,
         core ? core->label().c_str() : "");
}

// ---- handing over between cores

static int pick_next(int after) {
    const int n = machine.live;
    int start = after + 1;
    if (machine.options.shuffle) {
        machine.random ^= machine.random << 13;
        machine.random ^= machine.random >> 7;
        machine.random ^= machine.random << 17;
        start = int(machine.random % uint64_t(n));
    }
    for (int i = 0; i < n; ++i) {
        const int at = (start + i) % n;
        if (machine.cores[at]->state == Core::ready) return at;
    }
    return -1;
}

static void stop_all() {
    machine.aborted = true;
    for (int i = 0; i < machine.live; ++i) machine.cores[i]->wake.notify_all();
}

static void report_deadlock() {
    std::string text = "pto_sim [deadlock] no core can go on:";
    for (int i = 0; i < machine.live; ++i) {
        const Core& c = *machine.cores[i];
        if (c.state == Core::waiting)
            text += " " + c.label() + " waits for cross-core flag " + std::to_string(c.waits_for) + " in " +
                    place(c.waits_at) + ";";
    }
    if (machine.error.empty()) machine.error = text;
    stop_all();
}

// With machine.lock held: gives the turn away; returns once it is back, or throws.
static void hand_over(std::unique_lock<std::mutex>& held, Core& self) {
    const int next = pick_next(self.index);
    if (next < 0) {
        report_deadlock();
        throw Stop{};
    }
    if (next != self.index) {
        machine.turn = next;
        machine.cores[next]->wake.notify_one();
        self.wake.wait(held, [&] { return machine.turn == self.index || machine.aborted; });
    }
    if (machine.aborted) throw Stop{};
}

void wait_turn_until_counter(int id, uint32_t site) {
    Core& self = *core;
    std::unique_lock<std::mutex> held(machine.lock);
    while (self.counter[id].empty()) {
        self.state = Core::waiting;
        self.waits_for = id;
        self.waits_at = site;
        hand_over(held, self);
    }
}

void wake_waiters(Core& target, int id) {
    if (target.state == Core::waiting && target.waits_for == id) target.state = Core::ready;
}

static void core_main(Core* self) {
    core = self;
    {
        std::unique_lock<std::mutex> held(machine.lock);
        self->wake.wait(held, [&] { return machine.turn == self->index || machine.aborted; });
        if (machine.aborted) return;
    }
    try {
        machine.launch->entry(machine.launch->arguments, self->cube);
    } catch (const Stop&) {
    } catch (const std::exception& e) {
        if (machine.error.empty()) machine.error = std::string("pto_sim [internal] ") + e.what();
    }
    std::unique_lock<std::mutex> held(machine.lock);
    self->state = Core::done;
    if (!machine.error.empty()) {
        stop_all();
    } else {
        const int next = pick_next(self->index);
        if (next >= 0) {
            machine.turn = next;
            machine.cores[next]->wake.notify_one();
        } else {
            for (int i = 0; i < machine.live; ++i) {
                if (machine.cores[i]->state != Core::done) {
                    report_deadlock();
                    break;
                }
            }
        }
    }
    core = nullptr;
}

// ---- a launch

static void prepare(Core& c, int slot, int block) {
    c.index = slot;
    c.block = block;
    c.cube = slot % cores_a_block == 0;
    c.sub = c.cube ? 0 : slot % cores_a_block - 1;
    c.base = uint32_t(block * agents_a_block + (slot % cores_a_block) * units);
    if (c.cube) {
        c.l1.own("L1", 512 * 1024);
        c.l0a.own("L0A", 64 * 1024);
        c.l0b.own("L0B", 64 * 1024);
        c.l0c.own("L0C", 128 * 1024);
    } else {
        c.ub.own("UB", 192 * 1024);
    }
    for (int u = 0; u < units; ++u) {
        c.clock[u].assign(size_t(machine.n_agents), 0);
        c.issued[u] = 0;
    }
    for (auto& row : c.flags)
        for (auto& cell : row)
            for (Flag& f : cell) f.set = false;
    for (int id = 0; id < cross_ids; ++id) {
        c.counter[id].clear();
        c.half_way[id][0].clear();
        c.half_way[id][1].clear();
        c.joining[id].clear();
        c.pairing[id].clear();
    }
    c.has_base = false;
    c.state = Core::ready;
}

static std::string leftovers(Core& c) {
    if (!machine.options.order) return "";
    for (int s = 0; s < units; ++s)
        for (int d = 0; d < units; ++d)
            for (int id = 0; id < event_ids; ++id)
                if (c.flags[s][d][id].set)
                    return "pto_sim [flag-left] " + c.label() + " ends with the flag from " + unit_name(s) + " to " +
                           unit_name(d) + ", EVENT_ID" + std::to_string(id) + ", still set by " +
                           place(c.flags[s][d][id].site);
    for (int id = 0; id < cross_ids; ++id) {
        const std::string flag = "cross-core flag " + std::to_string(id);
        if (!c.counter[id].empty())
            return "pto_sim [ffts-left] " + c.label() + " ends with " + flag + " at " +
                   std::to_string(c.counter[id].size()) + "; last signalled by " + place(c.counter[id].back().site);
        for (const auto* queue : {&c.half_way[id][0], &c.half_way[id][1], &c.joining[id], &c.pairing[id]})
            if (!queue->empty())
                return "pto_sim [ffts-left] " + c.label() + " ends with " + flag + " signalled by " +
                       place(queue->back().site) + " but not by every core that it joins";
    }
    return "";
}

static void run_cores(int first_block, int blocks) {
    machine.live = blocks * cores_a_block;
    machine.base = machine.options.concurrent && machine.options.only < 0 ? 0 : uint32_t(first_block * agents_a_block);
    machine.n_agents = machine.live * units;
    while (int(machine.cores.size()) < machine.live) machine.cores.emplace_back(new Core);
    for (int i = 0; i < machine.live; ++i) prepare(*machine.cores[i], i, first_block + i / cores_a_block);
    machine.aborted = false;
    machine.turn = -1;
    std::vector<std::thread> threads;
    for (int i = 0; i < machine.live; ++i) threads.emplace_back(core_main, machine.cores[i].get());
    {
        std::lock_guard<std::mutex> held(machine.lock);
        machine.turn = machine.options.shuffle ? pick_next(-1) : 0;
        machine.cores[machine.turn]->wake.notify_one();
    }
    for (std::thread& t : threads) t.join();
    for (int i = 0; i < machine.live && machine.error.empty(); ++i) machine.error = leftovers(*machine.cores[i]);
    for (int i = 0; i < machine.live; ++i) {
        Core& c = *machine.cores[i];
        for (Buffer* b : {&c.ub, &c.l1, &c.l0a, &c.l0b, &c.l0c}) b->reset();
    }
}

static void register_buffers(const Launch& l) {
    machine.gm.clear();
    for (int i = 0; i < l.n_pointers; ++i) {
        const int kind = l.kinds[i] & ~region;
        if (l.bytes[i] < 0 || kind < 0 || kind > divided)
            fail("arguments", "pointer %d: kind is 0 input, 1 output, 2 workspace, 3 both or 4 divided; bytes are not negative", i);
        if (kind == divided) continue;
        uint8_t* from = static_cast<uint8_t*>(l.pointers[i]);
        for (int j = 0; j < i; ++j) {
            uint8_t* other = static_cast<uint8_t*>(l.pointers[j]);
            if (l.kinds[j] != divided && from < other + l.bytes[j] && other < from + l.bytes[i] && (kind || l.kinds[j] & ~region))
                fail("arguments", "pointers %d and %d share memory, and one of them is written", j, i);
        }
        machine.gm.emplace_back(new Buffer);
        Buffer& b = *machine.gm.back();
        b.watch("GM buffer " + std::to_string(i), from, size_t(l.bytes[i]));
        b.read_only = kind == 0;
        const bool alone = machine.options.only >= 0;  // what other blocks would have written is taken as it lies
        b.always_known = alone || kind == 0 || kind == 3;
        if (kind == 2) memset(from, alone ? 0 : 0xFF, size_t(l.bytes[i]));
    }
}

static void say(char* message, int message_len, const std::string& text) {
    if (message && message_len > 0) snprintf(message, size_t(message_len), "%s", text.c_str());
}

int refuse(char* message, int message_len, const char* name, const char* what, int wants, int got) {
    say(message, message_len, std::string("pto_sim [arguments] ") + name + " takes " + std::to_string(wants) + " " +
                                  what + ", not " + std::to_string(got));
    return 2;
}

int run(const Launch& l) {
    static std::mutex one_launch_at_a_time;
    std::lock_guard<std::mutex> launching(one_launch_at_a_time);
    machine.launch = &l;
    machine.error.clear();
    machine.trace.clear();
    machine.instructions = 0;
    machine.random = uint64_t(machine.options.shuffle) * 0x9E3779B97F4A7C15ULL + 1;
    machine.deadline = std::chrono::steady_clock::now() + std::chrono::seconds(machine.options.timeout_s);
    try {
        if (l.block_dim < 1) fail("arguments", "block_dim is %d", l.block_dim);
        register_buffers(l);
        if (machine.options.only >= 0) {
            if (machine.options.only >= l.block_dim)
                fail("arguments", "only = %d of %d blocks", machine.options.only, l.block_dim);
            run_cores(machine.options.only, 1);
        } else if (machine.options.concurrent) {
            run_cores(0, l.block_dim);
        } else {
            for (int b = 0; b < l.block_dim && machine.error.empty(); ++b) run_cores(b, 1);
        }
    } catch (const Stop&) {
    } catch (const std::exception& e) {
        machine.error = std::string("pto_sim [internal] ") + e.what();
    }
    machine.gm.clear();
    if (machine.cores.size() > 6) machine.cores.resize(6);  // a loaded kernel keeps little memory
    machine.launch = nullptr;
    if (machine.error.empty()) return 0;
    say(l.message, l.message_len, std::string(l.name) + ": " + machine.error);
    return 1;
}

}  // namespace pto_sim

// ---- options and trace, for the Python side

extern "C" __attribute__((visibility("default"))) int pto_sim_option(const char* name, int64_t value) {
    pto_sim::Options& o = pto_sim::machine.options;
    const std::pair<const char*, int*> known[] = {{"concurrent", &o.concurrent}, {"v_after_v", &o.v_after_v},
                                                  {"order", &o.order},
                                                  {"trace", &o.trace},           {"shuffle", &o.shuffle},
                                                  {"timeout_s", &o.timeout_s},   {"only", &o.only}};
    for (auto& k : known) {
        if (!strcmp(k.first, name)) {
            *k.second = int(value);
            return 0;
        }
    }
    return 1;
}

extern "C" __attribute__((visibility("default"))) int64_t pto_sim_trace_length() {
    return int64_t(pto_sim::machine.trace.size());
}

extern "C" __attribute__((visibility("default"))) const pto_sim::TraceRecord* pto_sim_trace_records() {
    return pto_sim::machine.trace.data();
}
