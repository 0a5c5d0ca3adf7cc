#include "search/pattern_plan.h"

#include <algorithm>
#include <deque>

#include "search/order_branching.h"

namespace mosaic::search {
namespace {

constexpr double kPricingShare = 0.7;  // of the time
// Parts with more modules are bound by the order of stages before all patterns are searched.
constexpr int kManyModules = 24;
constexpr double kOrderShare = 0.8;      // of what is left then
constexpr std::size_t kMostKnown = 200;  // stages to start prices from

struct PartOfPlan {
    PartOfPlan(const StageAreas& areas, Mask members, const std::vector<Pattern>& start, const Clock& clock)
        : members(members),
          pricer(areas, members),
          prices(find_prices(areas, pricer, members, {start, nullptr, kNever}, clock)) {}

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

// Puts other stages in place of those of a part.
void replace(StageSearch& search, Partition& best, Mask members, std::vector<Mask> stages) {
    for (const Mask stage : best.stages) {
        if ((stage & members) == 0) stages.push_back(stage);
    }
    best.stages = std::move(stages);
    best.cost = cost_of(search, best.stages, ~Mask{0});
}

// What the search has worked out already: of stages that run much work for the time they take, not too many. Sets in
// which one module waits for another were asked for, too, and are no stages.
std::vector<Pattern> known_stages(const StageSearch& search, const StageAreas& areas) {
    std::vector<double> work;
    for (const Module& module : search.problem().modules) {
        double least = static_cast<double>(kNever);
        for (const Option& option : module.options) {
            least = std::min(least, static_cast<double>(option.latency()) * option.area());
        }
        work.push_back(least);
    }
    std::vector<std::pair<double, Pattern>> known;
    search.each_known([&](Mask stage, const StageValue& value) {
        if (value.cost >= kNever) return;
        double total = 0;
        Mask apart = 0;
        each(stage, [&](int m) {
            total += work[static_cast<std::size_t>(m)];
            apart |= areas.apart(m);
        });
        if ((apart & stage) != 0) return;
        known.push_back({-total / static_cast<double>(value.cost + 1), {stage, value.cost}});
    });
    std::sort(known.begin(), known.end(), [](const auto& a, const auto& b) {
        return a.first != b.first ? a.first < b.first : a.second.stage < b.second.stage;
    });
    if (known.size() > kMostKnown) known.resize(kMostKnown);
    std::vector<Pattern> stages;
    for (const auto& one : known) stages.push_back(one.second);
    return stages;
}

}  // namespace

void improve_by_patterns(StageSearch& search, const Limits& limits, const Clock& clock, Partition& best, Ns& bound) {
    StageAreas areas(search.problem());
    std::deque<PartOfPlan> parts;
    // Small parts are settled soon; what is left of the time is for the large ones.
    std::vector<Mask> sets = areas.parts();
    std::stable_sort(sets.begin(), sets.end(),
                     [](Mask a, Mask b) { return __builtin_popcountll(a) < __builtin_popcountll(b); });
    const Clock pricing(clock.seconds_left() * kPricingShare);
    const std::vector<Pattern> start = known_stages(search, areas);
    for (const Mask members : sets) parts.emplace_back(areas, members, start, pricing);
    Ns total = 0;
    for (PartOfPlan& part : parts) {
        const Ns incumbent = cost_of(search, best.stages, part.members);
        Ns by_order = 0;  // few modules are settled without
        if (__builtin_popcountll(part.members) > kManyModules) {
            OrderBranching cases(areas, part.pricer, part.members, part.prices);
            by_order = cases.run(incumbent, Clock(clock.seconds_left() * kOrderShare));
        }
        PatternSearch patterns(search, areas, part.pricer, part.prices, part.members, clock);
        const Found found = patterns.run(incumbent, limits.max_nodes);
        total = std::min(kNever, total + std::max(found.bound, by_order));
        if (!found.stages.empty()) replace(search, best, part.members, found.stages);
    }
    bound = std::max(bound, std::min(total, best.cost));
}

}  // namespace mosaic::search
