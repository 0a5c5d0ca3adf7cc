// A bound of plans that knows in which order stages run.
#pragma once

#include <unordered_set>
#include <vector>

#include "search/pattern_prices.h"

namespace mosaic::search {

// Prices know which modules wait for each other, not that stages have an order: the mix that they come from may run a
// beside what follows b, and b beside what follows a. Of two modules of which neither waits for the other one's stage
// is the first, or they share it. Each of the three rules out stages, which raises prices: modules wait for more of the
// others, and two that share a stage are in none without each other. The least of the three is a bound. The case with
// the least bound is split again, until time is over.
class OrderBranching {
  public:
    // `areas` and `pricer` are of the members; both are changed by run(), and as they were after it.
    OrderBranching(StageAreas& areas, PatternPricer& pricer, Mask members, const Prices& prices);

    // Returns what no plan of the members is below, or `incumbent` if that is less.
    Ns run(Ns incumbent, const Clock& clock);

    std::size_t num_cases() const { return num_cases_; }

  private:
    using Order = std::vector<Mask>;  // by module: all that it waits for, directly or not

    struct Case {
        Ns bound;
        std::size_t number;
        Order order;
        std::vector<Mask> together;  // sets of modules that share a stage
        Prices prices;

        // Those that share a stage with this one, itself among them.
        Mask with(int module) const {
            for (const Mask set : together) {
                if ((set >> module & 1) != 0) return set;
            }
            return Mask{1} << module;
        }
    };
    struct Pair {
        int first;
        int second;
    };

    void pool(const Prices& prices);
    bool choose(const Case& from, Pair& pair) const;
    double kept_apart(const Case& from, const Order& later, Mask early, Mask late) const;
    double ruled_out(const Case& from, Mask early, Mask late) const;
    void split(const Case& from, Pair pair, Ns incumbent, const Clock& clock);
    void add(const Case& from, Order order, std::vector<Mask> together, Ns incumbent, const Clock& clock);
    Order one_first(Order order, Mask first, Mask second) const;
    Order both_at_once(Order order, Mask both) const;

    StageAreas& areas_;
    PatternPricer& pricer_;
    Mask members_;
    std::vector<Pattern> pool_;
    std::unordered_set<Mask> pooled_;
    std::vector<Case> open_;  // a heap: the least bound first
    std::size_t num_cases_ = 0;
};

struct OrderBounds {
    Ns by_prices;
    Ns by_order;
};

// Both bounds of a whole problem; the second is no more than `incumbent`.
OrderBounds bound_by_order(const Problem& problem, Ns incumbent, const Clock& clock);

}  // namespace mosaic::search
