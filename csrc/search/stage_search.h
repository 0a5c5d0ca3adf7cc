// The best way to run a set of modules side by side: paper section 3.4, Eq. 4, by special-purpose search.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "known.h"
#include "ladder.h"
#include "packing.h"

namespace mosaic::search {

class StageSearch {
  public:
    // Throws std::invalid_argument for a problem that cannot be searched.
    StageSearch(const Problem& problem, const Effort& effort);

    const Problem& problem() const { return problem_; }

    // A quick lower bound; kNever if the set cannot fit at all.
    Ns bound(Mask set);

    // Finds the optimum of a set if it is below `cutoff`; otherwise proves that it is not. Where the number of nodes
    // runs out, the value stays open: its bound is below its cost.
    const StageValue& evaluate(Mask set, Ns cutoff = kNever);

    // Takes what is known from elsewhere; it must hold for this problem.
    void adopt(Carried carried) { carried_ = std::move(carried); }

    // From now on this set costs kNever. Its bound stays, since sets that hold it are judged by it.
    void forbid(Mask set);

    // Everything found out, without what was forbidden. The search is not usable afterwards.
    StageValues take_values();

    // Nodes for each question from here on; what stayed open with fewer is tried again when it is asked for.
    void set_max_nodes(std::int64_t max_nodes);

    std::int64_t num_evaluations() const { return num_evaluations_; }
    std::int64_t num_open() const { return num_open_; }

  private:
    struct Range {
        const Ladder* ladder;
        Ns low;
        Ns high;
    };
    // The least time of one kind with which a set can be placed while the other kind is limited.
    struct Scan {
        Ns time = kNever;  // kNever: none within the range
        Ns bound = 0;
        bool is_open = false;
        Stage stage;
    };

    Ns area_bound(Mask set, Ns at_least) const;
    Scan least_time(Mask set, Range range, Target (*target_at)(Ns, Ns), Ns other, Ns (*time_of)(const Stage&));
    void search_sum(Mask set, StageValue& value, Ns cutoff);
    void search_phases(Mask set, StageValue& value, Ns cutoff);
    static Ns keep(StageValue& value, Stage& stage, Ns cost);

    const Problem& problem_;
    Effort effort_;
    std::unordered_map<Mask, Ns> bounds_;
    StageValues values_;
    Carried carried_;
    std::vector<Mask> forbidden_;
    std::int64_t num_evaluations_ = 0;
    std::int64_t num_open_ = 0;
};

}  // namespace mosaic::search
