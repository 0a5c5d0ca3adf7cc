#pragma once

#include "search/pipeline/tasks.h"

namespace mosaic::search::pipeline {

// A time that no orders are below: of each row Jackson's preemptive schedule, with the longest paths before and behind
// each task.
Ns lower_bound(const Tasks& tasks);

}  // namespace mosaic::search::pipeline
