#include "search/pattern_search.h"

#include <algorithm>

namespace mosaic::search {
namespace {

constexpr std::size_t kMostPatterns = 300000;
constexpr std::int64_t kMostSearched = 20000000;  // nodes of one search
constexpr Ns kFirstShare = 2000;                  // the first slack is this part of the bound
constexpr Ns kLastShare = 3;                 // what is within this part of the most slack takes as long as the most
constexpr std::int64_t kFirstNodes = 20000;  // of one question about one stage
constexpr std::int64_t kMoreNodes = 10;
constexpr std::int64_t kMostWork = 200000000;  // columns looked at for one partition

}  // namespace

PatternSearch::PatternSearch(StageSearch& search, const StageAreas& areas, PatternPricer& pricer, const Prices& prices,
                             Mask members, const Clock& clock)
    : search_(search), areas_(areas), pricer_(pricer), prices_(prices), members_(members), clock_(clock) {}

Found PatternSearch::run(Ns incumbent, std::int64_t max_nodes) {
    const Ns floor = prices_.sum(members_);
    Found found;
    found.bound = std::min(floor, incumbent);
    found.cost = incumbent;
    // Stages that are hard to settle are left open at first; a good plan is often found without them.
    Way way = Way::leading_stages;
    for (std::int64_t nodes = std::min(max_nodes, kFirstNodes); found.bound < found.cost;) {
        search_.set_max_nodes(nodes);
        const bool is_whole = widen(floor, way, found);
        if (clock_.is_over() || (!is_whole && way == Way::all_stages)) break;
        if (!is_whole) {  // too many to find the best of them
            way = Way::all_stages;
            continue;
        }
        if (nodes >= max_nodes) break;
        nodes = std::min(max_nodes, nodes * kMoreNodes);
    }
    return found;
}

// From little slack to as much as the best plan has; returns whether all of it was looked at.
bool PatternSearch::widen(Ns floor, Way way, Found& found) {
    const bool is_leading = way == Way::leading_stages;
    const Ns first = is_leading ? found.bound - floor + 1 : 0;
    most_ = found.cost - floor;
    for (Ns slack = std::max(first, floor / kFirstShare + 1); found.bound < found.cost; slack += slack / 2 + 1) {
        limit_ = slack < most_ - most_ / kLastShare ? slack : most_;
        if (!list(limit_)) return false;
        const bool is_whole = is_leading ? search_leading() : search();
        if (!best_.empty()) {
            found.stages = std::move(best_);
            best_.clear();
            found.cost = floor + most_;
        }
        if (is_whole || is_leading) found.bound = std::max(found.bound, floor + std::min(limit_, least_open_));
        if (!is_whole) return false;
        if (limit_ >= most_) return true;
    }
    return true;
}

bool PatternSearch::list(Ns slack) {
    std::unordered_map<Mask, Ns> patterns;
    const std::vector<double> prices(prices_.of.begin(), prices_.of.end());
    if (!pricer_.list(prices, static_cast<double>(slack), kMostPatterns, clock_, patterns)) return false;
    candidates_.clear();
    for (const auto& [stage, cost] : patterns) {
        const Ns worth = prices_.sum(stage);
        candidates_.push_back(
            {stage, worth, std::max<Ns>(0, std::max(cost, search_.found_bound(stage)) - worth), false});
    }
    std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
        return a.excess != b.excess ? a.excess < b.excess : a.stage < b.stage;
    });
    with_.assign(kMaxModules, {});
    index_.clear();
    all_.clear();
    for (std::size_t i = 0; i < candidates_.size() && candidates_[i].excess <= slack; ++i) {
        all_.push_back(static_cast<int>(i));
        index_.emplace(candidates_[i].stage, static_cast<int>(i));
        each(candidates_[i].stage, [&](int m) { with_[static_cast<std::size_t>(m)].push_back(static_cast<int>(i)); });
    }
    return true;
}

bool PatternSearch::search() {
    least_open_ = kNever;
    num_nodes_ = 0;
    is_stopped_ = false;
    least_spent_.clear();
    path_.clear();
    extend(0, 0);
    return !is_stopped_;
}

bool PatternSearch::search_leading() {
    std::vector<Column> columns;
    for (const int index : all_) {
        const Candidate& candidate = candidates_[static_cast<std::size_t>(index)];
        columns.push_back({candidate.stage, candidate.excess});
    }
    CheapestPartition cheapest(areas_, members_, std::move(columns), limit_, kMostWork);
    least_open_ = kNever;
    Ns lead = 0;  // no partition has less
    while (true) {
        std::vector<Mask> stages = cheapest.find(limit_, clock_);
        if (!cheapest.is_stopped()) lead = cheapest.least();
        if (cheapest.is_stopped() || clock_.is_over()) {
            least_open_ = std::min(least_open_, lead);
            return false;
        }
        if (stages.empty()) return true;
        if (!work_out(std::move(stages), cheapest)) least_open_ = std::min(least_open_, lead);
    }
}

// Returns whether anything was learnt of them. If not, those that stay open are left out from here on.
bool PatternSearch::work_out(std::vector<Mask> stages, CheapestPartition& cheapest) {
    if (search_.problem().is_disturbed() && raise_calmly(stages, cheapest)) return true;
    std::stable_sort(stages.begin(), stages.end(), [](Mask a, Mask b) {  // small ones are soon settled
        return __builtin_popcountll(a) < __builtin_popcountll(b);
    });
    Ns total = cheapest.least();
    Ns cost = 0;
    bool has_learnt = false;
    std::vector<Mask> open;
    for (const Mask stage : stages) {
        const Ns worth = prices_.sum(stage);
        const Ns before = cheapest.excess(stage);
        search_.raise_bound(stage, worth + before);
        const StageValue& value = search_.evaluate(stage, worth + before + most_ - total);
        cost = std::min(kNever, cost + std::max<Ns>(0, value.cost - worth));
        if (value.bound - worth > before) {
            cheapest.raise(stage, value.bound - worth);
            total += value.bound - worth - before;
            has_learnt = true;
        }
        if (total >= most_) return true;
        if (!value.is_exact()) open.push_back(stage);
    }
    if (cost < most_) {
        most_ = cost;
        limit_ = std::min(limit_, most_);
        best_ = std::move(stages);
    }
    if (has_learnt || open.empty()) return true;
    for (const Mask stage : open) cheapest.raise(stage, kNever);
    return false;
}

// What rules a partition out without disturbance is found much sooner.
bool PatternSearch::raise_calmly(const std::vector<Mask>& stages, CheapestPartition& cheapest) {
    Ns total = cheapest.least();
    bool has_learnt = false;
    for (const Mask stage : stages) {
        const Ns worth = prices_.sum(stage);
        const Ns before = cheapest.excess(stage);
        search_.raise_bound(stage, worth + before);
        const Ns excess = search_.calm_bound(stage, worth + before + most_ - total) - worth;
        if (excess <= before) continue;
        cheapest.raise(stage, excess);
        total += excess - before;
        has_learnt = true;
    }
    return has_learnt;
}

Mask PatternSearch::ready(Mask done) const {
    Mask found = 0;
    each(members_ & ~done, [&](int m) {
        if ((search_.problem().modules[static_cast<std::size_t>(m)].before & members_ & ~done) == 0) {
            found |= Mask{1} << m;
        }
    });
    return found;
}

// A module whose stage may as well come next, since everything that could share it is ready; of several the one with
// the fewest patterns. -1: there is none.
int PatternSearch::find_first(Mask ready, Mask waiting) const {
    int first = -1;
    each(ready, [&](int m) {
        if ((waiting & ~areas_.apart(m)) != 0) return;
        const bool is_rarer =
            first < 0 || with_[static_cast<std::size_t>(m)].size() < with_[static_cast<std::size_t>(first)].size();
        if (is_rarer) first = m;
    });
    return first;
}

void PatternSearch::extend(Mask done, Ns spent) {
    if (done == members_) {
        limit_ = spent;
        most_ = spent;
        best_ = path_;
        return;
    }
    const auto [place, is_new] = least_spent_.try_emplace(done, spent);
    if (!is_new && place->second <= spent) return;
    place->second = spent;
    if (++num_nodes_ > kMostSearched || (num_nodes_ % 64 == 0 && clock_.is_over())) is_stopped_ = true;
    const Mask now = ready(done);
    const int first = find_first(now, members_ & ~done & ~now);
    const std::vector<int>& listed = first >= 0 ? with_[static_cast<std::size_t>(first)] : all_;
    const Mask fixed = first >= 0 ? Mask{1} << first : 0;
    std::vector<int> looked_up;
    const bool is_short = __builtin_popcountll(now) < 60 && Mask{1} << __builtin_popcountll(now) < listed.size();
    if (is_short) look_up(now & ~fixed, fixed, looked_up);
    for (const int index : is_short ? looked_up : listed) {
        Candidate& candidate = candidates_[static_cast<std::size_t>(index)];
        if ((candidate.stage & ~now) != 0) continue;
        if (is_stopped_) return;
        if (spent + candidate.excess < limit_) extend(done, spent, candidate);
    }
}

// All candidates that hold `fixed` and beside it only modules of `others`, in the order in which they are listed.
void PatternSearch::look_up(Mask others, Mask fixed, std::vector<int>& found) const {
    for (Mask part = others;; part = (part - 1) & others) {
        const auto place = index_.find(part | fixed);
        if (place != index_.end()) found.push_back(place->second);
        if (part == 0) break;
    }
    std::sort(found.begin(), found.end());
}

void PatternSearch::extend(Mask done, Ns spent, Candidate& candidate) {
    const StageValue& value = search_.evaluate(candidate.stage, candidate.worth + limit_ - spent);
    candidate.excess = std::max(candidate.excess, value.bound - candidate.worth);
    const Ns after = spent + std::max<Ns>(0, value.cost - candidate.worth);
    if (value.cost > value.bound) least_open_ = std::min(least_open_, spent + candidate.excess);
    if (value.cost >= kNever || after >= limit_) return;
    path_.push_back(candidate.stage);
    extend(done | candidate.stage, after);
    path_.pop_back();
}

}  // namespace mosaic::search
