#include "search/pipeline/order/replay.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace mosaic::search::pipeline {

void check_orders(const Tasks& tasks, const Orders& orders) {
    using std::to_string;
    if (static_cast<int>(orders.size()) != tasks.num_rows()) {
        throw std::invalid_argument("there are orders of " + to_string(orders.size()) + " rows and " +
                                    to_string(tasks.num_rows()) + " rows; give one a row");
    }
    std::vector<bool> seen(tasks.num_tasks(), false);
    int num_seen = 0;
    for (int row = 0; row < tasks.num_rows(); ++row) {
        for (const int task : orders[row]) {
            if (task < 0 || task >= tasks.num_tasks() || tasks[task].row != row) {
                throw std::invalid_argument("the order of row " + to_string(row) + " has task " + to_string(task) +
                                            ", which is none of its tasks; give each row its own");
            }
            if (seen[task]) {
                throw std::invalid_argument("the order of row " + to_string(row) + " has task " + to_string(task) +
                                            " twice; each task runs once");
            }
            seen[task] = true;
            ++num_seen;
        }
    }
    if (num_seen == tasks.num_tasks()) return;
    const auto left = std::find(seen.begin(), seen.end(), false) - seen.begin();
    throw std::invalid_argument("no order has task " + to_string(left) + "; each task runs once");
}

std::vector<Bytes> peak_of(const Tasks& tasks, const Orders& orders, const std::vector<Ns>& starts) {
    std::vector<int> place(tasks.num_tasks());  // tasks that take no time start together, in the order of their row
    for (const std::vector<int>& row : orders) {
        for (std::size_t i = 0; i < row.size(); ++i) place[row[i]] = static_cast<int>(i);
    }
    std::vector<int> by_start(tasks.order());
    std::sort(by_start.begin(), by_start.end(),
              [&](int a, int b) { return starts[a] != starts[b] ? starts[a] < starts[b] : place[a] < place[b]; });
    // What ends when something starts has ended before.
    std::priority_queue<std::pair<Ns, int>, std::vector<std::pair<Ns, int>>, std::greater<>> ends;
    std::vector<Bytes> in_use, peak;
    for (int rank = 0; rank < tasks.num_ranks(); ++rank) in_use.push_back(tasks.base(rank));
    peak = in_use;
    for (const int task : by_start) {
        for (; !ends.empty() && ends.top().first <= starts[task]; ends.pop()) {
            in_use[tasks.rank_of(ends.top().second)] -= tasks[ends.top().second].frees;
        }
        const int rank = tasks.rank_of(task);
        in_use[rank] += tasks[task].takes;
        peak[rank] = std::max(peak[rank], in_use[rank]);
        ends.push({starts[task] + tasks[task].time, task});
    }
    return peak;
}

Ns Replay::run(const Orders& orders, Ns cutoff, bool soft) {
    const int n = tasks_.num_tasks(), rows = tasks_.num_rows();
    starts_.assign(n, -1);
    ready_.assign(n, 0);
    missing_.resize(n);
    row_end_.assign(rows, 0);
    next_.assign(rows, kNever);
    at_.assign(rows, 0);
    is_short_.assign(rows, false);
    memory_.clear();
    for (int i = 0; i < n; ++i) missing_[i] = tasks_.before(i).size();
    for (int row = 0; row < rows; ++row) {
        if (!orders[row].empty() && missing_[orders[row][0]] == 0) next_[row] = 0;
    }
    const std::vector<Ns>& tails = tasks_.tails();
    Ns makespan = 0;
    for (int left = n; left > 0;) {
        const int row = static_cast<int>(std::min_element(next_.begin(), next_.end()) - next_.begin());
        const Ns now = next_[row];
        if (const Ns event = memory_.next_event(); event <= now && event < kNever) {
            const int rank = tasks_.rank_of(memory_.pass_event());
            for (int other = 0; other < rows; ++other) {
                if (!is_short_[other] || tasks_.rank_of_row(other) != rank) continue;
                is_short_[other] = false;
                wake(other, std::max(event, row_end_[other]));
            }
            continue;
        }
        if (now == kNever) return kNever;
        const int task = orders[row][at_[row]];
        next_[row] = kNever;
        if (!soft && memory_.short_by(task) > 0) {
            is_short_[row] = true;
            continue;
        }
        if (now + tails[task] > cutoff) return kNever;
        const Ns end = now + tasks_[task].time;
        starts_[task] = now;
        makespan = std::max(makespan, end);
        memory_.start(task, now);
        --left;
        row_end_[row] = end;
        ++at_[row];
        if (at_[row] < static_cast<int>(orders[row].size()) && missing_[orders[row][at_[row]]] == 0) {
            wake(row, std::max(end, ready_[orders[row][at_[row]]]));
        }
        for (const Arrow& arrow : tasks_.after(task)) {
            ready_[arrow.task] = std::max(ready_[arrow.task], end + arrow.lag);
            if (--missing_[arrow.task] > 0) continue;
            const int other = tasks_[arrow.task].row;
            const int place = at_[other];
            if (place < static_cast<int>(orders[other].size()) && orders[other][place] == arrow.task) {
                wake(other, std::max(row_end_[other], ready_[arrow.task]));
            }
        }
    }
    return makespan;
}

std::int64_t Replay::excess() const {
    double sum = 0;
    for (int rank = 0; rank < tasks_.num_ranks(); ++rank) {
        const Bytes limit = tasks_.limit(rank), peak = memory_.peak()[rank];
        if (limit > 0 && peak > limit) sum += 1 + 1e6 * static_cast<double>(peak - limit) / static_cast<double>(limit);
    }
    return static_cast<std::int64_t>(sum);
}

Deadlock Replay::deadlock(const Orders& orders) const {
    Deadlock found;
    found.short_by.assign(tasks_.num_ranks(), 0);
    for (int row = 0; row < tasks_.num_rows(); ++row) {
        found.at = std::max(found.at, row_end_[row]);
        if (at_[row] == static_cast<int>(orders[row].size())) continue;
        const int task = orders[row][at_[row]];
        found.waiting.push_back(task);
        Bytes& most = found.short_by[tasks_.rank_of_row(row)];
        if (missing_[task] == 0) most = std::max(most, memory_.short_by(task));
    }
    return found;
}

}  // namespace mosaic::search::pipeline
