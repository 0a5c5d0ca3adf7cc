// Layouts as slots, and the two ways of turning a layout into groups of SMs.
#pragma once

#include <string>
#include <vector>

#include "slots.h"

namespace mosaic {

// The partitions that are in force together, as slots: as a caller wrote them.
using LayoutSlots = std::vector<std::vector<int>>;

enum class Placement {
    // Slots of the one split are merged: partitions of all layouts are disjoint where their slots are.
    merged,
    // One cuDevSmResourceSplit a layout, by sizes (driver of 13.1 or newer): disjoint within a layout only.
    split
};

// "merged" or "split"; throws std::invalid_argument for anything else.
Placement parse_placement(const std::string& text);
const char* text(Placement placement);
// Throws Unavailable if the driver cannot place this way.
void require_placement(Placement placement);

// Checks each partition as SlotSplit::select does, and that no slot is in two of them.
std::vector<SlotSet> check_layout(const SlotSplit& split, const LayoutSlots& layout);

// One descriptor for each set; all of one layout are asked for together.
std::vector<CUdevResourceDesc> describe_layout(const SlotSplit& split, const std::vector<SlotSet>& sets,
                                               Placement placement);

}  // namespace mosaic
