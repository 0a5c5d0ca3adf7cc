// From stages to a good plan: clustering, then descent.
#pragma once

#include <optional>
#include <vector>

#include "search/clock.h"
#include "search/stages/stage_search.h"

namespace mosaic::search {

// A partition of the modules into stages, with its cost.
struct Partition {
    std::vector<Mask> stages;
    Ns cost = kNever;
};

// Sorts stages so that every module comes after what it depends on; empty if they depend on each other in a cycle.
std::optional<std::vector<Mask>> in_order(const Problem& problem, std::vector<Mask> stages);

// Throws std::invalid_argument unless `start` is empty or a partition of all modules in an order.
void check_start(const Problem& problem, const std::vector<Mask>& start);

// One module after the other.
Partition one_by_one(StageSearch& search);

// Greedy agglomerative clustering (Algorithm 1), then descent over moves, swaps and merges; from `start` instead where
// it is given and fits.
Partition improve(StageSearch& search, const Clock& clock, const std::vector<Mask>& start);

}  // namespace mosaic::search
