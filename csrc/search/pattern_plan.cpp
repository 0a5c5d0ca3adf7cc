#include "pattern_plan.h"

#include <algorithm>
#include <deque>

namespace mosaic::search {
namespace {

constexpr double kPricingShare = 0.5;  // of the time

struct PartOfPlan {
    PartOfPlan(const StageAreas& areas, Mask members, const Clock& clock)
        : members(members), pricer(areas, members), prices(find_prices(areas, pricer, members, clock)) {}

    Mask members;
    PatternPricer pricer;
    Prices prices;
};

// What the stages of a part cost; no stage belongs to two parts.
Ns cost_of(StageSearch& search, const std::vector<Mask>& stages, Mask members) {
    Ns sum = 0;
    for (const Mask stage : stages) {
        if ((stage & members) != 0) sum = std::min(kNever, sum + search.evaluate(stage).cost);
    }
    return sum;
}

}  // namespace

void improve_by_patterns(StageSearch& search, const Limits& limits, const Clock& clock, Partition& best, Ns& bound) {
    const StageAreas areas(search.problem());
    std::deque<PartOfPlan> parts;
    // Small parts are settled soon; what is left of the time is for the large ones.
    std::vector<Mask> sets = areas.parts();
    std::stable_sort(sets.begin(), sets.end(),
                     [](Mask a, Mask b) { return __builtin_popcountll(a) < __builtin_popcountll(b); });
    const Clock pricing(clock.seconds_left() * kPricingShare);
    for (const Mask members : sets) parts.emplace_back(areas, members, pricing);
    Ns total = 0;
    for (PartOfPlan& part : parts) {
        const Ns incumbent = cost_of(search, best.stages, part.members);
        PatternSearch patterns(search, areas, part.pricer, part.prices, part.members, clock);
        const Found found = patterns.run(incumbent, limits.max_nodes);
        total = std::min(kNever, total + found.bound);
        if (found.stages.empty()) continue;
        std::vector<Mask> stages = found.stages;
        for (const Mask stage : best.stages) {
            if ((stage & part.members) == 0) stages.push_back(stage);
        }
        best.stages = std::move(stages);
        best.cost += found.cost - incumbent;
    }
    bound = std::max(bound, std::min(total, best.cost));
}

}  // namespace mosaic::search
