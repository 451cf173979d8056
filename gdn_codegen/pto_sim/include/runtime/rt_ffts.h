// Host side call that fetches the address for set_ffts_base_addr; a simulated launch passes its own.
#ifndef PTO_SIM_RT_FFTS_H
#define PTO_SIM_RT_FFTS_H
#include <cstdint>
inline int rtGetC2cCtrlAddr(uint64_t* addr, uint32_t* len) {
    *addr = 0xFF75ULL;
    *len = 0;
    return 0;
}
#endif
