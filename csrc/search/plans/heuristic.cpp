#include "search/plans/heuristic.h"

#include <algorithm>

#include "search/plans/chains.h"

namespace mosaic::search {
namespace {

class Descent {
  public:
    Descent(StageSearch& search, const Clock& clock)
        : search_(search), problem_(search.problem()), clock_(clock), apart_(all_apart(earlier_of(search.problem()))) {}

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
                    if (!may_be_stage(merged, apart_) || search_.bound(merged) >= cutoff) continue;
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
        if (!may_be_stage(first, apart_) || !may_be_stage(second, apart_)) return false;
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
    std::vector<Mask> apart_;  // what can be in no stage with each module
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

}  // namespace

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
        partition.cost = std::min(kNever, partition.cost + search.evaluate(bit).cost);
    }
    return partition;
}

Partition improve(StageSearch& search, const Clock& clock, const std::vector<Mask>& start) {
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
    return best;
}

}  // namespace mosaic::search
