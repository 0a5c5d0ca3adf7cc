// Large graphs: every part on its own by prices and patterns.
#pragma once

#include "search/pattern_search.h"
#include "search/plans/plan_search.h"

namespace mosaic::search {

// Improves a plan, and raises `bound` to what no plan can be below, until both meet or time is over. Where interference
// is on, stages cost what they cost with it, and the bound is that of patterns without it: true, less sharp.
void improve_by_patterns(StageSearch& search, const Limits& limits, const Clock& clock, Partition& best, Ns& bound);

}  // namespace mosaic::search
