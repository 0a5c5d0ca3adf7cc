#include "layout.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace mosaic::search {
namespace {

constexpr int kSteps = 20000;

bool share_device(const Run& first, const Run& second) {
    return std::any_of(first.devices.begin(), first.devices.end(), [&](int device) {
        return std::find(second.devices.begin(), second.devices.end(), device) != second.devices.end();
    });
}

// In any layout every run can be moved down until it meets slot 0 or the end of another, and runs can be placed in the
// order of their starts; so no other starts and orders need trying.
class BottomUp {
  public:
    BottomUp(const std::vector<Run>& runs, int num_slots)
        : runs_(runs), num_slots_(num_slots), starts_(runs.size(), -1), meets_(runs.size()) {
        for (std::size_t i = 0; i < runs.size(); ++i) {
            for (std::size_t j = 0; j < runs.size(); ++j) {
                if (i != j && share_device(runs[i], runs[j])) meets_[i].push_back(j);
            }
        }
    }

    bool first_fit(const std::vector<std::size_t>& order) {
        std::fill(starts_.begin(), starts_.end(), -1);
        for (const std::size_t run : order) {
            int start = 0;
            for (bool moved = true; moved;) {
                moved = false;
                for (const std::size_t other : meets_[run]) {
                    if (starts_[other] >= 0 && overlap(run, start, other)) {
                        start = starts_[other] + runs_[other].quota;
                        moved = true;
                    }
                }
            }
            if (start + runs_[run].quota > num_slots_) return false;
            starts_[run] = start;
        }
        return true;
    }

    bool search() {
        std::fill(starts_.begin(), starts_.end(), -1);
        steps_ = kSteps;
        return descend(0, 0);
    }

    bool gave_up() const { return steps_ < 0; }
    const std::vector<int>& starts() const { return starts_; }

  private:
    bool overlap(std::size_t run, int start, std::size_t other) const {
        return start < starts_[other] + runs_[other].quota && starts_[other] < start + runs_[run].quota;
    }

    bool is_free(std::size_t run, int start) const {
        return start + runs_[run].quota <= num_slots_ &&
               std::none_of(meets_[run].begin(), meets_[run].end(),
                            [&](std::size_t other) { return starts_[other] >= 0 && overlap(run, start, other); });
    }

    bool descend(std::size_t placed, int last) {
        if (placed == runs_.size()) return true;
        std::set<int> ends{0};
        for (std::size_t run = 0; run < runs_.size(); ++run) {
            if (starts_[run] >= 0) ends.insert(starts_[run] + runs_[run].quota);
        }
        for (const int start : ends) {
            if (start < last) continue;
            for (std::size_t run = 0; run < runs_.size(); ++run) {
                if (starts_[run] >= 0 || !is_free(run, start)) continue;
                if (--steps_ < 0) return false;
                starts_[run] = start;
                if (descend(placed + 1, start)) return true;
                starts_[run] = -1;
            }
        }
        return false;
    }

    const std::vector<Run>& runs_;
    int num_slots_;
    std::vector<int> starts_;
    std::vector<std::vector<std::size_t>> meets_;
    int steps_ = kSteps;
};

}  // namespace

std::optional<std::vector<int>> lay_out(const std::vector<Run>& runs, int num_slots, bool* gave_up) {
    std::vector<std::size_t> order(runs.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto by_degree = [&](std::size_t first, std::size_t second) {
        const Run& one = runs[first];
        const Run& two = runs[second];
        if (one.devices.size() != two.devices.size()) return one.devices.size() > two.devices.size();
        if (one.devices != two.devices) return one.devices < two.devices;
        return one.quota > two.quota;
    };
    std::stable_sort(order.begin(), order.end(), by_degree);
    BottomUp layout(runs, num_slots);
    if (layout.first_fit(order) || layout.search()) return layout.starts();
    if (layout.gave_up()) *gave_up = true;
    return std::nullopt;
}

}  // namespace mosaic::search
