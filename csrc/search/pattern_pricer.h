// Patterns: sets of modules that fit into one stage by area, with the least that such a stage can take.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "search/clock.h"
#include "search/stage_areas.h"

namespace mosaic::search {

struct Pattern {
    Mask stage = 0;
    Ns cost = 0;  // no stage of these modules takes less
};

// Looks for patterns that are worth much for what they cost, each module being worth its price.
//
// What a stage can take is a point (first, second); a rectangle of points is judged at once: its modules need no more
// area than at its far corner, and it costs no less than its near corner. The best that fits is a knapsack, bounded by
// its fractional form in which of each chain of modules one counts at most, then solved in a few steps. What it finds
// is a set, and what that costs at its best rules out most other rectangles at once; those that may hold more are cut
// in two, down to points. The rectangles stay from one question to the next.
class PatternPricer {
  public:
    PatternPricer(const StageAreas& areas, Mask members);

    // To be called when the order of the areas was changed; all else must be as it was. A pattern holds all modules of
    // a set of `together`, or none of them; no two of these sets have a module in common.
    void take_order(const std::vector<Mask>& together = {});

    // Those that a pattern has with this one, itself among them.
    Mask with(int module) const;

    // Returns a bound on worth over cost of all patterns, which is `stop` or the best there is if that is more, and
    // adds patterns of a ratio above `stop`. Ends early with a higher bound once there are `enough` or time is over.
    double best_ratio(const std::vector<double>& prices, double stop, std::size_t enough, const Clock& clock,
                      std::vector<Pattern>& found);

    // Lists all patterns that cost less than their worth and `slack`; false if there are more than `most` of them or
    // time is over.
    bool list(const std::vector<double>& prices, double slack, std::size_t most, const Clock& clock,
              std::unordered_map<Mask, Ns>& found);

  private:
    struct Rectangle {
        std::int32_t first_low, first_high;  // places among the areas' times
        std::int32_t second_low, second_high;
        std::int32_t child;  // of two, one after the other; 0: not cut yet
    };
    struct Part {
        double area;
        double worth;
    };
    struct Unit {  // modules that are in no pattern without each other
        Mask modules;
        Mask places;  // in modules_
        Mask apart;
    };
    class Knapsack;

    Ns cost(Mask set);
    double take(Mask set, const std::vector<double>& prices, double stop, std::size_t before,
                std::vector<Pattern>& found);
    double near_cost(const Rectangle& at) const;
    bool is_point(const Rectangle& at) const;
    bool is_full() const;
    // Cuts a rectangle unless there are too many; returns whether it is cut.
    bool cut(std::size_t index);
    void append(Rectangle rectangle);
    const std::int32_t* areas_of(std::size_t index) const { return &area_[index * modules_.size()]; }
    std::int64_t area_of(const Unit& unit, const std::int32_t* areas) const;
    static double worth_of(Mask modules, const std::vector<double>& prices);
    double most_worth(std::size_t index, const std::vector<double>& prices);
    void add_hull(std::size_t index, const std::vector<int>& chain, const std::vector<double>& prices);

    const StageAreas& areas_;
    Mask members_;
    std::vector<int> modules_;
    std::vector<Unit> units_;
    std::vector<std::vector<int>> chains_;  // of places in units_
    std::vector<Rectangle> rectangles_;
    std::vector<std::int32_t> area_;  // by rectangle and place of the module, at the far corner
    double room_;
    std::unordered_map<Mask, Ns> costs_;  // of sets, by area
    std::vector<Part> parts_;             // scratch
    std::vector<Part> points_;
};

}  // namespace mosaic::search
