#include "search/plans/stage_order.h"

#include <algorithm>

namespace mosaic::search {

std::vector<std::size_t> draw_order(const Problem& problem, const std::vector<Mask>& stages, std::mt19937_64& random) {
    std::vector<std::size_t> left(stages.size());
    for (std::size_t i = 0; i < left.size(); ++i) left[i] = i;
    std::vector<std::size_t> order;
    Mask waiting = problem.all();
    while (!left.empty()) {
        std::vector<std::size_t> ready;
        for (const std::size_t i : left) {
            Mask before = 0;
            each(stages[i], [&](int m) { before |= problem.modules[static_cast<std::size_t>(m)].before; });
            if ((before & waiting) == 0) ready.push_back(i);
        }
        const std::size_t next = ready[static_cast<std::size_t>(random() % ready.size())];
        order.push_back(next);
        waiting &= ~stages[next];
        left.erase(std::find(left.begin(), left.end(), next));
    }
    return order;
}

}  // namespace mosaic::search
