// When to stop.
#pragma once

#include <algorithm>
#include <chrono>

namespace mosaic::search {

class Clock {
  public:
    explicit Clock(double seconds) : end_(std::chrono::steady_clock::now() + to_ticks(seconds)) {}
    bool is_over() const { return std::chrono::steady_clock::now() >= end_; }
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
