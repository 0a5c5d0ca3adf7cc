#include "pattern_plan.h"

#include <algorithm>
#include <deque>

#include "order_branching.h"

namespace mosaic::search {
namespace {

constexpr double kPricingShare = 0.7;  // of the time
constexpr double kDiveShare = 0.6;     // of what is left
// Parts with more modules get a plan by a dive before all patterns are searched.
constexpr int kManyModules = 24;
constexpr double kOrderShare = 0.8;       // of what is left then, for the order of stages of such parts
constexpr std::int64_t kDiveNodes = 100;  // of one question about one stage
constexpr std::size_t kMostKnown = 1000;  // stages to start prices from
constexpr std::size_t kMostTried = 30;    // stages, each time

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

// Modules of a set all of whose predecessors in the set are done: none of them waits for another.
Mask ready(const Problem& problem, Mask set) {
    Mask found = 0;
    each(set, [&](int m) {
        if ((problem.modules[static_cast<std::size_t>(m)].before & set) == 0) found |= Mask{1} << m;
    });
    return found;
}

// Of the patterns that prices came from, the stage that takes least above its worth for what it is worth.
Mask best_stage(StageSearch& search, const Prices& prices, Mask now) {
    std::vector<Pattern> patterns;
    for (const Pattern& pattern : prices.patterns) {
        if ((pattern.stage & ~now) == 0) patterns.push_back(pattern);
    }
    const auto ratio = [&](Mask stage, Ns cost) {
        return static_cast<double>(cost) / static_cast<double>(prices.sum(stage) + 1);
    };
    std::sort(patterns.begin(), patterns.end(), [&](const Pattern& a, const Pattern& b) {
        const double first = ratio(a.stage, a.cost);
        const double second = ratio(b.stage, b.cost);
        return first != second ? first < second : a.stage < b.stage;
    });
    if (patterns.size() > kMostTried) patterns.resize(kMostTried);
    Mask best = now & -now;
    double least = ratio(best, search.evaluate(best).cost);
    for (const Pattern& pattern : patterns) {
        const double own = ratio(pattern.stage, search.evaluate(pattern.stage).cost);
        if (own < least) {
            least = own;
            best = pattern.stage;
        }
    }
    return best;
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

// Fixes one stage after the other, with prices for what is left each time.
void dive(StageSearch& search, const StageAreas& areas, const PartOfPlan& part, const Clock& clock, Partition& best) {
    search.set_max_nodes(kDiveNodes);
    std::vector<Mask> stages;
    Mask rest = part.members;
    for (Prices prices = part.prices; rest != 0 && !clock.is_over();) {
        stages.push_back(best_stage(search, prices, ready(search.problem(), rest)));
        rest &= ~stages.back();
        if (rest == 0) break;
        PatternPricer pricer(areas, rest);
        prices = find_prices(areas, pricer, rest, {prices.patterns, &prices, kNever},
                             Clock(clock.seconds_left() * kPricingShare));
    }
    if (rest == 0 && cost_of(search, stages, ~Mask{0}) < cost_of(search, best.stages, part.members)) {
        replace(search, best, part.members, std::move(stages));
    }
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
        if (__builtin_popcountll(part.members) > kManyModules)
            dive(search, areas, part, Clock(clock.seconds_left() * kDiveShare), best);
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
