// Whether a set of modules can be placed so that each meets a target.
#pragma once

#include <cstdint>

#include "search/clock.h"
#include "search/stages/stage.h"

namespace mosaic::search {

// Each module's forward and backward, and their sum, must not exceed these.
struct Target {
    Ns forward = kNever;
    Ns backward = kNever;
    Ns latency = kNever;

    bool is_met(Ns forward_time, Ns backward_time, Ns both) const {
        return forward_time <= forward && backward_time <= backward && both <= latency;
    }
    bool is_met(const Option& option) const { return is_met(option.forward, option.backward, option.latency()); }
};

enum class Answer { yes, no, open };

// How far to go for an answer; what is spent is taken off.
struct Effort {
    std::int64_t nodes_left = 0;
    const Clock* clock = nullptr;  // may be null

    // Takes nodes off; false where none is left, or no time.
    bool spend(std::int64_t nodes = 1) {
        const std::int64_t before = nodes_left;
        nodes_left -= nodes;
        Work::add(nodes * kNodeWork);
        if (before / kNodesALook != nodes_left / kNodesALook && clock != nullptr && clock->is_over()) nodes_left = -1;
        return nodes_left >= 0;
    }

  private:
    static constexpr std::int64_t kNodesALook = 64;
    static constexpr std::int64_t kNodeWork = 400;
};

}  // namespace mosaic::search
