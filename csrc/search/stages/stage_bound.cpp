#include "search/stages/stage_bound.h"

#include <algorithm>

namespace mosaic::search {
namespace {

// More slots than any machine has, and few enough that 64 of them can be added.
constexpr std::int32_t kNoArea = INT32_MAX / 128;

}  // namespace

StageBound::StageBound(const Problem& problem)
    : room_(std::int64_t{problem.machine.num_devices} * problem.machine.num_slots) {
    const auto fits = [&](const Option& option) {
        return problem.machine.memory == 0 || option.memory <= problem.machine.memory;
    };
    for (const Module& module : problem.modules) {
        Ns forward = kNever;
        Ns backward = kNever;
        Ns latency = kNever;
        for (const int index : module.options.worthwhile()) {  // others change nothing
            const Option& option = module.options[static_cast<std::size_t>(index)];
            if (!fits(option)) continue;
            forward = std::min(forward, option.forward);
            backward = std::min(backward, option.backward);
            latency = std::min(latency, option.latency());
            times_.push_back(option.latency());
        }
        forward_.push_back(forward);
        backward_.push_back(backward);
        latency_.push_back(latency);
    }
    std::sort(times_.begin(), times_.end());
    times_.erase(std::unique(times_.begin(), times_.end()), times_.end());
    for (const Module& module : problem.modules) {
        std::vector<std::int32_t> area(times_.size(), kNoArea);
        for (const int index : module.options.worthwhile()) {
            const Option& option = module.options[static_cast<std::size_t>(index)];
            if (!fits(option)) continue;
            const auto place = std::lower_bound(times_.begin(), times_.end(), option.latency()) - times_.begin();
            std::int32_t& least = area[static_cast<std::size_t>(place)];
            least = std::min(least, static_cast<std::int32_t>(option.area()));
        }
        for (std::size_t i = 1; i < area.size(); ++i) area[i] = std::min(area[i], area[i - 1]);
        area_.push_back(std::move(area));
    }
}

Ns StageBound::operator()(Mask set) const {
    const Ns alone = slowest(latency_, set);
    const Ns least = std::max(alone, least_forward(set) + least_backward(set));
    if ((set & (set - 1)) == 0 || alone >= kNever) return std::min(least, kNever);
    const auto fits = [&](std::size_t place) {
        std::int64_t needed = 0;
        each(set, [&](int m) { needed += area_[static_cast<std::size_t>(m)][place]; });
        return needed <= room_;
    };
    // The last time that is not above what is known already comes first: mostly that fits.
    const auto after = std::upper_bound(times_.begin(), times_.end(), least) - times_.begin();
    auto low = static_cast<std::size_t>(after);
    if (fits(low - 1)) return least;
    auto high = times_.size();
    while (low < high) {
        const std::size_t middle = low + (high - low) / 2;
        if (fits(middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low == times_.size() ? kNever : times_[low];
}

Ns StageBound::slowest(const std::vector<Ns>& least, Mask set) {
    Ns worst = 0;
    each(set, [&](int m) { worst = std::max(worst, least[static_cast<std::size_t>(m)]); });
    return worst;
}

}  // namespace mosaic::search
