// What orders take: each row runs its tasks in a given order, each as early as what it waits for and memory allow.
#pragma once

#include <vector>

#include "search/pipeline/order/memory.h"

namespace mosaic::search::pipeline {

using Orders = std::vector<std::vector<int>>;  // for each row its tasks

// Rows that wait for ever.
struct Deadlock {
    std::vector<int> waiting;     // for each row that has not ended the task that it waits to start
    Ns at = 0;                    // when the last task before that ended
    std::vector<Bytes> short_by;  // for each rank
};

// Throws std::invalid_argument unless each row has exactly its tasks.
void check_orders(const Tasks& tasks, const Orders& orders);

// The most in use on each rank where rows run tasks in these orders, and tasks start at these times.
std::vector<Bytes> peak_of(const Tasks& tasks, const Orders& orders, const std::vector<Ns>& starts);

// Plays orders again and again in the same memory.
//
// Time moves on from start to start. Where rows share a rank, and both could start at one time while memory has room
// for one, the row with the lower number does.
class Replay {
  public:
    explicit Replay(const Tasks& tasks) : tasks_(tasks), memory_(tasks) {}

    // Returns when the last task ends; kNever where rows wait for ever, or where it surely ends after `cutoff`.
    // Where memory is `soft`, no task waits for it, and `excess` says by how much it is too small.
    Ns run(const Orders& orders, Ns cutoff = kNever, bool soft = false);

    // Of the last run, by how much ranks' peaks are above their limits, in parts per million of these, all added.
    std::int64_t excess() const;

    // Of the last run, where it came to its end.
    const std::vector<Ns>& starts() const { return starts_; }
    const std::vector<Bytes>& peak() const { return memory_.peak(); }
    // Of the last run, where it did not.
    Deadlock deadlock(const Orders& orders) const;

  private:
    void wake(int row, Ns at) {
        if (at < next_[row]) next_[row] = at;
    }

    const Tasks& tasks_;
    Memory memory_;
    std::vector<Ns> starts_, ready_, row_end_, next_;
    std::vector<int> missing_, at_;
    std::vector<bool> is_short_;
};

}  // namespace mosaic::search::pipeline
