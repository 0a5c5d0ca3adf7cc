// How long memory surely stays in use: what a task takes, matched with the later task that frees it.
#pragma once

#include <vector>

#include "search/pipeline/tasks.h"

namespace mosaic::search::pipeline {

// `bytes` are in use on a rank from the start of one task to the end of another, or to the end of the step (-1).
struct Hold {
    int rank;
    int from, to;
    Bytes bytes;
    Ns least;  // the longest way between, both included: no schedule holds it for a shorter time
};

struct Holds {
    // In every schedule and at every time, what is in use on a rank is its base and the holds that last then: which
    // take is matched with which free does not change the sum, as long as each free comes after its take.
    std::vector<Hold> holds;
    // False where some free follows no take of its rank for sure, or there are too many to look at.
    std::vector<bool> is_exact;
};

Holds match_holds(const Tasks& tasks);

}  // namespace mosaic::search::pipeline
