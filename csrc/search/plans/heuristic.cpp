#include <algorithm>
#include <random>

#include "search/plans/plan_search.h"

namespace mosaic::search {
namespace {

Mask before_of(const Problem& problem, Mask set) {
    Mask before = 0;
    each(set, [&](int m) { before |= problem.modules[static_cast<std::size_t>(m)].before; });
    return before;
}

// What comes before each module, directly or not.
std::vector<Mask> all_before(const Problem& problem) {
    std::vector<Mask> earlier;
    for (const Module& module : problem.modules) earlier.push_back(module.before);
    for (std::size_t round = 0; round < earlier.size(); ++round) {  // as many rounds as the longest chain can have
        for (Mask& own : earlier) each(own, [&](int other) { own |= earlier[static_cast<std::size_t>(other)]; });
    }
    return earlier;
}

class Descent {
  public:
    Descent(StageSearch& search, const Clock& clock)
        : search_(search), problem_(search.problem()), clock_(clock), earlier_(all_before(search.problem())) {}

    Ns cost(Mask stage) { return stage == 0 ? 0 : search_.evaluate(stage).cost; }

    Ns total(const std::vector<Mask>& stages) {
        Ns sum = 0;
        for (const Mask stage : stages) {
            const Ns one = cost(stage);
            if (one >= kNever) return kNever;
            sum += one;
        }
        return sum;
    }

    // Algorithm 1: merges the pair that gains most, while one gains. A merge is worked out only as far as it takes to
    // know that it does not beat the best so far.
    void cluster(Partition& partition) {
        while (!clock_.is_over()) {
            Ns best_gain = 0;
            std::vector<Mask> best;
            for (std::size_t i = 0; i < partition.stages.size(); ++i) {
                for (std::size_t j = i + 1; j < partition.stages.size(); ++j) {
                    const Mask merged = partition.stages[i] | partition.stages[j];
                    const Ns apart = cost(partition.stages[i]) + cost(partition.stages[j]);
                    const Ns cutoff = apart - best_gain;
                    if (!are_independent(merged) || search_.bound(merged) >= cutoff) continue;
                    auto stages = partition.stages;
                    stages[i] = merged;
                    stages.erase(stages.begin() + static_cast<std::ptrdiff_t>(j));
                    if (!in_order(problem_, stages)) continue;
                    const Ns together = search_.evaluate(merged, cutoff).cost;
                    if (together < cutoff) {
                        best_gain = apart - together;
                        best = std::move(stages);
                    }
                }
            }
            if (best_gain == 0) return;
            partition.stages = std::move(best);
            partition.cost = total(partition.stages);
        }
    }

    void descend(Partition& partition) {
        while (!clock_.is_over() && (move_one(partition) || swap_two(partition) || merge_two(partition))) {
        }
    }

    // Replaces stages i and j (j may be one past the end: a new stage) by two others if that is better and in order.
    bool replace(Partition& partition, std::size_t i, std::size_t j, Mask first, Mask second) {
        if (!are_independent(first) || !are_independent(second)) return false;
        const Ns before = cost(partition.stages[i]) + (j < partition.stages.size() ? cost(partition.stages[j]) : 0);
        if (bound(first) + bound(second) >= before) return false;
        auto stages = partition.stages;
        stages[i] = first;
        if (j < stages.size()) {
            stages[j] = second;
        } else {
            stages.push_back(second);
        }
        stages.erase(std::remove(stages.begin(), stages.end(), Mask{0}), stages.end());
        if (!in_order(problem_, stages)) return false;
        if (search_value(first, before - bound(second)) + search_value(second, before - bound(first)) >= before) {
            return false;
        }
        partition.stages = std::move(stages);
        partition.cost = total(partition.stages);
        return true;
    }

  private:
    // No module of a stage may depend on another one of it, directly or not.
    bool are_independent(Mask stage) const {
        Mask earlier = 0;
        each(stage, [&](int m) { earlier |= earlier_[static_cast<std::size_t>(m)]; });
        return (earlier & stage) == 0;
    }
    Ns bound(Mask stage) { return stage == 0 ? 0 : search_.bound(stage); }
    Ns search_value(Mask stage, Ns cutoff) { return stage == 0 ? 0 : search_.evaluate(stage, cutoff).cost; }

    bool move_one(Partition& partition) {
        for (std::size_t i = 0; i < partition.stages.size(); ++i) {
            for (Mask rest = partition.stages[i]; rest != 0; rest &= rest - 1) {
                const Mask bit = rest & -rest;
                for (std::size_t j = 0; j <= partition.stages.size(); ++j) {
                    if (j == i || clock_.is_over()) continue;
                    const Mask target = j < partition.stages.size() ? partition.stages[j] : 0;
                    if (replace(partition, i, j, partition.stages[i] & ~bit, target | bit)) return true;
                }
            }
        }
        return false;
    }

    bool swap_two(Partition& partition) {
        for (std::size_t i = 0; i < partition.stages.size(); ++i) {
            for (std::size_t j = i + 1; j < partition.stages.size(); ++j) {
                for (Mask ours = partition.stages[i]; ours != 0; ours &= ours - 1) {
                    for (Mask theirs = partition.stages[j]; theirs != 0; theirs &= theirs - 1) {
                        if (clock_.is_over()) return false;
                        const Mask both = (ours & -ours) | (theirs & -theirs);
                        if (replace(partition, i, j, partition.stages[i] ^ both, partition.stages[j] ^ both))
                            return true;
                    }
                }
            }
        }
        return false;
    }

    bool merge_two(Partition& partition) {
        for (std::size_t i = 0; i < partition.stages.size(); ++i) {
            for (std::size_t j = i + 1; j < partition.stages.size(); ++j) {
                if (clock_.is_over()) return false;
                if (replace(partition, i, j, partition.stages[i] | partition.stages[j], 0)) return true;
            }
        }
        return false;
    }

    StageSearch& search_;
    const Problem& problem_;
    const Clock& clock_;
    std::vector<Mask> earlier_;  // what comes before each module, directly or not
};

// Modules whose longest chain of predecessors has the same length, together where they fit.
std::vector<Mask> levels(const Problem& problem) {
    std::vector<Mask> found;
    Mask done = 0;
    while (done != problem.all()) {
        Mask ready = 0;
        each(problem.all() & ~done, [&](int m) {
            if ((problem.modules[static_cast<std::size_t>(m)].before & ~done) == 0) ready |= Mask{1} << m;
        });
        found.push_back(ready);
        done |= ready;
    }
    return found;
}

void check_start(const Problem& problem, const std::vector<Mask>& start) {
    if (start.empty()) return;
    Mask seen = 0;
    for (const Mask stage : start) {
        if (stage == 0 || (stage & seen) != 0 || (before_of(problem, stage) & stage) != 0) {
            throw std::invalid_argument("a stage of the start is empty, overlaps another or depends on itself");
        }
        seen |= stage;
    }
    if (seen != problem.all() || !in_order(problem, start)) {
        throw std::invalid_argument("the start does not hold every module in an order that keeps dependencies");
    }
}

// Moves a few modules anywhere that order allows, whatever it costs.
std::vector<Mask> kick(const Problem& problem, std::vector<Mask> stages, std::mt19937_64& draw) {
    const int moves = 2 + static_cast<int>(draw() % 2);
    for (int tries = 0, done = 0; tries < 20 && done < moves; ++tries) {
        const Mask bit = Mask{1} << (draw() % static_cast<std::uint64_t>(problem.size()));
        auto moved = stages;
        for (Mask& stage : moved) stage &= ~bit;
        const std::size_t target = draw() % (moved.size() + 1);
        if (target == moved.size()) {
            moved.push_back(bit);
        } else {
            moved[target] |= bit;
        }
        moved.erase(std::remove(moved.begin(), moved.end(), Mask{0}), moved.end());
        const bool allowed = std::all_of(moved.begin(), moved.end(),
                                         [&](Mask stage) { return (before_of(problem, stage) & stage) == 0; });
        if (!allowed || !in_order(problem, moved)) continue;
        stages = std::move(moved);
        ++done;
    }
    return stages;
}

}  // namespace

std::optional<std::vector<Mask>> in_order(const Problem& problem, std::vector<Mask> stages) {
    std::vector<Mask> sorted;
    Mask done = 0;
    while (!stages.empty()) {
        const auto next = std::find_if(stages.begin(), stages.end(),
                                       [&](Mask stage) { return (before_of(problem, stage) & ~done) == 0; });
        if (next == stages.end()) return std::nullopt;
        done |= *next;
        sorted.push_back(*next);
        stages.erase(next);
    }
    return sorted;
}

Partition one_by_one(StageSearch& search) {
    Partition partition;
    partition.cost = 0;
    for (int m = 0; m < search.problem().size(); ++m) {
        const Mask bit = Mask{1} << m;
        partition.stages.push_back(bit);
        partition.cost += search.evaluate(bit).cost;
    }
    return partition;
}

Partition improve(StageSearch& search, const Limits& limits, const Clock& clock, const std::vector<Mask>& start) {
    const Problem& problem = search.problem();
    check_start(problem, start);
    Descent descent(search, clock);
    Partition best = one_by_one(search);
    if (clock.is_over()) return best;
    const auto descend_from = [&](const std::vector<Mask>& stages) {
        Partition other{stages, descent.total(stages)};
        if (other.cost >= kNever) return false;
        descent.descend(other);
        if (other.cost < best.cost) best = other;
        return true;
    };
    if (start.empty() || !descend_from(start)) {
        descent.cluster(best);
        descent.descend(best);
        descend_from(levels(problem));
    }
    std::mt19937_64 draw(limits.seed);
    for (int round = 0; round < limits.kicks && !clock.is_over(); ++round) {
        Partition kicked;
        kicked.stages = kick(problem, best.stages, draw);
        kicked.cost = descent.total(kicked.stages);
        if (kicked.cost >= kNever) continue;
        descent.descend(kicked);
        if (kicked.cost < best.cost) best = kicked;
    }
    return best;
}

}  // namespace mosaic::search
