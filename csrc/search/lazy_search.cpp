#include "lazy_search.h"

#include <algorithm>
#include <numeric>

namespace mosaic::search {
namespace {

constexpr std::size_t kMostModules = 20;
// Pairs of a set of finished modules and a stage after it; each round looks at all of them.
constexpr std::int64_t kMostPairs = 30'000'000;
// Of the time, after the list of pairs: with less, a descent gets further than a list that is never used.
constexpr double kLeastLeft = 0.4;
// Of one question about one stage, at first.
constexpr std::int64_t kFirstNodes = 20'000;
// Modules of a stage that is not looked at while there is news of smaller ones.
constexpr int kLarge = 5;

}  // namespace

LazySearch::LazySearch(StageSearch& search, const Limits& limits, const Clock& clock, std::vector<Mask> groups,
                       Ns incumbent)
    : search_(search),
      problem_(search.problem()),
      limits_(limits),
      clock_(clock),
      groups_(std::move(groups)),
      best_(incumbent) {
    for (const Mask group : groups_) {
        Mask earlier = 0;
        each(group, [&](int m) { earlier |= problem_.modules[static_cast<std::size_t>(m)].before; });
        before_.push_back(0);
        for (std::size_t i = 0; i < groups_.size(); ++i) {
            if ((groups_[i] & earlier) != 0) before_.back() |= Mask{1} << i;
        }
    }
}

Mask LazySearch::to_modules(Mask stage) const {
    Mask modules = 0;
    each(stage, [&](int i) { modules |= groups_[static_cast<std::size_t>(i)]; });
    return modules;
}

bool LazySearch::prepare() {
    const std::size_t size = groups_.size();
    if (size > kMostModules) return false;
    all_ = (Mask{1} << size) - 1;
    later_.assign(size, 0);
    earlier_.assign(size, 0);
    for (std::size_t round = 0; round < size; ++round) {  // as many rounds as the longest chain can have
        for (std::size_t m = 0; m < size; ++m) {
            each(before_[m], [&](int n) { later_[static_cast<std::size_t>(n)] |= Mask{1} << m | later_[m]; });
        }
    }
    stages_.assign(all_ + 1, -1);
    rests_.assign(all_ + 1, -1);
    nexts_.assign(all_ + 1, 0);
    std::int64_t num_pairs = 0;
    ideals_.assign(1, make_ideal(0));
    rests_[0] = 0;
    for (std::size_t i = 0; i < ideals_.size(); ++i) {
        const Ideal ideal = ideals_[i];
        num_pairs += std::int64_t{1} << __builtin_popcountll(ideal.rest);
        if (num_pairs > kMostPairs || clock_.seconds_left() < limits_.seconds * kLeastLeft) return false;
        each_stage(ideal, [&](Mask stage) {
            const Mask next = ideal.done | stage;
            if (stage_bound(stage) >= best_ || rests_[next] >= 0) return;
            rests_[next] = 0;
            if (next != all_) ideals_.push_back(make_ideal(next));
        });
    }
    std::stable_sort(ideals_.begin(), ideals_.end(), [](const Ideal& a, const Ideal& b) {
        return __builtin_popcountll(a.done) > __builtin_popcountll(b.done);
    });
    std::fill(rests_.begin(), rests_.end(), kNever);
    rests_[all_] = 0;
    if (groups_.size() == static_cast<std::size_t>(problem_.size())) take_known();
    return true;
}

// Bounds of an earlier search, for the same sets and for all larger ones: from each of them, or over all sets at once
// where that is less. Here groups are modules.
void LazySearch::take_known() {
    std::vector<std::pair<Mask, Ns>> known;
    std::int64_t num_larger = 0;
    search_.carried().each_bound([&](Mask set, Ns bound) {
        known.emplace_back(set, bound);
        num_larger += std::int64_t{1} << __builtin_popcountll(independent_of(set));
    });
    if (num_larger <= static_cast<std::int64_t>(problem_.all()) * problem_.size() / 2) {
        for (const auto& [set, bound] : known) raise(set, std::max(stages_[set], bound));
        return;
    }
    for (const auto& [set, bound] : known) stages_[set] = std::max(stages_[set], bound);
    for (Mask set = 1; set <= problem_.all(); ++set) {
        each(set, [&](int m) {
            const Ns smaller = stages_[set & ~(Mask{1} << m)];
            if (smaller > stages_[set]) stages_[set] = smaller;
        });
    }
}

LazySearch::Ideal LazySearch::make_ideal(Mask done) {
    Mask ready = 0;
    Mask waiting = 0;
    each(all_ & ~done, [&](int m) {
        const bool is_ready = (before_[static_cast<std::size_t>(m)] & ~done) == 0;
        (is_ready ? ready : waiting) |= Mask{1} << m;
    });
    // A module's stage may as well come first where everything that could share it is ready. Of several the one that
    // takes longest, so that bounds are high early.
    Mask first = 0;
    each(ready, [&](int m) {
        const Mask bit = Mask{1} << m;
        const bool may_be_first = (waiting & ~later_[static_cast<std::size_t>(m)]) == 0;
        if (may_be_first && (first == 0 || stage_bound(bit) > stage_bound(first))) first = bit;
    });
    return {done, first, ready & ~first};
}

Ns& LazySearch::stage_bound(Mask stage) {
    Ns& bound = stages_[stage];
    if (bound < 0) bound = search_.known_bound(to_modules(stage));
    return bound;
}

template <typename Visit>
void LazySearch::each_stage(const Ideal& ideal, Visit visit) {
    Mask others = ideal.rest;
    while (true) {
        if ((others | ideal.first) != 0) visit(others | ideal.first);
        if (others == 0) return;
        others = (others - 1) & ideal.rest;
    }
}

std::vector<Mask> LazySearch::run() {
    std::int64_t nodes = std::min(limits_.max_nodes, kFirstNodes);
    search_.set_max_nodes(nodes);
    while (true) {
        ++num_rounds_;
        sweep();
        bound_ = std::max(bound_, std::min(best_, rests_[0]));
        if (bound_ >= best_ || clock_.is_over()) break;
        if (work_out(lead())) continue;
        if (nodes >= limits_.max_nodes) break;
        nodes = std::min(limits_.max_nodes, 8 * nodes);
        search_.set_max_nodes(nodes);
    }
    std::vector<Mask> stages;
    for (const Mask stage : found_) stages.push_back(to_modules(stage));
    return stages;
}

// The least time of what is left after each set, by the bounds of stages.
void LazySearch::sweep() {
    for (const Ideal& ideal : ideals_) {
        // Bounds only rise: where the best stage's has not, it still is the best.
        const Mask known = nexts_[ideal.done];
        if (known != 0 && stages_[known] + rests_[ideal.done | known] == rests_[ideal.done]) continue;
        Ns least = kNever;
        Mask next = 0;
        each_stage(ideal, [&](Mask stage) {
            const Ns time = stages_[stage] + rests_[ideal.done | stage];
            if (time < least) {
                least = time;
                next = stage;
            }
        });
        rests_[ideal.done] = least;
        nexts_[ideal.done] = next;
    }
}

std::vector<Mask> LazySearch::lead() const {
    std::vector<Mask> stages;
    for (Mask done = 0; done != all_; done |= stages.back()) stages.push_back(nexts_[done]);
    return stages;
}

// Returns whether anything was learnt: a stage took longer than its bound, or the plan is better than the best.
bool LazySearch::work_out(const std::vector<Mask>& stages) {
    Ns total = rests_[0];
    Ns cost = 0;
    bool has_learnt = false;
    if (problem_.is_disturbed()) {  // what rules a plan out without disturbance is found much sooner
        for (const Mask stage : stages) {
            const Ns before = stages_[stage];
            const Ns bound = search_.calm_bound(to_modules(stage), best_ - (total - before));
            if (bound <= before) continue;
            raise(stage, bound);
            total += bound - before;
            has_learnt = true;
        }
        if (has_learnt) return true;
    }
    std::vector<Mask> small_first = stages;  // what they take to work out grows steeply with their size
    std::stable_sort(small_first.begin(), small_first.end(),
                     [](Mask a, Mask b) { return __builtin_popcountll(a) < __builtin_popcountll(b); });
    for (const Mask stage : small_first) {
        if (has_learnt && __builtin_popcountll(stage) >= kLarge) return true;
        // No plan with this stage takes less than this one does by bounds, so only a stage that saves on the best by
        // that measure is of use.
        const Ns before = stages_[stage];
        const Ns cutoff = best_ - (total - before);
        const Mask modules = to_modules(stage);
        search_.raise_bound(modules, before);
        const bool is_lazy = problem_.is_disturbed();
        const StageValue& value = is_lazy ? search_.sharpen(modules, cutoff) : search_.evaluate(modules, cutoff);
        cost = std::min(kNever, cost + value.cost);
        if (value.bound > before) {
            raise(stage, value.bound);
            total += value.bound - before;
            has_learnt = true;
        }
        if (total >= best_) return true;
    }
    if (cost >= best_) return has_learnt;
    best_ = cost;
    found_ = stages;
    return true;
}

// A larger stage never takes less.
void LazySearch::raise(Mask stage, Ns bound) {
    stages_[stage] = bound;
    if (search_.is_forbidden(to_modules(stage))) return;
    const Mask others = independent_of(stage);
    for (Mask more = others; more != 0; more = (more - 1) & others) {
        Ns& larger = stages_[stage | more];
        if (larger >= 0) larger = std::max(larger, bound);
    }
}

// Modules that may be in a stage with all of these.
Mask LazySearch::independent_of(Mask stage) const {
    Mask others = all_ & ~stage;
    each(stage,
         [&](int m) { others &= ~(earlier_[static_cast<std::size_t>(m)] | later_[static_cast<std::size_t>(m)]); });
    return others;
}

}  // namespace mosaic::search
