// Runs an emitted source in PTO-ISA's CPU_SIM: three threads a block, and the flags between cores, which it lacks.
// With PTO-ISA's headers before those of the bundled simulator, whose driver includes the source once a role.
#include <condition_variable>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <pto_sim/driver.hpp>

namespace {

constexpr int flags = 16, most = 15;

struct Core {
    int block, sub;  // sub -1: the cube core
    int counter[flags] = {}, arrived[flags] = {};
    int waits_for = -1;

    std::string label() const {
        return "block " + std::to_string(block) + (sub < 0 ? " cube" : " vector " + std::to_string(sub));
    }
};

struct Stop {};

std::mutex lock;
std::condition_variable woken;
std::vector<std::unique_ptr<Core>> cores;
int awake = 0, blocks = 0;
bool aborted = false;
std::string error;
thread_local Core* self = nullptr;

// With `lock` held.
void fail(const std::string& text) {
    if (error.empty()) error = "pto_sim " + text;
    aborted = true;
    woken.notify_all();
}

// With `lock` held: `from` has arrived; once all of `group` have, each of `to` counts one more.
template <typename From, typename To>
void join(int id, From group, To to) {
    ++self->arrived[id];
    for (const auto& c : cores)
        if (group(*c) && !c->arrived[id]) return;
    for (const auto& c : cores)
        if (group(*c)) --c->arrived[id];
    for (const auto& c : cores) {
        if (!to(*c)) continue;
        if (++c->counter[id] > most) fail("[ffts-overflow] flag " + std::to_string(id) + " of " + c->label());
        if (c->waits_for == id) {
            c->waits_for = -1;
            ++awake;
        }
    }
    woken.notify_all();
}

}  // namespace

inline void set_ffts_base_addr(uint64_t) {}
inline int64_t get_block_num() { return blocks; }

inline void ffts_cross_core_sync(pipe_t, uint64_t config) {
    const int mode = int(config >> 4 & 3), id = int(config >> 8 & 15), block = self->block;
    const bool cube = self->sub < 0;
    std::unique_lock<std::mutex> held(lock);
    const auto same_kind = [=](const Core& c) { return (c.sub < 0) == cube; };
    const auto siblings = [=](const Core& c) { return c.block == block && (c.sub < 0) == cube; };
    const auto others = [=](const Core& c) { return c.block == block && (c.sub < 0) != cube; };
    if (mode == 0) join(id, same_kind, same_kind);
    else if (mode == 1) join(id, siblings, siblings);
    else join(id, siblings, others);
    if (aborted) throw Stop{};
}

inline void wait_flag_dev(int64_t id) {
    std::unique_lock<std::mutex> held(lock);
    if (!self->counter[id] && !aborted) {
        self->waits_for = int(id);
        if (!--awake) fail("[deadlock] all cores wait, " + self->label() + " for flag " + std::to_string(id));
        woken.wait(held, [] { return aborted || self->waits_for < 0; });
    }
    if (aborted) throw Stop{};
    --self->counter[id];
}

namespace {

// On-chip memory starts as NaN: hardware leaves it dirty.
void poison() {
    auto& memory = pto::NPUMemoryModel::Instance();
    memset(memory.GetUBBase(), 0xFF, 192 << 10);
    memset(memory.GetL1Base(), 0xFF, 512 << 10);
    memset(memory.GetL0ABase(), 0xFF, 64 << 10);
    memset(memory.GetL0BBase(), 0xFF, 64 << 10);
    memset(memory.GetL0CBase(), 0xFF, 128 << 10);
}

void core_main(Core* core, const pto_sim::Launch* launch) {
    self = core;
    const bool cube = core->sub < 0;
    std::string thrown;
    try {
        pto::cpu_sim::set_execution_context(core->block, cube ? 0 : core->sub, 2);
        poison();
        launch->entry(launch->arguments, cube);
    } catch (const Stop&) {
    } catch (const std::exception& e) {
        thrown = e.what();
    }
    std::unique_lock<std::mutex> held(lock);
    if (!thrown.empty()) fail("[cpu-sim] " + core->label() + ": " + thrown);
    if (--awake) return;
    for (const auto& c : cores)
        if (c->waits_for >= 0) fail("[deadlock] " + c->label() + " waits for flag " + std::to_string(c->waits_for));
}

}  // namespace

namespace pto_sim {

int refuse(char* message, int message_len, const char* name, const char* what, int wants, int got) {
    snprintf(message, message_len, "pto_sim [arguments] %s takes %d %s, got %d", name, wants, what, got);
    return 1;
}

int run(const Launch& launch) {
    error.clear();
    aborted = false;
    blocks = launch.block_dim;
    cores.clear();
    for (int block = 0; block < blocks; ++block)
        for (int sub = -1; sub < 2; ++sub) cores.push_back(std::make_unique<Core>(Core{block, sub}));
    awake = int(cores.size());
    for (int i = 0; i < launch.n_pointers; ++i)
        if ((launch.kinds[i] & ~pto_sim::region) == 2) memset(launch.pointers[i], 0xFF, launch.bytes[i]);  // workspaces: NaN
    std::vector<std::thread> threads;
    for (const auto& c : cores) threads.emplace_back(core_main, c.get(), &launch);
    for (auto& t : threads) t.join();
    for (const auto& c : cores)
        for (int id = 0; id < flags && !aborted; ++id)
            if (c->counter[id] || c->arrived[id]) fail("[ffts-left] flag " + std::to_string(id) + " of " + c->label());
    snprintf(launch.message, launch.message_len, "%s", error.c_str());
    return !error.empty();
}

}  // namespace pto_sim

// The bundled simulator's options mean nothing here.
extern "C" __attribute__((visibility("default"))) int pto_sim_option(const char*, int64_t) { return 0; }

#include "driver.cpp"
