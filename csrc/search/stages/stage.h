// A set of modules placed side by side, and what it costs.
#pragma once

#include <vector>

#include "search/problem.h"

namespace mosaic::search {

// A module in a stage.
struct Placed {
    int module = 0;
    int option = 0;            // index among the module's options
    std::vector<int> devices;  // rising
};

struct Stage {
    Ns forward = 0;  // of the slowest module in each phase, beside the others
    Ns backward = 0;
    Ns latency = 0;  // of the module whose forward and backward together take longest
    std::vector<Placed> placed;
};

// What a stage costs: how long a training step's two halves take.
inline Ns cost_of(const Stage& stage) { return stage.forward + stage.backward; }

// Recomputes a stage's forward and backward from its placement, with what neighbours cost (Eq. 7).
void time_stage(const Problem& problem, Stage& stage);

}  // namespace mosaic::search
