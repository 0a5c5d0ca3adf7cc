#include "slots.h"

#include <algorithm>
#include <utility>

namespace mosaic {
namespace {

constexpr const char* kSplit = "cuDevSmResourceSplitByCount";

std::string text(const std::vector<int>& slots) {
    std::string joined = "[";
    for (std::size_t i = 0; i < slots.size(); ++i) {
        joined += (i == 0 ? "" : ", ") + std::to_string(slots[i]);
    }
    return joined + "]";
}

}  // namespace

SlotSplit::SlotSplit(const Device& device) : device_(device) {
    const CUdevResource whole = device.sm_resource();
    split(whole);
    check(whole.sm.smCount);
}

void SlotSplit::split(const CUdevResource& whole) {
    // The driver rounds the count up to its own smallest group, so asking for one SM reads the granularity
    // from it where the resource does not tell its minimum (before 13.0).
    const unsigned min_sms = std::max(1u, whole.sm.minSmPartitionSize);
    unsigned possible = whole.sm.smCount;
    MOSAIC_CALL(cuDevSmResourceSplitByCount, static_cast<CUdevResource*>(nullptr), &possible, &whole,
                static_cast<CUdevResource*>(nullptr), 0u, min_sms);
    if (possible == 0 || possible > whole.sm.smCount) {
        throw_broken(kSplit, "would make " + std::to_string(possible) + " groups of " +
                                 std::to_string(whole.sm.smCount) + " SMs");
    }
    groups_.assign(possible, CUdevResource{});
    unsigned made = possible;
    MOSAIC_CALL(cuDevSmResourceSplitByCount, groups_.data(), &made, &whole, &remainder_, 0u, min_sms);
    if (made != possible) {
        throw_broken(kSplit,
                     "made " + std::to_string(made) + " groups where its dry run promised " + std::to_string(possible));
    }
}

void SlotSplit::check(unsigned whole_sms) const {
    unsigned granted = remainder_.sm.smCount;
    for (const CUdevResource& group : groups_) {
        if (group.type != CU_DEV_RESOURCE_TYPE_SM || group.sm.smCount == 0 || group.sm.smCount != sms_per_slot()) {
            throw_broken(kSplit, "gave groups of unequal size (" + std::to_string(sms_per_slot()) + " and " +
                                     std::to_string(group.sm.smCount) + " SMs)");
        }
        granted += group.sm.smCount;
    }
    if (granted > whole_sms) {
        throw_broken(kSplit, "gave out " + std::to_string(granted) + " SMs of " + std::to_string(whole_sms));
    }
}

CUdevResourceDesc SlotSplit::describe(const SlotSet& set) const {
    std::vector<CUdevResource> merged;
    merged.reserve(set.slots.size());
    for (const int slot : set.slots) merged.push_back(groups_.at(static_cast<std::size_t>(slot)));
    CUdevResourceDesc descriptor = nullptr;
    MOSAIC_CALL(cuDevResourceGenerateDesc, &descriptor, merged.data(), static_cast<unsigned>(merged.size()));
    return descriptor;
}

SlotSet SlotSplit::select(std::vector<int> slots) const {
    const std::string asked = "slots=" + text(slots);
    const std::string range = "0 to " + std::to_string(num_slots() - 1);
    if (slots.empty()) {
        throw std::invalid_argument(asked + " is empty, but a partition needs a slot; name some of " + range);
    }
    std::sort(slots.begin(), slots.end());
    SlotSet set;
    for (const int slot : slots) {
        if (slot < 0 || slot >= num_slots()) {
            throw std::invalid_argument(asked + " names slot " + std::to_string(slot) + ", but this split has " +
                                        std::to_string(num_slots()) + " slots; use " + range);
        }
        if (!set.slots.empty() && set.slots.back() == slot) {
            throw std::invalid_argument(asked + " names slot " + std::to_string(slot) +
                                        " twice, but a partition is a set; name each slot once");
        }
        set.slots.push_back(slot);
        set.num_sms += groups_[static_cast<std::size_t>(slot)].sm.smCount;
    }
    return set;
}

}  // namespace mosaic
