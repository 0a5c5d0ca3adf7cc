#include "search/stages/stage_search.h"

#include <algorithm>

namespace mosaic::search {
namespace {

// Of a question on the way to the answer; the last one, which proves it, has all.
constexpr std::int64_t kQuickNodes = 2000;
// First guess of how far a set is above its bound, as a part of it.
constexpr Ns kFirstStep = 32;
// A best and a bound that are no further apart than this part are settled by one question just below the best.
constexpr Ns kNear = 48;
// Of one question about a placement, before it is looked for greedily.
constexpr std::int64_t kQuickRoomNodes = 200;
// Of one set, for which placements are also looked for greedily: that is not counted in nodes.
constexpr int kGreedyQuestions = 40;
// Of one question: how often a range of times is cut that took all nodes, and the part of the nodes that each cut has.
constexpr int kMaxCuts = 100;
constexpr std::int64_t kRoughNodes = 5000;  // where a question has no more, a rough answer will do: nothing is cut
constexpr std::int64_t kCutShare = 4;

bool is_over(const Effort& effort) { return effort.clock != nullptr && effort.clock->is_over(); }

}  // namespace

StageSearch::StageSearch(const Problem& problem, const Effort& effort)
    : problem_((check(problem), problem)), effort_(effort), bound_(problem), rooms_(problem), greedy_(problem) {
    if (!problem.is_disturbed()) return;
    beside_ = std::make_unique<BesidePacker>(problem);
    calm_ = std::make_unique<Problem>(Problem{problem.modules, problem.machine, {}});
    undisturbed_ = std::make_unique<StageSearch>(*calm_, effort);
}

Ns StageSearch::bound(Mask set) {
    const auto [place, is_new] = bounds_.try_emplace(set, 0);
    if (is_new) place->second = bound_(set);
    return place->second;
}

Ns StageSearch::known_bound(Mask set) const {
    const auto known = values_.find(set);
    return known == values_.end() || is_forbidden(set) ? bound_(set) : known->second.bound;
}

void StageSearch::forbid(Mask set) {
    forbidden_.push_back(set);
    values_[set] = StageValue{kNever, kNever, {}, false};
}

bool StageSearch::is_forbidden(Mask set) const {
    return std::find(forbidden_.begin(), forbidden_.end(), set) != forbidden_.end();
}

void StageSearch::set_max_nodes(std::int64_t max_nodes) {
    if (max_nodes == effort_.nodes_left) return;
    effort_.nodes_left = max_nodes;
    for (auto& [set, value] : values_) value.gave_up = false;
    if (undisturbed_) undisturbed_->set_max_nodes(max_nodes);
}

const StageValue& StageSearch::evaluate(Mask set, Ns cutoff) { return settle(set, cutoff, true); }

const StageValue& StageSearch::sharpen(Mask set, Ns cutoff) { return settle(set, cutoff, false); }

const StageValue& StageSearch::settle(Mask set, Ns cutoff, bool is_whole) {
    StageValue& value = value_of(set);
    if (value.is_exact() || value.gave_up || value.bound >= cutoff) return value;
    greedy_left_ = kGreedyQuestions;
    if (undisturbed_) take_undisturbed(set, value, cutoff);
    value.gave_up = close(set, value, cutoff, is_whole);
    return value;
}

Ns StageSearch::calm_bound(Mask set, Ns cutoff) {
    StageValue& value = value_of(set);
    if (undisturbed_ && !value.is_exact() && value.bound < cutoff) {
        value.bound = std::max(value.bound, undisturbed_->evaluate(set, cutoff).bound);
    }
    return value.bound;
}

StageValue& StageSearch::value_of(Mask set) {
    auto [place, is_new] = values_.try_emplace(set);
    StageValue& value = place->second;
    if (is_new) value.bound = bound(set);
    return value;
}

// What cannot be done without disturbance cannot be done with it, and that is found out much sooner.
void StageSearch::take_undisturbed(Mask set, StageValue& value, Ns cutoff) {
    const StageValue& calm = undisturbed_->evaluate(set, cutoff);
    value.bound = std::max(value.bound, calm.bound);
    if (calm.cost >= kNever) return;
    Stage stage = calm.stage;
    time_stage(problem_, stage);
    keep(value, stage, cost_of(stage));
}

// Guesses upwards from the bound until there is a placement, halves what is between the two, and settles the rest with
// one question just below the best.
bool StageSearch::close(Mask set, StageValue& value, Ns cutoff, bool is_whole) {
    const Ns before = value.bound;
    Ns guess = value.bound;  // where to look; what is proven is in value.bound
    if (is_whole || value.step == 0) value.step = std::max<Ns>(1, value.bound / kFirstStep);
    const Ns far = 4 * value.bound + 64;
    while (true) {
        const Ns high = std::min(cutoff, value.cost);
        if (value.bound >= high || (!is_whole && value.bound > before)) return false;
        Ns below = value.cost < cutoff ? guess + (high - guess) / 2 : guess + value.step;
        const bool is_last = high - guess <= std::max<Ns>(1, high / kNear) || below >= std::min(far, high);
        if (is_last) below = high;
        const std::int64_t nodes = is_last ? effort_.nodes_left : std::min(effort_.nodes_left, kQuickNodes);
        const Answer answer = ask(set, value, below, nodes);
        if (answer == Answer::yes) continue;
        if (answer == Answer::no) value.bound = std::max(value.bound, below);
        if (answer == Answer::open && is_last) return true;
        guess = below;
        value.step *= 2;
    }
}

// Whether a set can be placed for less than `below`. The forward time is split into ranges,
// and a range is done with where its longest forward and the backward that is left beside its shortest cannot be met.
Answer StageSearch::ask(Mask set, StageValue& value, Ns below, std::int64_t nodes) {
    Effort effort{nodes, effort_.clock};
    Stage stage;
    int num_cuts = 0;
    std::vector<Range> ranges{{bound_.least_forward(set), below - 1 - bound_.least_backward(set)}};
    while (!ranges.empty()) {
        const Range range = ranges.back();
        ranges.pop_back();
        if (range.low > range.high) continue;
        const Answer answer = pack(set, {range.high, below - 1 - range.low, below - 1}, effort, stage);
        if (answer == Answer::open) {
            if (is_over(effort) || nodes <= kRoughNodes || ++num_cuts > kMaxCuts || !cut(set, range, ranges))
                return answer;
            effort.nodes_left = nodes / kCutShare;
            continue;
        }
        if (answer == Answer::no) continue;
        const Ns forward = stage.forward;
        const Ns cost = cost_of(stage);
        keep(value, stage, cost);
        if (cost < below) return Answer::yes;
        // Neither half allows this placement again.
        ranges.push_back({forward, range.high});
        ranges.push_back({range.low, forward - 1});
    }
    return Answer::no;
}

// What is hard to tell of a range is often easy to tell of its parts, where both times are closer to what they can be.
// Returns whether there are any smaller ones; neighbours make times that no option has.
bool StageSearch::cut(Mask set, const Range& range, std::vector<Range>& ranges) const {
    if (beside_) return false;
    std::vector<Ns> times;
    each(set, [&](int m) {
        for (const Option& option : problem_.modules[static_cast<std::size_t>(m)].options) {
            if (option.forward >= range.low && option.forward <= range.high) times.push_back(option.forward);
        }
    });
    std::sort(times.begin(), times.end());
    times.erase(std::unique(times.begin(), times.end()), times.end());
    if (times.empty()) return true;  // no stage is in there
    if (times.size() == 1) {
        if (range.low == range.high) return false;
        ranges.push_back({times[0], times[0]});
        return true;
    }
    const std::size_t half = times.size() / 2;
    ranges.push_back({times[half], times.back()});
    ranges.push_back({times[0], times[half - 1]});
    return true;
}

Answer StageSearch::pack(Mask set, const Target& target, Effort& effort, Stage& stage) {
    const Answer calm = pack_calmly(set, target, effort, stage.placed);
    if (calm != Answer::yes) return calm;
    time_stage(problem_, stage);
    const auto is_met = [&] { return target.is_met(stage.forward, stage.backward, stage.latency); };
    if (!beside_ || is_met()) return Answer::yes;
    const Answer answer = beside_->pack(set, target, effort, stage.placed);
    if (answer == Answer::yes) time_stage(problem_, stage);
    return answer;
}

// Most questions are settled at once; of the others many by a greedy placement, and the rest as far as the effort goes.
Answer StageSearch::pack_calmly(Mask set, const Target& target, Effort& effort, std::vector<Placed>& placed) {
    Effort quick{std::min(kQuickRoomNodes, effort.nodes_left), effort.clock};
    const std::int64_t before = quick.nodes_left;
    const Answer answer = rooms_.pack(set, target, quick, placed);
    effort.nodes_left -= before - quick.nodes_left;
    if (answer != Answer::open || is_over(effort)) return answer;
    if (--greedy_left_ >= 0 && greedy_.pack(set, target, effort.clock, placed)) return Answer::yes;
    return rooms_.pack(set, target, effort, placed);
}

void StageSearch::keep(StageValue& value, Stage& stage, Ns cost) {
    if (cost >= value.cost) return;
    value.cost = cost;
    value.stage = std::move(stage);
}

}  // namespace mosaic::search
