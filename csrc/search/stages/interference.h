// Extra time that neighbours on a device cost a module.
#pragma once

#include <algorithm>

#include "search/problem.h"

namespace mosaic::search {

// A module on a device with the option it has there.
struct Resident {
    int module;
    int option;
};

// What neighbours cost one module, the worst of its devices (Eq. 7).
struct Extras {
    Ns forward = 0;
    Ns backward = 0;
    Ns both = 0;  // forward and backward on the same device

    void raise_to(Ns forward_time, Ns backward_time) {
        forward = std::max(forward, forward_time);
        backward = std::max(backward, backward_time);
        both = std::max(both, forward_time + backward_time);
    }
};

// Extra time of `own` in one phase (0 forward, 1 backward) beside `others` on one device. Never negative, zero without
// others, and never less for more others.
Ns extra(const Problem& problem, int phase, const Resident& own, const Resident* others, int num_others);

// What one neighbour costs a module, as shares of its time alone: a row for each quota that the module may have, an
// entry for each quota that the neighbour may, both rising.
struct PairShares {
    int module = 0;
    int beside = 0;
    std::vector<std::vector<double>> rows;
};

// Makes a problem's interference pairwise, by phase; pairs that are not named cost nothing. Throws
// std::invalid_argument for a pair of modules that are not there, rows that do not fit their quotas, or negative
// shares.
void disturb_by_shares(Problem& problem, const std::vector<PairShares> (&shares)[2]);

}  // namespace mosaic::search
