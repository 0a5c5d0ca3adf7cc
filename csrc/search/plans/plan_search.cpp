#include "search/plans/plan_search.h"

#include <chrono>

#include "search/plans/lazy_search.h"
#include "search/plans/plain_bound.h"
#include "search/plans/window_search.h"

namespace mosaic::search {
namespace {

// A stage that takes more to settle is no stage for the heuristic.
constexpr std::int64_t kHeuristicNodes = 5000;
// Of the effort, for the heuristic's descent; windows have the rest.
constexpr double kHeuristicShare = 0.2;
// More modules have a descent before a proof; of the effort, for that.
constexpr int kFewModules = 12;
constexpr double kSoonShare = 0.05;
// Of the effort, what a list of all stages must leave for a proof; and of what is left then, for the proof.
constexpr double kMinLeft = 0.3;
constexpr double kProofShare = 0.85;

// A good plan, and a plain bound.
Partition search_roughly(StageSearch& search, const Limits& limits, const Clock& clock, Plan& made) {
    Partition best = improve(search, clock.part(kHeuristicShare), {});
    made.bound = plain_bound(search.problem());
    if (best.cost < kNever && made.bound < best.cost) WindowSearch(search, limits).run(clock, best);
    return best;
}

// Few modules need no heuristic: bounds lead to better plans sooner than descents do.
Partition search_exactly(StageSearch& search, const Limits& limits, const Clock& clock, Plan& made) {
    const bool is_small = search.problem().size() <= kFewModules;
    Partition best = is_small ? one_by_one(search) : improve(search, clock.part(kSoonShare), {});
    std::vector<Mask> singles;
    each(search.problem().all(), [&](int m) { singles.push_back(Mask{1} << m); });
    LazySearch exact(search, limits, clock, singles, best.cost);
    if (exact.prepare(kMinLeft)) {
        std::vector<Mask> better = exact.run(clock.part(kProofShare));
        if (!better.empty()) best = {std::move(better), exact.cost()};
        made.num_expanded = exact.num_rounds();
    } else {
        best = improve(search, clock.part(kHeuristicShare), best.stages);
    }
    made.bound = std::max(exact.bound(), plain_bound(search.problem()));
    if (made.bound < best.cost && best.cost < kNever) WindowSearch(search, limits).run(clock, best);
    return best;
}

}  // namespace

Plan plan(const Problem& problem, const Limits& limits, const std::vector<Mask>& forbidden) {
    const auto start = std::chrono::steady_clock::now();
    const Clock clock(limits.seconds, limits.effort);
    StageSearch search(problem, {std::min(limits.max_nodes, kHeuristicNodes), &clock});
    for (const Mask set : forbidden) search.forbid(set);
    Plan made;
    const bool is_exact = limits.exact && !clock.is_over();
    const Partition best = (is_exact ? search_exactly : search_roughly)(search, limits, clock, made);
    made.cost = best.cost;
    made.bound = std::min(made.bound, made.cost);
    if (made.cost < kNever) {
        const auto ordered = in_order(problem, best.stages);
        for (const Mask stage : *ordered) made.stages.push_back(search.evaluate(stage).stage);
    }
    made.status = made.bound >= made.cost ? Status::optimal : Status::feasible;
    made.num_evaluations = search.num_evaluations();
    made.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return made;
}

}  // namespace mosaic::search
