// What one search found out about sets of modules, for the next one that has modules in common with it.
#pragma once

#include <unordered_map>
#include <vector>

#include "problem.h"
#include "stage.h"

namespace mosaic::search {

// What is known of a set of modules.
struct StageValue {
    Ns bound = 0;      // no placement costs less
    Ns cost = kNever;  // of `stage`; kNever if none is known
    Stage stage;
    bool gave_up = false;  // the number of nodes ran out: the value stays as it is
    bool is_exact() const { return bound >= cost; }
};

using StageValues = std::unordered_map<Mask, StageValue>;

struct Known {
    Problem problem;
    StageValues values;
};

// The values that hold for another problem too: of sets of modules that have the same options in both, on the same
// machine and with the same interference; none otherwise. `places[m]` is the index that module m had before; -1: it is
// new. Throws std::invalid_argument where `places` does not fit the problems.
StageValues carry_over(const Known& known, const Problem& problem, const std::vector<int>& places);

}  // namespace mosaic::search
