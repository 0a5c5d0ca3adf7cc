// Extra time that neighbours on a device cost a module.
#pragma once

#include <algorithm>

#include "problem.h"

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

}  // namespace mosaic::search
