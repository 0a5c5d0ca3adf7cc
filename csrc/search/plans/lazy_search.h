// The exact search for problems small enough to hold a bound for every set of modules.
#pragma once

#include <vector>

#include "search/clock.h"
#include "search/plans/chains.h"
#include "search/plans/plan_search.h"

namespace mosaic::search {

// Every set that may be a stage starts with a quick bound. The best plan by these bounds is found by dynamic
// programming over sets of finished modules; then its own stages are worked out, which raises their bounds and those of
// all larger sets, and it is looked for again. A plan that is best by bounds and has only stages worked out is the best
// there is.
class LazySearch {
  public:
    // Modules of one group stay together. Groups need not hold all modules, but no other module may have to come
    // between two of theirs. `incumbent` is what is to be beaten.
    LazySearch(StageSearch& search, const Limits& limits, const Clock& clock, std::vector<Mask> groups, Ns incumbent);

    // Lists what may come after what; false where that is too much to hold, or leaves less than a part of the clock's
    // effort. Nothing else can be asked then.
    bool prepare(double least_left);

    // Returns the stages of a plan better than the incumbent, if there is one. Where time ended this, it goes on when
    // it is called again.
    std::vector<Mask> run(const Clock& clock);

    // There is a better incumbent than before.
    void beat(Ns incumbent) { best_ = std::min(best_, incumbent); }

    Ns cost() const { return best_; }
    Ns bound() const { return bound_; }
    std::int64_t num_rounds() const { return num_rounds_; }

  private:
    // In here, masks are of groups; the search is asked in modules.
    Mask to_modules(Mask stage) const;

    // A set of modules that is closed under dependencies: all stages so far.
    struct Ideal {
        Mask done;
        Mask first;  // its next stage holds this module; 0: any
        Mask rest;   // others that may be in it
        std::size_t number;
        // Of the best stage so far: its number, and that of all that is done then.
        std::size_t next_stage = 0;
        std::size_t next_ideal = 0;
    };

    void order();
    void sort_ideals();
    Ideal make_ideal(Mask done);
    Ns& stage_bound(Mask stage, std::size_t number);
    template <typename Visit>
    void each_stage(const Ideal& ideal, Visit visit);
    bool sweep(const Clock& clock);
    std::vector<Mask> lead() const;
    bool work_out(const std::vector<Mask>& stages);
    void raise(Mask stage, Ns bound);
    void raise_larger(std::size_t number, Mask others, Ns bound);
    Mask independent_of(Mask stage) const;
    Ns stage_bound(Mask stage) const { return stages_[index_.of_stage(stage)]; }

    StageSearch& search_;
    const Problem& problem_;
    const Limits& limits_;
    const Clock& clock_;
    std::vector<Mask> groups_;  // modules of each
    Ns best_;
    Ns bound_ = 0;
    std::int64_t num_rounds_ = 0;
    std::vector<Mask> found_;
    std::vector<Mask> before_;  // what comes before each group
    Mask all_ = 0;
    std::vector<Mask> later_;    // what comes after each, directly or not
    std::vector<Mask> apart_;    // what can be in no stage with each
    ChainIndex index_;           // of groups
    std::vector<Ideal> ideals_;  // larger ones first
    std::vector<Ns> stages_;     // bound by number; -1: not asked for yet
    std::vector<Ns> rests_;      // by number: what is left after an ideal takes at least this
    std::vector<Mask> nexts_;    // by number: the stage with which it does
};

}  // namespace mosaic::search
