// Device code includes it, but uses nothing of it.
#ifndef PTO_SIM_ACL_H
#define PTO_SIM_ACL_H
#include <cstdint>
typedef void* aclrtStream;
#endif
