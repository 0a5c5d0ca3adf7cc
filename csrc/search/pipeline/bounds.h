// Times that no orders are below.
#pragma once

#include "search/pipeline/tasks.h"

namespace mosaic::search::pipeline {

struct Bounds {
    Ns load = 0;         // the longest sum of a row's times
    Ns way = 0;          // the longest way
    Ns ends = 0;         // a row's sum, and before it and behind it what is shortest
    Ns one_machine = 0;  // Jackson's preemptive schedule of a row, with what comes before and behind each task
    Ns memory = 0;       // bytes times the time for which they are held, over the bytes that a rank has
    Ns best() const;
};

Bounds find_bounds(const Tasks& tasks);

}  // namespace mosaic::search::pipeline
