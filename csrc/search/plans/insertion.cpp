#include <algorithm>

#include "search/plans/chains.h"
#include "search/plans/plan_search.h"

namespace mosaic::search {
namespace {

// Puts the only module of a stage beside others where that saves most; leaves it where nothing does.
void insert(StageSearch& search, std::vector<Mask>& stages, std::size_t own, const std::vector<Mask>& apart) {
    const Mask bit = stages[own];
    const Ns alone = search.evaluate(bit).cost;
    Ns most_saved = 0;
    std::vector<Mask> best;
    for (std::size_t i = 0; i < stages.size(); ++i) {
        const Mask both = stages[i] | bit;
        if (i == own || (apart[static_cast<std::size_t>(__builtin_ctzll(bit))] & stages[i]) != 0) continue;
        const Ns cutoff = search.evaluate(stages[i]).cost + alone - most_saved;
        if (search.bound(both) >= cutoff) continue;
        std::vector<Mask> moved = stages;
        moved[i] = both;
        moved.erase(moved.begin() + static_cast<std::ptrdiff_t>(own));
        if (!in_order(search.problem(), moved)) continue;
        const Ns cost = search.evaluate(both, cutoff).cost;
        if (cost >= cutoff) continue;
        most_saved += cutoff - cost;
        best = std::move(moved);
    }
    if (most_saved > 0) stages = std::move(best);
}

}  // namespace

Partition insert_new(StageSearch& search, std::vector<Mask> stages) {
    std::vector<Mask> before;
    for (const Module& module : search.problem().modules) before.push_back(module.before);
    const std::vector<Mask> apart = all_apart(all_earlier(before));
    each(search.carried().strange(), [&](int m) {
        const auto own = std::find(stages.begin(), stages.end(), Mask{1} << m);
        if (own != stages.end()) insert(search, stages, static_cast<std::size_t>(own - stages.begin()), apart);
    });
    Ns sum = 0;
    for (const Mask stage : stages) sum = std::min(kNever, sum + search.evaluate(stage).cost);
    return {std::move(stages), sum};
}

}  // namespace mosaic::search
