// The best plan of a problem with a proof, or a plan and a bound.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "search/stages/stage_search.h"

namespace mosaic::search {

struct Limits {
    double effort = 10;                // work, in seconds of a core; 0: only the plan of one module after the other
    std::int64_t max_nodes = 2000000;  // of one question about one stage
    double seconds = std::numeric_limits<double>::infinity();  // wall clock, for the extraordinary
};

enum class Status { optimal, feasible };

struct Plan {
    Status status = Status::feasible;
    Ns cost = kNever;  // kNever: what is forbidden leaves no plan
    Ns bound = 0;
    std::vector<Stage> stages;  // in an order that keeps dependencies
};

// The best plan with a proof, or, where a limit ends the search, the best one found and a true lower bound. No stage is
// one of the forbidden sets.
Plan plan(const Problem& problem, const Limits& limits, const std::vector<Mask>& forbidden);

}  // namespace mosaic::search
