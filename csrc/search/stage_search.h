// The best way to run a set of modules side by side: paper section 3.4, Eq. 4, by special-purpose search.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "ladder.h"
#include "packing.h"

namespace mosaic::search {

// What is known of a set of modules.
struct StageValue {
    Ns bound = 0;      // no placement costs less
    Ns cost = kNever;  // of `stage`; kNever if none is known
    Stage stage;
    bool gave_up = false;  // the number of nodes ran out: the value stays as it is
    bool is_exact() const { return bound >= cost; }
};

class StageSearch {
  public:
    // Throws std::invalid_argument for a problem that cannot be searched.
    StageSearch(const Problem& problem, std::int64_t max_nodes);

    const Problem& problem() const { return problem_; }

    // A quick lower bound; kNever if the set cannot fit at all.
    Ns bound(Mask set);

    // Finds the optimum of a set if it is below `cutoff`; otherwise proves that it is not. Where the number of nodes
    // runs out, the value stays open: its bound is below its cost.
    const StageValue& evaluate(Mask set, Ns cutoff = kNever);

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
    std::int64_t max_nodes_;
    std::unordered_map<Mask, Ns> bounds_;
    std::unordered_map<Mask, StageValue> values_;
    std::int64_t num_evaluations_ = 0;
    std::int64_t num_open_ = 0;
};

}  // namespace mosaic::search
