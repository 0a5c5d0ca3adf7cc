// Placements found by fitting one module after the other, in many orders: soon, where there is some room to spare.
#pragma once

#include <cstdint>
#include <vector>

#include "search/stages/packers/packing.h"

namespace mosaic::search {

// Never proves that there is no placement. The same question has the same answer.
class GreedyPacker {
  public:
    explicit GreedyPacker(const Problem& problem) : problem_(problem) {}

    // Whether a placement in which every module meets the target alone was found in time; then `placed` holds it.
    bool pack(Mask set, const Target& target, const Clock* clock, std::vector<Placed>& placed);

  private:
    struct Item {
        int module = 0;
        std::vector<int> options;  // that meet the target
        std::int64_t least_area = 0;
        int least_quota = 0;
        double key = 0;  // larger ones come first
    };

    bool list(Mask set, const Target& target);
    bool attempt(std::vector<Placed>& placed);
    bool is_over() const { return clock_ != nullptr && clock_->is_over(); }
    bool fit(const Item& item, std::int64_t spare, int least_quota, Placed& placed);
    std::int64_t choose(const Option& option, int least_quota);

    const Problem& problem_;
    const Clock* clock_ = nullptr;  // may be null
    std::vector<Item> items_;
    std::vector<int> free_;             // slots by device
    std::vector<std::int64_t> memory_;  // bytes by device
    std::vector<int> chosen_;           // devices
    std::vector<std::pair<int, int>> fitting_;
};

}  // namespace mosaic::search
