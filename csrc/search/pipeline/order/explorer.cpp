#include "search/pipeline/order/explorer.h"

#include <algorithm>
#include <numeric>
#include <queue>

namespace mosaic::search::pipeline {

Groups::Groups(const Tasks& tasks) : after(tasks.num_groups()), num_before(tasks.num_groups(), 0) {
    const int n = tasks.num_groups();
    std::vector<std::vector<int>> feeds(n);
    std::vector<std::pair<int, int>> came(n, {INT32_MAX, INT32_MAX});  // microbatch, first task
    for (int i = 0; i < tasks.num_tasks(); ++i) {
        const int group = tasks[i].group;
        came[group] = std::min(came[group], {tasks[i].microbatch, i});
        for (const Arrow& arrow : tasks.after(i)) {
            const int other = tasks[arrow.task].group;
            if (other != group && tasks[i].kind == kForward && tasks[arrow.task].kind == kForward) {
                feeds[group].push_back(other);
            }
        }
    }
    std::vector<int> missing(n, 0);
    for (auto& others : feeds) {
        std::sort(others.begin(), others.end());
        others.erase(std::unique(others.begin(), others.end()), others.end());
        for (const int other : others) ++missing[other];
    }
    // Groups that feed each other in a circle come as they came, and what they feed does not bind.
    const auto later = [&](int a, int b) { return came[a] != came[b] ? came[a] > came[b] : a > b; };
    std::priority_queue<int, std::vector<int>, decltype(later)> ready(later);
    std::vector<bool> is_placed(n, false);
    for (int group = 0; group < n; ++group) {
        if (missing[group] == 0) ready.push(group);
    }
    while (!ready.empty()) {
        const int group = ready.top();
        ready.pop();
        is_placed[group] = true;
        natural.push_back(group);
        for (const int other : feeds[group]) {
            if (--missing[other] == 0) ready.push(other);
        }
    }
    for (int group = 0; group < n; ++group) {
        if (!is_placed[group]) natural.push_back(group);
    }
    for (int group = 0; group < n; ++group) {
        if (!is_placed[group]) continue;
        for (const int other : feeds[group]) {
            if (!is_placed[other]) continue;
            after[group].push_back(other);
            ++num_before[other];
        }
    }
}

Explorer::Explorer(const Tasks& tasks, const Groups& groups, const OrderLimits& limits, int thread, const Clock* clock,
                   std::atomic<bool>& is_stopped)
    : tasks(tasks),
      groups(groups),
      thread(thread),
      random(limits.seed * 1000003 + static_cast<std::uint64_t>(thread)),
      rollout_(tasks),
      replay_(tasks),
      rollouts_left_(limits.max_rollouts / limits.num_threads +
                     (thread < limits.max_rollouts % limits.num_threads ? 1 : 0)),
      bound_(limits.bound),
      clock_(clock),
      is_stopped_(is_stopped) {}

bool Explorer::is_over() {
    if (found_.makespan <= bound_ || rollouts_left_ <= 0) return true;
    // Looking at a clock costs as much as a task.
    unseen_ -= tasks.num_tasks();
    if (unseen_ <= 0) {
        unseen_ = 4000;
        if (clock_ != nullptr && clock_->is_over()) is_stopped_ = true;
    }
    return is_stopped_;
}

void Explorer::keep(Ns makespan, const std::vector<Ns>& starts, Orders orders) {
    found_.has_any = true;
    found_.makespan = makespan;
    found_.starts = starts;
    found_.orders = std::move(orders);
    found_.progress.emplace_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count(),
                                 makespan);
}

Ns Explorer::roll(Ranking& ranking, bool both, Ns cutoff) {
    Ns best = kNever;
    const Admission given = ranking.admission;
    for (const Admission admission : {given, given == Admission::gate ? Admission::reserve : Admission::gate}) {
        if (admission != given && !(both && is_limited() && rollouts_left_ > 0)) break;
        Ranking tried = ranking;
        tried.admission = admission;
        const Ns makespan = rollout_.run(tried, std::min(cutoff, best));
        spend(std::max(rollout_.num_placed(), tasks.num_tasks() / 4 + 1));
        if (makespan == kNever && cutoff == kNever && best == kNever && !found_.deadlock) {
            found_.deadlock = rollout_.deadlock();
        }
        if (makespan >= best) continue;
        best = makespan;
        ranking.admission = admission;
        if (best >= found_.makespan) continue;
        // A reservation may leave gaps that its orders do not need.
        keep(best, rollout_.starts(), rollout_.orders());
        const Ns played = is_limited() ? replay_.run(found_.orders) : kNever;
        if (played < found_.makespan) keep(played, replay_.starts(), found_.orders);
    }
    return best;
}

void Explorer::spend(int num_tasks) {
    spent_ += num_tasks;
    if (spent_ < tasks.num_tasks()) return;
    spent_ -= tasks.num_tasks();
    --rollouts_left_;
    ++found_.num_rollouts;
}

Ns Explorer::replay(const Orders& orders, Ns cutoff, int weight) {
    --rollouts_left_;
    ++found_.num_rollouts;
    const Ns makespan = replay_.run(orders, cutoff, is_limited());
    if (makespan == kNever) return kNever;
    const std::int64_t excess = is_limited() ? replay_.excess() : 0;
    if (excess > 0) {
        const double longer = static_cast<double>(makespan) * 1e-6 * static_cast<double>(excess) * weight / 4;
        return makespan + 1 + static_cast<Ns>(std::min(longer, 1e18));
    }
    if (makespan < found_.makespan) keep(makespan, replay_.starts(), orders);
    return makespan;
}

void Explorer::draw(std::vector<int>& order, std::size_t num_given) {
    order.resize(num_given);
    num_missing_ = groups.num_before;
    ready_.clear();
    for (const int group : order) {
        num_missing_[group] = -1;
        for (const int other : groups.after[group]) --num_missing_[other];
    }
    for (const int group : groups.natural) {
        if (num_missing_[group] == 0) ready_.push_back(group);
    }
    while (!ready_.empty()) {
        const int at = random.below(static_cast<int>(ready_.size()));
        const int group = ready_[at];
        ready_[at] = ready_.back();
        ready_.pop_back();
        order.push_back(group);
        for (const int other : groups.after[group]) {
            if (--num_missing_[other] == 0) ready_.push_back(other);
        }
    }
}

}  // namespace mosaic::search::pipeline
