#include <algorithm>

#include "search/pipeline/order/methods.h"

namespace mosaic::search::pipeline {

void run_natural(Explorer& explorer) {
    Ranking ranking = explorer.natural();
    explorer.roll(ranking, true);
}

void run_random(Explorer& explorer) {
    Ranking ranking = explorer.natural();
    while (!explorer.is_over()) {
        explorer.draw(ranking.forward, 0);
        ranking.backward = ranking.forward;
        explorer.roll(ranking, true);
    }
}

namespace {

struct DepthFirst {
    Explorer& explorer;
    std::vector<int> order, num_before;

    // Returns false where the search is to end.
    bool descend() {
        if (order.size() == explorer.groups.natural.size()) {
            Ranking ranking{order, order, Admission::reserve, Lean::alternate};
            explorer.roll(ranking, true);
            return !explorer.is_over();
        }
        // Threads share what can come first.
        const int step = order.empty() ? explorer.num_threads : 1;
        int place = 0;
        for (const int group : explorer.groups.natural) {
            if (num_before[group] != 0) continue;
            if (order.empty() && place++ % step != explorer.thread) continue;
            order.push_back(group);
            num_before[group] = -1;
            for (const int other : explorer.groups.after[group]) --num_before[other];
            const bool goes_on = descend();
            for (const int other : explorer.groups.after[group]) ++num_before[other];
            num_before[group] = 0;
            order.pop_back();
            if (!goes_on) return false;
        }
        return true;
    }
};

}  // namespace

void run_depth_first(Explorer& explorer) {
    if (!explorer.is_over()) DepthFirst{explorer, {}, explorer.groups.num_before}.descend();
}

}  // namespace mosaic::search::pipeline
