#include "search/plans/lazy_search.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace mosaic::search {
namespace {

// Numbers of sets; each has a bound, and so has what is left after it.
constexpr std::size_t kMaxNumbers = std::size_t{1} << 21;
// Pairs of a set of finished modules and a stage after it; each round looks at all of them.
constexpr std::int64_t kMaxPairs = 400'000'000;
constexpr std::int64_t kPairsALook = 1'000'000;
constexpr std::int64_t kPairWork = 3;
constexpr std::int64_t kBoundWork = 100;
constexpr std::int64_t kRaiseWork = 5;
// Of one question about one stage, at first.
constexpr std::int64_t kFirstNodes = 20'000;
// Modules of a stage that is not looked at while there is news of smaller ones.
constexpr int kLarge = 5;

// As far as they can be counted.
std::int64_t num_subsets(Mask set) { return std::int64_t{1} << std::min(40, __builtin_popcountll(set)); }

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

bool LazySearch::prepare(double least_left) {
    const std::size_t size = groups_.size();
    all_ = size == kMaxModules ? ~Mask{0} : (Mask{1} << size) - 1;
    order();
    if (index_.size() > kMaxNumbers) return false;
    stages_.assign(index_.size(), -1);
    rests_.assign(index_.size(), -1);
    nexts_.assign(index_.size(), 0);
    std::int64_t num_pairs = 0;
    bool is_late = false;
    ideals_.assign(1, make_ideal(0));
    // Modules that are ready at once are each done, in the next stage, or later.
    if (std::pow(3.0, __builtin_popcountll(ideals_[0].rest)) > static_cast<double>(kMaxPairs)) return false;
    rests_[0] = 0;
    for (std::size_t i = 0; i < ideals_.size(); ++i) {
        const Ideal ideal = ideals_[i];
        if (num_pairs + num_subsets(ideal.rest) > kMaxPairs) return false;
        each_stage(ideal, [&](Mask stage, std::size_t number, std::size_t next) {
            // Of a single ideal there may be as many stages as take a tenth of a second.
            if (++num_pairs % 1024 == 0) {
                Work::add(1024 * kPairWork);
                is_late = clock_.left() < clock_.whole() * least_left;
            }
            if (is_late || stage_bound(stage, number) >= best_ || rests_[next] >= 0) return;
            rests_[next] = 0;
            if ((ideal.done | stage) != all_) ideals_.push_back(make_ideal(ideal.done | stage));
        });
        if (is_late) return false;
    }
    sort_ideals();
    std::fill(rests_.begin(), rests_.end(), kNever);
    rests_[index_.of_ideal(all_)] = 0;
    return true;
}

// Larger ones first, and else as they were found.
void LazySearch::sort_ideals() {
    std::vector<std::size_t> ends(kMaxModules + 2, 0);
    const auto place = [](const Ideal& ideal) {
        return kMaxModules - static_cast<std::size_t>(__builtin_popcountll(ideal.done));
    };
    for (const Ideal& ideal : ideals_) ++ends[place(ideal) + 1];
    for (std::size_t i = 1; i < ends.size(); ++i) ends[i] += ends[i - 1];
    std::vector<Ideal> sorted(ideals_.size());
    for (const Ideal& ideal : ideals_) sorted[ends[place(ideal)]++] = ideal;
    ideals_ = std::move(sorted);
}

void LazySearch::order() {
    const std::size_t size = groups_.size();
    const std::vector<Mask> earlier = all_earlier(before_);
    later_.assign(size, 0);
    for (std::size_t m = 0; m < size; ++m) {
        each(earlier[m], [&](int n) { later_[static_cast<std::size_t>(n)] |= Mask{1} << m; });
    }
    apart_ = all_apart(earlier);
    index_ = ChainIndex(earlier);
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
    int first = -1;
    const auto alone = [&](int m) { return stage_bound(Mask{1} << m, index_.in_stage(m)); };
    each(ready, [&](int m) {
        const bool may_be_first = (waiting & ~later_[static_cast<std::size_t>(m)]) == 0;
        if (may_be_first && (first < 0 || alone(m) > alone(first))) first = m;
    });
    const Mask bit = first < 0 ? 0 : Mask{1} << first;
    return {done, bit, ready & ~bit, index_.of_ideal(done), 0, 0};
}

Ns& LazySearch::stage_bound(Mask stage, std::size_t number) {
    Ns& bound = stages_[number];
    if (bound < 0) {
        Work::add(kBoundWork);
        bound = search_.known_bound(to_modules(stage));
    }
    return bound;
}

// Calls `visit(stage, its number, the number of all that is done then)`.
template <typename Visit>
void LazySearch::each_stage(const Ideal& ideal, Visit visit) {
    // Modules of the rest are counted down in binary, so that the numbers change by what one place adds to them.
    std::size_t stage_steps[kMaxModules];
    std::size_t ideal_steps[kMaxModules];
    std::size_t number = 0;
    std::size_t next = 0;
    std::size_t count = 0;
    each(ideal.rest, [&](int m) {
        stage_steps[count] = number - index_.in_stage(m);
        ideal_steps[count++] = next - index_.in_ideal(m);
        number += index_.in_stage(m);
        next += index_.in_ideal(m);
    });
    number += index_.of_stage(ideal.first);
    next += ideal.number + index_.of_ideal(ideal.first);
    Mask others = ideal.rest;
    for (Mask left = (Mask{1} << count) - 1;; --left) {
        if ((others | ideal.first) != 0) visit(others | ideal.first, number, next);
        if (left == 0) return;
        const int place = __builtin_ctzll(left);
        number += stage_steps[place];
        next += ideal_steps[place];
        others = (others - 1) & ideal.rest;
    }
}

std::vector<Mask> LazySearch::run(const Clock& clock) {
    found_.clear();
    std::int64_t nodes = std::min(limits_.max_nodes, kFirstNodes);
    search_.set_max_nodes(nodes);
    while (true) {
        ++num_rounds_;
        if (!sweep(clock)) break;
        bound_ = std::max(bound_, std::min(best_, rests_[0]));
        if (bound_ >= best_ || clock.is_over()) break;
        if (work_out(lead())) continue;
        if (nodes >= limits_.max_nodes) break;
        nodes = std::min(limits_.max_nodes, 8 * nodes);
        search_.set_max_nodes(nodes);
    }
    std::vector<Mask> stages;
    for (const Mask stage : found_) stages.push_back(to_modules(stage));
    return stages;
}

// The least time of what is left after each set, by the bounds of stages. False where time ended it.
bool LazySearch::sweep(const Clock& clock) {
    std::int64_t num_pairs = 0;  // since the last look at the clock
    for (Ideal& ideal : ideals_) {
        const std::size_t own = ideal.number;
        // Bounds only rise: where the best stage's has not, it still is the best.
        if (nexts_[own] != 0 && stages_[ideal.next_stage] + rests_[ideal.next_ideal] == rests_[own]) continue;
        num_pairs += num_subsets(ideal.rest);
        Work::add(num_subsets(ideal.rest) * kPairWork);
        if (num_pairs > kPairsALook) {
            if (clock.is_over()) return false;
            num_pairs = 0;
        }
        Ns least = kNever;
        Mask best = 0;
        each_stage(ideal, [&](Mask stage, std::size_t number, std::size_t next) {
            const Ns time = stages_[number] + rests_[next];
            if (time >= least) return;
            least = time;
            best = stage;
            ideal.next_stage = number;
            ideal.next_ideal = next;
        });
        rests_[own] = least;
        nexts_[own] = best;
    }
    return true;
}

std::vector<Mask> LazySearch::lead() const {
    std::vector<Mask> stages;
    for (Mask done = 0; done != all_; done |= stages.back()) stages.push_back(nexts_[index_.of_ideal(done)]);
    return stages;
}

// Returns whether anything was learnt: a stage took longer than its bound, or the plan is better than the best.
bool LazySearch::work_out(const std::vector<Mask>& stages) {
    Ns total = rests_[0];
    Ns cost = 0;
    bool has_learnt = false;
    if (problem_.is_disturbed()) {  // what rules a plan out without disturbance is found much sooner
        for (const Mask stage : stages) {
            const Ns before = stage_bound(stage);
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
        const Ns before = stage_bound(stage);
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
    const std::size_t number = index_.of_stage(stage);
    stages_[number] = bound;
    if (!search_.is_forbidden(to_modules(stage))) raise_larger(number, independent_of(stage), bound);
}

// Where a larger one is no lower already, all that hold it are not either.
void LazySearch::raise_larger(std::size_t number, Mask others, Ns bound) {
    while (others != 0) {
        const int m = __builtin_ctzll(others);
        others &= others - 1;
        const std::size_t with = number + index_.in_stage(m);
        Ns& larger = stages_[with];
        Work::add(kRaiseWork);
        if (larger >= bound) continue;
        if (larger >= 0) larger = bound;
        raise_larger(with, others & ~apart_[static_cast<std::size_t>(m)], bound);
    }
}

// Modules that may be in a stage with all of these.
Mask LazySearch::independent_of(Mask stage) const {
    Mask others = all_ & ~stage;
    each(stage, [&](int m) { others &= ~apart_[static_cast<std::size_t>(m)]; });
    return others;
}

}  // namespace mosaic::search
