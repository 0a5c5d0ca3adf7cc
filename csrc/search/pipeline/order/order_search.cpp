#include "search/pipeline/order/order_search.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace mosaic::search::pipeline {
namespace {

struct Method {
    const char* name;
    void (*run)(Explorer&);
};

constexpr Method kMethods[] = {{"natural", [](Explorer&) {}}, {"tree", run_tree}, {"shifts", run_shifts}};

const Method& method_of(const std::string& name) {
    std::string known;
    for (const Method& method : kMethods) {
        if (name == method.name) return method;
        known += std::string(known.empty() ? "" : ", ") + method.name;
    }
    throw std::invalid_argument("method='" + name + "' is unknown; use one of " + known);
}

// Threads beside the caller's, all joined at the end, whatever happens.
class Crew {
  public:
    Crew(std::vector<Explorer>& explorers, const Method& method, std::atomic<bool>& is_stopped)
        : is_stopped_(is_stopped), num_running_(static_cast<int>(explorers.size()) - 1) {
        for (std::size_t i = 1; i < explorers.size(); ++i) {
            threads_.emplace_back([this, &explorers, &method, i] {
                std::exception_ptr thrown;
                try {
                    method.run(explorers[i]);
                } catch (...) {
                    thrown = std::current_exception();
                }
                const std::lock_guard lock(mutex_);
                if (thrown && !thrown_) thrown_ = thrown;
                --num_running_;
                ended_.notify_all();
            });
        }
    }
    ~Crew() {
        is_stopped_ = true;
        for (std::thread& thread : threads_) thread.join();
    }
    Crew(const Crew&) = delete;
    Crew& operator=(const Crew&) = delete;

    void wait(const Clock& clock) {
        std::unique_lock lock(mutex_);
        while (num_running_ > 0) {
            ended_.wait_for(lock, std::chrono::milliseconds(10));
            if (clock.is_over()) is_stopped_ = true;
        }
        if (thrown_) std::rethrow_exception(thrown_);
    }

  private:
    std::atomic<bool>& is_stopped_;
    std::mutex mutex_;
    std::condition_variable ended_;
    int num_running_;
    std::exception_ptr thrown_;
    std::vector<std::thread> threads_;
};

void merge(FoundOrders& best, FoundOrders other) {
    best.num_rollouts += other.num_rollouts;
    if (!best.deadlock) best.deadlock = std::move(other.deadlock);
    best.progress.insert(best.progress.end(), other.progress.begin(), other.progress.end());
    if (other.makespan >= best.makespan) return;
    best.has_any = true;
    best.makespan = other.makespan;
    best.orders = std::move(other.orders);
    best.starts = std::move(other.starts);
}

// Leaves what was the best of all when it came.
void tidy(std::vector<std::pair<double, Ns>>& progress) {
    std::sort(progress.begin(), progress.end());
    Ns best = kNever;
    const auto is_late = [&](const std::pair<double, Ns>& step) {
        if (step.second >= best) return true;
        best = step.second;
        return false;
    };
    std::vector<std::pair<double, Ns>> kept;
    for (const auto& step : progress) {
        if (!is_late(step)) kept.push_back(step);
    }
    progress = std::move(kept);
}

// Where rows share a rank, a search may give tasks later times than their orders need.
void settle(const Tasks& tasks, FoundOrders& found) {
    if (!found.has_any) return;
    Replay replay(tasks);
    if (const Ns makespan = replay.run(found.orders); makespan <= found.makespan) {
        found.starts = replay.starts();
        if (makespan < found.makespan && !found.progress.empty()) found.progress.back().second = makespan;
        found.makespan = makespan;
    }
    found.peak = peak_of(tasks, found.orders, found.starts);
}

}  // namespace

FoundOrders find_orders(const Tasks& tasks, const std::string& name, const OrderLimits& limits) {
    const Method& method = method_of(name);
    if (limits.num_threads < 1 || limits.num_threads > 1024) {
        throw std::invalid_argument("num_threads=" + std::to_string(limits.num_threads) + "; use 1 to 1024");
    }
    if (!(limits.seconds >= 0) || limits.max_rollouts < 0) {
        throw std::invalid_argument("seconds=" + std::to_string(limits.seconds) +
                                    ", max_rollouts=" + std::to_string(limits.max_rollouts) + "; use 0 or more");
    }
    const Clock clock(limits.seconds);
    const Groups groups(tasks);
    std::atomic<bool> is_stopped{false};
    std::vector<Explorer> explorers;
    explorers.reserve(limits.num_threads);
    for (int i = 0; i < limits.num_threads; ++i) {
        explorers.emplace_back(tasks, groups, limits, i, i == 0 ? &clock : nullptr, is_stopped);
    }
    Ranking natural = explorers[0].natural();
    explorers[0].roll(natural, true);  // whatever the limits, so that there is an answer, and none worse
    Crew crew(explorers, method, is_stopped);
    method.run(explorers[0]);
    crew.wait(clock);
    FoundOrders best;
    for (Explorer& explorer : explorers) merge(best, explorer.take());
    tidy(best.progress);
    settle(tasks, best);
    return best;
}

}  // namespace mosaic::search::pipeline
