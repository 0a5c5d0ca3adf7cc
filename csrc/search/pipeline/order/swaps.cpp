// Local search over orders: tasks on a critical way change places, and the orders are played again. Orders that do not
// fit memory are on the way, too, at a price: from one order that fits to the next there is often no other.
#include <algorithm>

#include "search/pipeline/order/methods.h"
#include "search/pipeline/order/shifts.h"

namespace mosaic::search::pipeline {
namespace {

constexpr int kReach = 6;  // places that a task goes at most where nothing says where it should
// Late acceptance: a step is good that is no worse than where the search was so many steps ago.
constexpr int kHistories[] = {30, 100, 300, 1000};
constexpr int kSmall = 1000000;            // tasks that one run may replay in a small step
constexpr int kFewTasks = 100;             // a step of so many is searched from many places, each soon left
constexpr int kSlacks[] = {64, 16, 6, 3};  // at the beginning, one part in so many worse is good enough

class Swaps {
  public:
    explicit Swaps(Explorer& explorer) : explorer_(explorer), tasks_(explorer.tasks), place_(tasks_.num_tasks()) {}

    // Exchanges that many pairs of microbatches or groups, and searches from there.
    void run(Orders orders, int num_exchanges, std::int64_t num_tries) {
        at_ = std::move(orders);
        if (explorer_.is_over() || tasks_.num_tasks() == 0) return;
        for (int i = 0; i < num_exchanges; ++i) exchange();
        weight_ = 1 << explorer_.random.below(4);
        value_ = explorer_.replay(at_, kNever, weight_);
        if (value_ == kNever) return;
        for (auto& row : at_) number(row, 0, static_cast<int>(row.size()) - 1);
        starts_ = explorer_.replayed_starts();
        find_way();
        // Short ones first: what one run misses, the next one finds from elsewhere.
        const int length = kHistories[explorer_.random.below(is_small_ ? std::min(4, 2 + num_runs_++ / 128) : 4)];
        history_.assign(length, value_ + value_ / kSlacks[explorer_.random.below(4)]);
        Ns least = value_;
        std::int64_t idle = 0;
        const int patience = is_small_ ? 8 * length + 300 : 15 * length + 1000;  // without a gain, after which is none
        for (std::int64_t i = 0; i < num_tries && idle < patience && !explorer_.is_over(); ++i) {
            try_one(history_[i % length]);
            history_[i % length] = value_;
            idle = value_ < least ? 0 : idle + 1;
            least = std::min(least, value_);
        }
    }

  private:
    void number(const std::vector<int>& row, int first, int last) {
        for (int i = first; i <= last; ++i) place_[row[i]] = i;
    }

    // On each row tasks of one go where tasks of the other were, in their own order. Single swaps hardly get there.
    void exchange() {
        const Task& a = tasks_[explorer_.random.below(tasks_.num_tasks())];
        const Task& b = tasks_[explorer_.random.below(tasks_.num_tasks())];
        const bool is_group = explorer_.random.below(2) == 0;
        const auto unit = [&](const Task& task) { return is_group ? task.group : task.microbatch; };
        if (unit(a) == unit(b)) return;
        for (std::vector<int>& row : at_) {
            std::vector<int> of_a, of_b;
            for (const int task : row) {
                if (unit(tasks_[task]) == unit(a)) of_a.push_back(task);
                if (unit(tasks_[task]) == unit(b)) of_b.push_back(task);
            }
            std::size_t next_a = 0, next_b = 0;
            for (int& task : row) {
                const int was = unit(tasks_[task]);
                if (was != unit(a) && was != unit(b)) continue;
                const bool is_b = next_a == of_a.size() || (was == unit(a) && next_b < of_b.size());
                task = is_b ? of_b[next_b++] : of_a[next_a++];
            }
        }
    }

    bool waits_for(int task, int other) const {
        for (const Arrow& arrow : tasks_.before(task)) {
            if (arrow.task == other) return true;
        }
        return false;
    }

    // From the last task back to what made it start when it did: runs of one row's tasks without a gap.
    void find_way() {
        blocks_.clear();
        int at = 0;
        for (int i = 0; i < tasks_.num_tasks(); ++i) {
            if (end_of(i) > end_of(at)) at = i;
        }
        int last = at;
        while (at >= 0) {
            const std::vector<int>& row = at_[tasks_[at].row];
            const int before = place_[at] > 0 ? row[place_[at] - 1] : -1;
            const bool is_row = before >= 0 && end_of(before) == starts_[at];
            int cause = -1;
            for (const Arrow& arrow : tasks_.before(at)) {
                if (end_of(arrow.task) + arrow.lag == starts_[at]) cause = arrow.task;
            }
            if (is_row && (cause < 0 || explorer_.random.below(2) == 0)) {
                at = before;
                continue;
            }
            if (last != at) blocks_.push_back({tasks_[at].row, place_[at], place_[last]});
            at = last = cause;
        }
    }

    void try_one(Ns late) {
        int row = 0, from = 0, to = 0;
        if (!draw_move(row, from, to)) return;
        turn(at_[row], from, to);
        const Ns limit = std::max(late, value_);
        const Ns value = explorer_.replay(at_, limit, weight_);
        if (value > limit) {
            turn(at_[row], to, from);
            return;
        }
        value_ = value;
        starts_ = explorer_.replayed_starts();
        find_way();
    }

    // Puts the task at one place of a row to another.
    void turn(std::vector<int>& row, int from, int to) {
        if (to < from) std::rotate(row.begin() + to, row.begin() + from, row.begin() + from + 1);
        if (to > from) std::rotate(row.begin() + from, row.begin() + from + 1, row.begin() + to + 1);
        number(row, std::min(from, to), std::max(from, to));
    }

    bool draw_move(int& row, int& from, int& to) {
        Random& random = explorer_.random;
        const int choice = random.below(16);
        if (blocks_.empty() || choice < (!explorer_.is_limited() ? 1 : is_small_ ? 10 : 4)) {
            row = random.below(tasks_.num_rows());
            const int size = static_cast<int>(at_[row].size());
            if (size < 2) return false;
            from = random.below(size);
            to = std::clamp(from + random.below(2 * kReach + 1) - kReach, 0, size - 1);
            if (from == to) return false;
        } else {
            const Block& block = blocks_[random.below(static_cast<int>(blocks_.size()))];
            row = block.row;
            if (choice < 10) {  // at one of its ends: swaps inside change nothing by themselves
                from = random.below(2) == 0 ? block.first : block.last - 1;
                to = from + 1;
            } else if (choice < 13) {
                from = block.first + random.below(block.last - block.first);
                to = block.last;
            } else {
                from = block.first + 1 + random.below(block.last - block.first);
                to = block.first;
            }
        }
        for (int i = std::min(from, to); i < std::max(from, to); ++i) {
            const bool is_back = to < from;
            if (is_back ? waits_for(at_[row][from], at_[row][i]) : waits_for(at_[row][i + 1], at_[row][from]))
                return false;
        }
        return true;
    }

    Ns end_of(int task) const { return starts_[task] + tasks_[task].time; }

    struct Block {
        int row, first, last;
    };
    Explorer& explorer_;
    const Tasks& tasks_;
    const bool is_small_ = tasks_.num_tasks() <= kFewTasks;
    int num_runs_ = 0;
    Orders at_;
    Ns value_ = kNever;
    int weight_ = 1;  // of memory that is too small
    std::vector<int> place_;
    std::vector<Ns> starts_, history_;
    std::vector<Block> blocks_;
};

}  // namespace

void run_swaps(Explorer& explorer) {
    Shifts shifts(explorer);
    Swaps swaps(explorer);
    // Small steps are replayed in a microsecond, and have hills all the same.
    const int n = explorer.tasks.num_tasks();
    std::int64_t tries = 20 * n + kSmall / std::max(n, 50);
    for (int round = 0; !explorer.is_over(); ++round) {
        // In large steps rankings have more to give.
        shifts.run(shifts.round() * std::min(8, 1 + n / 200));
        if (!explorer.found().has_any) continue;
        // From the best, from where shifts stand, and from anywhere.
        if (round % 2 == 0) {
            swaps.run(explorer.found().orders, explorer.random.below(3), tries);
        } else if (round % 4 == 1) {
            if (shifts.has_orders()) swaps.run(shifts.orders(), 0, tries);
        } else {
            Ranking ranking = explorer.natural();
            explorer.draw(ranking.forward, 0);
            ranking.backward = ranking.forward;
            if (explorer.roll(ranking, true) < kNever) swaps.run(explorer.orders_of(ranking), 0, tries);
            tries += tries / 8;
        }
    }
}

}  // namespace mosaic::search::pipeline
