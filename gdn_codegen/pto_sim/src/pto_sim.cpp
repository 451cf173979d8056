// The engine in one unit: compiled once, linked into every simulated kernel.
#include "engine.hpp"

#include "launch.cpp"
#include "shadow.cpp"
#include "sync.cpp"
#include "tiles.cpp"
#include "numbers.cpp"
#include "move.cpp"
#include "cube.cpp"
#include "vector.cpp"
#include "expand.cpp"
