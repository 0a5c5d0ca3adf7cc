// When to stop: after some work, at a time, or because somebody asks for it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>

namespace mosaic::search {

// Thrown out of a search that somebody wants to end without an answer.
struct Interrupted {};

// What somebody wants of a search that runs: to stop is to come back with the best so far.
enum class Wish { go_on, stop, interrupt };

// As long as one lives, every look at a clock on its thread asks now and then what is wanted of the search.
class Watch {
  public:
    using Time = std::chrono::steady_clock::time_point;

    explicit Watch(std::function<Wish()> wish) : wish_(std::move(wish)), before_(current_) { current_ = this; }
    ~Watch() { current_ = before_; }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

    // Whether the search on this thread is to stop. Throws Interrupted.
    static bool is_stopped(Time now) {
        if (current_ == nullptr) return false;
        if (now >= current_->next_) current_->ask(now);
        return current_->is_stopped_;
    }

  private:
    void ask(Time now) {
        next_ = now + std::chrono::milliseconds(50);  // seldom enough to cost nothing, and at once for a person
        const Wish wish = wish_();
        if (wish == Wish::interrupt) throw Interrupted();
        is_stopped_ = is_stopped_ || wish == Wish::stop;
    }

    inline static thread_local Watch* current_ = nullptr;
    std::function<Wish()> wish_;
    Watch* before_;
    bool is_stopped_ = false;
    Time next_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
};

// What searches on this thread have done so far, in about the nanoseconds that it takes a core: counted in what they
// look at, so the same on any machine under any load.
class Work {
  public:
    static void add(std::int64_t work) { done_ += work; }
    static double done_s() { return static_cast<double>(done_) * 1e-9; }

  private:
    inline static thread_local std::int64_t done_ = 0;
};

class Clock {
  public:
    // Effort is work in seconds. Time is for the extraordinary: what it ends depends on the machine.
    explicit Clock(double seconds, double effort = std::numeric_limits<double>::infinity())
        : end_(std::chrono::steady_clock::now() + to_ticks(seconds)), work_end_(Work::done_s() + effort) {}
    // A clock that ends with this one, or when a part of what this has left is done.
    Clock part(double share) const {
        Clock made = *this;
        made.work_end_ = Work::done_s() + share * left();
        return made;
    }
    // Also where a watch says so. Throws Interrupted.
    bool is_over() const { return left() <= 0; }
    // Effort, and no more than there are seconds. Never negative; none where a watch says so.
    double left() const { return std::max(0.0, std::min(seconds_left(), work_end_ - Work::done_s())); }
    // Never negative; none where a watch says so.
    double seconds_left() const {
        const auto now = std::chrono::steady_clock::now();
        if (Watch::is_stopped(now)) return 0;
        return std::max(0.0, std::chrono::duration<double>(end_ - now).count());
    }

  private:
    static std::chrono::steady_clock::duration to_ticks(double seconds) {
        // Ten years are as good as forever, and do not overflow.
        const double most = 3e8;
        return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
            std::chrono::duration<double>(seconds < most ? seconds : most));
    }
    std::chrono::steady_clock::time_point end_;
    double work_end_;
};

}  // namespace mosaic::search
