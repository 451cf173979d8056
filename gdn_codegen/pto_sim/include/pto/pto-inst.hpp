// The header that PTO C++ includes. Here it brings in the strict simulator for A2/A3.
#ifndef PTO_SIM_PTO_INST_HPP
#define PTO_SIM_PTO_INST_HPP

#include <pto_sim/types.hpp>

#include <pto_sim/tile.hpp>

#include <pto_sim/sync.hpp>

#include <pto_sim/move.hpp>

#include <pto_sim/cube.hpp>

#include <pto_sim/vector.hpp>

#endif
