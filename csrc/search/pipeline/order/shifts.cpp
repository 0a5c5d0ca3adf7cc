// Local search in two neighbourhoods: groups move in a ranking, and tasks move within their rows, which reaches orders
// that no ranking gives.
#include <algorithm>

#include "search/pipeline/order/explorer.h"

namespace mosaic::search::pipeline {
namespace {

void shift(std::vector<int>& order, int from, int to) {
    if (to < from) std::rotate(order.begin() + to, order.begin() + from, order.begin() + from + 1);
    if (to > from) std::rotate(order.begin() + from, order.begin() + from + 1, order.begin() + to + 1);
}

// Shifts of groups, accepted if the step is no longer, with kicks after rounds without a gain.
class GroupShifts {
  public:
    explicit GroupShifts(Explorer& explorer) : explorer_(explorer), at_(explorer.natural()), best_(at_) {
        if (explorer.thread == 0) return;
        explorer.draw(at_.forward, 0);
        at_.backward = at_.forward;
    }

    void run(std::int64_t num_tries) {
        if (best_value_ == kNever && !explorer_.is_over()) {
            value_ = best_value_ = explorer_.roll(at_, true);
            best_ = at_;
        } else if (!has_gained_) {
            kick();
        }
        has_gained_ = false;
        for (std::int64_t i = 0; i < num_tries && !explorer_.is_over(); ++i) has_gained_ = try_shift() || has_gained_;
    }

    bool has_orders() const { return value_ < kNever; }
    Orders orders() { return explorer_.orders_of(at_); }

  private:
    bool try_shift() {
        Ranking tried = at_;
        change(tried);
        const Ns value = explorer_.roll(tried, false, value_);
        if (value > value_) return false;
        const bool has_gained = value < value_;
        at_ = std::move(tried);
        value_ = value;
        if (value < best_value_) {
            best_ = at_;
            best_value_ = value;
        }
        return has_gained;
    }

    void kick() {
        if (explorer_.random.below(4) == 0) {
            at_ = explorer_.natural();
            explorer_.draw(at_.forward, 0);
            at_.backward = at_.forward;
        } else {
            at_ = best_;
            for (int i = 3 + explorer_.random.below(4); i > 0; --i) change(at_);
        }
        if (!explorer_.is_over()) value_ = explorer_.roll(at_, true);
    }

    void change(Ranking& ranking) {
        Random& random = explorer_.random;
        if (random.below(16) == 0) {
            if (explorer_.is_limited() && random.below(2) == 0) {
                ranking.admission = ranking.admission == Admission::gate ? Admission::reserve : Admission::gate;
            } else {
                ranking.lean = static_cast<Lean>(random.below(3));
            }
            return;
        }
        const int n = static_cast<int>(ranking.forward.size());
        if (n < 2) return;
        const int choice = random.below(8);
        if (choice == 0) {
            const int from = random.below(n);
            shift(ranking.backward, from, random.below(n));
            return;
        }
        const int group = shift_forward(ranking.forward);
        if (choice <= 2) return;
        // Its backwards go where its forwards went: behind the same group.
        std::vector<int>& backward = ranking.backward;
        backward.erase(std::find(backward.begin(), backward.end(), group));
        const auto at = std::find(ranking.forward.begin(), ranking.forward.end(), group);
        const auto behind = at == ranking.forward.begin() ? backward.begin()
                                                          : std::find(backward.begin(), backward.end(), *(at - 1)) + 1;
        backward.insert(behind, group);
    }

    // Moves a group, at most next to a group that feeds it or that it feeds. Returns the group.
    int shift_forward(std::vector<int>& order) {
        const auto feeds = [&](int a, int b) {
            const std::vector<int>& after = explorer_.groups.after[a];
            return std::find(after.begin(), after.end(), b) != after.end();
        };
        const int n = static_cast<int>(order.size());
        const int from = explorer_.random.below(n), goal = explorer_.random.below(n);
        const int group = order[from];
        int to = from;
        while (to > goal && !feeds(order[to - 1], group)) --to;
        while (to < goal && !feeds(group, order[to + 1])) ++to;
        shift(order, from, to);
        return group;
    }

    Explorer& explorer_;
    Ranking at_, best_;
    Ns value_ = kNever, best_value_ = kNever;
    bool has_gained_ = true;
};

// Shifts of tasks, most of them on the critical path, by late acceptance: a shift is accepted if the step is no longer
// than some shifts ago. Orders that exceed memory are accepted at a price, since between two orders that fit there is
// often no other.
class TaskShifts {
  public:
    explicit TaskShifts(Explorer& explorer) : explorer_(explorer), tasks_(explorer.tasks), place_(tasks_.num_tasks()) {}

    void run(Orders orders, std::int64_t num_tries) {
        constexpr int kHistories[] = {30, 100, 300, 1000};
        constexpr int kSlacks[] = {64, 16, 6, 3};  // the first orders are accepted up to one part in so many longer
        Random& random = explorer_.random;
        orders_ = std::move(orders);
        memory_weight_ = 1 << random.below(4);
        if (explorer_.is_over()) return;
        value_ = explorer_.replay(orders_, kNever, memory_weight_);
        if (value_ == kNever) return;
        find_blocks();
        // Short histories first: what one run misses, the next one finds from elsewhere.
        const int length = kHistories[random.below(std::min(4, 2 + num_runs_++ / 128))];
        std::vector<Ns> history(length, value_ + value_ / kSlacks[random.below(4)]);
        Ns least = value_;
        std::int64_t idle = 0;
        for (std::int64_t i = 0; i < num_tries && idle < 8 * length + 300 && !explorer_.is_over(); ++i) {
            try_shift(std::max(history[i % length], value_));
            history[i % length] = value_;
            idle = value_ < least ? 0 : idle + 1;
            least = std::min(least, value_);
        }
    }

  private:
    void try_shift(Ns limit) {
        Random& random = explorer_.random;
        int row = random.below(tasks_.num_rows()), from = 0, to = 0;
        if (blocks_.empty() || random.below(16) < (explorer_.is_limited() ? 10 : 2)) {
            constexpr int kReach = 6;
            const int size = static_cast<int>(orders_[row].size());
            if (size < 2) return;
            from = random.below(size);
            to = std::clamp(from + random.below(2 * kReach + 1) - kReach, 0, size - 1);
        } else {  // to one end of a block: shifts inside change nothing by themselves
            const Block& block = blocks_[random.below(static_cast<int>(blocks_.size()))];
            row = block.row;
            const bool is_first = random.below(2) == 0, is_next = random.below(2) == 0;
            const int step = is_next ? 1 : 1 + random.below(block.last - block.first);
            to = is_first ? block.first : block.last;
            from = is_first ? to + step : to - step;
        }
        std::vector<int>& order = orders_[row];
        for (int i = std::min(from, to); i < std::max(from, to); ++i) {
            if (to < from ? waits_for(order[from], order[i]) : waits_for(order[i + 1], order[from])) return;
        }
        shift(order, from, to);
        const Ns value = from == to ? kNever : explorer_.replay(orders_, limit, memory_weight_);
        if (value > limit) return shift(order, to, from);
        value_ = value;
        find_blocks();
    }

    // Follows the last task back to the start of the step: runs of tasks of one row without a gap.
    void find_blocks() {
        const std::vector<Ns>& starts = explorer_.replayed_starts();
        const auto end_of = [&](int task) { return starts[task] + tasks_[task].time; };
        for (const std::vector<int>& order : orders_) {
            for (std::size_t i = 0; i < order.size(); ++i) place_[order[i]] = static_cast<int>(i);
        }
        blocks_.clear();
        int at = 0;
        for (int task = 0; task < tasks_.num_tasks(); ++task) {
            if (end_of(task) > end_of(at)) at = task;
        }
        for (int last = at; at >= 0;) {
            const int row = tasks_[at].row;
            const int before = place_[at] > 0 ? orders_[row][place_[at] - 1] : -1;
            int cause = -1;
            for (const Arrow& arrow : tasks_.before(at)) {
                if (end_of(arrow.task) + arrow.lag == starts[at]) cause = arrow.task;
            }
            if (before >= 0 && end_of(before) == starts[at] && (cause < 0 || explorer_.random.below(2) == 0)) {
                at = before;
            } else {
                if (last != at) blocks_.push_back({row, place_[at], place_[last]});
                at = last = cause;
            }
        }
    }

    bool waits_for(int task, int other) const {
        for (const Arrow& arrow : tasks_.before(task)) {
            if (arrow.task == other) return true;
        }
        return false;
    }

    struct Block {
        int row, first, last;  // places in the row
    };
    Explorer& explorer_;
    const Tasks& tasks_;
    Orders orders_;
    std::vector<Block> blocks_;
    std::vector<int> place_;
    Ns value_ = kNever;
    int memory_weight_ = 1;
    int num_runs_ = 0;
};

}  // namespace

void run_shifts(Explorer& explorer) {
    // In larger steps the effort does not suffice for single tasks.
    const int most_tasks = explorer.is_limited() ? 500 : 300;
    GroupShifts groups(explorer);
    TaskShifts tasks(explorer);
    const int n = explorer.tasks.num_tasks();
    const std::int64_t round = 64 + 32 * static_cast<std::int64_t>(explorer.groups.natural.size());
    const std::int64_t num_tries = 20 * n + 1000000 / std::max(n, 50);
    for (int i = 0; !explorer.is_over(); ++i) {
        groups.run(round * std::min(8, 1 + n / 200));
        if (n == 0 || n > most_tasks || !explorer.found().has_any) continue;
        // From the best, from where the groups stand, and from anywhere.
        if (i % 2 == 0) {
            tasks.run(explorer.found().orders, num_tries);
        } else if (i % 4 == 1) {
            if (groups.has_orders()) tasks.run(groups.orders(), num_tries);
        } else {
            Ranking ranking = explorer.natural();
            explorer.draw(ranking.forward, 0);
            ranking.backward = ranking.forward;
            if (explorer.roll(ranking, true) < kNever) tasks.run(explorer.orders_of(ranking), num_tries);
        }
    }
}

}  // namespace mosaic::search::pipeline
