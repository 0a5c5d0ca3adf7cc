// Work shared out over ranks: longest first, and better by trading.
#pragma once

#include <cstdint>
#include <vector>

namespace mosaic::search::context {

// The rank of each piece of work: the largest first, each to the rank that has least so far and not yet `cap` pieces;
// of equal ones the lower rank, of equal pieces the first. There is room: cap times ranks are at least the pieces.
std::vector<std::int32_t> longest_first(const std::vector<std::int64_t>& work, std::int32_t num_ranks,
                                        std::int64_t cap);

// Has the rank with most trade a piece against a smaller one of another rank, where the larger of the two then has
// least, until nothing is won or the most is within 1/`fineness` of the mean. Each rank keeps its number of pieces.
std::vector<std::int32_t> traded(const std::vector<std::int64_t>& work, std::vector<std::int32_t> rank_of,
                                 std::int32_t num_ranks, std::int64_t fineness);

}  // namespace mosaic::search::context
