#include "search/plans/longest_bound.h"

#include <algorithm>

namespace mosaic::search {
namespace {

constexpr double kNone = 1e30;
constexpr int kHalvings = 7;
// Sums of doubles may be off in their last bits; what is only just too much counts as fitting.
constexpr double kSlack = 1 + 1e-9;

double at(const std::vector<Ns>& latency, const std::vector<double>& values, Ns time) {
    const auto after = std::upper_bound(latency.begin(), latency.end(), time);
    return after == latency.begin() ? kNone : values[static_cast<std::size_t>(after - latency.begin()) - 1];
}

}  // namespace

LongestBound::LongestBound(const Problem& problem)
    : room_(static_cast<double>(problem.machine.num_devices) * problem.machine.num_slots) {
    for (const Module& module : problem.modules) {
        std::vector<const Option*> options;
        for (const Option& option : module.options) {
            if (problem.machine.memory == 0 || option.memory <= problem.machine.memory) options.push_back(&option);
        }
        std::sort(options.begin(), options.end(),
                  [](const Option* first, const Option* second) { return first->latency() < second->latency(); });
        Curve curve;
        double area = kNone;
        double work = kNone;
        for (const Option* option : options) {
            area = std::min(area, static_cast<double>(option->area()));
            work = std::min(work, static_cast<double>(option->area()) * static_cast<double>(option->latency()));
            curve.latency.push_back(option->latency());
            curve.area.push_back(area);
            curve.work.push_back(work);
        }
        curves_.push_back(std::move(curve));
    }
}

Ns LongestBound::operator()(Mask set, Ns at_least, Ns at_most) {
    if ((set & (set - 1)) == 0 || at_least >= at_most) return at_least;
    const auto known = known_.find(set);
    if (known != known_.end()) return std::max(at_least, known->second);
    std::vector<int> modules;
    Ns shortest = 0;  // that the longest stage can be
    each(set, [&](int m) {
        modules.push_back(m);
        const Curve& curve = curves_[static_cast<std::size_t>(m)];
        shortest = std::max(shortest, curve.latency.empty() ? kNever : curve.latency.front());
    });
    if (shortest >= kNever) return at_least;
    Ns low = at_least;
    if (!is_possible(modules, shortest, at_most)) {
        low = at_most;
    } else {
        Ns high = at_most;
        for (int i = 0; i < kHalvings; ++i) {
            const Ns middle = low + (high - low) / 2;
            (is_possible(modules, shortest, middle) ? high : low) = middle;
        }
    }
    known_.emplace(set, low);
    return low;
}

bool LongestBound::is_possible(const std::vector<int>& modules, Ns shortest, Ns total) {
    // Lengths from one step to the next are judged together, each part at its best.
    for (Ns low = shortest; low <= total;) {
        const Ns high = std::min(total, low + low / 100 + 1);
        if (fits(modules, low, high, total)) return true;
        low = high + 1;
    }
    return false;
}

bool LongestBound::fits(const std::vector<int>& modules, Ns low, Ns high, Ns total) {
    const Ns left = total - low;
    double room = room_;
    double outside = 0;
    items_.clear();
    for (const int m : modules) {
        const Curve& curve = curves_[static_cast<std::size_t>(m)];
        const Item item{at(curve.latency, curve.area, high), at(curve.latency, curve.work, std::min(high, left))};
        if (item.work < kNone) {
            outside += item.work;
            items_.push_back(item);
        } else {
            room -= item.area;  // it can only be in the longest stage
        }
    }
    const double time = room_ * static_cast<double>(left) * kSlack;
    if (room < 0) return false;
    if (outside <= time) return true;
    std::sort(items_.begin(), items_.end(), [](const Item& first, const Item& second) {
        return first.work * second.area > second.work * first.area;
    });
    for (const Item& item : items_) {
        const double share = std::min(1.0, room / item.area);
        outside -= share * item.work;
        room -= share * item.area;
        if (outside <= time) return true;
        if (room <= 0) return false;
    }
    return false;
}

}  // namespace mosaic::search
