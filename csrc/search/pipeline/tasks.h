// Tasks of one step on rows, compiled: checked once, with what waits for what both ways and an order that keeps it.
#pragma once

#include <cstdint>
#include <vector>

#include "search/problem.h"

namespace mosaic::search::pipeline {

using Bytes = std::int64_t;

enum Kind : std::uint8_t { kForward, kBackward, kWeights };
constexpr int kKinds = 3;

// An arrow of a wait, seen from one of its ends.
struct Arrow {
    int task;  // at the other end
    Ns lag;
};

// What is known of one task; small, since roll-outs read it at random.
struct Task {
    Ns time = 0;
    Bytes takes = 0;
    Bytes frees = 0;
    int row = 0;
    int group = 0;
    int microbatch = 0;
    Kind kind = kForward;

    // What stays in use, or goes out of use, for good.
    Bytes net() const { return takes - frees; }
    // In use while it runs, above what stays.
    Bytes temporary() const { return takes < frees ? takes : frees; }
};

// As they come from outside, an entry a task or a wait.
struct Columns {
    std::vector<std::int64_t> row, kind, microbatch, group, time, takes, frees;
    std::vector<std::int64_t> source, target, lag;
    std::vector<std::int64_t> rank_of;      // an entry a row
    std::vector<std::int64_t> base, limit;  // an entry a rank, or none
};

class Tasks {
  public:
    // Throws std::invalid_argument with the value, the rule and the way out.
    explicit Tasks(Columns columns);

    int num_tasks() const { return static_cast<int>(tasks_.size()); }
    int num_rows() const { return static_cast<int>(rank_of_.size()); }
    int num_ranks() const { return static_cast<int>(base_.size()); }
    int num_groups() const { return num_groups_; }
    int num_microbatches() const { return num_microbatches_; }

    const Task& operator[](int task) const { return tasks_[task]; }
    int rank_of_row(int row) const { return rank_of_[row]; }
    int rank_of(int task) const { return rank_of_[tasks_[task].row]; }
    // Whether other rows share the memory of this one's rank.
    bool is_shared(int rank) const { return lanes_[rank] > 1; }
    Bytes base(int rank) const { return base_[rank]; }
    Bytes limit(int rank) const { return limit_[rank]; }  // 0: none
    bool has_limits() const { return has_limits_; }

    struct Arrows {
        const Arrow* first;
        const Arrow* last;
        const Arrow* begin() const { return first; }
        const Arrow* end() const { return last; }
        int size() const { return static_cast<int>(last - first); }
    };
    Arrows after(int task) const { return {&after_[after_begin_[task]], &after_[after_begin_[task + 1]]}; }
    Arrows before(int task) const { return {&before_[before_begin_[task]], &before_[before_begin_[task + 1]]}; }

    // All tasks, each after what it waits for.
    const std::vector<int>& order() const { return order_; }
    // For each row its tasks, in that order.
    const std::vector<std::vector<int>>& rows() const { return rows_; }
    // Longest path from a task's start to the end of the step.
    const std::vector<Ns>& tails() const { return tails_; }
    Ns total_time() const { return total_time_; }

  private:
    void check() const;
    void link();
    void sort();
    void measure();

    Columns columns_;
    std::vector<Task> tasks_;
    std::vector<int> rank_of_, lanes_;
    std::vector<Bytes> base_, limit_;
    bool has_limits_ = false;
    int num_groups_ = 0;
    int num_microbatches_ = 0;
    std::vector<int> after_begin_, before_begin_;
    std::vector<Arrow> after_, before_;  // one more than there are, so that the end has an address
    std::vector<int> order_;
    std::vector<std::vector<int>> rows_;
    std::vector<Ns> tails_;
    Ns total_time_ = 0;
};

}  // namespace mosaic::search::pipeline
