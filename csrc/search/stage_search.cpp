#include "stage_search.h"

#include <algorithm>
#include <set>

namespace mosaic::search {
namespace {

constexpr std::int64_t kQuickNodes = 2000;

Ns least(const Module& module, Ns (*time)(const Option&)) {
    Ns best = kNever;
    for (const Option& option : module.options) best = std::min(best, time(option));
    return best;
}

Ns forward_of(const Option& option) { return option.forward; }
Ns backward_of(const Option& option) { return option.backward; }
Ns latency_of(const Option& option) { return option.latency(); }

// The largest over a set's modules of the least that each can take.
Ns slowest(const Problem& problem, Mask set, Ns (*time)(const Option&)) {
    Ns worst = 0;
    each(set, [&](int m) { worst = std::max(worst, least(problem.modules[static_cast<std::size_t>(m)], time)); });
    return worst;
}

std::vector<Ns> distinct(const Problem& problem, Mask set, Ns (*time)(const Option&), Ns from) {
    std::set<Ns> values;
    each(set, [&](int m) {
        for (const Option& option : problem.modules[static_cast<std::size_t>(m)].options) {
            if (time(option) >= from) values.insert(time(option));
        }
    });
    return {values.begin(), values.end()};
}

}  // namespace

StageSearch::StageSearch(const Problem& problem, const Effort& effort) : problem_(problem), effort_(effort) {
    check(problem);
}

Ns StageSearch::bound(Mask set) {
    const auto known = bounds_.find(set);
    if (known != bounds_.end()) return known->second;
    const Ns alone = slowest(problem_, set, &latency_of);
    const Ns phases = slowest(problem_, set, &forward_of) + slowest(problem_, set, &backward_of);
    Ns least_cost = problem_.objective == Objective::phases ? std::max(alone, phases) : alone;
    if ((set & (set - 1)) != 0) least_cost = area_bound(set, least_cost);
    bounds_.emplace(set, least_cost);
    return least_cost;
}

// The least time at which the smallest options that meet it fit into the machine by number of slots.
Ns StageSearch::area_bound(Mask set, Ns at_least) const {
    const std::int64_t room = std::int64_t{problem_.machine.num_devices} * problem_.machine.num_slots;
    const auto fits = [&](Ns time) {
        std::int64_t needed = 0;
        each(set, [&](int m) {
            std::int64_t area = INT32_MAX;
            for (const Option& option : problem_.modules[static_cast<std::size_t>(m)].options) {
                if (option.latency() <= time) area = std::min<std::int64_t>(area, option.area());
            }
            needed += area;
        });
        return needed <= room;
    };
    if (fits(at_least)) return at_least;
    const std::vector<Ns> times = distinct(problem_, set, &latency_of, at_least);
    const auto first = std::partition_point(times.begin(), times.end(), [&](Ns time) { return !fits(time); });
    return first == times.end() ? kNever : *first;
}

void StageSearch::forbid(Mask set) {
    forbidden_.push_back(set);
    values_[set] = StageValue{kNever, kNever, {}, false};
}

StageValues StageSearch::take_values() {
    for (const Mask set : forbidden_) values_.erase(set);
    return std::move(values_);
}

void StageSearch::set_max_nodes(std::int64_t max_nodes) {
    effort_.max_nodes = max_nodes;
    for (auto& [set, value] : values_) value.gave_up = false;
}

const StageValue& StageSearch::evaluate(Mask set, Ns cutoff) {
    auto [place, is_new] = values_.try_emplace(set);
    StageValue& value = place->second;
    if (is_new) {
        if (auto known = carried_.find(set)) value = std::move(*known);
        value.bound = std::max(value.bound, bound(set));
    }
    if (value.is_exact() || value.gave_up || value.bound >= cutoff) return value;
    ++num_evaluations_;
    if (problem_.objective == Objective::sum) {
        search_sum(set, value, std::min(cutoff, value.cost));
    } else {
        search_phases(set, value, std::min(cutoff, value.cost));
    }
    value.gave_up = !value.is_exact() && value.bound < cutoff;
    num_open_ += value.gave_up;
    return value;
}

StageSearch::Scan StageSearch::least_time(Mask set, Range range, Target (*target_at)(Ns, Ns), Ns other,
                                          Ns (*time_of)(const Stage&)) {
    Scan scan;
    if (range.low > range.high) {
        scan.bound = range.high + 1;
        return scan;
    }
    Ns low = range.low;      // where to look next; what is proven stays in range.low
    Ns target = range.high;  // whether it can be done at all comes first
    bool is_full = true;     // a full search; otherwise a quick one, whose giving up says "look higher"
    while (true) {
        const Effort effort{is_full ? effort_.max_nodes : std::min(effort_.max_nodes, kQuickNodes), effort_.clock};
        Packing found = pack(problem_, set, target_at(target, other), effort);
        if (found.answer == Answer::open && is_full) {
            scan.is_open = true;
            scan.bound = range.low;
            return scan;
        }
        if (found.answer == Answer::yes) {
            scan.time = time_of(found.stage);
            scan.stage = std::move(found.stage);
            range.high = scan.time - 1;
        } else {
            if (scan.time == kNever) {
                scan.bound = range.high + 1;
                return scan;
            }
            low = range.ladder->up(target + 1);
            if (found.answer == Answer::no) range.low = low;
        }
        if (range.low > range.high) {
            scan.bound = scan.time;
            return scan;
        }
        // One full search just below the best settles what quick ones left open.
        is_full = low > range.high;
        target = is_full ? range.high : range.ladder->between(low, range.high);
    }
}

void StageSearch::search_sum(Mask set, StageValue& value, Ns cutoff) {
    const Ladder ladder(distinct(problem_, set, &latency_of, 0), problem_.is_disturbed());
    Scan scan = least_time(
        set, {&ladder, ladder.up(value.bound), cutoff - 1}, [](Ns time, Ns) { return Target{kNever, kNever, time}; }, 0,
        [](const Stage& stage) { return stage.latency; });
    keep(value, scan.stage, scan.time);
    value.bound = std::max(value.bound, std::min(scan.bound, cutoff));
}

// Walks the corners of what can be met: the least forward time, the least backward time that goes with it, then the
// next forward time at which less than that backward time can be met, while the two together beat the best so far.
void StageSearch::search_phases(Mask set, StageValue& value, Ns cutoff) {
    const Ladder forwards(distinct(problem_, set, &forward_of, 0), problem_.is_disturbed());
    const Ladder backwards(distinct(problem_, set, &backward_of, 0), problem_.is_disturbed());
    const Ns least_backward = slowest(problem_, set, &backward_of);
    Ns forward = forwards.up(slowest(problem_, set, &forward_of));
    Ns best = cutoff;
    Ns allowed = kNever;  // backward times from here on have been beaten
    while (forward + least_backward < best) {
        allowed = std::min(allowed, best - 1 - forward);
        if (allowed < least_backward) break;
        Scan corner = least_time(
            set, {&forwards, forward, best - 1 - least_backward},
            [](Ns time, Ns limit) { return Target{time, limit, kNever}; }, allowed,
            [](const Stage& stage) { return stage.forward; });
        if (corner.is_open) return;
        if (corner.time == kNever) break;
        best = std::min(best, keep(value, corner.stage, cost_of(problem_, corner.stage)));
        const Ns most = std::min(allowed, best - 1 - corner.time);
        Scan down = least_time(
            set, {&backwards, backwards.up(least_backward), most},
            [](Ns time, Ns limit) { return Target{limit, time, kNever}; }, corner.time,
            [](const Stage& stage) { return stage.backward; });
        if (down.is_open) return;
        if (down.time != kNever) {
            best = std::min(best, keep(value, down.stage, cost_of(problem_, down.stage)));
            allowed = down.time - 1;
        }
        forward = forwards.up(corner.time + 1);
    }
    value.bound = std::max(value.bound, best);
}

Ns StageSearch::keep(StageValue& value, Stage& stage, Ns cost) {
    if (cost < value.cost) {
        value.cost = cost;
        value.stage = std::move(stage);
    }
    return value.cost;
}

}  // namespace mosaic::search
