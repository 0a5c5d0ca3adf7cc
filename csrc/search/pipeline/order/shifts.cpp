#include "search/pipeline/order/shifts.h"

#include <algorithm>

#include "search/pipeline/order/methods.h"

namespace mosaic::search::pipeline {

Shifts::Shifts(Explorer& explorer) : explorer_(explorer), at_(explorer.natural()), best_(at_) {
    if (explorer.thread > 0) {
        explorer.draw(at_.forward, 0);
        at_.backward = at_.forward;
    }
}

void Shifts::run(std::int64_t num_tries) {
    if (best_value_ == kNever && !explorer_.is_over()) {
        value_ = best_value_ = explorer_.roll(at_, true);
        best_ = at_;
    } else if (!has_gained_) {
        kick();
    }
    has_gained_ = false;
    for (std::int64_t i = 0; i < num_tries && !explorer_.is_over(); ++i) has_gained_ = try_one() || has_gained_;
}

bool Shifts::try_one() {
    Ranking tried = at_;
    change(tried);
    const Ns value = explorer_.roll(tried, false, value_);
    if (value > value_) return false;
    const bool gained = value < value_;
    at_ = std::move(tried);
    value_ = value;
    if (value < best_value_) {
        best_ = at_;
        best_value_ = value;
    }
    return gained;
}

void Shifts::kick() {
    if (explorer_.random.below(4) == 0) {
        at_ = explorer_.natural();
        explorer_.draw(at_.forward, 0);
        at_.backward = at_.forward;
    } else {
        at_ = best_;
        for (int i = 3 + explorer_.random.below(4); i > 0; --i) change(at_);
    }
    if (!explorer_.is_over()) value_ = explorer_.roll(at_, true);
}

// Puts the group at one place to another, with those that feed it before it where that binds. Returns the group.
int Shifts::move(std::vector<int>& order, bool is_bound) {
    const int n = static_cast<int>(order.size());
    const int from = explorer_.random.below(n);
    const int group = order[from];
    int to = explorer_.random.below(n);
    if (is_bound) {
        const auto feeds = [&](int a, int b) {
            const std::vector<int>& after = explorer_.groups.after[a];
            return std::find(after.begin(), after.end(), b) != after.end();
        };
        int reach = from;
        if (to < from) {
            while (reach > to && !feeds(order[reach - 1], group)) --reach;
        } else {
            while (reach < to && !feeds(group, order[reach + 1])) ++reach;
        }
        to = reach;
    }
    if (to < from) std::rotate(order.begin() + to, order.begin() + from, order.begin() + from + 1);
    if (to > from) std::rotate(order.begin() + from, order.begin() + from + 1, order.begin() + to + 1);
    return group;
}

void Shifts::change(Ranking& ranking) {
    Random& random = explorer_.random;
    if (random.below(16) == 0) {
        if (explorer_.is_limited() && random.below(2) == 0) {
            ranking.admission = ranking.admission == Admission::gate ? Admission::reserve : Admission::gate;
        } else {
            ranking.lean = static_cast<Lean>(random.below(3));
        }
        return;
    }
    if (ranking.forward.size() < 2) return;
    const int choice = random.below(8);
    if (choice == 0) {
        move(ranking.backward, false);
        return;
    }
    const int group = move(ranking.forward, true);
    if (choice <= 2) return;
    // Its backwards go where its forwards went: behind the same group.
    std::vector<int>& backward = ranking.backward;
    backward.erase(std::find(backward.begin(), backward.end(), group));
    const auto at = std::find(ranking.forward.begin(), ranking.forward.end(), group);
    const auto behind =
        at == ranking.forward.begin() ? backward.begin() : std::find(backward.begin(), backward.end(), *(at - 1)) + 1;
    backward.insert(behind, group);
}

Orders Shifts::orders() { return explorer_.orders_of(at_); }

void run_shifts(Explorer& explorer) {
    Shifts shifts(explorer);
    while (!explorer.is_over()) shifts.run(shifts.round());
}

}  // namespace mosaic::search::pipeline
