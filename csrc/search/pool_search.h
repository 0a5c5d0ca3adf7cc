// A plan for what has changed a little, from the stages that the search before the change looked at.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "search/clock.h"
#include "search/covering_lp.h"
#include "search/plans/plan_search.h"

namespace mosaic::search {

// An earlier search has worked out the stages of all plans that were nearly best. The best plan of what there is now
// often has the same stages, without modules that are gone and with the new ones beside them. So the pool is: each set
// that was known, less what is gone; each of these with one new module; single modules; and the stages of the plan to
// start from.
//
// Prices of the modules come from the cheapest mix of stages by their bounds; stages of the mix are worked out, and it
// is looked for again, a few times. Then the best plan with stages of the pool is looked for below a target that starts
// just above what prices say, and rises: prices leave few ways to reach it, which are listed and gone through by
// dynamic programming over sets of finished modules, again with bounds that are made exact only where they lead.
class PoolSearch {
  public:
    explicit PoolSearch(StageSearch& search);

    // Improves a plan until the pool has no better one, time is over, or there is too much to list.
    void run(const Clock& clock, Partition& best);

  private:
    struct Stage {
        Mask set;
        Ns bound;
    };
    struct Step {
        std::uint32_t stage;
        std::uint32_t next;  // ideal
    };
    // A set of modules that is closed under dependencies: all stages so far.
    struct Ideal {
        Mask done;
        Ns reached;             // no less by any way from the start, by bounds
        Ns rest = kNever;       // what is left takes at least this, with stages of the pool
        std::size_t first = 0;  // of its steps
        std::size_t end = 0;
        std::size_t best = 0;  // of its steps, by rest
    };

    void fill(const Partition& best);
    void add(Mask set, Ns bound);
    void keep_promising(const Partition& best, std::size_t num_kept);
    void index();
    void find_prices(const Clock& clock, Ns incumbent);
    bool price(CoveringLp& mix, Ns incumbent);
    double worth(Mask set) const;
    bool raise(Stage& stage, Ns cutoff);
    bool improve_below(Ns target, const Clock& clock, Partition& best);
    bool list(const Clock& clock, Ns target);
    void list_steps(std::size_t number, Ns target);
    int find_first(Mask ready, Mask waiting) const;
    std::uint32_t ideal_of(Mask done, Ns reached);
    Ns through(const Step& step) const;
    void sweep();
    std::vector<std::size_t> lead() const;
    bool work_out(const std::vector<std::size_t>& stages, Partition& found);

    StageSearch& search_;
    const Problem& problem_;
    RestBound rest_;
    std::vector<Mask> before_;                         // what comes before each module
    std::vector<Mask> apart_;                          // what can be in no stage with each
    std::unordered_map<Mask, std::size_t> places_;     // in stages_
    std::vector<Stage> stages_;                        // single modules first
    std::vector<std::vector<std::uint32_t>> with_;     // stages that hold each module
    std::vector<double> prices_;                       // no stage is worth more than its bound
    std::unordered_map<Mask, std::uint32_t> numbers_;  // of ideals
    std::vector<std::vector<std::uint32_t>> by_size_;  // ideals
    std::vector<Ideal> ideals_;
    std::vector<Step> steps_;
};

}  // namespace mosaic::search
