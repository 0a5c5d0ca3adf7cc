// Bytes in use on ranks while tasks run, event by event.
#pragma once

#include <algorithm>
#include <functional>
#include <queue>
#include <vector>

#include "search/pipeline/tasks.h"

namespace mosaic::search::pipeline {

// Where one row has a rank for itself, nothing happens on the rank before the end of what runs: what that frees counts
// as free at once. Where rows share a rank, it is freed by an event at the end.
class Memory {
  public:
    explicit Memory(const Tasks& tasks) : tasks_(tasks) { clear(); }

    void clear() {
        in_use_.resize(tasks_.num_ranks());
        for (int rank = 0; rank < tasks_.num_ranks(); ++rank) in_use_[rank] = tasks_.base(rank);
        peak_ = in_use_;
        events_ = {};
    }
    void start(int task, Ns start) {
        const Task& what = tasks_[task];
        const int rank = tasks_.rank_of(task);
        in_use_[rank] += what.takes;
        peak_[rank] = std::max(peak_[rank], in_use_[rank]);
        if (what.frees == 0) return;
        if (tasks_.is_shared(rank)) {
            events_.push({start + what.time, task});
        } else {
            in_use_[rank] -= what.frees;
        }
    }
    Ns next_event() const { return events_.empty() ? kNever : events_.top().at; }
    // Frees what the next event frees, and returns its task.
    int pass_event() {
        const int task = events_.top().task;
        events_.pop();
        in_use_[tasks_.rank_of(task)] -= tasks_[task].frees;
        return task;
    }
    // By how much it is too small for this task now; 0: it fits.
    Bytes short_by(int task) const {
        const int rank = tasks_.rank_of(task);
        if (tasks_.limit(rank) == 0) return 0;
        return std::max<Bytes>(0, in_use_[rank] + tasks_[task].takes - tasks_.limit(rank));
    }
    Bytes in_use(int rank) const { return in_use_[rank]; }
    const std::vector<Bytes>& peak() const { return peak_; }

  private:
    struct Event {
        Ns at;
        int task;
        bool operator>(const Event& other) const { return at != other.at ? at > other.at : task > other.task; }
    };
    const Tasks& tasks_;
    std::vector<Bytes> in_use_, peak_;
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
};

}  // namespace mosaic::search::pipeline
