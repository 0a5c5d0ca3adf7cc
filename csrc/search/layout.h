// Which slots a module gets: one contiguous run, the same on each of its devices (paper Eq. 6, symmetry).
#pragma once

#include <optional>
#include <vector>

#include "problem.h"

namespace mosaic::search {

// A module's run of slots on its devices.
struct Run {
    int quota;
    std::vector<int> devices;
};

// Finds the first slot of each run so that no two share a slot of a device; empty where there is no way, or where
// none was found within a fixed number of steps (`gave_up` is then set).
std::optional<std::vector<int>> lay_out(const std::vector<Run>& runs, int num_slots, bool* gave_up);

}  // namespace mosaic::search
