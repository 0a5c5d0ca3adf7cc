// Which choice each pair of a rank takes: the least time added that its memory has room for (PipeWeaver, 6.3).
#pragma once

#include <vector>

#include "search/pipeline/tuning_rows.h"

namespace mosaic::search {

// What a nanosecond added to each pair's forward and backward counts.
struct Weights {
    std::vector<double> forward;
    std::vector<double> backward;
};

struct Selection {
    std::vector<int> chosen;  // for each pair; the leanest of each where nothing fits
    double cost = 0;          // weighted nanoseconds added
    double bound = 0;         // no choice that fits costs less
    bool fits = false;
    Ns at = 0;                     // where nothing fits: when the most is missing,
    std::int64_t short_bytes = 0;  // and how much
};

struct SelectionLimits {
    double gap = 0;    // of the cost at which to stop
    int rounds = 400;  // of prices at most
};

// Prices for memory at each row give the bound (Lagrangian relaxation, whose best is that of the linear program), and
// point at choices that a greedy repair and exchanges between pairs make fit. Deterministic.
Selection select_ways(const std::vector<PairWays>& pairs, const std::vector<MemoryRow>& rows, const Weights& weights,
                      const SelectionLimits& limits);

}  // namespace mosaic::search
