// Orders in which the stages of a plan can run.
#pragma once

#include <random>
#include <vector>

#include "search/problem.h"

namespace mosaic::search {

// Places of stages in an order that keeps dependencies. Of stages that nothing orders, chance says which comes first,
// so that each may be the neighbour of each. The stages must be a partition of all modules that has such an order.
std::vector<std::size_t> draw_order(const Problem& problem, const std::vector<Mask>& stages, std::mt19937_64& random);

}  // namespace mosaic::search
