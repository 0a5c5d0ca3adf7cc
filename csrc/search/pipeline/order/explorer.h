// One thread's search: its limits, what it tried, and the best that it found.
#pragma once

#include <atomic>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "search/clock.h"
#include "search/pipeline/order/random.h"
#include "search/pipeline/order/rollout.h"

namespace mosaic::search::pipeline {

struct OrderLimits {
    double seconds = 1;
    std::int64_t max_rollouts = INT64_MAX;  // of all threads together; a replay of orders counts as one
    int num_threads = 1;
    std::uint64_t seed = 0;
    Ns bound = 0;  // no orders are better: a search that comes down to it ends
};

struct FoundOrders {
    bool has_any = false;
    Orders orders;
    std::vector<Ns> starts;
    Ns makespan = kNever;
    std::vector<Bytes> peak;  // of each rank
    std::int64_t num_rollouts = 0;
    std::vector<std::pair<double, Ns>> progress;  // seconds since the search began, and the best since then
    std::optional<Deadlock> deadlock;             // the first one
};

// The order in which groups came first, without those that feed others after those; and who feeds whom.
struct Groups {
    explicit Groups(const Tasks& tasks);
    std::vector<int> natural;             // by microbatch, each after what feeds it
    std::vector<std::vector<int>> after;  // of each group those that its forwards feed
    std::vector<int> num_before;
};

class Explorer {
  public:
    Explorer(const Tasks& tasks, const Groups& groups, const OrderLimits& limits, int thread, const Clock* clock,
             std::atomic<bool>& is_stopped);

    // Whether the limits end the search, or nothing better can be found.
    bool is_over();
    // Rolls out, counts, and keeps what is best. Under tight memory with its admission, or with `both` in turn, and
    // then leaves the better one in the ranking.
    Ns roll(Ranking& ranking, bool both, Ns cutoff = kNever);
    // The same for orders. Memory that is too small by a share makes them longer by `weight` quarters of it, so
    // that a search may come through orders that do not fit; these are not kept.
    Ns replay(const Orders& orders, Ns cutoff, int weight);
    // Counts work on so many tasks, of which a roll-out has all.
    void spend(int num_tasks);
    Ranking natural() const { return {groups.natural, groups.natural, Admission::reserve, Lean::alternate}; }
    // Groups drawn one by one among those whose feeders are drawn; the first ones are given.
    void draw(std::vector<int>& order, std::size_t num_given);
    // A ranking's orders; rolls it out again. It must come to its end.
    Orders orders_of(Ranking ranking) {
        roll(ranking, false);
        return rollout_.orders();
    }
    const std::vector<Ns>& replayed_starts() const { return replay_.starts(); }
    bool is_limited() const { return rollout_.is_limited(); }
    FoundOrders take() { return std::move(found_); }
    const FoundOrders& found() const { return found_; }

    const Tasks& tasks;
    const Groups& groups;
    const int thread;
    Random random;

  private:
    void keep(Ns makespan, const std::vector<Ns>& starts, Orders orders);

    Rollout rollout_;
    Replay replay_;
    std::int64_t rollouts_left_;
    Ns bound_;
    const Clock* clock_;  // null where another thread looks at it
    std::atomic<bool>& is_stopped_;
    std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
    int unseen_ = 0, spent_ = 0;
    FoundOrders found_;
    std::vector<int> num_missing_, ready_;
};

// Methods of search. Each goes on until the explorer is over, or it has tried all that it can.
// Monte-Carlo tree search over the next group (PipeWeaver, Algorithm 1).
void run_tree(Explorer& explorer);
// Local search by shifts of groups and of tasks.
void run_shifts(Explorer& explorer);

}  // namespace mosaic::search::pipeline
