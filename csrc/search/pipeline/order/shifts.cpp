// Local search in two neighbourhoods: groups move in a ranking, and tasks move within their rows, which reaches orders
// that no ranking gives.
#include <algorithm>
#include <cstdlib>

#include "search/pipeline/order/explorer.h"

namespace mosaic::search::pipeline {
namespace {

constexpr int kLarge = 300;  // tasks of a step from which its searches stay near what they have

void shift(std::vector<int>& order, int from, int to) {
    if (to < from) std::rotate(order.begin() + to, order.begin() + from, order.begin() + from + 1);
    if (to > from) std::rotate(order.begin() + from, order.begin() + from + 1, order.begin() + to + 1);
}

// Shifts of groups, accepted if the step is no longer, with kicks after rounds without a gain. Most rankings have
// backwards in the reverse order of forwards: a step ends as it begins, seen from its end.
class GroupShifts {
  public:
    explicit GroupShifts(Explorer& explorer) : explorer_(explorer), at_(explorer.natural()), best_(at_) {}

    void run(std::int64_t num_tries) {
        if (best_value_ == kNever) {
            start(explorer_.thread > 0, explorer_.is_limited() ? 0 : num_tries / 4);
            best_ = at_;
            best_value_ = value_;
        } else if (!has_gained_) {
            kick(num_tries / 4);
        }
        has_gained_ = false;
        for (std::int64_t i = 0; i < num_tries && !explorer_.is_over(); ++i) has_gained_ = try_shift() || has_gained_;
    }

    bool has_orders() const { return value_ < kNever; }
    Orders orders() { return explorer_.orders_of(at_); }

  private:
    // From the best of some rankings, the first of them the natural one unless all are drawn.
    void start(bool is_drawn, std::int64_t num_draws) {
        value_ = kNever;
        for (std::int64_t i = 0; i < 1 + std::min<std::int64_t>(num_draws, kDraws) && !explorer_.is_over(); ++i) {
            Ranking ranking = explorer_.natural();
            if (is_drawn || i > 0) explorer_.draw(ranking.forward, 0);
            ranking.backward = ranking.forward;
            const int share = explorer_.is_limited() ? 2 : 4;
            if ((is_drawn || i > 0 || share > 2) && explorer_.random.below(share) > 0) {
                std::reverse(ranking.backward.begin(), ranking.backward.end());
            }
            const Ns value = explorer_.roll(ranking, true, value_);
            if (value > value_ || value == kNever) continue;
            value_ = value;
            at_ = std::move(ranking);
        }
    }

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

    void kick(std::int64_t num_draws) {
        if (explorer_.random.below(4) == 0) return start(true, explorer_.is_limited() ? 0 : num_draws);
        at_ = best_;
        for (int i = 3 + explorer_.random.below(4); i > 0; --i) change(at_);
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
        std::vector<int>&forward = ranking.forward, &backward = ranking.backward;
        const int n = static_cast<int>(forward.size());
        if (n < 2) return;
        const int choice = random.below(8);
        if (choice == 0) {
            const int from = random.below(n);
            shift(backward, from, random.below(n));
            return;
        }
        const int group = shift_forward(forward);
        if (choice <= 2) return;
        // Its backwards go where its forwards went: next to the same group.
        const auto place_of = [&](int of) { return std::find(backward.begin(), backward.end(), of); };
        const bool is_reversed = place_of(forward.front()) > place_of(forward.back());
        backward.erase(place_of(group));
        const auto at = std::find(forward.begin(), forward.end(), group);
        if (at == forward.begin()) {
            backward.insert(is_reversed ? backward.end() : backward.begin(), group);
        } else {
            backward.insert(place_of(*(at - 1)) + (is_reversed ? 0 : 1), group);
        }
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

    static constexpr std::int64_t kDraws = 200;
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
    explicit TaskShifts(Explorer& explorer)
        : explorer_(explorer),
          tasks_(explorer.tasks),
          place_(tasks_.num_tasks()),
          heads_(tasks_.num_tasks()),
          tails_(tasks_.num_tasks()) {}

    void run(Orders orders, std::int64_t num_tries) {
        constexpr int kHistories[] = {30, 100, 300, 1000};
        constexpr int kSlacks[] = {64, 16, 6, 3};  // the first orders are accepted up to one part in so many longer
        const bool is_large = tasks_.num_tasks() > kLarge;  // a small share of its time is many tasks
        Random& random = explorer_.random;
        orders_ = std::move(orders);
        for (const std::vector<int>& order : orders_) {
            for (std::size_t i = 0; i < order.size(); ++i) place_[order[i]] = static_cast<int>(i);
        }
        memory_weight_ = 1 << random.below(4);
        if (explorer_.is_over()) return;
        value_ = evaluate(kNever);
        if (value_ == kNever) return;
        find_blocks();
        // Short histories first: what one run misses, the next one finds from elsewhere.
        const int length = kHistories[random.below(std::min(4, 2 + num_runs_++ / 128))];
        std::vector<Ns> history(length, value_ + value_ / kSlacks[random.below(4)] / (is_large ? 100 : 1));
        Ns least = value_;
        std::int64_t idle = 0;
        for (std::int64_t i = 0; i < num_tries && idle < (is_large ? 4 : 8) * length + 300 && !explorer_.is_over();
             ++i) {
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
        } else {  // to one end of a block, or from there: shifts inside change nothing by themselves
            const Block& block = blocks_[random.below(static_cast<int>(blocks_.size()))];
            row = block.row;
            const bool is_first = random.below(2) == 0, is_next = random.below(2) == 0;
            const int step = is_next ? 1 : 1 + random.below(block.last - block.first);
            to = is_first ? block.first : block.last;
            from = is_first ? to + step : to - step;
            if (random.below(2) == 0) std::swap(from, to);
        }
        explorer_.spend(1 + std::abs(to - from) / 4);
        if (from == to || estimate(row, from, to, limit) > limit) return;
        move(row, from, to);
        const Ns value = evaluate(limit);
        if (value > limit) {
            move(row, to, from);
            find_heads();
            return;
        }
        value_ = value;
        find_blocks();
    }

    void move(int row, int from, int to) {
        std::vector<int>& order = orders_[row];
        shift(order, from, to);
        for (int i = std::min(from, to); i <= std::max(from, to); ++i) place_[order[i]] = i;
    }

    // The step's length in these orders, longer where memory is exceeded; kNever where it is above the limit.
    Ns evaluate(Ns limit) {
        explorer_.spend(tasks_.num_tasks() / 2 + 1);
        const Ns makespan = find_heads();
        if (makespan > limit || makespan == kNever) return kNever;
        if (!explorer_.is_limited() && makespan >= explorer_.found().makespan) return makespan;
        return explorer_.replay(orders_, limit, memory_weight_);
    }

    int next_of(int task) const {
        const std::vector<int>& order = orders_[tasks_[task].row];
        return place_[task] + 1 < static_cast<int>(order.size()) ? order[place_[task] + 1] : -1;
    }

    // Earliest starts of tasks without limits of memory, and an order that keeps them. Returns the end of the last
    // task; kNever where tasks wait in a circle.
    Ns find_heads() {
        const int n = tasks_.num_tasks();
        std::fill(heads_.begin(), heads_.end(), 0);
        missing_.resize(n);
        sorted_.clear();
        for (int task = 0; task < n; ++task) {
            missing_[task] = tasks_.before(task).size() + (place_[task] > 0);
            if (missing_[task] == 0) sorted_.push_back(task);
        }
        Ns makespan = 0;
        for (std::size_t at = 0; at < sorted_.size(); ++at) {
            const int task = sorted_[at];
            const Ns end = heads_[task] + tasks_[task].time;
            makespan = std::max(makespan, end);
            const auto reach = [&](int other, Ns start) {
                heads_[other] = std::max(heads_[other], start);
                if (--missing_[other] == 0) sorted_.push_back(other);
            };
            for (const Arrow& arrow : tasks_.after(task)) reach(arrow.task, end + arrow.lag);
            if (const int next = next_of(task); next >= 0) reach(next, end);
        }
        return static_cast<int>(sorted_.size()) == n ? makespan : kNever;
    }

    // Earliest start by the waits of a task, and the longest path behind its end by those of others for it.
    Ns head_of(int task) const {
        Ns head = 0;
        for (const Arrow& arrow : tasks_.before(task)) {
            head = std::max(head, heads_[arrow.task] + tasks_[arrow.task].time + arrow.lag);
        }
        return head;
    }
    Ns tail_of(int task) const {
        Ns tail = 0;
        for (const Arrow& arrow : tasks_.after(task)) {
            tail = std::max(tail, arrow.lag + tasks_[arrow.task].time + tails_[arrow.task]);
        }
        return tail;
    }

    // The longest path through the tasks that a shift moves, by the heads and tails of the others (Balas and
    // Vazacopoulos 1998); kNever where tasks might come to wait in a circle.
    Ns estimate(int row, int from, int to, Ns limit) {
        const std::vector<int>& order = orders_[row];
        const int task = order[from], goal = order[to];
        if (from < to) {
            for (const Arrow& arrow : tasks_.after(task)) {
                if (heads_[arrow.task] + tasks_[arrow.task].time <= heads_[goal]) return kNever;
            }
        } else {
            for (const Arrow& arrow : tasks_.before(task)) {
                if (heads_[arrow.task] >= heads_[goal] + tasks_[goal].time) return kNever;
            }
        }
        const int first = std::min(from, to), last = std::max(from, to);
        moved_.assign(order.begin() + first, order.begin() + last + 1);
        shift(moved_, from - first, to - first);
        moved_heads_.clear();
        Ns now = first > 0 ? heads_[order[first - 1]] + tasks_[order[first - 1]].time : 0;
        for (const int other : moved_) {
            moved_heads_.push_back(now = std::max(now, head_of(other)));
            now += tasks_[other].time;
        }
        const int behind = next_of(order[last]);
        Ns tail = behind < 0 ? 0 : tasks_[behind].time + tails_[behind], longest = 0;
        for (int i = last - first; i >= 0 && longest <= limit; --i) {
            tail = std::max(tail, tail_of(moved_[i])) + tasks_[moved_[i]].time;
            longest = std::max(longest, moved_heads_[i] + tail);
        }
        return longest;
    }

    // Finds tails, and follows the last task back to the start of the step: runs of tasks of one row without a gap.
    void find_blocks() {
        int at = sorted_.empty() ? -1 : sorted_.front();
        for (auto task = sorted_.rbegin(); task != sorted_.rend(); ++task) {
            const int next = next_of(*task);
            tails_[*task] = std::max(tail_of(*task), next < 0 ? 0 : tasks_[next].time + tails_[next]);
            if (heads_[*task] + tasks_[*task].time > heads_[at] + tasks_[at].time) at = *task;
        }
        const auto ends_at = [&](int task, Ns time) { return heads_[task] + tasks_[task].time == time; };
        blocks_.clear();
        for (int last = at; at >= 0;) {
            const int row = tasks_[at].row;
            const int before = place_[at] > 0 ? orders_[row][place_[at] - 1] : -1;
            int cause = -1;
            for (const Arrow& arrow : tasks_.before(at)) {
                if (ends_at(arrow.task, heads_[at] - arrow.lag)) cause = arrow.task;
            }
            if (before >= 0 && ends_at(before, heads_[at]) && (cause < 0 || explorer_.random.below(2) == 0)) {
                at = before;
            } else {
                if (last != at) blocks_.push_back({row, place_[at], place_[last]});
                at = last = cause;
            }
        }
    }

    struct Block {
        int row, first, last;  // places in the row
    };
    Explorer& explorer_;
    const Tasks& tasks_;
    Orders orders_;
    std::vector<Block> blocks_;
    std::vector<int> place_, sorted_, missing_, moved_;
    std::vector<Ns> heads_, tails_, moved_heads_;
    Ns value_ = kNever;
    int memory_weight_ = 1;
    int num_runs_ = 0;
};

}  // namespace

void run_shifts(Explorer& explorer) {
    // In larger steps the effort does not suffice for single tasks.
    const int most_tasks = explorer.is_limited() ? 500 : 5000;
    GroupShifts groups(explorer);
    TaskShifts tasks(explorer);
    const int n = explorer.tasks.num_tasks();
    const std::int64_t round = 64 + 32 * static_cast<std::int64_t>(explorer.groups.natural.size());
    const std::int64_t num_tries = 20 * n + 1000000 / std::max(n, 50);
    for (int i = 0; !explorer.is_over(); ++i) {
        groups.run(explorer.is_limited() || n <= kLarge ? round : round / 2);
        if (n == 0 || n > most_tasks || !explorer.found().has_any) continue;
        // From the best, from where the groups stand, and from anywhere.
        if (i % 2 == 0 || (i % 4 == 3 && n > kLarge)) {
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
