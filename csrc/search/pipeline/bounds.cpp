#include "search/pipeline/bounds.h"

#include <algorithm>
#include <queue>

namespace mosaic::search::pipeline {
namespace {

// One task on a machine of its own: when it can start, how long it takes, and how long the step lasts behind its end.
struct Job {
    Ns head, time, tail;
};

// The latest end of the best schedule that may interrupt jobs: of those that have come the one with the longest tail
// runs (Jackson 1955). No schedule that interrupts none is shorter.
Ns one_machine(std::vector<Job> jobs) {
    std::sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) { return a.head < b.head; });
    std::priority_queue<std::pair<Ns, Ns>> open;  // tail, time left
    Ns now = 0, latest = 0;
    std::size_t next = 0;
    while (next < jobs.size() || !open.empty()) {
        if (open.empty()) now = std::max(now, jobs[next].head);
        for (; next < jobs.size() && jobs[next].head <= now; ++next) open.push({jobs[next].tail, jobs[next].time});
        auto [tail, left] = open.top();
        open.pop();
        const Ns until = next < jobs.size() ? std::min(now + left, jobs[next].head) : now + left;
        left -= until - now;
        now = until;
        if (left > 0) {
            open.push({tail, left});
        } else {
            latest = std::max(latest, now + tail);
        }
    }
    return latest;
}

// Longest ways as in `Tasks`, and more: where several tasks of one row feed one, their row takes its time for all of
// them. Heads are times before a task's start, tails times behind its end.
class Ends {
  public:
    explicit Ends(const Tasks& tasks) : head(tasks.num_tasks(), 0), tail(tasks.num_tasks(), 0), tasks_(tasks) {
        const std::vector<int>& order = tasks.order();
        for (const int task : order) head[task] = reach(tasks.before(task), head);
        for (auto at = order.rbegin(); at != order.rend(); ++at) tail[*at] = reach(tasks.after(*at), tail);
    }
    std::vector<Ns> head, tail;

  private:
    // When all of these have run at the earliest, where each comes at its own `come` and has a lag behind it.
    Ns reach(const Tasks::Arrows& arrows, const std::vector<Ns>& come) {
        Ns latest = 0;
        rows_.clear();
        for (const Arrow& arrow : arrows) {
            latest = std::max(latest, come[arrow.task] + tasks_[arrow.task].time + arrow.lag);
            rows_.push_back(tasks_[arrow.task].row);
        }
        std::sort(rows_.begin(), rows_.end());
        for (std::size_t i = 1; i < rows_.size(); ++i) {
            if (rows_[i] != rows_[i - 1] || (i > 1 && rows_[i - 2] == rows_[i])) continue;
            jobs_.clear();
            for (const Arrow& arrow : arrows) {
                const Task& task = tasks_[arrow.task];
                if (task.row == rows_[i]) jobs_.push_back({come[arrow.task], task.time, arrow.lag});
            }
            latest = std::max(latest, one_machine(jobs_));
        }
        return latest;
    }

    const Tasks& tasks_;
    std::vector<int> rows_;
    std::vector<Job> jobs_;
};

}  // namespace

Ns lower_bound(const Tasks& tasks) {
    Ns longest = 0;
    const Ends ends(tasks);
    for (const std::vector<int>& row : tasks.rows()) {
        std::vector<Job> jobs;
        for (const int task : row) jobs.push_back({ends.head[task], tasks[task].time, ends.tail[task]});
        longest = std::max(longest, one_machine(std::move(jobs)));
    }
    return longest;
}

}  // namespace mosaic::search::pipeline
