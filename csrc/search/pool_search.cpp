#include "search/pool_search.h"

#include <algorithm>
#include <numeric>

#include "search/plans/chains.h"

namespace mosaic::search {
namespace {

// More stages make prices slower than they make plans better.
constexpr std::size_t kMostStages = 5'000;
// Of the ways to reach a target; each round goes through some of them.
constexpr std::size_t kMostSteps = 400'000;
// Mixes that are priced. What prices still lack then, targets make up for.
constexpr int kMostMixes = 10;
// How near to the best plan's time prices need to come, as a part of it.
constexpr double kLeastGap = 1e-3;
// The first target is this part above what prices say, and the next ones so many times as far.
constexpr double kFirstTarget = 4e-3;
constexpr double kNextTarget = 4;
// Of the time, for prices.
constexpr double kPriceShare = 0.5;
// Of a stage that cannot be, or was given up, in the mix.
constexpr double kTooMuch = 1e15;
// Of one question about one stage: what takes more is given up.
constexpr std::int64_t kNodes = 2000;
// Modules of a stage that is not looked at while there is news of smaller ones.
constexpr int kLarge = 5;

}  // namespace

PoolSearch::PoolSearch(StageSearch& search) : search_(search), problem_(search.problem()), rest_(search.problem()) {
    for (const Module& module : problem_.modules) before_.push_back(module.before);
    apart_ = all_apart(all_earlier(before_));
}

void PoolSearch::run(const Clock& clock, Partition& best) {
    if (best.cost >= kNever || clock.is_over()) return;
    fill(best);
    search_.set_max_nodes(kNodes);
    find_prices(Clock(clock.seconds_left() * kPriceShare), best.cost);
    const double value = std::accumulate(prices_.begin(), prices_.end(), 0.0);
    if (value < 1) return;  // nothing takes any time
    for (double above = kFirstTarget;; above *= kNextTarget) {
        const Ns target = std::min(best.cost, static_cast<Ns>(value * (1 + above)));
        if (improve_below(target, clock, best) || target >= best.cost) return;
    }
}

void PoolSearch::fill(const Partition& best) {
    std::vector<int> strange;
    each(search_.carried().strange(), [&](int m) { strange.push_back(m); });
    for (int m = 0; m < problem_.size(); ++m) add(Mask{1} << m, 0);
    for (const Mask stage : best.stages) add(stage, 0);
    const std::size_t num_kept = stages_.size();
    search_.carried().each_part([&](Mask set, Ns bound) {
        if (set == 0 || !may_be_stage(set, apart_)) return;
        add(set, bound);
        for (const int m : strange) {
            if ((apart_[static_cast<std::size_t>(m)] & set) == 0) add(set | Mask{1} << m, bound);
        }
    });
    if (stages_.size() > kMostStages) keep_promising(best, num_kept);
    index();
}

void PoolSearch::add(Mask set, Ns bound) {
    const auto [place, is_new] = places_.try_emplace(set, stages_.size());
    if (is_new) {
        stages_.push_back({set, std::max(bound, search_.bound(set))});
    } else {
        Stage& stage = stages_[place->second];
        stage.bound = std::max(stage.bound, bound);
    }
}

// Stages that take little for what is in them, by what that takes in the plan to start from: there, modules are worth
// what their stage takes, in parts like what they would take alone. Single modules and the plan's own stages stay.
void PoolSearch::keep_promising(const Partition& best, std::size_t num_kept) {
    prices_.assign(before_.size(), 0);
    for (const Mask stage : best.stages) {
        double alone = 0;
        each(stage, [&](int m) { alone += static_cast<double>(stages_[static_cast<std::size_t>(m)].bound); });
        const auto cost = static_cast<double>(search_.evaluate(stage, 0).cost);
        each(stage, [&](int m) {
            const auto at = static_cast<std::size_t>(m);
            prices_[at] = cost * static_cast<double>(stages_[at].bound) / alone;
        });
    }
    const auto first = stages_.begin() + static_cast<std::ptrdiff_t>(num_kept);
    const auto last = stages_.begin() + static_cast<std::ptrdiff_t>(kMostStages);
    const auto above = [&](const Stage& stage) { return static_cast<double>(stage.bound) - worth(stage.set); };
    std::nth_element(first, last, stages_.end(), [&](const Stage& one, const Stage& other) {
        const double a = above(one);
        const double b = above(other);
        return a != b ? a < b : one.set < other.set;
    });
    stages_.resize(kMostStages);
}

void PoolSearch::index() {
    // The order in which an earlier search's sets come says nothing, and nothing may depend on it.
    std::sort(stages_.begin() + static_cast<std::ptrdiff_t>(before_.size()), stages_.end(),
              [](const Stage& one, const Stage& other) { return one.set < other.set; });
    places_.clear();
    with_.assign(before_.size(), {});
    for (std::size_t i = 0; i < stages_.size(); ++i) {
        places_.emplace(stages_[i].set, i);
        each(stages_[i].set,
             [&](int m) { with_[static_cast<std::size_t>(m)].push_back(static_cast<std::uint32_t>(i)); });
    }
}

void PoolSearch::find_prices(const Clock& clock, Ns incumbent) {
    std::vector<double> alone;
    for (std::size_t m = 0; m < before_.size(); ++m) alone.push_back(static_cast<double>(stages_[m].bound));
    CoveringLp mix(alone);
    for (std::size_t i = before_.size(); i < stages_.size(); ++i) {
        mix.add(stages_[i].set, std::min(static_cast<double>(stages_[i].bound), kTooMuch));
    }
    for (int count = 1; price(mix, incumbent) && count < kMostMixes && !clock.is_over(); ++count) continue;
}

// Prices modules by the mix of stages that takes least, and works out the stages of that mix. Returns whether any took
// longer than its bound, so that the mix is another one now.
bool PoolSearch::price(CoveringLp& mix, Ns incumbent) {
    mix.solve();
    prices_ = mix.prices();
    double most = 1;
    for (const Stage& stage : stages_) most = std::max(most, worth(stage.set) / static_cast<double>(stage.bound));
    for (double& one : prices_) one *= (1 - 1e-9) / most;
    const double gap = static_cast<double>(incumbent) - std::accumulate(prices_.begin(), prices_.end(), 0.0);
    if (gap < kLeastGap * static_cast<double>(incumbent)) return false;
    std::vector<std::size_t> raised;
    mix.each_used([&](Mask set, double) {
        const std::size_t place = places_.at(set);
        if (raise(stages_[place], static_cast<Ns>(worth(set) + gap) + 1)) raised.push_back(place);
    });
    for (const std::size_t place : raised) {
        mix.raise(place, std::min(static_cast<double>(stages_[place].bound), kTooMuch));
    }
    return !raised.empty();
}

double PoolSearch::worth(Mask set) const {
    double sum = 0;
    each(set, [&](int m) { sum += prices_[static_cast<std::size_t>(m)]; });
    return sum;
}

// Works a stage out as far as it matters whether it takes less than `cutoff`. Returns whether its bound has risen.
bool PoolSearch::raise(Stage& stage, Ns cutoff) {
    const Ns before = stage.bound;
    search_.raise_bound(stage.set, before);
    const StageValue& value = search_.evaluate(stage.set, cutoff);
    // One that stays open is as good as none: there is no time to settle it.
    stage.bound = value.gave_up && value.cost >= cutoff ? kNever : std::max(before, value.bound);
    return stage.bound > before;
}

// Looks for the best plan below a target; returns whether there is one, or nothing more can be found out.
bool PoolSearch::improve_below(Ns target, const Clock& clock, Partition& best) {
    if (!list(clock, target)) return true;
    Partition found{{}, target};
    while (!clock.is_over()) {
        sweep();
        if (ideals_[0].rest >= found.cost || !work_out(lead(), found)) break;
    }
    if (!found.stages.empty()) best = std::move(found);
    return clock.is_over() || best.cost < target;
}

// Lists the ways to stay below a target; false where they are too many, or time is over.
bool PoolSearch::list(const Clock& clock, Ns target) {
    ideals_.clear();
    steps_.clear();
    numbers_.clear();
    by_size_.assign(before_.size() + 1, {});
    ideal_of(0, 0);
    for (std::size_t size = 0; size < by_size_.size(); ++size) {
        for (std::size_t i = 0; i < by_size_[size].size(); ++i) {
            list_steps(by_size_[size][i], target);
            if (steps_.size() > kMostSteps || (i % 64 == 0 && clock.is_over())) return false;
        }
    }
    return true;
}

std::uint32_t PoolSearch::ideal_of(Mask done, Ns reached) {
    const auto number = static_cast<std::uint32_t>(ideals_.size());
    const auto [place, is_new] = numbers_.try_emplace(done, number);
    if (is_new) {
        ideals_.push_back({done, reached});
        by_size_[static_cast<std::size_t>(__builtin_popcountll(done))].push_back(number);
    } else {
        Ideal& ideal = ideals_[place->second];
        ideal.reached = std::min(ideal.reached, reached);
    }
    return place->second;
}

void PoolSearch::list_steps(std::size_t number, Ns target) {
    const Mask done = ideals_[number].done;
    const Ns reached = ideals_[number].reached;
    Mask ready = 0;
    each(problem_.all() & ~done, [&](int m) {
        if ((before_[static_cast<std::size_t>(m)] & ~done) == 0) ready |= Mask{1} << m;
    });
    const auto look = [&](std::uint32_t index) {
        const Stage& stage = stages_[index];
        if ((stage.set & ~ready) != 0 || reached + stage.bound >= target) return;
        const Mask next = done | stage.set;
        const Ns rest = std::max(rest_(next), static_cast<Ns>(worth(problem_.all() & ~next)));
        if (reached + stage.bound + rest >= target) return;
        steps_.push_back({index, ideal_of(next, reached + stage.bound)});
    };
    ideals_[number].first = steps_.size();
    const int first = find_first(ready, problem_.all() & ~done & ~ready);
    if (first >= 0) {
        for (const std::uint32_t index : with_[static_cast<std::size_t>(first)]) look(index);
    } else {
        for (std::uint32_t index = 0; index < stages_.size(); ++index) look(index);
    }
    ideals_[number].end = steps_.size();
}

// A module whose stage may as well come first, as everything that could share it is ready: of several, the one with the
// fewest stages. -1: there is none, and any stage may be first.
int PoolSearch::find_first(Mask ready, Mask waiting) const {
    int first = -1;
    const auto num_stages = [&](int m) { return with_[static_cast<std::size_t>(m)].size(); };
    each(ready, [&](int m) {
        if ((waiting & ~rest_.later(m)) != 0) return;
        if (first < 0 || num_stages(m) < num_stages(first)) first = m;
    });
    return first;
}

Ns PoolSearch::through(const Step& step) const {
    return std::min(kNever, stages_[step.stage].bound + ideals_[step.next].rest);
}

// What is left after each ideal takes at least this long. Bounds only rise: where the best step's has not, it still is
// the best.
void PoolSearch::sweep() {
    for (std::size_t size = by_size_.size(); size-- > 0;) {
        for (const std::uint32_t number : by_size_[size]) {
            Ideal& ideal = ideals_[number];
            if (ideal.done == problem_.all()) {
                ideal.rest = 0;
                continue;
            }
            if (ideal.rest < kNever && through(steps_[ideal.best]) == ideal.rest) continue;
            ideal.rest = kNever;
            for (std::size_t i = ideal.first; i < ideal.end; ++i) {
                const Ns time = through(steps_[i]);
                if (time >= ideal.rest) continue;
                ideal.rest = time;
                ideal.best = i;
            }
        }
    }
}

std::vector<std::size_t> PoolSearch::lead() const {
    std::vector<std::size_t> stages;
    for (std::size_t at = 0; ideals_[at].done != problem_.all();) {
        const Step& step = steps_[ideals_[at].best];
        stages.push_back(step.stage);
        at = step.next;
    }
    return stages;
}

// Returns whether anything was learnt: a stage takes longer than its bound, or the plan is better than the best found.
bool PoolSearch::work_out(const std::vector<std::size_t>& stages, Partition& found) {
    std::vector<std::size_t> small_first = stages;  // what they take to work out grows steeply with their size
    std::stable_sort(small_first.begin(), small_first.end(), [&](std::size_t a, std::size_t b) {
        return __builtin_popcountll(stages_[a].set) < __builtin_popcountll(stages_[b].set);
    });
    Ns total = ideals_[0].rest;
    Ns cost = 0;
    bool has_learnt = false;
    for (const std::size_t place : small_first) {
        Stage& stage = stages_[place];
        if (has_learnt && __builtin_popcountll(stage.set) >= kLarge) return true;
        const Ns before = stage.bound;
        if (raise(stage, found.cost - (total - before))) {
            total = std::min(kNever, total + stage.bound - before);
            has_learnt = true;
        }
        cost = std::min(kNever, cost + search_.evaluate(stage.set, 0).cost);
        if (total >= found.cost) return true;
    }
    if (cost >= found.cost) return has_learnt;
    found.cost = cost;
    found.stages.clear();
    for (const std::size_t place : stages) found.stages.push_back(stages_[place].set);
    return true;
}

}  // namespace mosaic::search
