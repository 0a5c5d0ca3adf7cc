#include "search/stages/packers/greedy_packer.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace mosaic::search {
namespace {

constexpr int kAttempts = 24;
constexpr std::int64_t kDeviceWork = 8;
constexpr std::size_t kOptionsALook =
    64;  // at the clock: with thousands of devices each takes a tenth of a millisecond

}  // namespace

bool GreedyPacker::pack(Mask set, const Target& target, const Clock* clock, std::vector<Placed>& placed) {
    clock_ = clock;
    if (!list(set, target)) return false;
    std::mt19937 draw(1);
    for (int i = 0; i < kAttempts && !is_over(); ++i) {
        // By area at first, then by area times something between 1/2 and 2.
        for (Item& item : items_) {
            const double noise = i == 0 ? 1.0 : 0.5 + 1.5 * static_cast<double>(draw() % 1024) / 1024;
            item.key = static_cast<double>(item.least_area) * noise;
        }
        std::sort(items_.begin(), items_.end(),
                  [](const Item& a, const Item& b) { return a.key != b.key ? a.key > b.key : a.module < b.module; });
        if (attempt(placed)) return true;
    }
    return false;
}

// Returns false where some module has no option, or all together have no room by number.
bool GreedyPacker::list(Mask set, const Target& target) {
    items_.clear();
    std::int64_t needed = 0;
    bool is_possible = true;
    each(set, [&](int m) {
        Item item{m, {}, INT32_MAX, INT32_MAX, 0};
        const auto& options = problem_.modules[static_cast<std::size_t>(m)].options;
        for (std::size_t i = 0; i < options.size(); ++i) {
            const bool fits = problem_.machine.memory == 0 || options[i].memory <= problem_.machine.memory;
            if (!fits || !target.is_met(options[i])) continue;
            item.options.push_back(static_cast<int>(i));
            item.least_area = std::min<std::int64_t>(item.least_area, options[i].area());
            item.least_quota = std::min(item.least_quota, options[i].quota);
        }
        is_possible = is_possible && !item.options.empty();
        needed += item.least_area;
        items_.push_back(std::move(item));
    });
    return is_possible && needed <= std::int64_t{problem_.machine.num_devices} * problem_.machine.num_slots;
}

bool GreedyPacker::attempt(std::vector<Placed>& placed) {
    const auto num_devices = static_cast<std::size_t>(problem_.machine.num_devices);
    free_.assign(num_devices, problem_.machine.num_slots);
    memory_.assign(num_devices, problem_.machine.memory);
    placed.clear();
    std::vector<int> least_quota(items_.size() + 1, INT32_MAX);  // of all from each place on
    std::int64_t spare = std::int64_t{problem_.machine.num_devices} * problem_.machine.num_slots;
    for (std::size_t i = items_.size(); i-- > 0;) {
        least_quota[i] = std::min(least_quota[i + 1], items_[i].least_quota);
        spare -= items_[i].least_area;
    }
    for (std::size_t i = 0; i < items_.size(); ++i) {
        Placed one;
        if (!fit(items_[i], spare, least_quota[i + 1], one)) return false;
        const Option& option =
            problem_.modules[static_cast<std::size_t>(one.module)].options[static_cast<std::size_t>(one.option)];
        spare -= option.area() - items_[i].least_area;
        std::sort(one.devices.begin(), one.devices.end());
        for (const int device : one.devices) {
            const auto at = static_cast<std::size_t>(device);
            free_[at] -= option.quota;
            memory_[at] -= option.memory;
        }
        placed.push_back(std::move(one));
    }
    return true;
}

// Takes the option that wastes least: slots above the module's least area, and what is left on devices too full for
// others.
bool GreedyPacker::fit(const Item& item, std::int64_t spare, int least_quota, Placed& placed) {
    std::int64_t best = INT64_MAX;
    for (std::size_t i = 0; i < item.options.size(); ++i) {
        if (i % kOptionsALook == kOptionsALook - 1 && is_over()) return false;
        const int index = item.options[i];
        const Option& option =
            problem_.modules[static_cast<std::size_t>(item.module)].options[static_cast<std::size_t>(index)];
        const std::int64_t more = option.area() - item.least_area;
        if (more > spare || 2 * more >= best) continue;
        const std::int64_t waste = choose(option, least_quota);
        if (waste < 0 || 2 * more + waste >= best) continue;
        best = 2 * more + waste;
        placed.module = item.module;
        placed.option = index;
        placed.devices = chosen_;
    }
    return best < INT64_MAX;
}

// Devices that the option fills exactly come first, then those with the least room. Returns twice the slots that are
// lost to all others, plus one for each device that is not filled; negative: it does not fit.
std::int64_t GreedyPacker::choose(const Option& option, int least_quota) {
    fitting_.clear();
    Work::add(kDeviceWork * static_cast<std::int64_t>(free_.size()));
    for (std::size_t device = 0; device < free_.size(); ++device) {
        if (free_[device] < option.quota) continue;
        if (problem_.machine.memory != 0 && memory_[device] < option.memory) continue;
        const int left = free_[device] - option.quota;
        const int rank = left == 0 ? 0 : left < least_quota ? 1000 + left : 100 + free_[device];
        fitting_.emplace_back(rank, static_cast<int>(device));
    }
    const auto degree = static_cast<std::size_t>(option.degree);
    if (fitting_.size() < degree) return -1;
    std::sort(fitting_.begin(), fitting_.end());
    chosen_.clear();
    std::int64_t waste = 0;
    for (std::size_t i = 0; i < degree; ++i) {
        const int left = free_[static_cast<std::size_t>(fitting_[i].second)] - option.quota;
        waste += left == 0 ? 0 : left < least_quota ? 2 * left : 1;
        chosen_.push_back(fitting_[i].second);
    }
    return waste;
}

}  // namespace mosaic::search
