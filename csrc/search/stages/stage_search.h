// The best way to run a set of modules side by side: paper section 3.4, Eq. 4, by special-purpose search.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "search/problem.h"
#include "search/stages/packers/beside_packer.h"
#include "search/stages/packers/greedy_packer.h"
#include "search/stages/packers/room_packer.h"
#include "search/stages/stage.h"
#include "search/stages/stage_bound.h"

namespace mosaic::search {

// What is known of a set of modules.
struct StageValue {
    Ns bound = 0;      // no placement costs less
    Ns cost = kNever;  // of `stage`; kNever if none is known
    Stage stage;
    bool gave_up = false;  // the number of nodes ran out: the value stays as it is
    Ns step = 0;           // how far above the bound to look next; 0: not asked yet
    bool is_exact() const { return bound >= cost; }
};

class StageSearch {
  public:
    // Throws std::invalid_argument for a problem that cannot be searched.
    StageSearch(const Problem& problem, const Effort& effort);

    const Problem& problem() const { return problem_; }

    // A quick lower bound; kNever if the set cannot fit at all.
    Ns bound(Mask set);

    // The same with what was found out about the set; nothing is kept.
    Ns known_bound(Mask set) const;

    // Finds the optimum of a set if it is below `cutoff`; otherwise proves that it is not. Where the number of nodes
    // runs out, the value stays open: its bound is below its cost.
    const StageValue& evaluate(Mask set, Ns cutoff = kNever);

    // As `evaluate`, but comes back as soon as the bound has risen: where others then are better, that was enough.
    const StageValue& sharpen(Mask set, Ns cutoff);

    // A bound without disturbance; no more than `evaluate` finds out, and much sooner.
    Ns calm_bound(Mask set, Ns cutoff);

    // Takes a bound that was found out by what a set holds.
    void raise_bound(Mask set, Ns bound) {
        StageValue& value = value_of(set);
        value.bound = std::max(value.bound, bound);
    }

    // From now on this set costs kNever. Its bound stays, since sets that hold it are judged by it.
    void forbid(Mask set);
    bool is_forbidden(Mask set) const;

    // Nodes for each question from here on; what stayed open with fewer is tried again when it is asked for.
    void set_max_nodes(std::int64_t max_nodes);

  private:
    struct Range {  // of forward times
        Ns low;
        Ns high;
    };

    // What is known of a set so far.
    StageValue& value_of(Mask set);
    const StageValue& settle(Mask set, Ns cutoff, bool is_whole);
    // Returns whether the number of nodes ran out.
    bool close(Mask set, StageValue& value, Ns cutoff, bool is_whole);
    Answer ask(Mask set, StageValue& value, Ns below, std::int64_t nodes);
    bool cut(Mask set, const Range& range, std::vector<Range>& ranges) const;
    Answer pack(Mask set, const Target& target, Effort& effort, Stage& stage);
    Answer pack_calmly(Mask set, const Target& target, Effort& effort, std::vector<Placed>& placed);
    void take_undisturbed(Mask set, StageValue& value, Ns cutoff);
    static void keep(StageValue& value, Stage& stage, Ns cost);

    const Problem& problem_;
    Effort effort_;
    StageBound bound_;
    RoomPacker rooms_;
    GreedyPacker greedy_;
    int greedy_left_ = 0;                       // questions
    std::unique_ptr<BesidePacker> beside_;      // where modules disturb each other
    std::unique_ptr<Problem> calm_;             // the same without disturbance
    std::unique_ptr<StageSearch> undisturbed_;  // and its search: what that proves holds here too
    std::unordered_map<Mask, Ns> bounds_;
    std::unordered_map<Mask, StageValue> values_;
    std::vector<Mask> forbidden_;
};

}  // namespace mosaic::search
