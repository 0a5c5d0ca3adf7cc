// The best plan of a problem with a proof, or a good plan and a bound.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "search/plans/heuristic.h"

namespace mosaic::search {

struct Limits {
    double effort = 10;                // work, in seconds of a core; 0: only the plan of one module after the other
    std::int64_t max_nodes = 2000000;  // of one question about one stage
    std::uint64_t seed = 0;
    bool exact = true;                                         // false: a good plan soon, with a plain bound
    double seconds = std::numeric_limits<double>::infinity();  // wall clock, for the extraordinary
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

// The best plan with a proof, or, where a limit ends the search, the best one found and a true lower bound.
Plan plan(const Problem& problem, const Limits& limits, const Hint& hint);

}  // namespace mosaic::search
