// A plan gets better part by part: a few stages next to each other are opened, and planned anew.
#pragma once

#include <random>
#include <vector>

#include "search/clock.h"
#include "search/plans/plan_search.h"

namespace mosaic::search {

// A window is a set of stages of a plan such that no other stage has to come between two of them: whatever becomes of
// it fits where it was. Where its stages have too many modules for the exact search, only some of them are free, and
// the rest of each stage stays together. Windows are drawn at random.
class WindowSearch {
  public:
    WindowSearch(StageSearch& search, const Limits& limits);

    // Improves a plan until time is over, or many windows in a row were in vain.
    void run(const Clock& clock, Partition& best);

  private:
    // The stages' indices in a random order that keeps dependencies.
    std::vector<std::size_t> draw_order(const std::vector<Mask>& stages);
    // The stages of a window, grown from a random one by its neighbours in an order of stages.
    std::vector<std::size_t> draw_window(const std::vector<Mask>& stages);
    // What is to be planned anew: free modules, and what is left of each stage.
    std::vector<Mask> draw_groups(const std::vector<Mask>& stages, const std::vector<std::size_t>& window);
    bool replan(const Clock& clock, Partition& best);
    std::size_t draw(std::size_t below) { return static_cast<std::size_t>(random_() % below); }

    StageSearch& search_;
    Limits limits_;
    std::mt19937_64 random_;
};

}  // namespace mosaic::search
