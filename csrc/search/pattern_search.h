// Plans made of few patterns: those that cost little more than their modules' prices.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "search/cheapest_partition.h"
#include "search/pattern_prices.h"
#include "search/stages/stage_search.h"

namespace mosaic::search {

// What is known of plans for some modules.
struct Found {
    std::vector<Mask> stages;  // empty: nothing better than what was there
    Ns cost = kNever;          // of the best plan known
    Ns bound = 0;              // no plan costs less
};

// Every stage of a plan takes at least what its modules are worth; what it takes more is its excess. A plan that is
// at most `slack` above the sum of all prices has no stage with an excess of more than that. So all patterns of a small
// excess are listed, and plans made of them are searched: first with little slack, then with more, until there is a
// plan, which is the best then, or the patterns are too many.
//
// Every stage on the way is worked out at first, with little effort, which finds plans. Then only those are that the
// best partition by bounds leads to, with more and more effort: what cannot be settled keeps its bound, and what no
// partition is below by bounds no plan is below.
class PatternSearch {
  public:
    PatternSearch(StageSearch& search, const StageAreas& areas, PatternPricer& pricer, const Prices& prices,
                  Mask members, const Clock& clock);

    // Looks for plans that cost less than `incumbent`, and for a bound, until time is over.
    Found run(Ns incumbent, std::int64_t max_nodes);

  private:
    struct Candidate {
        Mask stage;
        Ns worth;
        Ns excess;             // at least; what was found out about it is kept
        bool is_open = false;  // its cost is not settled
    };

    enum class Way { all_stages, leading_stages };

    bool widen(Ns floor, Way way, Found& found);
    bool list(Ns slack);
    // Looks for a plan within the limit; returns whether everything was looked at.
    bool search();
    void extend(Mask done, Ns spent);
    void extend(Mask done, Ns spent, Candidate& candidate);
    // The same, where only stages of the best partition by bounds are worked out.
    bool search_leading();
    bool work_out(std::vector<Mask> stages, CheapestPartition& cheapest);
    bool raise_calmly(const std::vector<Mask>& stages, CheapestPartition& cheapest);
    Mask ready(Mask done) const;
    int find_first(Mask ready, Mask waiting) const;
    void look_up(Mask others, Mask fixed, std::vector<int>& found) const;

    StageSearch& search_;
    const StageAreas& areas_;
    PatternPricer& pricer_;
    const Prices& prices_;
    Mask members_;
    const Clock& clock_;
    std::vector<Candidate> candidates_;   // by rising excess when listed
    std::vector<std::vector<int>> with_;  // candidates with each module
    std::vector<int> all_;
    std::unordered_map<Mask, int> index_;  // of those in all_, by stage
    std::unordered_map<Mask, Ns> least_spent_;
    std::vector<Mask> path_;
    std::vector<Mask> best_;
    Ns limit_ = 0;  // only plans with less excess count
    Ns most_ = 0;   // excess of the best plan known
    Ns least_open_ = kNever;
    std::int64_t num_nodes_ = 0;
    bool is_stopped_ = false;
};

}  // namespace mosaic::search
