// A plan made better by planning two of its stages anew at once, however many modules they hold.
#pragma once

#include <array>
#include <random>
#include <vector>

#include "search/plans/plan_search.h"
#include "search/stage_areas.h"

namespace mosaic::search {

// Large stages differ in what they cost by the two times that they aim at, and by little else: once the times of two
// stages are fixed, which module goes where is a knapsack by area, solved exactly. So times are drawn, not modules. A
// split that fits by area is packed, and taken where that costs less. Of use where stages hold more modules than a
// window of the exact search can open.
class PairSearch {
  public:
    PairSearch(StageSearch& search, const StageAreas& areas, std::uint64_t seed);

    // Until so many kicks in a row bring nothing, or time is over.
    void run(const Clock& clock, int num_kicks, Partition& best);

  private:
    struct Times {
        Ns first;
        Ns second;
    };
    struct Item {
        int module;
        bool is_early;  // another module of the pair waits for it
        bool is_late;   // it waits for another one
    };
    using Pair = std::array<Times, 2>;

    bool replan(const Clock& clock, Partition& plan, Ns limit);
    Mask draw_split(Mask before, Mask after, Ns goal);
    void list(Mask both);
    // Times of two stages that cost `goal` together.
    Pair draw_times(Ns goal, Mask before, Mask after);
    Times draw_times(Ns total, Mask like);
    // Makes times as short as they can be with a split; returns the modules of the first stage, 0 if there is no split.
    Mask shorten(Pair& times, std::int64_t room);
    Mask split(const Pair& times, std::int64_t room);
    Mask trace(std::size_t room) const;
    Ns cost_below(Mask stage, Ns cutoff);
    std::uint64_t draw(Ns below) { return random_() % static_cast<std::uint64_t>(below); }

    StageSearch& search_;
    const StageAreas& areas_;
    std::mt19937_64 random_;
    std::vector<Item> items_;
    std::array<std::vector<std::int64_t>, 2> needs_;  // area of each item in each stage
    // By number of items and room of the first stage: the least that they take of the second.
    std::vector<std::int32_t> least_;
};

// Pairs alone, from a partition that keeps dependencies: throws std::invalid_argument where it does not.
Partition improve_by_pairs(const Problem& problem, const Limits& limits, const std::vector<Mask>& start);

}  // namespace mosaic::search
