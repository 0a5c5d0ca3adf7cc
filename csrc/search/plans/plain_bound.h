// What no plan is below, told by areas and by chains of modules alone.
#pragma once

#include "search/problem.h"

namespace mosaic::search {

// The longest of: all modules' least slots x time over the machine's slots; a chain of modules at their fastest; and
// what comes before a module, its own stage, and what comes after it, which are three times that do not overlap.
Ns plain_bound(const Problem& problem);

}  // namespace mosaic::search
