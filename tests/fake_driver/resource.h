// SM resources as the fake writes them.
#pragma once

#include <bitset>

#include "state.h"

namespace fake {

constexpr std::size_t kMaxSms = 256;
using SmSet = std::bitset<kMaxSms>;
enum class Source : std::uint32_t { query = 0x51, result = 0x52, remainder = 0x53 };

// What the driver hides in a resource's padding: where it came from and which SMs it means.
struct Hidden {
    Source source;
    std::int32_t device;
    std::uint64_t split;
    SmSet sms;
};
static_assert(sizeof(Hidden) <= sizeof(Resource::hidden), "must fit into the padding");

void write(Resource* out, const Hidden& hidden, unsigned alignment);
unsigned remainder_alignment(unsigned alignment);
Hidden read(const Resource& resource);
bool is_zero(const Resource& resource);
// Ids of a device's SMs, in the order in which splits take them.
std::vector<unsigned> sm_ids(int device);

}  // namespace fake
