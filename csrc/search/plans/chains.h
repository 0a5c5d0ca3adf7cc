// Chains of modules, and short numbers for sets that keep to them.
#pragma once

#include <cstddef>
#include <vector>

#include "search/problem.h"

namespace mosaic::search {

// What comes before each module, directly or not, from what comes directly before it.
std::vector<Mask> all_earlier(std::vector<Mask> before);
std::vector<Mask> earlier_of(const Problem& problem);

// What can be in no stage with each module: all that comes before or after it, directly or not.
std::vector<Mask> all_apart(const std::vector<Mask>& earlier);

// Whether no module of a set comes before another one of it.
bool may_be_stage(Mask set, const std::vector<Mask>& apart);

// Numbers from 0 for two kinds of sets: ideals, which hold all that comes before what they hold and so have the first
// few modules of each chain; and stages, of which no module comes before another and so have one of each chain at
// most. Both kinds have a digit a chain, so there are far fewer numbers than sets where modules are in rows, and
// removing a module from a stage makes its number smaller.
class ChainIndex {
  public:
    ChainIndex() = default;
    explicit ChainIndex(const std::vector<Mask>& earlier);

    // How many numbers there are, of either kind; above 2^40 no number means anything.
    std::size_t size() const { return size_; }

    // What a module adds to the number of an ideal and of a stage.
    std::size_t in_ideal(int module) const { return in_ideal_[static_cast<std::size_t>(module)]; }
    std::size_t in_stage(int module) const { return in_stage_[static_cast<std::size_t>(module)]; }

    std::size_t of_ideal(Mask set) const { return sum(in_ideal_, set); }
    std::size_t of_stage(Mask set) const { return sum(in_stage_, set); }

  private:
    static std::size_t sum(const std::vector<std::size_t>& added, Mask set) {
        std::size_t number = 0;
        each(set, [&](int m) { number += added[static_cast<std::size_t>(m)]; });
        return number;
    }

    std::size_t size_ = 1;
    std::vector<std::size_t> in_ideal_;
    std::vector<std::size_t> in_stage_;
    std::vector<std::size_t> steps_;    // by chain: what one more of it adds
    std::vector<std::size_t> lengths_;  // by chain
};

}  // namespace mosaic::search
