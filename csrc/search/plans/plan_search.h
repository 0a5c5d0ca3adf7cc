// From stages to plans: a heuristic that starts from several constructions and improves, and the exact search.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "search/clock.h"
#include "search/plans/longest_bound.h"
#include "search/stages/stage_search.h"

namespace mosaic::search {

struct Limits {
    double seconds = 10;                // wall clock; 0: only the plan of one module after the other
    std::int64_t max_nodes = 2000000;   // of one question about one stage
    std::int64_t max_edges = 20000000;  // stages that the exact search may look at
    int kicks = 30;                     // of the heuristic, after its first descent
    std::uint64_t seed = 0;
    bool exact = true;      // false: heuristic with the bound of the start
    bool patterns = false;  // whether few modules are searched like many: by prices and patterns first
};

// What a search is told beforehand.
struct Hint {
    std::vector<Mask> start;             // a partition to start from; empty: none
    std::vector<Mask> forbidden;         // sets that must not be stages
    std::shared_ptr<const Known> known;  // of an earlier search; may be null
    std::vector<int> places;             // the index that each module had there; -1: it is new
};

enum class Status { optimal, feasible };

struct Plan {
    Status status = Status::feasible;
    Ns cost = kNever;  // kNever: what is forbidden leaves no plan
    Ns bound = 0;
    std::vector<Stage> stages;  // in an order that keeps dependencies
    std::shared_ptr<const Known> known;
    std::int64_t num_evaluations = 0;
    std::int64_t num_expanded = 0;
    double seconds = 0;
};

// A partition of the modules into stages, with its cost.
struct Partition {
    std::vector<Mask> stages;
    Ns cost = kNever;
};

// Sorts stages so that every module comes after what it depends on; empty if they depend on each other in a cycle.
std::optional<std::vector<Mask>> in_order(const Problem& problem, std::vector<Mask> stages);

// One module after the other.
Partition one_by_one(StageSearch& search);

// Greedy agglomerative clustering (Algorithm 1), then descent over moves, swaps, merges and splits, then kicks. From
// `start` instead where it is given and fits. Throws std::invalid_argument if it is no partition in order.
Partition improve(StageSearch& search, const Limits& limits, const Clock& clock, const std::vector<Mask>& start);

// Stages of an earlier plan with those modules that the search knows nothing of put where they cost least: beside
// others, or left in the stage of their own that they have. Costs kNever where a stage cannot be.
Partition insert_new(StageSearch& search, std::vector<Mask> stages);

// What is left to do after some modules takes at least this long.
class RestBound {
  public:
    explicit RestBound(const Problem& problem);
    Ns operator()(Mask done) const;

    // The same with what the longest stage tells; takes longer, is never less, and looks no higher than `at_most`.
    Ns sharper(Mask done, Ns at_most);

    Mask earlier(int module) const { return earlier_[static_cast<std::size_t>(module)]; }
    Mask later(int module) const { return later_[static_cast<std::size_t>(module)]; }

  private:
    double work_of(Mask set) const;

    std::vector<double> work_;   // least slots x time of each module, over all slots of the machine
    std::vector<Ns> least_;      // shortest time of each module
    std::vector<Mask> earlier_;  // what must be done before each module, directly or not
    std::vector<Mask> later_;
    std::vector<Ns> tail_;  // longest chain of modules from each on
    Mask all_;
    LongestBound longest_;
    std::unordered_map<Mask, Ns> sharper_;
};

// The best plan with a proof, or, where a limit ends the search, the best one found and a true lower bound.
Plan plan(const Problem& problem, const Limits& limits, const Hint& hint);

}  // namespace mosaic::search
