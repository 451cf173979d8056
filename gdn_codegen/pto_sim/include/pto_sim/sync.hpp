// Flags inside a core, flags between cores, and what a core knows of itself.
#ifndef PTO_SIM_SYNC_HPP
#define PTO_SIM_SYNC_HPP

#include <pto_sim/types.hpp>

namespace pto_sim {
// sync.cpp
void flag_set(pipe_t src, pipe_t dst, int id, Site site);
void flag_wait(pipe_t src, pipe_t dst, int id, Site site);
void barrier(pipe_t pipe, Site site);
void cross_set(pipe_t pipe, uint64_t config, Site site);
void cross_wait(int id, Site site);
void cross_base(uint64_t addr, Site site);
int block_index();
int block_count();
int sub_index();
int sub_count();
}  // namespace pto_sim

inline void set_flag(pipe_t src, pipe_t dst, event_t id, PTO_SIM_HERE) { pto_sim::flag_set(src, dst, id, site); }
inline void wait_flag(pipe_t src, pipe_t dst, event_t id, PTO_SIM_HERE) { pto_sim::flag_wait(src, dst, id, site); }
inline void pipe_barrier(pipe_t pipe, PTO_SIM_HERE) { pto_sim::barrier(pipe, site); }
inline void ffts_cross_core_sync(pipe_t pipe, uint64_t config, PTO_SIM_HERE) { pto_sim::cross_set(pipe, config, site); }
inline void wait_flag_dev(int64_t id, PTO_SIM_HERE) { pto_sim::cross_wait(static_cast<int>(id), site); }
inline void set_ffts_base_addr(uint64_t addr, PTO_SIM_HERE) { pto_sim::cross_base(addr, site); }

inline int64_t get_block_idx() { return pto_sim::block_index(); }
inline int64_t get_block_num() { return pto_sim::block_count(); }
inline int64_t get_subblockid() { return pto_sim::sub_index(); }
inline int64_t get_subblockdim() { return pto_sim::sub_count(); }

// Instructions here work on valid sizes, so the lane mask has nothing to do.
inline void set_mask_norm() {}
inline void set_mask_count() {}
inline void set_vector_mask(uint64_t, uint64_t) {}

#endif
