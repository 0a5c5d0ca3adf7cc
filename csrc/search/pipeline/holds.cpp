#include "search/pipeline/holds.h"

#include <algorithm>

namespace mosaic::search::pipeline {
namespace {

constexpr std::int64_t kMaxSteps = 30000000;  // a fraction of a second

class Matcher {
  public:
    explicit Matcher(const Tasks& tasks) : tasks_(tasks), place_(tasks.num_tasks()), seen_(tasks.num_tasks(), -1) {
        found_.is_exact.assign(tasks.num_ranks(), true);
        for (int i = 0; i < tasks.num_tasks(); ++i) {
            place_[tasks.order()[i]] = i;
            left_.push_back(std::max<Bytes>(0, -tasks[i].net()));
        }
        way_.resize(tasks.num_tasks());
    }

    Holds match() {
        // The last take goes with the next free: as brackets close.
        for (int at = tasks_.num_tasks() - 1; at >= 0; --at) {
            const int task = tasks_.order()[at], rank = tasks_.rank_of(task);
            const Bytes temporary = tasks_[task].temporary();
            if (temporary > 0) found_.holds.push_back({rank, task, task, temporary, tasks_[task].time});
            if (tasks_[task].net() <= 0) continue;
            if (steps_ > kMaxSteps) found_.is_exact[rank] = false;
            if (found_.is_exact[rank]) match(task, rank);
        }
        for (int task = 0; task < tasks_.num_tasks(); ++task) {
            if (left_[task] > 0) found_.is_exact[tasks_.rank_of(task)] = false;
        }
        return std::move(found_);
    }

  private:
    void match(int task, int rank) {
        find_later(task);
        Bytes bytes = tasks_[task].net();
        for (const int other : later_) {
            if (bytes == 0) return;
            if (left_[other] == 0 || tasks_.rank_of(other) != rank) continue;
            const Bytes part = std::min(bytes, left_[other]);
            found_.holds.push_back({rank, task, other, part, way_[other] + tasks_[other].time});
            left_[other] -= part;
            bytes -= part;
        }
        if (bytes > 0) found_.holds.push_back({rank, task, -1, bytes, tasks_.tails()[task]});
    }

    // All that come after a task, in order, with the longest way from its start to theirs.
    void find_later(int task) {
        later_.assign(1, task);
        seen_[task] = task;
        way_[task] = 0;
        for (std::size_t i = 0; i < later_.size(); ++i) {
            for (const Arrow& arrow : tasks_.after(later_[i])) {
                if (seen_[arrow.task] == task) continue;
                seen_[arrow.task] = task;
                way_[arrow.task] = 0;
                later_.push_back(arrow.task);
            }
        }
        std::sort(later_.begin(), later_.end(), [&](int a, int b) { return place_[a] < place_[b]; });
        for (const int at : later_) {
            for (const Arrow& arrow : tasks_.after(at)) {
                way_[arrow.task] = std::max(way_[arrow.task], way_[at] + tasks_[at].time + arrow.lag);
                ++steps_;
            }
        }
    }

    const Tasks& tasks_;
    Holds found_;
    std::vector<int> place_, seen_, later_;
    std::vector<Bytes> left_;
    std::vector<Ns> way_;
    std::int64_t steps_ = 0;
};

}  // namespace

Holds match_holds(const Tasks& tasks) { return Matcher(tasks).match(); }

}  // namespace mosaic::search::pipeline
