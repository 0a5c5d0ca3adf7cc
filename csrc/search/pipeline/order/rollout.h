// One roll-out: from a ranking of groups to orders and times, forwards and backwards interleaved as in PipeWeaver 6.2.
#pragma once

#include <vector>

#include "search/pipeline/order/bitrows.h"
#include "search/pipeline/order/replay.h"

namespace mosaic::search::pipeline {

// How memory lets tasks in.
enum class Admission {
    gate,     // a task that does not fit closes its queue for now, as in the paper; rows may come to wait for ever
    reserve,  // a microbatch comes in only where all that it will ever take fits on every rank; then it always ends
};

// Which of a forward and a backward runs that could both run now.
enum class Lean { alternate, backward, forward };

// Groups from the first to the last, for forwards, and for backwards with weights.
struct Ranking {
    std::vector<int> forward, backward;
    Admission admission = Admission::reserve;
    Lean lean = Lean::alternate;
};

// Rolls out again and again in the same memory.
//
// Time moves on from start to start. A row that is free takes the first of its tasks, by ranking, that could start by
// now. Weights apart run only where neither a forward nor a backward can.
class Rollout {
  public:
    explicit Rollout(const Tasks& tasks);

    // Returns when the last task ends; kNever where rows wait for ever, or where it surely ends after `cutoff`.
    Ns run(const Ranking& ranking, Ns cutoff = kNever);

    // Whether memory is ever in the way.
    bool is_limited() const { return is_limited_; }
    int num_placed() const { return static_cast<int>(ran_.size()); }
    // Of the last run, where it came to its end.
    const std::vector<Ns>& starts() const { return starts_; }
    Orders orders() const;
    // Of the last run, where it did not.
    Deadlock deadlock() const;

  private:
    struct Late {  // ready, but not yet
        Ns at;
        int task;
        bool operator>(const Late& other) const { return at != other.at ? at > other.at : task > other.task; }
    };

    void prepare(const Ranking& ranking);
    void place(Kind kind, const std::vector<int>& groups);
    void arrive(int task, Ns now);
    void show(int task);
    int choose(int row);
    int first_of(int row, Kind kind, bool& is_short) const;
    bool fits(int task) const;
    bool could_admit(int microbatch) const;
    void admit(int microbatch, Ns now);
    void release(int task, Ns at, bool is_event);
    void wake(int row, Ns at) {
        if (at < next_[row]) next_[row] = at;
    }

    const Tasks& tasks_;
    Memory memory_;
    Admission admission_ = Admission::reserve;
    Lean lean_ = Lean::alternate;
    bool is_limited_ = false;
    // Of each group its tasks of each kind.
    std::vector<std::vector<int>> members_[kKinds];
    std::vector<int> first_missing_;
    BitRows open_[kKinds];    // ready by now, by place in the ranking
    BitRows closed_[kKinds];  // the same, of microbatches that are not in
    std::vector<int> task_at_[kKinds], first_place_[kKinds], num_placed_[kKinds];
    std::vector<int> place_, ran_;  // of each task its place in the ranking; tasks as they were started
    std::vector<Ns> starts_, ready_, row_end_, next_;
    std::vector<int> missing_;
    std::vector<std::vector<Late>> late_;
    std::vector<Kind> last_;
    std::vector<char> is_short_;
    // For reservations: bytes that a microbatch will ever hold on each rank, those that are promised, and the most that
    // tasks which run have beside.
    std::vector<std::vector<std::pair<int, Bytes>>> holds_;
    std::vector<Bytes> first_promised_, promised_, backward_temporary_;
    std::vector<char> is_in_;
    std::vector<std::vector<int>> closed_of_;
};

}  // namespace mosaic::search::pipeline
