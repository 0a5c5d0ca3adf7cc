#include "search/plans/window_search.h"

#include <algorithm>
#include <numeric>

#include "search/plans/lazy_search.h"

namespace mosaic::search {
namespace {

constexpr std::int64_t kNodes = 500;  // of one question about one stage
// Windows in a row that bring nothing, by stage: where the best plan is asked for, and where a good one soon.
constexpr std::size_t kMaxInVain = 200;
constexpr std::size_t kMaxInVainSoon = 10;
constexpr std::size_t kMaxStages = 5;  // of a window
constexpr std::size_t kModulesOfStage = 4;
constexpr std::size_t kMaxGroups = 12;  // few enough for milliseconds

Mask united(const std::vector<Mask>& stages, const std::vector<std::size_t>& window) {
    Mask all = 0;
    for (const std::size_t i : window) all |= stages[i];
    return all;
}

}  // namespace

WindowSearch::WindowSearch(StageSearch& search, const Limits& limits)
    : search_(search), limits_(limits), random_(limits.seed) {
    limits_.max_nodes = std::min(limits.max_nodes, kNodes);
}

void WindowSearch::run(const Clock& clock, Partition& best) {
    // Few stages may hold many modules, and have as many ways to open them.
    const std::size_t most =
        kMaxInVain * std::max(best.stages.size(), search_.problem().modules.size() / kModulesOfStage);
    for (std::size_t in_vain = 0; in_vain < most && best.stages.size() > 1 && !clock.is_over();) {
        in_vain = replan(clock, best) ? 0 : in_vain + 1;
    }
}

std::vector<std::size_t> WindowSearch::draw_order(const std::vector<Mask>& stages) {
    std::vector<std::size_t> left(stages.size());
    std::iota(left.begin(), left.end(), 0);
    std::vector<std::size_t> order;
    Mask waiting = search_.problem().all();
    while (!left.empty()) {
        std::vector<std::size_t> ready;
        for (const std::size_t i : left) {
            if ((before_of(search_.problem(), stages[i]) & waiting) == 0) ready.push_back(i);
        }
        order.push_back(ready[draw(ready.size())]);
        waiting &= ~stages[order.back()];
        left.erase(std::find(left.begin(), left.end(), order.back()));
    }
    return order;
}

std::vector<std::size_t> WindowSearch::draw_window(const std::vector<Mask>& stages) {
    const std::vector<std::size_t> order = draw_order(stages);
    const std::size_t most = std::min(order.size(), kMaxStages);
    const std::size_t size = 2 + draw(most - 1);
    const std::size_t start = draw(order.size() - size + 1);
    return {order.begin() + static_cast<std::ptrdiff_t>(start),
            order.begin() + static_cast<std::ptrdiff_t>(start + size)};
}

std::vector<Mask> WindowSearch::draw_groups(const std::vector<Mask>& stages, const std::vector<std::size_t>& window) {
    std::vector<int> modules;
    each(united(stages, window), [&](int m) { modules.push_back(m); });
    std::vector<Mask> groups;
    Mask is_free = 0;
    const bool is_small = modules.size() <= kMaxGroups;
    const std::size_t most = is_small ? modules.size() : kMaxGroups - window.size();
    for (std::size_t i = 0; i < most; ++i) {
        std::swap(modules[i], modules[i + draw(modules.size() - i)]);
        groups.push_back(Mask{1} << modules[i]);
        is_free |= groups.back();
    }
    for (const std::size_t i : window) {
        if ((stages[i] & ~is_free) != 0) groups.push_back(stages[i] & ~is_free);
    }
    std::sort(groups.begin(), groups.end());
    return groups;
}

bool WindowSearch::replan(const Clock& clock, Partition& best) {
    const std::vector<std::size_t> window = draw_window(best.stages);
    Ns cost = 0;
    for (const std::size_t i : window) cost += search_.evaluate(best.stages[i]).cost;
    LazySearch exact(search_, limits_, clock, draw_groups(best.stages, window), cost);
    if (!exact.prepare(0)) return false;
    std::vector<Mask> stages = exact.run(clock);
    if (stages.empty()) return false;
    const Mask opened = united(best.stages, window);
    for (const Mask stage : best.stages) {
        if ((stage & opened) == 0) stages.push_back(stage);
    }
    best.cost -= cost - exact.cost();
    best.stages = std::move(stages);
    return true;
}

}  // namespace mosaic::search
