// What the fake needs of the CUDA driver's binary interface, declared here on its own: if Mosaic and the fake
// disagree on a layout, tests fail. Values and layouts are those of CUDA 12.4 to 13.5.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fake {

using Result = int;
enum : Result {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotInitialized = 3,
    kDeinitialized = 4,
    kNoDevice = 100,
    kInvalidDevice = 101,
    kInvalidImage = 200,
    kInvalidContext = 201,
    kInvalidHandle = 400,
    kNotFound = 500,
    kIllegalAddress = 700,
    kContextIsDestroyed = 709,
    kSystemDriverMismatch = 803,
    kInvalidResourceType = 914,
    kInvalidResourceConfiguration = 915,
    kStreamDetached = 917,
    kUnknown = 999,
};

constexpr int kResourceTypeSm = 1;
constexpr unsigned kGreenDefaultStream = 0x1;
constexpr unsigned kStreamNonBlocking = 0x1;

constexpr std::uint64_t kPerThreadDefaultStream = 0x2;

constexpr int kAttributeMultiprocessorCount = 16;
constexpr int kAttributeMajor = 75;
constexpr int kAttributeMinor = 76;

struct SmFields {
    unsigned count;
    unsigned min_partition_size;
    unsigned coscheduled_alignment;
    unsigned flags;
};

struct Resource {
    int type;
    unsigned char hidden[92];
    union {
        SmFields sm;
        unsigned char oversize[40];
    };
    Resource* next;
};
static_assert(sizeof(Resource) == 144 && offsetof(Resource, sm) == 96, "CUdevResource changed its layout");

using DevicePointer = unsigned long long;

}  // namespace fake
