// Compiles the emitted source PTO_SIM_SOURCE for both kinds of core and exports PTO_SIM_KERNELS.
#include <pto_sim/driver.hpp>

#define __CCE_AICORE__ 220

namespace pto_sim_cube {
#define __DAV_C220_CUBE__ 1
#define __DAV_CUBE__ 1
#include PTO_SIM_SOURCE
#undef __DAV_C220_CUBE__
#undef __DAV_CUBE__
}  // namespace pto_sim_cube

namespace pto_sim_vec {
#define __DAV_C220_VEC__ 1
#define __DAV_VEC__ 1
#include PTO_SIM_SOURCE
#undef __DAV_C220_VEC__
#undef __DAV_VEC__
}  // namespace pto_sim_vec

PTO_SIM_KERNELS
