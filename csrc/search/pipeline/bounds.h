// Times that no orders are below.
#pragma once

#include "search/pipeline/tasks.h"

namespace mosaic::search::pipeline {

struct Bounds {
    Ns load = 0;         // the longest sum of a row's times
    Ns way = 0;          // the longest way
    Ns one_machine = 0;  // Jackson's preemptive schedule of a row, with what comes before and behind each task
};

Bounds find_bounds(const Tasks& tasks);

}  // namespace mosaic::search::pipeline
