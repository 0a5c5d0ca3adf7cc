#include <algorithm>
#include <chrono>
#include <cmath>
#include <queue>
#include <unordered_map>

#include "search/plans/lazy_search.h"
#include "search/pair_search.h"
#include "search/pattern_plan.h"
#include "search/plans/plan_search.h"
#include "search/pool_search.h"
#include "search/plans/window_search.h"

namespace mosaic::search {
namespace {

// A stage that takes more to settle is no stage for the heuristic.
constexpr std::int64_t kHeuristicNodes = 5000;
// Of the time, where the heuristic would take all of it and leave none for a proof.
constexpr double kHeuristicShare = 0.05;
// Of what is left then, for windows before anything else: what they find helps prices, too.
constexpr double kWindowShare = 0.15;
constexpr double kWindowShareOfMany = 0.1;
// Of what is left then, for pairs of stages, where there are many modules: few end in the same plan without.
constexpr double kPairShare = 0.35;
constexpr int kManyModules = 24;
// Of what is left then, for prices and patterns: of many modules, what they do not settle by then they rarely do later.
constexpr double kPatternShare = 0.95;
constexpr double kPatternShareOfMany = 0.85;
// Of what is left then, for more pairs; and of what is left then, for more windows.
constexpr double kLastPairShare = 0.5;
constexpr double kLastWindowShare = 0.8;
// Of the time, what a list of all stages must leave: of more use to a plan that is given than proofs are other plans.
constexpr double kLeastLeft = 0.4;
constexpr double kLeastLeftOfStart = 0.8;
// Of what is left, where there are few modules: for a proof, first where a plan is given to start from, and then; and
// in between for plans from what an earlier search knew.
constexpr double kSoonShare = 0.3;
constexpr double kPoolShare = 0.5;
constexpr double kLateShare = 0.7;
// Windows in a row that bring nothing, by stage, before and after patterns.
constexpr int kFewInVain = 10;
constexpr int kManyInVain = 200;
constexpr int kFewKicks = 30;  // of pairs, in a row and in vain

struct Edge {
    Ns bound;  // of the stage and of what is left after it
    Mask stage;
};

// A set of modules that is closed under dependencies: all stages so far.
struct Ideal {
    Ns cost = kNever;  // of the best way known to get here
    Mask from = 0;
    bool is_expanded = false;
    std::vector<Edge> edges;  // stages that may come next, by rising bound
};

constexpr Ns kUnknown = -1;
constexpr Ns kSharpened = -2;

struct Entry {
    Ns bound;  // no plan through here costs less
    Ns cost;   // of the ideal, when this was written: older entries are skipped
    Mask ideal;
    std::int64_t edge;  // -1: the ideal itself; otherwise its next edge to look at
    Ns stage_cost;      // of that edge once it is known; kUnknown before, kSharpened once its bound was looked at twice

    bool operator<(const Entry& other) const {  // the queue's top is its largest
        if (bound != other.bound) return bound > other.bound;
        if (ideal != other.ideal) return ideal < other.ideal;
        return edge > other.edge;
    }
};

// Best-first search over ideals of the dependency graph; a stage leads from one to the next. The order of stages does
// not change what they cost, so an ideal is all that needs to be remembered.
class IdealSearch {
  public:
    IdealSearch(StageSearch& search, const Limits& limits, const Clock& clock, Ns incumbent)
        : search_(search),
          problem_(search.problem()),
          limits_(limits),
          clock_(clock),
          rest_(search.problem()),
          best_(incumbent) {}

    // Returns the stages of a plan better than the incumbent, if there is one.
    std::vector<Mask> run() {
        ideals_[0].cost = 0;
        queue_.push({rest_(0), 0, 0, -1, kUnknown});
        while (!queue_.empty()) {
            const Entry top = queue_.top();
            if (top.bound >= best_) break;
            if (is_stopped_ || clock_.is_over()) {
                bound_ = std::min({top.bound, best_, least_open_});
                return found_;
            }
            queue_.pop();
            if (top.cost > ideals_[top.ideal].cost) continue;
            if (top.edge < 0) {
                expand(top);
            } else if (top.stage_cost < 0) {
                look_at(top);
            } else {
                follow(top);
            }
        }
        bound_ = std::min(best_, least_open_);
        return found_;
    }

    Ns cost() const { return best_; }
    Ns bound() const { return bound_; }
    std::int64_t num_expanded() const { return num_expanded_; }

  private:
    void expand(const Entry& entry) {
        Ideal& ideal = ideals_[entry.ideal];
        if (entry.ideal == problem_.all()) {
            if (ideal.cost < best_) {
                best_ = ideal.cost;
                found_ = trace();
            }
            return;
        }
        const Ns bound = entry.cost + rest_.sharper(entry.ideal, best_ - entry.cost);
        if (bound > entry.bound) {
            if (bound < best_) queue_.push({bound, entry.cost, entry.ideal, -1, kUnknown});
            return;
        }
        if (!ideal.is_expanded) {
            ideal.is_expanded = true;
            ++num_expanded_;
            list_edges(entry.ideal, ideal);
            if (is_stopped_) least_open_ = std::min(least_open_, entry.bound);  // stages may be missing from the list
        }
        push_edge(entry.ideal, ideal, 0);
    }

    void list_edges(Mask done, Ideal& ideal) {
        std::vector<int> ready;
        Mask waiting = 0;
        each(problem_.all() & ~done, [&](int m) {
            if ((problem_.modules[static_cast<std::size_t>(m)].before & ~done) == 0) {
                ready.push_back(m);
            } else {
                waiting |= Mask{1} << m;
            }
        });
        const int first = find_first(ready, waiting);
        if (first >= 0) {
            ready.erase(std::find(ready.begin(), ready.end(), first));
            add_edge(done, ideal, ready, 0, Mask{1} << first);
        } else {
            grow(done, ideal, ready, 0, 0);
        }
        std::sort(ideal.edges.begin(), ideal.edges.end(), [](const Edge& first, const Edge& second) {
            return first.bound != second.bound ? first.bound < second.bound : first.stage < second.stage;
        });
        num_edges_ += static_cast<std::int64_t>(ideal.edges.size());
        if (num_edges_ > limits_.max_edges) is_stopped_ = true;
    }

    // A module whose stage may as well come first: everything that could share the stage with it is ready. Of several
    // the one that takes longest, so that bounds are high early. -1: there is none, and any stage may be first.
    int find_first(const std::vector<int>& ready, Mask waiting) const {
        int first = -1;
        for (const int m : ready) {
            if ((waiting & ~rest_.later(m)) != 0) continue;
            if (first < 0 || search_.bound(Mask{1} << m) > search_.bound(Mask{1} << first)) first = m;
        }
        return first;
    }

    // Adds modules to a stage one by one: a larger stage never has a smaller bound, so what is too long stays so.
    void grow(Mask done, Ideal& ideal, const std::vector<int>& ready, std::size_t next, Mask stage) {
        for (std::size_t i = next; i < ready.size() && !is_stopped_; ++i) {
            add_edge(done, ideal, ready, i + 1, stage | Mask{1} << ready[i]);
        }
    }

    void add_edge(Mask done, Ideal& ideal, const std::vector<int>& ready, std::size_t next, Mask stage) {
        const Ns own = search_.bound(stage);
        if (own >= kNever || ideal.cost + own >= best_) return;
        const Ns bound = own + rest_(done | stage);
        if (ideal.cost + bound < best_) ideal.edges.push_back({bound, stage});
        is_stopped_ = is_stopped_ || num_edges_ + static_cast<std::int64_t>(ideal.edges.size()) > limits_.max_edges ||
                      (++num_looked_ % 1024 == 0 && clock_.is_over());
        grow(done, ideal, ready, next, stage);
    }

    void push_edge(Mask at, const Ideal& ideal, std::int64_t edge) {
        if (edge >= static_cast<std::int64_t>(ideal.edges.size())) return;
        const Ns bound = ideal.cost + ideal.edges[static_cast<std::size_t>(edge)].bound;
        if (bound < best_) queue_.push({bound, ideal.cost, at, edge, kUnknown});
    }

    void look_at(const Entry& entry) {
        const Ideal& ideal = ideals_[entry.ideal];
        const Mask stage = ideal.edges[static_cast<std::size_t>(entry.edge)].stage;
        const Ns own = search_.bound(stage);
        const Ns rest = rest_.sharper(entry.ideal | stage, best_ - ideal.cost - own);
        const Ns bound = ideal.cost + own + rest;
        if (entry.stage_cost == kUnknown) push_edge(entry.ideal, ideal, entry.edge + 1);
        if (bound > entry.bound) {
            if (bound < best_) queue_.push({bound, ideal.cost, entry.ideal, entry.edge, kSharpened});
            return;
        }
        const Ns cutoff = best_ - ideal.cost - rest;
        const StageValue& value = search_.evaluate(stage, cutoff);
        const bool is_open = !value.is_exact() && value.bound < cutoff;
        if (is_open) least_open_ = std::min(least_open_, ideal.cost + value.bound + rest);
        if (value.cost < cutoff) {
            queue_.push({ideal.cost + value.cost + rest, ideal.cost, entry.ideal, entry.edge, value.cost});
        }
    }

    void follow(const Entry& entry) {
        const Mask stage = ideals_[entry.ideal].edges[static_cast<std::size_t>(entry.edge)].stage;
        const Mask next = entry.ideal | stage;
        Ideal& ideal = ideals_[next];
        const Ns cost = entry.cost + entry.stage_cost;
        if (cost >= ideal.cost) return;
        ideal.cost = cost;
        ideal.from = entry.ideal;
        ideal.is_expanded = false;  // edges that the higher cost ruled out may count now
        ideal.edges.clear();
        queue_.push({cost + rest_(next), cost, next, -1, kUnknown});
    }

    std::vector<Mask> trace() const {
        std::vector<Mask> stages;
        for (Mask at = problem_.all(); at != 0;) {
            const Mask from = ideals_.at(at).from;
            stages.push_back(at & ~from);
            at = from;
        }
        std::reverse(stages.begin(), stages.end());
        return stages;
    }

    StageSearch& search_;
    const Problem& problem_;
    const Limits& limits_;
    const Clock& clock_;
    RestBound rest_;
    Ns best_;
    Ns bound_ = 0;
    Ns least_open_ = kNever;  // of plans through a stage that was given up or not listed
    std::unordered_map<Mask, Ideal> ideals_;
    std::priority_queue<Entry> queue_;
    std::vector<Mask> found_;
    std::int64_t num_edges_ = 0;
    std::int64_t num_expanded_ = 0;
    std::int64_t num_looked_ = 0;  // stages, whether or not they are edges then
    bool is_stopped_ = false;
};

// The better of the stages to start from, if there are any, and of one module after the other.
Partition take_over(StageSearch& search, const Limits& limits, const std::vector<Mask>& start) {
    Partition best = improve(search, limits, Clock(0), start);  // checks the start
    if (!start.empty()) {
        Partition given = insert_new(search, start);
        if (given.cost < best.cost) best = std::move(given);
    }
    best.cost = std::min(best.cost, kNever);  // a forbidden module alone adds more than that
    return best;
}

// The heuristic, and a bound where no time is left for better.
Partition search_roughly(StageSearch& search, const Limits& limits, const Clock& clock, const std::vector<Mask>& start,
                         Plan& made) {
    const Partition best = improve(search, limits, clock, start);
    made.bound = RestBound(search.problem()).sharper(0, std::min(best.cost, kNever));
    made.bound = std::min(made.bound, best.cost);
    return best;
}

Partition search_large(StageSearch& search, const Limits& limits, const Clock& clock, const std::vector<Mask>& start,
                       Plan& made) {
    const Clock early(limits.seconds * kHeuristicShare);
    Partition best = search_roughly(search, limits, early, start, made);
    if (clock.is_over()) return best;
    best.cost = std::min(best.cost, kNever);
    if (best.cost < kNever) {
        const bool is_many = search.problem().size() > kManyModules;
        WindowSearch windows(search, limits);
        const double share = is_many ? kWindowShareOfMany : kWindowShare;
        windows.run(Clock(clock.seconds_left() * share), kFewInVain, best);
        const StageAreas areas(search.problem());
        PairSearch pairs(search, areas, limits.seed);
        if (is_many) pairs.run(Clock(clock.seconds_left() * kPairShare), kFewKicks, best);
        const double pattern_share = is_many ? kPatternShareOfMany : kPatternShare;
        improve_by_patterns(search, limits, Clock(clock.seconds_left() * pattern_share), best, made.bound);
        if (made.bound < best.cost) {
            if (is_many) pairs.run(Clock(clock.seconds_left() * kLastPairShare), kFewKicks, best);
            windows.run(Clock(clock.seconds_left() * kLastWindowShare), kManyInVain, best);
        }
    }
    if (clock.is_over() || made.bound >= best.cost) return best;
    search.set_max_nodes(limits.max_nodes);
    IdealSearch exact(search, limits, clock, best.cost);
    std::vector<Mask> better = exact.run();
    made.bound = std::max(made.bound, exact.bound());
    made.num_expanded = exact.num_expanded();
    if (better.empty()) return best;
    return {std::move(better), exact.cost()};
}

// Small problems need no heuristic: bounds lead to better plans sooner than descents do. Where a proof is not had soon,
// what an earlier search knew is asked for a better plan to go on from, and windows where it is not had late either.
Partition search_exactly(StageSearch& search, const Limits& limits, const Clock& clock, const std::vector<Mask>& start,
                         Plan& made) {
    Partition best = take_over(search, limits, start);
    std::vector<Mask> singles;
    each(search.problem().all(), [&](int m) { singles.push_back(Mask{1} << m); });
    LazySearch exact(search, limits, clock, singles, best.cost);
    const bool is_small = !limits.patterns && exact.prepare(start.empty() ? kLeastLeft : kLeastLeftOfStart);
    const auto prove = [&](double share) {
        std::vector<Mask> better = exact.run(Clock(clock.seconds_left() * share));
        if (!better.empty()) best = {std::move(better), exact.cost()};
        made.bound = exact.bound();
        made.num_expanded = exact.num_rounds();
        return made.bound >= best.cost;
    };
    if (!start.empty()) {
        if (is_small && prove(kSoonShare)) return best;
        PoolSearch(search).run(Clock(clock.seconds_left() * kPoolShare), best);
        exact.beat(best.cost);
    }
    if (!is_small) return search_large(search, limits, clock, start.empty() ? start : best.stages, made);
    if (!prove(kLateShare) && best.cost < kNever) WindowSearch(search, limits).run(clock, kManyInVain, best);
    return best;
}

}  // namespace

Plan plan(const Problem& problem, const Limits& limits, const Hint& hint) {
    const auto start = std::chrono::steady_clock::now();
    const Clock clock(limits.seconds);
    StageSearch search(problem, {std::min(limits.max_nodes, kHeuristicNodes), &clock});
    if (hint.known) search.adopt(Carried(hint.known.get(), problem, hint.places));
    for (const Mask set : hint.forbidden) search.forbid(set);
    Plan made;
    const auto search_without_proof = [&] {
        if (hint.start.empty()) return search_roughly(search, limits, clock, hint.start, made);
        Partition given = take_over(search, limits, hint.start);
        PoolSearch(search).run(Clock(clock.seconds_left() * kPoolShare), given);
        return search_roughly(search, limits, clock, given.stages, made);
    };
    const Partition best = limits.exact && !clock.is_over() ? search_exactly(search, limits, clock, hint.start, made)
                                                            : search_without_proof();
    made.cost = std::min(best.cost, kNever);  // a forbidden module alone may have added to it
    if (made.cost < kNever) {
        const auto ordered = in_order(problem, best.stages);
        for (const Mask stage : *ordered) made.stages.push_back(search.evaluate(stage).stage);
    }
    made.status = made.bound >= made.cost ? Status::optimal : Status::feasible;
    made.num_evaluations = search.num_evaluations();
    made.known = std::make_shared<const Known>(Known{problem, search.take_values()});
    made.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return made;
}

}  // namespace mosaic::search
