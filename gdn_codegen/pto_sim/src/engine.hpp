// What the parts of the engine share: cores, buffers with their shadow, clocks, and how an error stops a run.
#ifndef PTO_SIM_ENGINE_HPP
#define PTO_SIM_ENGINE_HPP

#include <pto_sim/driver.hpp>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace pto_sim {

// What orders work inside a core. `issue` is the scalar unit's control flow: what it has seen, every later instruction
// has seen. `S` is its stores, which other pipes see only by a flag.
enum Unit { issue, S, V, M, MTE1, MTE2, MTE3, FIX, units };

constexpr int cores_a_block = 3;
constexpr int agents_a_block = cores_a_block * units;
constexpr int event_ids = 8;
constexpr int cross_ids = 16;
constexpr int cross_limit = 15;
constexpr size_t cell_bytes = 32;
constexpr size_t split_bytes = 2;
constexpr size_t splits = cell_bytes / split_bytes;

struct Access {
    uint32_t who = 0;  // agent + 1
    uint32_t when = 0;
    uint32_t site = 0;
};

struct History {
    Access write;
    Access read;
    uint32_t more = 0;  // 1 + index of a list of further readers that no order links to `read`
};

// 32 bytes of a buffer. Bytes of one cell that different accesses touch get a history for each 2 bytes.
struct Cell {
    History all;
    uint32_t split;  // 1 + index into Buffer::fine
    uint32_t known;  // a bit a byte: was it ever written?
};

struct Buffer {
    std::string name;
    uint8_t* data = nullptr;
    size_t size = 0;
    Cell* cells = nullptr;
    size_t high = 0;  // bytes from here on are as at the start
    bool always_known = false;
    bool read_only = false;
    std::vector<std::vector<History>> fine;
    std::vector<std::vector<Access>> readers;

    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer();
    void own(const char* label, size_t bytes);
    void watch(const std::string& label, void* host, size_t bytes);
    void reset();

private:
    bool owns_ = false;
};

using Clock = std::vector<uint32_t>;

struct Flag {
    bool set = false;
    uint32_t site = 0;
    Clock clock;
};

struct Signal {
    uint32_t site;
    Clock clock;
};

struct Core {
    int index = 0, block = 0, sub = 0;
    bool cube = false;
    uint32_t base = 0;  // its first agent
    Buffer ub, l1, l0a, l0b, l0c;
    Clock clock[units];
    uint32_t issued[units];
    Flag flags[units][units][event_ids];
    std::deque<Signal> counter[cross_ids];
    std::deque<Signal> half_way[cross_ids][2];  // at a cube: signals of its vector cores that miss the other's
    std::deque<Signal> joining[cross_ids];      // own signals of mode 0 that miss those of other cores
    std::deque<Signal> pairing[cross_ids];      // the same of mode 1
    bool has_base = false;
    // scheduling
    enum State { ready, waiting, done } state = ready;
    int waits_for = -1;
    uint32_t waits_at = 0;
    uint32_t last_site = 0;
    std::condition_variable wake;

    std::string label() const;
};

struct SiteInfo {
    const char* file;
    int line;
    const char* name;
};

struct TraceRecord {
    int32_t core;  // block * 3 + {0 cube, 1 and 2 vector}
    int32_t unit;
    int32_t rows, cols;
    int32_t dtype;
    int32_t line;
    int32_t a, b, c;  // what Step.extra of __init__.py says
    char name[24];
};

struct Options {
    int concurrent = 1;       // all blocks live at once; 0 runs them one after another
    int v_after_v = 2;        // 2 every dependence, 1 all but write after read, 0 off
    int order = 1;            // 0: no error where a wait is missing, or a flag is left at the end
    int trace = 0;
    int shuffle = 0;          // not 0: seed of the order in which ready cores run
    int timeout_s = 300;
    int only = -1;            // not -1: run this block alone, of a launch of block_dim; GM starts as zeros
};

struct Machine {
    Options options;
    std::vector<std::unique_ptr<Core>> cores;
    std::vector<std::unique_ptr<Buffer>> gm;
    std::vector<SiteInfo> sites;
    std::vector<TraceRecord> trace;
    const Launch* launch = nullptr;
    int n_agents = 0;
    uint32_t base = 0;  // agent that clock entry 0 stands for
    int live = 0;       // cores of the present run
    int turn = -1;
    bool aborted = false;
    bool finished = false;
    uint64_t instructions = 0;
    uint64_t random = 1;
    std::chrono::steady_clock::time_point deadline;
    std::string error;
    std::mutex lock;
    std::condition_variable main_wake;
};

extern Machine machine;
extern thread_local Core* core;

struct Stop {};  // thrown on a core's thread once machine.error is set, or when another core stopped

[[noreturn]] void fail(const char* category, const char* format, ...) __attribute__((format(printf, 2, 3)));

uint32_t intern(const char* name, Site site);
std::string place(uint32_t site);          // "TADD at file:12"
std::string where(const char* name, Site site);  // the same, and on which core
const char* unit_name(int unit);

// One instruction in flight: its agent, its time, and what its agent has seen.
struct Instr {
    const char* name;
    int unit;
    uint32_t who, when, site;
    const uint32_t* seen;
};

std::string at(const Instr& in);  // its place, and on which core

Instr begin(const char* name, int unit, Site site);
Instr begin_scalar_read(const char* name, Site site);
void end_scalar_read(const Instr& in);
void trace(const Instr& in, int rows, int cols, Dtype dtype, int a = 0, int b = 0, int c = 0);
void trace(const Instr& in, const TileRef& tile);

void touch(const Instr& in, Buffer& buffer, size_t at, size_t bytes, bool write, bool needs_known = true);
void scrap(const Instr& in, Buffer& buffer, size_t at, size_t bytes);  // written, with what nobody knows

void join(Clock& into, const Clock& from);
void wait_turn_until_counter(int id, uint32_t site);
void wake_waiters(Core& target, int id);

// tiles.cpp
Buffer& buffer_of(const TileRef& tile, const Instr& in);
TileRef physical(const TileRef& tile);
uint8_t* bytes_of(const TileRef& tile, Buffer& buffer);
void touch_tile(const Instr& in, const TileRef& tile, int row, int col, int rows, int cols, bool write,
                bool needs_known = true);
void touch_valid(const Instr& in, const TileRef& tile, bool write);
void gather(const TileRef& tile, const uint8_t* base, int row, int col, int rows, int cols, uint8_t* out);
void scatter(const TileRef& tile, uint8_t* base, int row, int col, int rows, int cols, const uint8_t* from);
void check_valid(const Instr& in, const TileRef& tile, const char* role);
const char* dtype_name(Dtype t);

// vector.cpp
void check_overlap(const Instr& in, const TileRef& dst, const TileRef& src);
void binary_row(Op op, Dtype t, const void* a, const void* b, void* out, size_t n);

// numbers.cpp
void to_float(Dtype t, const void* from, float* to, size_t n);
void from_float(Dtype t, const float* from, void* to, size_t n, pto::RoundMode mode = pto::RoundMode::CAST_RINT);
uint32_t pad_bits(Dtype t, uint64_t pad);
void fill(int size, uint32_t bits, void* to, size_t n);
void multiply(const float* a, const float* b, float* c, int m, int k, int n);
float* scratch(int slot, size_t n);

inline int up(int value, int to) { return (value + to - 1) / to * to; }

}  // namespace pto_sim

#endif
