#include "search/plans/plan_search.h"

#include <algorithm>

namespace mosaic::search {
namespace {

constexpr std::int64_t kPairsALook = 100'000;
constexpr std::int64_t kPairWork = 3;
constexpr std::int64_t kBoundWork = 100;
constexpr std::int64_t kRaiseWork = 5;
// Of one question about one stage, at first.
constexpr std::int64_t kFirstNodes = 20'000;
// Of one question about one stage, in the descent.
constexpr std::int64_t kDescentNodes = 5'000;
// Of the effort, for the proof; the descent has the rest.
constexpr double kProofShare = 0.8;
// Modules of a stage that is not worked out while smaller ones have raised a bound.
constexpr int kLarge = 5;

Mask bit_of(int module) { return Mask{1} << module; }

int size_of(Mask set) { return __builtin_popcountll(set); }

// Every set that may be a stage starts with a quick bound. The best plan by these bounds is found by dynamic
// programming over sets of finished modules; then its own stages are worked out, which raises their bounds and those of
// all larger sets, and it is looked for again. A plan that is best by bounds and has only stages worked out is the best
// there is.
class LazySearch {
  public:
    LazySearch(StageSearch& search, const Limits& limits)
        : search_(search),
          problem_(search.problem()),
          limits_(limits),
          all_(problem_.all()),
          later_(problem_.modules.size(), 0),
          apart_(problem_.modules.size(), 0) {
        in_turn();
        find_relatives();
    }

    // Looks for the best plan until it is proven, or the clock ends it.
    void prove(const Clock& clock) {
        if (clock.is_over() || !list_ideals(clock)) return;
        std::int64_t nodes = std::min(limits_.max_nodes, kFirstNodes);
        search_.set_max_nodes(nodes);
        while (sweep(clock)) {
            bound_ = std::max(bound_, std::min(best_, rests_[0]));
            if (bound_ >= best_ || clock.is_over()) break;
            if (work_out(lead())) continue;
            if (nodes >= limits_.max_nodes) break;
            nodes = std::min(limits_.max_nodes, 8 * nodes);
            search_.set_max_nodes(nodes);
        }
    }

    // Merges the two stages that gain most (Algorithm 1), or else moves a module or swaps two, as long as a step gains.
    void descend(const Clock& clock) {
        if (bound_ >= best_ || best_ >= kNever) return;
        search_.set_max_nodes(std::min(limits_.max_nodes, kDescentNodes));
        while (merge_two(clock) || exchange_any(clock)) {
        }
    }

    Ns cost() const { return best_; }
    Ns bound() const { return std::min(bound_, best_); }
    const std::vector<Mask>& stages() const { return stages_; }

  private:
    // A set of modules that is closed under dependencies: all stages so far.
    struct Ideal {
        Mask done;
        Mask first;  // its next stage holds this module; 0: any
        Mask rest;   // others that may be in it
    };

    // The incumbent: one module after the other. The bound: the longest chain of modules at their fastest.
    void in_turn() {
        std::vector<Ns> chain(problem_.modules.size(), 0);
        best_ = 0;
        for (Mask done = 0; done != all_; done |= stages_.back()) {
            const int m = __builtin_ctzll(ready_after(done));
            const auto place = static_cast<std::size_t>(m);
            each(problem_.modules[place].before,
                 [&](int n) { chain[place] = std::max(chain[place], chain[static_cast<std::size_t>(n)]); });
            chain[place] += search_.bound(bit_of(m));
            bound_ = std::max(bound_, chain[place]);
            stages_.push_back(bit_of(m));
            best_ = std::min(kNever, best_ + search_.evaluate(bit_of(m)).cost);
        }
    }

    Mask ready_after(Mask done) const {
        Mask ready = 0;
        each(all_ & ~done, [&](int m) {
            if ((problem_.modules[static_cast<std::size_t>(m)].before & ~done) == 0) ready |= bit_of(m);
        });
        return ready;
    }

    void find_relatives() {
        for (std::size_t round = 0; round < later_.size(); ++round) {  // as many as the longest chain can have
            for (int m = 0; m < problem_.size(); ++m) {
                const Mask with_later = bit_of(m) | later_[static_cast<std::size_t>(m)];
                each(problem_.modules[static_cast<std::size_t>(m)].before,
                     [&](int n) { later_[static_cast<std::size_t>(n)] |= with_later; });
            }
        }
        for (int m = 0; m < problem_.size(); ++m) {
            apart_[static_cast<std::size_t>(m)] |= later_[static_cast<std::size_t>(m)];
            each(later_[static_cast<std::size_t>(m)], [&](int n) { apart_[static_cast<std::size_t>(n)] |= bit_of(m); });
        }
    }

    // Lists which sets may be finished; false where the clock ended that.
    bool list_ideals(const Clock& clock) {
        const std::size_t num_sets = std::size_t{1} << problem_.size();
        bounds_.assign(num_sets, -1);
        rests_.assign(num_sets, -1);
        nexts_.assign(num_sets, 0);
        std::int64_t num_pairs = 0;
        bool is_late = false;
        ideals_.assign(1, make_ideal(0));
        for (std::size_t i = 0; i < ideals_.size() && !is_late; ++i) {
            const Ideal ideal = ideals_[i];
            each_stage(ideal, [&](Mask stage) {
                if (++num_pairs % kPairsALook == 0) {
                    Work::add(kPairsALook * kPairWork);
                    is_late = is_late || clock.is_over();
                }
                Ns& rest = rests_[ideal.done | stage];
                if (is_late || bound_of(stage) >= best_ || rest >= 0) return;
                rest = 0;
                if ((ideal.done | stage) != all_) ideals_.push_back(make_ideal(ideal.done | stage));
            });
        }
        std::stable_sort(ideals_.begin(), ideals_.end(),
                         [](const Ideal& a, const Ideal& b) { return size_of(a.done) > size_of(b.done); });
        std::fill(rests_.begin(), rests_.end(), kNever);
        rests_[all_] = 0;
        return !is_late;
    }

    Ideal make_ideal(Mask done) {
        const Mask ready = ready_after(done);
        const Mask waiting = all_ & ~done & ~ready;
        // A module's stage may as well come first where everything that could share it is ready. Of several the one
        // that takes longest, so that bounds are high early.
        Mask first = 0;
        each(ready, [&](int m) {
            const bool may_be_first = (waiting & ~later_[static_cast<std::size_t>(m)]) == 0;
            if (may_be_first && (first == 0 || bound_of(bit_of(m)) > bound_of(first))) first = bit_of(m);
        });
        return {done, first, ready & ~first};
    }

    Ns bound_of(Mask stage) {
        Ns& bound = bounds_[stage];
        if (bound < 0) {
            Work::add(kBoundWork);
            bound = search_.known_bound(stage);
        }
        return bound;
    }

    template <typename Visit>
    static void each_stage(const Ideal& ideal, Visit visit) {
        for (Mask others = ideal.rest;; others = (others - 1) & ideal.rest) {
            if ((others | ideal.first) != 0) visit(others | ideal.first);
            if (others == 0) return;
        }
    }

    // The least time of what is left after each set, by the bounds of stages. False where the clock ended it.
    bool sweep(const Clock& clock) {
        std::int64_t num_pairs = 0;  // since the last look at the clock
        for (const Ideal& ideal : ideals_) {
            Ns& least = rests_[ideal.done];
            Mask& next = nexts_[ideal.done];
            // Bounds only rise: where the best stage's has not, it still is the best.
            if (next != 0 && bounds_[next] + rests_[ideal.done | next] == least) continue;
            num_pairs += std::int64_t{1} << size_of(ideal.rest);
            Work::add((std::int64_t{1} << size_of(ideal.rest)) * kPairWork);
            if (num_pairs > kPairsALook) {
                if (clock.is_over()) return false;
                num_pairs = 0;
            }
            least = kNever;
            each_stage(ideal, [&](Mask stage) {
                const Ns time = bounds_[stage] + rests_[ideal.done | stage];
                if (time >= least) return;
                least = time;
                next = stage;
            });
        }
        return true;
    }

    std::vector<Mask> lead() const {
        std::vector<Mask> stages;
        for (Mask done = 0; done != all_; done |= stages.back()) stages.push_back(nexts_[done]);
        return stages;
    }

    // Returns whether a stage took longer than its bound, or the plan is better than the best.
    bool work_out(const std::vector<Mask>& stages) {
        Ns total = rests_[0];
        Ns cost = 0;
        bool has_raised = false;
        const auto raise = [&](Mask stage, Ns bound) {
            if (bound <= bounds_[stage]) return;
            total += bound - bounds_[stage];
            has_raised = true;
            bounds_[stage] = bound;
            if (!search_.is_forbidden(stage)) raise_larger(stage, independent_of(stage), bound);
        };
        if (problem_.is_disturbed()) {  // what rules a plan out without disturbance is found much sooner
            for (const Mask stage : stages) raise(stage, search_.calm_bound(stage, best_ - (total - bounds_[stage])));
            if (has_raised) return true;
        }
        std::vector<Mask> small_first = stages;  // what they take to work out grows steeply with their size
        std::stable_sort(small_first.begin(), small_first.end(),
                         [](Mask a, Mask b) { return size_of(a) < size_of(b); });
        for (const Mask stage : small_first) {
            if (has_raised && size_of(stage) >= kLarge) return true;
            // No plan with this stage takes less than this one does by bounds, so only a stage that saves on the best
            // by that measure is of use.
            const Ns cutoff = best_ - (total - bounds_[stage]);
            search_.raise_bound(stage, bounds_[stage]);
            const StageValue& value =
                problem_.is_disturbed() ? search_.sharpen(stage, cutoff) : search_.evaluate(stage, cutoff);
            cost = std::min(kNever, cost + value.cost);
            raise(stage, value.bound);
            if (total >= best_) return true;
        }
        if (cost >= best_) return has_raised;
        best_ = cost;
        stages_ = stages;
        return true;
    }

    // A larger stage never takes less. Where one is no lower already, all that hold it are not either.
    void raise_larger(Mask stage, Mask others, Ns bound) {
        while (others != 0) {
            const int m = __builtin_ctzll(others);
            others &= others - 1;
            Ns& larger = bounds_[stage | bit_of(m)];
            Work::add(kRaiseWork);
            if (larger >= bound) continue;
            if (larger >= 0) larger = bound;
            raise_larger(stage | bit_of(m), others & ~apart_[static_cast<std::size_t>(m)], bound);
        }
    }

    // Modules that may be in a stage with all of these.
    Mask independent_of(Mask stage) const {
        Mask others = all_ & ~stage;
        each(stage, [&](int m) { others &= ~apart_[static_cast<std::size_t>(m)]; });
        return others;
    }

    // A plan that takes `gain` less than the best one.
    struct Step {
        Ns gain = 0;
        std::vector<Mask> stages;
    };

    bool merge_two(const Clock& clock) {
        Step best;
        for (std::size_t i = 0; i < stages_.size() && !clock.is_over(); ++i) {
            for (std::size_t j = i + 1; j < stages_.size(); ++j) exchange(i, j, stages_[i], 0, best);
        }
        return take(best);
    }

    bool exchange_any(const Clock& clock) {
        Step step;
        for (std::size_t i = 0; i < stages_.size(); ++i) {
            for (std::size_t j = 0; j <= stages_.size(); ++j) {  // the last one is a new stage
                if (i == j) continue;
                const Mask other = i < j && j < stages_.size() ? stages_[j] : 0;
                for (Mask left = stages_[i]; left != 0; left &= left - 1) {
                    if (clock.is_over()) return false;
                    const Mask mine = left & -left;
                    exchange(i, j, mine, 0, step);
                    for (Mask theirs = other; theirs != 0 && step.gain == 0; theirs &= theirs - 1) {
                        exchange(i, j, mine, theirs & -theirs, step);
                    }
                    if (take(step)) return true;
                }
            }
        }
        return false;
    }

    bool take(Step& step) {
        if (step.gain <= 0) return false;
        best_ -= step.gain;
        stages_ = std::move(step.stages);
        return true;
    }

    // Stage i gives `mine` to stage j and gets `theirs`: that is the step where it gains more than the step so far.
    void exchange(std::size_t i, std::size_t j, Mask mine, Mask theirs, Step& step) {
        std::vector<Mask> stages = stages_;
        stages.resize(std::max(stages.size(), j + 1), 0);
        const Mask first = stages[i] = (stages[i] & ~mine) | theirs;
        const Mask second = stages[j] = (stages[j] & ~theirs) | mine;
        const Ns before = cost_of_stage(stages_[i]) + (j < stages_.size() ? cost_of_stage(stages_[j]) : 0);
        const Ns most = before - step.gain;
        const Ns least_first = first == 0 ? 0 : search_.bound(first);
        const Ns least_second = second == 0 ? 0 : search_.bound(second);
        if (!may_be_stage(first) || !may_be_stage(second) || least_first + least_second >= most) return;
        if (!sort(stages)) return;
        const Ns after = cost_of_stage(first, most - least_second) + cost_of_stage(second, most - least_first);
        if (after < most) step = {before - after, std::move(stages)};
    }

    Ns cost_of_stage(Mask stage, Ns cutoff = kNever) { return stage == 0 ? 0 : search_.evaluate(stage, cutoff).cost; }

    bool may_be_stage(Mask stage) const {
        Mask apart = 0;
        each(stage, [&](int m) { apart |= apart_[static_cast<std::size_t>(m)]; });
        return (apart & stage) == 0;
    }

    // Puts stages into an order that keeps dependencies; false where there is none.
    bool sort(std::vector<Mask>& stages) const {
        stages.erase(std::remove(stages.begin(), stages.end(), Mask{0}), stages.end());
        Mask done = 0;
        for (auto next = stages.begin(); next != stages.end(); ++next) {
            const auto is_ready = [&](Mask stage) { return (stage & ~ready_after(done)) == 0; };
            const auto ready = std::find_if(next, stages.end(), is_ready);
            if (ready == stages.end()) return false;
            std::rotate(next, ready, ready + 1);
            done |= *next;
        }
        return true;
    }

    StageSearch& search_;
    const Problem& problem_;
    const Limits& limits_;
    const Mask all_;
    Ns best_ = kNever;
    Ns bound_ = 0;
    std::vector<Mask> stages_;   // of the best plan
    std::vector<Mask> later_;    // what comes after each module, directly or not
    std::vector<Mask> apart_;    // what can be in no stage with each module
    std::vector<Ideal> ideals_;  // larger ones first
    std::vector<Ns> bounds_;     // of each stage; -1: not asked for yet
    std::vector<Ns> rests_;      // by finished set: what is left takes at least this
    std::vector<Mask> nexts_;    // by finished set: the stage with which it does
};

}  // namespace

Plan plan(const Problem& problem, const Limits& limits, const std::vector<Mask>& forbidden) {
    const Clock clock(limits.seconds, limits.effort);
    StageSearch search(problem, {limits.max_nodes, &clock});
    for (const Mask set : forbidden) search.forbid(set);
    LazySearch lazy(search, limits);
    lazy.prove(clock.part(kProofShare));
    lazy.descend(clock);
    Plan made;
    made.cost = lazy.cost();
    made.bound = lazy.bound();
    if (made.cost < kNever) {
        for (const Mask stage : lazy.stages()) made.stages.push_back(search.evaluate(stage).stage);
    }
    made.status = made.bound >= made.cost ? Status::optimal : Status::feasible;
    return made;
}

}  // namespace mosaic::search
