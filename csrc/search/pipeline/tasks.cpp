#include "search/pipeline/tasks.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace mosaic::search::pipeline {
namespace {

using std::to_string;
using Column = std::vector<std::int64_t>;

constexpr std::int64_t kMax = INT64_MAX / 8;  // sums of a few such still fit

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void check_indices(const Column& values, std::int64_t end, const char* what, const char* of) {
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (values[i] >= 0 && values[i] < end) continue;
        const std::string range = end > 0 ? "use 0 to " + to_string(end - 1) : "there are none";
        refuse(std::string(what) + "=" + to_string(values[i]) + " of " + of + " " + to_string(i) +
               " is out of range; " + range);
    }
}

// Returns the sum.
std::int64_t check_amounts(const Column& values, const char* what, const char* of) {
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (values[i] < 0) {
            refuse(std::string(what) + "=" + to_string(values[i]) + " of " + of + " " + to_string(i) +
                   " is negative; use 0 or more");
        }
        if (values[i] > kMax - sum) {
            refuse("the " + std::string(what) + " of all " + of + "s up to " + to_string(i) + " add up to more than " +
                   to_string(kMax) + "; use smaller ones");
        }
        sum += values[i];
    }
    return sum;
}

void check_rank_column(const Column& values, std::size_t num_ranks, const char* what) {
    if (!values.empty() && values.size() != num_ranks) {
        refuse(std::string(what) + " has " + to_string(values.size()) + " entries and there are " +
               to_string(num_ranks) + " ranks; give one a rank, or none");
    }
    check_amounts(values, what, "rank");
}

}  // namespace

Tasks::Tasks(Columns columns) : columns_(std::move(columns)) {
    const std::int64_t ranks =
        columns_.rank_of.empty() ? 0 : 1 + *std::max_element(columns_.rank_of.begin(), columns_.rank_of.end());
    check_indices(columns_.rank_of, static_cast<std::int64_t>(columns_.rank_of.size()), "rank_of", "row");
    base_.assign(ranks, 0);
    limit_.assign(ranks, 0);
    check();
    std::copy(columns_.base.begin(), columns_.base.end(), base_.begin());
    std::copy(columns_.limit.begin(), columns_.limit.end(), limit_.begin());
    rank_of_.assign(columns_.rank_of.begin(), columns_.rank_of.end());
    lanes_.assign(ranks, 0);
    for (const int rank : rank_of_) ++lanes_[rank];
    has_limits_ = std::any_of(limit_.begin(), limit_.end(), [](Bytes limit) { return limit > 0; });
    const std::size_t n = columns_.row.size();
    tasks_.resize(n);
    std::unordered_map<std::int64_t, int> microbatches;
    for (std::size_t i = 0; i < n; ++i) {
        Task& task = tasks_[i];
        task = {columns_.time[i],
                columns_.takes[i],
                columns_.frees[i],
                static_cast<int>(columns_.row[i]),
                static_cast<int>(columns_.group[i]),
                microbatches.try_emplace(columns_.microbatch[i], static_cast<int>(microbatches.size())).first->second,
                static_cast<Kind>(columns_.kind[i])};
        num_groups_ = std::max(num_groups_, task.group + 1);
        total_time_ += task.time;
    }
    num_microbatches_ = static_cast<int>(microbatches.size());
    link();
    sort();
    measure();
}

void Tasks::check() const {
    const auto n = static_cast<std::int64_t>(columns_.row.size());
    if (n > INT32_MAX / 4) refuse(to_string(n) + " tasks are too many; use at most " + to_string(INT32_MAX / 4));
    check_indices(columns_.row, static_cast<std::int64_t>(columns_.rank_of.size()), "row", "task");
    check_indices(columns_.kind, kKinds, "kind", "task");
    check_indices(columns_.group, n, "group", "task");
    check_indices(columns_.microbatch, kMax, "microbatch", "task");
    check_amounts(columns_.time, "time_ns", "task");
    check_amounts(columns_.takes, "takes_bytes", "task");
    check_amounts(columns_.frees, "frees_bytes", "task");
    check_indices(columns_.source, n, "source", "wait");
    check_indices(columns_.target, n, "target", "wait");
    check_amounts(columns_.lag, "lag_ns", "wait");
    check_rank_column(columns_.base, base_.size(), "base_bytes");
    check_rank_column(columns_.limit, limit_.size(), "limit_bytes");
    std::vector<Bytes> left(base_.size(), 0);
    for (std::int64_t i = 0; i < n; ++i)
        left[columns_.rank_of[columns_.row[i]]] += columns_.takes[i] - columns_.frees[i];
    for (std::size_t rank = 0; rank < left.size(); ++rank) {
        if (left[rank] < 0) {
            refuse("tasks of rank " + to_string(rank) + " free " + to_string(-left[rank]) +
                   " bytes more than they take; what is freed has to be taken before, or is no part of it");
        }
    }
}

void Tasks::link() {
    const std::size_t n = tasks_.size();
    const std::size_t waits = columns_.source.size();
    after_begin_.assign(n + 1, 0);
    before_begin_.assign(n + 1, 0);
    for (std::size_t w = 0; w < waits; ++w) {
        ++after_begin_[columns_.source[w] + 1];
        ++before_begin_[columns_.target[w] + 1];
    }
    for (std::size_t i = 0; i < n; ++i) {
        after_begin_[i + 1] += after_begin_[i];
        before_begin_[i + 1] += before_begin_[i];
    }
    after_.resize(waits + 1);
    before_.resize(waits + 1);
    std::vector<int> after(after_begin_), before(before_begin_);
    for (std::size_t w = 0; w < waits; ++w) {
        const auto source = static_cast<int>(columns_.source[w]), target = static_cast<int>(columns_.target[w]);
        after_[after[source]++] = {target, columns_.lag[w]};
        before_[before[target]++] = {source, columns_.lag[w]};
    }
}

void Tasks::sort() {
    const int n = num_tasks();
    std::vector<int> missing(n);
    order_.reserve(n);
    for (int i = 0; i < n; ++i) {
        missing[i] = before(i).size();
        if (missing[i] == 0) order_.push_back(i);
    }
    for (std::size_t at = 0; at < order_.size(); ++at) {
        for (const Arrow& arrow : after(order_[at])) {
            if (--missing[arrow.task] == 0) order_.push_back(arrow.task);
        }
    }
    rows_.resize(num_rows());
    for (const int i : order_) rows_[tasks_[i].row].push_back(i);
    if (static_cast<int>(order_.size()) == n) return;
    // Who follows back what is missing comes to a task that it has seen.
    int at =
        static_cast<int>(std::find_if(missing.begin(), missing.end(), [](int m) { return m > 0; }) - missing.begin());
    std::vector<int> way;
    while (std::find(way.begin(), way.end(), at) == way.end()) {
        way.push_back(at);
        for (const Arrow& arrow : before(at)) {
            if (missing[arrow.task] > 0) at = arrow.task;
        }
    }
    std::string circle = to_string(at);
    for (auto step = way.rbegin(); step != way.rend(); ++step) {
        circle += " -> " + to_string(*step);
        if (*step == at) break;
    }
    refuse("tasks wait for each other in a circle: " + circle + "; leave out one of these waits");
}

void Tasks::measure() {
    const int n = num_tasks();
    tails_.assign(n, 0);
    for (int at = n - 1; at >= 0; --at) {
        const int i = order_[at];
        for (const Arrow& arrow : after(i)) tails_[i] = std::max(tails_[i], arrow.lag + tails_[arrow.task]);
        tails_[i] += tasks_[i].time;
    }
}

}  // namespace mosaic::search::pipeline
