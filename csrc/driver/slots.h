// The split of one device into slots, from which every partition of every layout is taken.
#pragma once

#include <vector>

#include "device.h"

namespace mosaic {

// Slots of one split, sorted and without repeats: what a partition is made of.
struct SlotSet {
    std::vector<int> slots;
    // Sum of what the driver granted to these slots.
    unsigned num_sms = 0;
};

// One call of cuDevSmResourceSplitByCount. Its groups are disjoint by the driver's promise, and only groups
// of one split may be merged into a partition, so there is one of these for each device in use.
class SlotSplit {
  public:
    explicit SlotSplit(const Device& device);

    const Device& device() const { return device_; }
    int num_slots() const { return static_cast<int>(groups_.size()); }
    unsigned sms_per_slot() const { return groups_.front().sm.smCount; }
    // Left over by the split, and in no partition: from CUDA 13.1 on they cannot be merged with slots.
    unsigned remainder_sms() const { return remainder_.sm.smCount; }

    // Throws std::invalid_argument for an empty set, a repeated slot or one that does not exist.
    SlotSet select(std::vector<int> slots) const;
    // A descriptor of the slots merged. The driver keeps it to the process's end.
    CUdevResourceDesc describe(const SlotSet& set) const;

  private:
    void split(const CUdevResource& whole);
    void check(unsigned whole_sms) const;

    Device device_;
    std::vector<CUdevResource> groups_;
    CUdevResource remainder_{};
};

}  // namespace mosaic
