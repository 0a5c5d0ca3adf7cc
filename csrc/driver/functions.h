// The one list of CUDA driver functions that Mosaic calls, and the only place that knows CUDA versions.
//
// X(name, since, use): `since` is the CUDA version (1000 * major + 10 * minor) whose form of the function
// we were written against; an older driver leaves the pointer null. `use` says what is lost without it.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <type_traits>

namespace mosaic {

// What a driver function is for; the weakest driver that has all of `base` can still be described.
enum class Use { base, slots, streams };

// One driver function, as it is reported to people.
struct DriverFunction {
    const char* name;
    int since;
    Use use;
};

}  // namespace mosaic

// clang-format off
#define MOSAIC_DRIVER_FUNCTIONS(X)                         \
    X(cuGetErrorName, 6000, base)                          \
    X(cuGetErrorString, 6000, base)                        \
    X(cuInit, 2000, base)                                  \
    X(cuDeviceGetCount, 2000, base)                        \
    X(cuDeviceGet, 2000, base)                             \
    X(cuDeviceGetName, 2000, base)                         \
    X(cuDeviceGetUuid, 11040, base)                        \
    X(cuDeviceGetAttribute, 2000, base)                    \
    X(cuDeviceTotalMem, 3020, base)                        \
    X(cuDevicePrimaryCtxRetain, 7000, base)                \
    X(cuDevicePrimaryCtxRelease, 11000, base)              \
    X(cuDeviceGetDevResource, 12040, slots)                \
    X(cuDevSmResourceSplitByCount, 12040, slots)           \
    X(cuDevResourceGenerateDesc, 12040, streams)           \
    X(cuGreenCtxCreate, 12040, streams)                    \
    X(cuGreenCtxDestroy, 12040, streams)                   \
    X(cuGreenCtxGetDevResource, 12040, streams)            \
    X(cuGreenCtxStreamCreate, 12050, streams)              \
    X(cuStreamDestroy, 4000, streams)                      \
    X(cuStreamSynchronize, 2000, streams)                  \
    X(cuCtxPushCurrent, 4000, streams)                     \
    X(cuCtxPopCurrent, 4000, streams)                      \
    X(cuMemGetInfo, 3020, streams)                         \
    X(cuLibraryLoadData, 12000, streams)                   \
    X(cuLibraryUnload, 12000, streams)                     \
    X(cuLibraryGetKernel, 12000, streams)                  \
    X(cuLaunchKernel, 4000, streams)                       \
    X(cuMemAlloc, 3020, streams)                           \
    X(cuMemFree, 3020, streams)                            \
    X(cuMemsetD32Async, 3020, streams)                     \
    X(cuMemcpyDtoHAsync, 3020, streams)
// clang-format on

// The headers know a form of that version, and it is the one that calls are compiled for.
#define MOSAIC_CHECK_FORM(name, since, use) \
    static_assert(std::is_same_v<PFN_##name##_v##since, decltype(&::name)>, #name " has no such form");
MOSAIC_DRIVER_FUNCTIONS(MOSAIC_CHECK_FORM)
#undef MOSAIC_CHECK_FORM

namespace mosaic {

// The pointers themselves. cuda.h renames some functions by macro (cuDeviceTotalMem -> cuDeviceTotalMem_v2);
// members and their uses are renamed alike, so code reads with the plain names.
struct Functions {
#define MOSAIC_MEMBER(name, since, use) decltype(&::name) name = nullptr;
    MOSAIC_DRIVER_FUNCTIONS(MOSAIC_MEMBER)
#undef MOSAIC_MEMBER
};

}  // namespace mosaic
