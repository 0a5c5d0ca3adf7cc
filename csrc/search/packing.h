// Whether a set of modules can be placed so that each meets a target: depth first over devices that look alike.
#pragma once

#include <cstdint>
#include <optional>

#include "clock.h"
#include "stage.h"

namespace mosaic::search {

// Each module's forward and backward, and their sum, must not exceed these.
struct Target {
    Ns forward = kNever;
    Ns backward = kNever;
    Ns latency = kNever;

    bool is_met(Ns forward_time, Ns backward_time, Ns both) const {
        return forward_time <= forward && backward_time <= backward && both <= latency;
    }
};

enum class Answer { yes, no, open };

struct Packing {
    Answer answer = Answer::no;
    Stage stage;  // timed; set for `yes`
};

// How far to go for an answer.
struct Effort {
    std::int64_t max_nodes = 0;
    const Clock* clock = nullptr;  // may be null
};

// `open` where the effort ran out before the answer was found.
Packing pack(const Problem& problem, Mask set, const Target& target, const Effort& effort);

}  // namespace mosaic::search
