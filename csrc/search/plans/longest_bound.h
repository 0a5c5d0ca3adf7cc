// How long some modules take at least, judged by the longest of their stages.
#pragma once

#include <unordered_map>
#include <vector>

#include "search/problem.h"

namespace mosaic::search {

// Let the longest stage take T. What runs in it shares the machine's slots at T; everything else has what is left of
// the time, with options no slower than that and than T. For every T this is a fractional knapsack: which modules go
// into the longest stage so that the slots x time of the others is least. A total for which no T works is too short.
// Dependencies are left out, and so is everything about single devices: this is a bound.
class LongestBound {
  public:
    explicit LongestBound(const Problem& problem);

    // A time that no plan of the modules is below, between `at_least`, which must be one, and `at_most`.
    Ns operator()(Mask set, Ns at_least, Ns at_most);

  private:
    // The least area and the least slots x time of a module among its options up to each latency.
    struct Curve {
        std::vector<Ns> latency;  // rising
        std::vector<double> area;
        std::vector<double> work;
    };
    struct Item {
        double area;
        double work;
    };

    bool is_possible(const std::vector<int>& modules, Ns shortest, Ns total);
    bool fits(const std::vector<int>& modules, Ns low, Ns high, Ns total);

    std::vector<Curve> curves_;
    double room_;
    std::vector<Item> items_;  // scratch
    std::unordered_map<Mask, Ns> known_;
};

}  // namespace mosaic::search
