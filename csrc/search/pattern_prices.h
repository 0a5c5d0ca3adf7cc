// Prices of modules such that no stage is worth more than it takes: a lower bound for any set of modules.
#pragma once

#include <vector>

#include "search/pattern_pricer.h"

namespace mosaic::search {

// So much of a stage.
struct Share {
    Mask stage;
    double amount;
};

// Whoever has to run some modules takes at least the sum of their prices, since no stage takes less than its own.
struct Prices {
    std::vector<Ns> of;  // by module; 0 for those that were not asked for
    // Sets from which the prices came, with what they cost there; a good plan is often made of them.
    std::vector<Pattern> patterns;
    std::vector<Share> mix;  // the cheapest of those patterns that there was last

    Ns sum(Mask set) const {
        Ns total = 0;
        each(set, [&](int m) { total += of[static_cast<std::size_t>(m)]; });
        return total;
    }
};

// Where prices start and end.
struct Pricing {
    // Stages that are known, which saves finding them: only their members count, and they may cost too much.
    std::vector<Pattern> start;
    // Prices that are true already; null: none.
    const Prices* known = nullptr;
    // Prices whose sum is more than this are good enough.
    Ns enough = kNever;
};

// The best prices that area allows, or nearly: the dual of the cheapest fractional mix of stages that covers all
// modules, by column generation. Where time is over they are lower but true.
Prices find_prices(const StageAreas& areas, PatternPricer& pricer, Mask members, const Pricing& pricing,
                   const Clock& clock);

}  // namespace mosaic::search
