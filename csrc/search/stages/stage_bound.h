// A quick lower bound of what a set of modules takes side by side.
#pragma once

#include <vector>

#include "search/problem.h"

namespace mosaic::search {

// The slowest module at its fastest, and the least time at which the smallest options that meet it fit into the machine
// by number of slots.
class StageBound {
  public:
    explicit StageBound(const Problem& problem);

    // kNever if the set cannot fit at all.
    Ns operator()(Mask set) const;

    // Of the slowest module in each phase, at its fastest.
    Ns least_forward(Mask set) const { return slowest(forward_, set); }
    Ns least_backward(Mask set) const { return slowest(backward_, set); }

  private:
    static Ns slowest(const std::vector<Ns>& least, Mask set);

    std::int64_t room_;
    std::vector<Ns> forward_;  // least of each module
    std::vector<Ns> backward_;
    std::vector<Ns> latency_;
    std::vector<Ns> times_;                        // all latencies that there are, rising
    std::vector<std::vector<std::int32_t>> area_;  // by module and place among these: least slots that meet it
};

}  // namespace mosaic::search
