// The times at which what can be met changes.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "problem.h"

namespace mosaic::search {

// Without interference an answer changes only at the options' own times; with it, at any nanosecond.
class Ladder {
  public:
    Ladder(std::vector<Ns> steps, bool is_disturbed) : steps_(std::move(steps)), is_disturbed_(is_disturbed) {}

    // The least time at or above `time` at which a target can first be met.
    Ns up(Ns time) const {
        if (is_disturbed_) return time;
        const auto step = std::lower_bound(steps_.begin(), steps_.end(), time);
        return step == steps_.end() ? kNever : *step;
    }
    // A time between two others, such that both halves get smaller.
    Ns between(Ns low, Ns high) const {
        if (is_disturbed_) return low + (high - low) / 2;
        const auto first = std::lower_bound(steps_.begin(), steps_.end(), low);
        const auto last = std::upper_bound(first, steps_.end(), high);
        if (first == last) return high;
        return *(first + (last - first - 1) / 2);
    }

  private:
    std::vector<Ns> steps_;
    bool is_disturbed_;
};

}  // namespace mosaic::search
