// Ways to look for orders; each goes on until its explorer's limits end it, or it has tried all that it can.
// Before any of them the natural ranking is rolled out.
#pragma once

#include "search/pipeline/order/explorer.h"

namespace mosaic::search::pipeline {

// Monte-Carlo tree search as in PipeWeaver's Algorithm 1, over which group comes next.
void run_tree(Explorer& explorer);
// Shifts of groups in a ranking, kept where they do not harm; kicks where they bring nothing.
void run_shifts(Explorer& explorer);
// Shifts, in turn with swaps of tasks on critical ways of the best orders: these reach orders that no ranking gives.
void run_swaps(Explorer& explorer);

}  // namespace mosaic::search::pipeline
