// Who touched which bytes: finds accesses that nothing orders, and reads of bytes that nobody wrote.
#include "engine.hpp"

namespace pto_sim {

Buffer::~Buffer() {
    if (owns_) free(data);
    free(cells);
}

void Buffer::own(const char* label, size_t bytes) {
    if (data) return;
    name = label;
    size = bytes;
    owns_ = true;
    data = static_cast<uint8_t*>(aligned_alloc(64, bytes));
    memset(data, 0xFF, bytes);
    cells = static_cast<Cell*>(calloc(bytes / cell_bytes, sizeof(Cell)));
    high = 0;
}

void Buffer::watch(const std::string& label, void* host, size_t bytes) {
    name = label;
    size = bytes;
    data = static_cast<uint8_t*>(host);
    cells = static_cast<Cell*>(calloc(bytes / cell_bytes + 1, sizeof(Cell)));
}

void Buffer::reset() {
    if (!data) return;
    memset(data, 0xFF, high);
    memset(static_cast<void*>(cells), 0, high / cell_bytes * sizeof(Cell));
    high = 0;
    fine.clear();
    readers.clear();
}

static bool ordered(const Instr& in, const Access& past) {
    if (past.who == in.who && past.when == in.when) return true;
    const uint32_t at = past.who - 1 - machine.base;
    if (at >= uint32_t(machine.n_agents)) return false;  // another block of a one-after-another run
    return in.seen[at] >= past.when;
}

static std::string who_is(const Access& a) {
    const int agent = int(a.who) - 1;
    const int slot = agent / units % cores_a_block;
    const int block = agent / agents_a_block;
    std::string text = std::string("pipe ") + unit_name(agent % units) + " of block " + std::to_string(block);
    return text + (slot == 0 ? " cube" : " vector " + std::to_string(slot - 1));
}

static void race(const Instr& in, const Buffer& b, const Access& past, const char* kind, size_t from, size_t to) {
    if (!machine.options.order) return;
    const int unit_then = (int(past.who) - 1) % units;
    const bool same_core = (past.who - 1) / units == (in.who - 1) / units;
    const std::string now = place(in.site), then = place(past.site);
    const bool past_reads = kind[2] == 'R' && kind[0] == 'W';
    const bool now_reads = kind[0] == 'R';
    if (same_core && unit_then == V && in.unit == V) {
        if (machine.options.v_after_v == 0 || (machine.options.v_after_v == 1 && past_reads)) return;
        fail("v-after-v", "%s: %s %s bytes [%zu, %zu) that %s %s, on pipe V of %s, with no pipe_barrier(PIPE_V) between",
             kind, now.c_str(), now_reads ? "reads" : "writes", from, to, then.c_str(), past_reads ? "reads" : "wrote",
             core->label().c_str());
    }
    std::string hint;
    if (same_core)
        hint = std::string("; it wants a flag from ") + unit_name(unit_then) + " to " + unit_name(in.unit);
    else if ((past.who - 1) / agents_a_block == (in.who - 1) / agents_a_block)
        hint = "; it wants a cross-core flag";
    else
        hint = "; the blocks run side by side, and only a device-wide barrier orders them";
    fail("race", "%s on %s, bytes [%zu, %zu): %s on pipe %s of %s %s what %s on %s %s, and nothing orders the two%s",
         kind, b.name.c_str(), from, to, now.c_str(), unit_name(in.unit), core->label().c_str(),
         now_reads ? "reads" : "writes", then.c_str(), who_is(past).c_str(), past_reads ? "reads" : "wrote",
         hint.c_str());
}

static void visit(const Instr& in, Buffer& b, History& h, bool write, size_t from, size_t to) {
    const Access now = {in.who, in.when, in.site};
    if (h.write.who && !ordered(in, h.write)) race(in, b, h.write, write ? "WAW" : "RAW", from, to);
    if (write) {
        if (h.read.who && !ordered(in, h.read)) race(in, b, h.read, "WAR", from, to);
        if (h.more) {
            for (const Access& r : b.readers[h.more - 1])
                if (!ordered(in, r)) race(in, b, r, "WAR", from, to);
            b.readers[h.more - 1].clear();
        }
        h.write = now;
        h.read = Access{};
        return;
    }
    // A reader that the new one is ordered after says nothing more: what follows the new one follows it too.
    if (!h.read.who || ordered(in, h.read)) {
        h.read = now;
        return;
    }
    if (!h.more) {
        b.readers.emplace_back();
        h.more = uint32_t(b.readers.size());
    }
    auto& list = b.readers[h.more - 1];
    for (Access& r : list) {
        if (ordered(in, r)) {
            r = now;
            return;
        }
    }
    list.push_back(now);
}

static void visit_split(const Instr& in, Buffer& b, size_t index, uint32_t bytes_mask, bool write) {
    Cell& cell = b.cells[index];
    if (!cell.split) {
        b.fine.emplace_back(splits, cell.all);
        // Each part gets its own list of further readers, or they would be merged.
        for (size_t i = 0; cell.all.more && i < splits; ++i) {
            const std::vector<Access> copy = b.readers[cell.all.more - 1];
            b.readers.push_back(copy);
            b.fine.back()[i].more = uint32_t(b.readers.size());
        }
        cell.split = uint32_t(b.fine.size());
    }
    constexpr uint32_t part = (1u << split_bytes) - 1;
    for (size_t i = 0; i < splits; ++i) {
        if (bytes_mask >> (i * split_bytes) & part) {
            const size_t from = index * cell_bytes + i * split_bytes;
            visit(in, b, b.fine[cell.split - 1][i], write, from, from + split_bytes);
        }
    }
}

static void unknown(const Instr& in, const Buffer& b, size_t index, uint32_t missing, size_t at, size_t bytes) {
    size_t byte = index * cell_bytes;
    while (!(missing & 1)) missing >>= 1, ++byte;
    fail("uninitialised", "%s on %s reads %s bytes [%zu, %zu), and nobody wrote byte %zu", place(in.site).c_str(),
         core->label().c_str(), b.name.c_str(), at, at + bytes, byte);
}

static void walk(const Instr& in, Buffer& b, size_t at, size_t bytes, bool write, bool needs_known, bool known) {
    if (!bytes) return;
    if (at + bytes > b.size)
        fail("bounds", "%s on %s touches %s bytes [%zu, %zu), past its %zu bytes", place(in.site).c_str(),
             core->label().c_str(), b.name.c_str(), at, at + bytes, b.size);
    if (b.read_only && !write) return;  // nothing ever writes it
    const size_t end = at + bytes;
    const size_t first = at / cell_bytes, last = (end - 1) / cell_bytes;
    if ((last + 1) * cell_bytes > b.high) b.high = (last + 1) * cell_bytes;  // first, as what follows may stop the run
    for (size_t index = first; index <= last; ++index) {
        uint32_t mask = 0xFFFFFFFFu;
        if (index == first && at % cell_bytes) mask &= ~0u << (at % cell_bytes);
        if (index == last && end % cell_bytes) mask &= ~0u >> (cell_bytes - end % cell_bytes);
        Cell& cell = b.cells[index];
        if (mask == 0xFFFFFFFFu && !cell.split)
            visit(in, b, cell.all, write, index * cell_bytes, (index + 1) * cell_bytes);
        else
            visit_split(in, b, index, mask, write);
        if (write)
            cell.known = known ? cell.known | mask : cell.known & ~mask;
        else if (needs_known && !b.always_known && (cell.known & mask) != mask)
            unknown(in, b, index, mask & ~cell.known, at, bytes);
    }
}

void touch(const Instr& in, Buffer& buffer, size_t at, size_t bytes, bool write, bool needs_known) {
    if (write && buffer.read_only)
        fail("read-only", "%s on %s writes %s, which is an input", place(in.site).c_str(), core->label().c_str(),
             buffer.name.c_str());
    walk(in, buffer, at, bytes, write, needs_known, true);
}

void scrap(const Instr& in, Buffer& buffer, size_t at, size_t bytes) {
    walk(in, buffer, at, bytes, true, false, false);
    memset(buffer.data + at, 0xFF, bytes);
}

}  // namespace pto_sim
