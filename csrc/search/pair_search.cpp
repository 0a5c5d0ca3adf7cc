#include "search/pair_search.h"

#include <algorithm>

#include "search/plans/stage_order.h"

namespace mosaic::search {
namespace {

constexpr int kDraws = 300;              // of times, for a pair
constexpr int kMostPacked = 6;           // splits of a pair whose stages are packed
constexpr Ns kLeastGain = 4096;          // a split has to save this part of what the pair takes
constexpr int kShortenings = 6;          // halvings of how much shorter times can be
constexpr Ns kMostShorter = 8;           // times are cut by at most this part
constexpr std::int64_t kMostWaste = 24;  // at most this part of the room is left for what packing wastes
constexpr int kMostInVain = 60;          // pairs in a row, before a kick
constexpr int kPairsOfKick = 3;
constexpr Ns kMostWorse = 40;        // a kick may cost this part of the plan
constexpr std::uint64_t kAlone = 8;  // one draw of so many opens one stage in place of two
constexpr std::int32_t kTooMuch = INT32_MAX / 2;

}  // namespace

PairSearch::PairSearch(StageSearch& search, const StageAreas& areas, std::uint64_t seed)
    : search_(search), areas_(areas), random_(seed) {}

void PairSearch::run(const Clock& clock, int num_kicks, Partition& best) {
    Partition plan = best;
    for (int kick = 0; !clock.is_over(); ++kick) {
        for (int in_vain = 0; in_vain < kMostInVain && !clock.is_over();) {
            in_vain = replan(clock, plan, plan.cost) ? 0 : in_vain + 1;
        }
        if (plan.cost < best.cost) {
            best = plan;
            kick = 0;
        }
        if (kick >= num_kicks) return;
        // From the best, over something worse, to somewhere else.
        plan = best;
        const Ns most = plan.cost + plan.cost / kMostWorse;
        for (int i = 0; i < kPairsOfKick; ++i) replan(clock, plan, most);
    }
}

// Draws two stages and plans their modules anew, so that the plan takes less than `limit`; returns whether that was
// possible.
bool PairSearch::replan(const Clock& clock, Partition& plan, Ns limit) {
    const std::vector<std::size_t> order = draw_order(search_.problem(), plan.stages, random_);
    const std::size_t at = random_() % order.size();
    const bool is_alone = at + 1 == order.size() || random_() % kAlone == 0;
    const Mask before = plan.stages[order[at]];
    const Mask after = is_alone ? 0 : plan.stages[order[at + 1]];
    const Ns now = cost_below(before, kNever) + cost_below(after, kNever);
    const Ns cutoff = now + limit - plan.cost;
    list(before | after);
    int num_packed = 0;
    for (int i = 0; i < kDraws && num_packed < kMostPacked && !clock.is_over(); ++i) {
        const Mask first = draw_split(before, after, cutoff - cutoff / kLeastGain - 1);
        const Mask second = (before | after) & ~first;
        if (first == 0 || first == before || first == after) continue;
        ++num_packed;
        const Ns least = second == 0 ? 0 : search_.bound(second);
        const Ns own = least < cutoff ? cost_below(first, cutoff - least) : cutoff;
        const Ns both = own < cutoff ? own + cost_below(second, cutoff - own) : cutoff;
        if (both >= cutoff) continue;
        auto& stages = plan.stages;
        const auto is_old = [&](Mask one) { return one == before || one == after; };
        stages.erase(std::remove_if(stages.begin(), stages.end(), is_old), stages.end());
        for (const Mask one : {first, second}) {
            if (one != 0) stages.push_back(one);
        }
        plan.cost = 0;  // anew, since what is known of other stages may have become better
        for (const Mask one : stages) plan.cost += cost_below(one, kNever);
        return true;
    }
    return false;
}

// The modules of the first of two stages that together take no more than `goal`, by area; 0: none was found.
Mask PairSearch::draw_split(Mask before, Mask after, Ns goal) {
    if (goal < 2) return 0;
    Pair times = draw_times(goal, before, after);
    const std::int64_t waste = static_cast<std::int64_t>(draw(areas_.room() / kMostWaste + 1));
    return shorten(times, areas_.room() - waste);
}

Ns PairSearch::cost_below(Mask stage, Ns cutoff) { return stage == 0 ? 0 : search_.evaluate(stage, cutoff).cost; }

void PairSearch::list(Mask both) {
    items_.clear();
    Mask waited_for = 0;
    each(both, [&](int m) { waited_for |= areas_.earlier(m); });
    each(both, [&](int m) { items_.push_back({m, (waited_for >> m & 1) != 0, (areas_.earlier(m) & both) != 0}); });
    for (auto& needs : needs_) needs.resize(items_.size());
}

PairSearch::Pair PairSearch::draw_times(Ns goal, Mask before, Mask after) {
    // Near what the first stage takes now, or anything.
    Ns first = 1 + static_cast<Ns>(draw(goal - 1));
    if (draw(2) == 0 && after != 0) {
        const Ns now = cost_below(before, kNever);
        first = std::clamp<Ns>(now + (first - goal / 2) / kMostShorter, 1, goal - 1);
    }
    return {draw_times(first, before), draw_times(goal - first, after)};
}

// The part of the first time is that of a stage there is, or of some option of some module.
PairSearch::Times PairSearch::draw_times(Ns total, Mask like) {
    const Problem& problem = search_.problem();
    if (problem.objective == Objective::sum) return {total, 0};
    Ns first = 1;
    Ns second = 1;
    if (like != 0 && draw(2) == 0) {
        const Stage& stage = search_.evaluate(like).stage;
        first += stage.forward;
        second += stage.backward;
    } else {
        const Item& item = items_[draw(static_cast<Ns>(items_.size()))];
        const auto& options = problem.modules[static_cast<std::size_t>(item.module)].options;
        const Option& option = options[draw(static_cast<Ns>(options.size()))];
        first += option.forward;
        second += option.backward;
    }
    const auto part = static_cast<double>(first) / static_cast<double>(first + second);
    const Ns own = static_cast<Ns>(part * static_cast<double>(total));
    return {own, total - own};
}

Mask PairSearch::shorten(Pair& times, std::int64_t room) {
    Mask found = split(times, room);
    Ns low = 0;  // how much can be taken off, in parts of 2^kShortenings * kMostShorter
    const Ns whole = (Ns{1} << kShortenings) * kMostShorter;
    const auto shorter = [&](Ns part) {
        Pair made = times;
        for (Times& one : made) one = {one.first - one.first / whole * part, one.second - one.second / whole * part};
        return made;
    };
    for (Ns step = Ns{1} << (kShortenings - 1); found != 0 && step > 0; step /= 2) {
        const Mask other = split(shorter(low + step), room);
        if (other == 0) continue;
        found = other;
        low += step;
    }
    times = shorter(low);
    return found;
}

// A knapsack: for each room of the first stage the least that is left for the second.
Mask PairSearch::split(const Pair& times, std::int64_t room) {
    std::int64_t total = 0;
    for (std::size_t i = 0; i < items_.size(); ++i) {
        const Item& item = items_[i];
        needs_[0][i] = item.is_late ? room + 1 : areas_.area(item.module, times[0].first, times[0].second);
        needs_[1][i] = item.is_early ? room + 1 : areas_.area(item.module, times[1].first, times[1].second);
        total += std::min(needs_[0][i], needs_[1][i]);
        if (std::min(needs_[0][i], needs_[1][i]) > room || total > 2 * room) return 0;
    }
    const auto width = static_cast<std::size_t>(room) + 1;
    least_.assign((items_.size() + 1) * width, kTooMuch);
    std::fill_n(least_.begin(), width, 0);
    for (std::size_t i = 0; i < items_.size(); ++i) {
        const std::int32_t* from = &least_[i * width];
        std::int32_t* to = &least_[(i + 1) * width];
        const auto second = static_cast<std::int32_t>(needs_[1][i]);
        const auto first = static_cast<std::size_t>(std::min<std::int64_t>(needs_[0][i], room + 1));
        if (needs_[1][i] <= room) {
            for (std::size_t c = 0; c < width; ++c) to[c] = std::min(from[c] + second, kTooMuch);
        }
        for (std::size_t c = first; c < width; ++c) to[c] = std::min(to[c], from[c - first]);
    }
    const bool fits = least_[items_.size() * width + width - 1] <= room;
    return fits ? trace(width) : 0;
}

Mask PairSearch::trace(std::size_t width) const {
    Mask first = 0;
    std::size_t room = width - 1;
    for (std::size_t i = items_.size(); i-- > 0;) {
        const std::int32_t here = least_[(i + 1) * width + room];
        const auto own = static_cast<std::size_t>(needs_[0][i]);
        if (own > room || least_[i * width + room - own] != here) continue;
        first |= Mask{1} << items_[i].module;
        room -= own;
    }
    return first;
}

Partition improve_by_pairs(const Problem& problem, const Limits& limits, const std::vector<Mask>& start) {
    const Clock clock(limits.seconds);
    StageSearch search(problem, {limits.max_nodes, &clock});
    Partition best = improve(search, limits, Clock(0), start);  // checks the start
    best = {start, 0};
    for (const Mask stage : start) best.cost = std::min(kNever, best.cost + search.evaluate(stage).cost);
    const StageAreas areas(problem);
    if (best.cost < kNever) PairSearch(search, areas, limits.seed).run(clock, limits.kicks, best);
    return best;
}

}  // namespace mosaic::search
