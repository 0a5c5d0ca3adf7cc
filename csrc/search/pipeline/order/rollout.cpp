#include "search/pipeline/order/rollout.h"

#include <algorithm>
#include <functional>

namespace mosaic::search::pipeline {

Rollout::Rollout(const Tasks& tasks) : tasks_(tasks), memory_(tasks), is_limited_(tasks.has_limits()) {
    const int n = tasks.num_tasks(), rows = tasks.num_rows(), ranks = tasks.num_ranks();
    std::vector<std::vector<int>> sizes(kKinds, std::vector<int>(rows, 0));
    for (auto& members : members_) members.resize(tasks.num_groups());
    std::vector<Bytes> row_temporary(rows, 0), row_backward(rows, 0);
    constexpr Bytes kNoTask = -1;
    std::vector<std::vector<Bytes>> holds(ranks,
                                          std::vector<Bytes>(is_limited_ ? tasks.num_microbatches() : 0, kNoTask));
    for (int i = 0; i < n; ++i) {
        const Task& task = tasks[i];
        ++sizes[task.kind][task.row];
        members_[task.kind][task.group].push_back(i);
        first_missing_.push_back(tasks.before(i).size());
        row_temporary[task.row] = std::max(row_temporary[task.row], task.temporary());
        if (task.kind != kForward) row_backward[task.row] = std::max(row_backward[task.row], task.temporary());
        if (is_limited_) {
            Bytes& held = holds[tasks.rank_of(i)][task.microbatch];
            held = std::max<Bytes>(0, held) + std::max<Bytes>(0, task.net());
        }
    }
    for (int kind = 0; kind < kKinds; ++kind) {
        open_[kind].resize(sizes[kind]);
        closed_[kind].resize(sizes[kind]);
        first_place_[kind].assign(1, 0);
        for (const int size : sizes[kind]) first_place_[kind].push_back(first_place_[kind].back() + size);
        task_at_[kind].resize(first_place_[kind].back());
        num_placed_[kind].resize(rows);
    }
    place_.resize(n);
    late_.resize(rows);
    if (!is_limited_) return;
    first_promised_.resize(ranks);
    backward_temporary_.assign(ranks, 0);
    for (int rank = 0; rank < ranks; ++rank) first_promised_[rank] = tasks.base(rank);
    for (int row = 0; row < rows; ++row) {
        first_promised_[tasks.rank_of_row(row)] += row_temporary[row];
        backward_temporary_[tasks.rank_of_row(row)] += row_backward[row];
    }
    is_limited_ = false;
    for (int rank = 0; rank < ranks; ++rank) {
        Bytes most = first_promised_[rank];
        for (const Bytes bytes : holds[rank]) most += std::max<Bytes>(0, bytes);
        is_limited_ |= tasks.limit(rank) > 0 && most > tasks.limit(rank);
    }
    if (!is_limited_) return;  // all of it fits at once
    holds_.resize(tasks.num_microbatches());
    closed_of_.resize(tasks.num_microbatches());
    for (int rank = 0; rank < ranks; ++rank) {
        if (tasks.limit(rank) == 0) continue;
        for (int microbatch = 0; microbatch < tasks.num_microbatches(); ++microbatch) {
            if (holds[rank][microbatch] != kNoTask) holds_[microbatch].emplace_back(rank, holds[rank][microbatch]);
        }
    }
}

void Rollout::place(Kind kind, const std::vector<int>& groups) {
    std::vector<int>& placed = num_placed_[kind];
    std::fill(placed.begin(), placed.end(), 0);
    for (const int group : groups) {
        for (const int task : members_[kind][group]) {
            const int row = tasks_[task].row;
            place_[task] = placed[row]++;
            task_at_[kind][first_place_[kind][row] + place_[task]] = task;
        }
    }
}

void Rollout::prepare(const Ranking& ranking) {
    const int n = tasks_.num_tasks(), rows = tasks_.num_rows();
    admission_ = ranking.admission;
    lean_ = ranking.lean;
    place(kForward, ranking.forward);
    place(kBackward, ranking.backward);
    place(kWeights, ranking.backward);
    for (int kind = 0; kind < kKinds; ++kind) {
        open_[kind].clear();
        closed_[kind].clear();
    }
    missing_ = first_missing_;
    ready_.assign(n, 0);
    starts_.assign(n, -1);
    ran_.clear();
    row_end_.assign(rows, 0);
    next_.assign(rows, kNever);
    last_.assign(rows, kWeights);
    is_short_.assign(rows, 0);
    for (auto& late : late_) late.clear();
    memory_.clear();
    if (is_limited_ && admission_ == Admission::reserve) {
        promised_ = first_promised_;
        is_in_.assign(tasks_.num_microbatches(), 0);
        for (auto& closed : closed_of_) closed.clear();
    }
    for (int i = 0; i < n; ++i) {
        if (missing_[i] == 0) arrive(i, 0);
    }
}

// Its last predecessor has been given its time.
void Rollout::arrive(int task, Ns now) {
    const int row = tasks_[task].row;
    if (ready_[task] <= std::max(now, row_end_[row])) {
        show(task);
        wake(row, std::max(now, row_end_[row]));
    } else {
        late_[row].push_back({ready_[task], task});
        std::push_heap(late_[row].begin(), late_[row].end(), std::greater<>());
        wake(row, ready_[task]);
    }
}

void Rollout::show(int task) {
    const Task& what = tasks_[task];
    if (is_limited_ && admission_ == Admission::reserve && !is_in_[what.microbatch]) {
        closed_[what.kind].set(what.row, place_[task]);
        closed_of_[what.microbatch].push_back(task);
    } else {
        open_[what.kind].set(what.row, place_[task]);
    }
}

bool Rollout::could_admit(int microbatch) const {
    for (const auto& [rank, bytes] : holds_[microbatch]) {
        if (promised_[rank] + bytes > tasks_.limit(rank)) return false;
    }
    return true;
}

void Rollout::admit(int microbatch, Ns now) {
    is_in_[microbatch] = 1;
    for (const auto& [rank, bytes] : holds_[microbatch]) promised_[rank] += bytes;
    for (const int task : closed_of_[microbatch]) {
        const Task& what = tasks_[task];
        closed_[what.kind].reset(what.row, place_[task]);
        open_[what.kind].set(what.row, place_[task]);
        // Rows that had nothing else to run may have it now.
        wake(what.row, std::max(now, row_end_[what.row]));
    }
}

bool Rollout::fits(int task) const {
    if (memory_.short_by(task) > 0) return false;
    const int rank = tasks_.rank_of(task);
    const Task& what = tasks_[task];
    // A forward leaves room for what a backward needs beside, or none could free what it holds.
    return what.kind != kForward || tasks_.limit(rank) == 0 || what.net() <= 0 ||
           memory_.in_use(rank) + what.net() + backward_temporary_[rank] <= tasks_.limit(rank);
}

// The task of a kind that its row would run now; -1: none.
int Rollout::first_of(int row, Kind kind, bool& is_short) const {
    const int* task_at = &task_at_[kind][first_place_[kind][row]];
    const int open = open_[kind].first(row);
    if (!is_limited_) return open < 0 ? -1 : task_at[open];
    if (admission_ == Admission::reserve) {
        const int closed = closed_[kind].first(row);
        if (closed >= 0 && (open < 0 || closed < open)) {
            if (could_admit(tasks_[task_at[closed]].microbatch)) return task_at[closed];
            is_short = true;
        }
        return open < 0 ? -1 : task_at[open];
    }
    if (open < 0) return -1;
    if (fits(task_at[open])) return task_at[open];
    is_short = true;
    return -1;
}

int Rollout::choose(int row) {
    bool is_short = false;
    int chosen = -1;
    const int forward = first_of(row, kForward, is_short);
    const int backward = first_of(row, kBackward, is_short);
    if (forward >= 0 && backward >= 0) {
        const bool is_forward = lean_ == Lean::alternate ? last_[row] != kForward : lean_ == Lean::forward;
        chosen = is_forward ? forward : backward;
    } else if (forward >= 0 || backward >= 0) {
        chosen = std::max(forward, backward);
    } else {
        chosen = first_of(row, kWeights, is_short);
    }
    is_short_[row] = is_short;
    return chosen;
}

// What a task frees is free: rows that memory kept waiting look again.
void Rollout::release(int task, Ns at, bool is_event) {
    const int rank = tasks_.rank_of(task);
    if (!is_event && tasks_.is_shared(rank)) return;
    const bool is_reserving = admission_ == Admission::reserve;
    if (is_reserving) {
        if (tasks_[task].net() >= 0) return;
        promised_[rank] += tasks_[task].net();
    }
    for (int row = 0; row < tasks_.num_rows(); ++row) {
        if (!is_short_[row] || (!is_reserving && tasks_.rank_of_row(row) != rank)) continue;
        is_short_[row] = 0;
        wake(row, std::max(at, row_end_[row]));
    }
}

Ns Rollout::run(const Ranking& ranking, Ns cutoff) {
    prepare(ranking);
    const std::vector<Ns>& tails = tasks_.tails();
    Ns makespan = 0;
    for (int left = tasks_.num_tasks(); left > 0;) {
        const int row = static_cast<int>(std::min_element(next_.begin(), next_.end()) - next_.begin());
        const Ns now = next_[row];
        if (is_limited_ && memory_.next_event() < kNever && memory_.next_event() <= now) {
            const Ns event = memory_.next_event();
            release(memory_.pass_event(), event, true);
            continue;
        }
        if (now == kNever) return kNever;
        std::vector<Late>& late = late_[row];
        while (!late.empty() && late.front().at <= now) {
            show(late.front().task);
            std::pop_heap(late.begin(), late.end(), std::greater<>());
            late.pop_back();
        }
        next_[row] = late.empty() ? kNever : late.front().at;
        const int task = choose(row);
        if (task < 0) continue;
        if (now + tails[task] > cutoff) return kNever;
        const Task& what = tasks_[task];
        if (is_limited_) {
            if (admission_ == Admission::reserve && !is_in_[what.microbatch]) admit(what.microbatch, now);
            memory_.start(task, now);
        }
        const Ns end = now + what.time;
        starts_[task] = now;
        ran_.push_back(task);
        open_[what.kind].reset(row, place_[task]);
        row_end_[row] = end;
        if (what.kind != kWeights) last_[row] = what.kind;
        makespan = std::max(makespan, end);
        --left;
        next_[row] = end;  // it looks again then, whatever there is
        if (is_limited_) release(task, now, false);
        for (const Arrow& arrow : tasks_.after(task)) {
            ready_[arrow.task] = std::max(ready_[arrow.task], end + arrow.lag);
            if (--missing_[arrow.task] == 0) arrive(arrow.task, now);
        }
    }
    return makespan;
}

Orders Rollout::orders() const {
    Orders orders(tasks_.num_rows());
    for (const int task : ran_) orders[tasks_[task].row].push_back(task);
    return orders;
}

Deadlock Rollout::deadlock() const {
    Deadlock found;
    found.short_by.assign(tasks_.num_ranks(), 0);
    std::vector<int> waiting(tasks_.num_rows(), -1);
    for (int i = 0; i < tasks_.num_tasks(); ++i) {
        const Task& task = tasks_[i];
        if (starts_[i] >= 0) {
            found.at = std::max(found.at, starts_[i] + task.time);
            continue;
        }
        int& first = waiting[task.row];
        if (first < 0 || (missing_[i] == 0 && missing_[first] > 0)) first = i;
        if (missing_[i] > 0 || !is_limited_) continue;
        if (admission_ == Admission::gate) {
            Bytes& most = found.short_by[tasks_.rank_of(i)];
            most = std::max(most, memory_.short_by(i));
        } else if (!is_in_[task.microbatch]) {
            for (const auto& [rank, bytes] : holds_[task.microbatch]) {
                const Bytes most = promised_[rank] + bytes - tasks_.limit(rank);
                found.short_by[rank] = std::max(found.short_by[rank], most);
            }
        }
    }
    for (const int task : waiting) {
        if (task >= 0) found.waiting.push_back(task);
    }
    return found;
}

}  // namespace mosaic::search::pipeline
