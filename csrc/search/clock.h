// When to stop: at a time, or because somebody asks for it.
#pragma once

#include <algorithm>
#include <chrono>

namespace mosaic::search {

// Thrown out of a search that somebody wants to end.
struct Interrupted {};

// As long as one lives, every look at a clock on its thread asks now and then whether the search is to end.
class Watch {
  public:
    using Time = std::chrono::steady_clock::time_point;

    explicit Watch(bool (*is_to_end)()) : is_to_end_(is_to_end), before_(current_) { current_ = this; }
    ~Watch() { current_ = before_; }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

    static void look(Time now) {
        if (current_ != nullptr && now >= current_->next_) current_->ask(now);
    }

  private:
    void ask(Time now) {
        next_ = now + std::chrono::milliseconds(50);  // seldom enough to cost nothing, and at once for a person
        if (is_to_end_()) throw Interrupted();
    }

    inline static thread_local Watch* current_ = nullptr;
    bool (*is_to_end_)();
    Watch* before_;
    Time next_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
};

class Clock {
  public:
    explicit Clock(double seconds) : end_(std::chrono::steady_clock::now() + to_ticks(seconds)) {}
    // Throws Interrupted where a watch says so.
    bool is_over() const {
        const auto now = std::chrono::steady_clock::now();
        Watch::look(now);
        return now >= end_;
    }
    // Never negative.
    double seconds_left() const {
        return std::max(0.0, std::chrono::duration<double>(end_ - std::chrono::steady_clock::now()).count());
    }

  private:
    static std::chrono::steady_clock::duration to_ticks(double seconds) {
        // Ten years are as good as forever, and do not overflow.
        const double most = 3e8;
        return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
            std::chrono::duration<double>(seconds < most ? seconds : most));
    }
    std::chrono::steady_clock::time_point end_;
};

}  // namespace mosaic::search
