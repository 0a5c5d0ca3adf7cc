#include <algorithm>
#include <cmath>
#include <queue>
#include <unordered_map>

#include "plan_search.h"

namespace mosaic::search {
namespace {

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

struct Entry {
    Ns bound;  // no plan through here costs less
    Ns cost;   // of the ideal, when this was written: older entries are skipped
    Mask ideal;
    std::int64_t edge;  // -1: the ideal itself; otherwise its next edge to look at
    Ns stage_cost;      // of that edge once it is known; -1 before

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
        queue_.push({rest_(0), 0, 0, -1, -1});
        while (!queue_.empty()) {
            const Entry top = queue_.top();
            if (top.bound >= best_) break;
            if (is_stopped_ || clock_.is_over()) {
                bound_ = std::min(top.bound, best_);
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
        if (!ideal.is_expanded) {
            ideal.is_expanded = true;
            ++num_expanded_;
            list_edges(entry.ideal, ideal);
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
        // Where all that is left may run at any time, stages can be put in the order of their lowest modules.
        const bool is_free = waiting == 0;
        grow(done, ideal, ready, 0, 0, is_free);
        std::sort(ideal.edges.begin(), ideal.edges.end(), [](const Edge& first, const Edge& second) {
            return first.bound != second.bound ? first.bound < second.bound : first.stage < second.stage;
        });
        num_edges_ += static_cast<std::int64_t>(ideal.edges.size());
        if (num_edges_ > limits_.max_edges) is_stopped_ = true;
    }

    // Adds modules to a stage one by one: a larger stage never has a smaller bound, so what is too long stays so.
    void grow(Mask done, Ideal& ideal, const std::vector<int>& ready, std::size_t next, Mask stage, bool is_free) {
        if (is_stopped_) return;
        for (std::size_t i = next; i < ready.size(); ++i) {
            if (is_free && stage == 0 && i > 0) return;
            const Mask wider = stage | Mask{1} << ready[i];
            const Ns own = search_.bound(wider);
            if (own >= kNever || ideal.cost + own >= best_) continue;
            const Ns bound = own + rest_(done | wider);
            if (ideal.cost + bound < best_) ideal.edges.push_back({bound, wider});
            const bool is_too_many = num_edges_ + static_cast<std::int64_t>(ideal.edges.size()) > limits_.max_edges ||
                                     (ideal.edges.size() % 4096 == 4095 && clock_.is_over());
            if (is_too_many) is_stopped_ = true;
            grow(done, ideal, ready, i + 1, wider, is_free);
        }
    }

    void push_edge(Mask at, const Ideal& ideal, std::int64_t edge) {
        if (edge >= static_cast<std::int64_t>(ideal.edges.size())) return;
        const Ns bound = ideal.cost + ideal.edges[static_cast<std::size_t>(edge)].bound;
        if (bound < best_) queue_.push({bound, ideal.cost, at, edge, -1});
    }

    void look_at(const Entry& entry) {
        const Ideal& ideal = ideals_[entry.ideal];
        const Mask stage = ideal.edges[static_cast<std::size_t>(entry.edge)].stage;
        const Ns rest = rest_(entry.ideal | stage);
        const Ns cutoff = best_ - ideal.cost - rest;
        const StageValue& value = search_.evaluate(stage, cutoff);
        const bool is_open = !value.is_exact() && value.bound < cutoff;
        if (is_open) least_open_ = std::min(least_open_, ideal.cost + value.bound + rest);
        if (value.cost < cutoff) {
            queue_.push({ideal.cost + value.cost + rest, ideal.cost, entry.ideal, entry.edge, value.cost});
        }
        push_edge(entry.ideal, ideal, entry.edge + 1);
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
        queue_.push({cost + rest_(next), cost, next, -1, -1});
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
    const RestBound rest_;
    Ns best_;
    Ns bound_ = 0;
    Ns least_open_ = kNever;  // of plans through a stage that was given up
    std::unordered_map<Mask, Ideal> ideals_;
    std::priority_queue<Entry> queue_;
    std::vector<Mask> found_;
    std::int64_t num_edges_ = 0;
    std::int64_t num_expanded_ = 0;
    bool is_stopped_ = false;
};

}  // namespace

RestBound::RestBound(const Problem& problem) : all_(problem.all()) {
    const double room = static_cast<double>(problem.machine.num_devices) * problem.machine.num_slots;
    const auto size = static_cast<std::size_t>(problem.size());
    std::vector<Ns> least(size, kNever);
    for (std::size_t m = 0; m < size; ++m) {
        double work = static_cast<double>(kNever);
        for (const Option& option : problem.modules[m].options) {
            least[m] = std::min(least[m], option.latency());
            work = std::min(work, static_cast<double>(option.latency()) * option.area());
        }
        work_.push_back(work / room);
    }
    tail_.assign(size, 0);
    for (std::size_t round = 0; round < size; ++round) {  // as many rounds as the longest chain can have
        for (std::size_t m = 0; m < size; ++m) {
            Ns longest = 0;
            for (std::size_t n = 0; n < size; ++n) {
                if ((problem.modules[n].before >> m & 1) != 0) longest = std::max(longest, tail_[n]);
            }
            tail_[m] = least[m] + longest;
        }
    }
}

Ns RestBound::operator()(Mask done) const {
    double work = 0;
    Ns longest = 0;
    each(all_ & ~done, [&](int m) {
        work += work_[static_cast<std::size_t>(m)];
        longest = std::max(longest, tail_[static_cast<std::size_t>(m)]);
    });
    // A sum of doubles may be above the true value in its last bits; a bound must not be.
    return std::max(longest, static_cast<Ns>(work * (1 - 1e-12)));
}

Plan plan(const Problem& problem, const Limits& limits) {
    const auto start = std::chrono::steady_clock::now();
    const Clock clock(limits.seconds);
    StageSearch search(problem, limits.max_nodes);
    Partition best = improve(search, limits, clock);
    Plan made;
    made.cost = best.cost;
    made.bound = std::min(best.cost, RestBound(problem)(0));
    if (limits.exact && !clock.is_over()) {
        IdealSearch exact(search, limits, clock, best.cost);
        std::vector<Mask> better = exact.run();
        made.bound = exact.bound();
        made.num_expanded = exact.num_expanded();
        if (!better.empty()) {
            best.stages = std::move(better);
            made.cost = exact.cost();
        }
    }
    const auto ordered = in_order(problem, best.stages);
    for (const Mask stage : *ordered) made.stages.push_back(search.evaluate(stage).stage);
    made.status = made.bound >= made.cost ? Status::optimal : Status::feasible;
    made.num_evaluations = search.num_evaluations();
    made.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return made;
}

}  // namespace mosaic::search
