// How many tokens the tokens of each block see.
#pragma once

#include <cstdint>
#include <vector>

#include "search/context/runs.h"

namespace mosaic::search::context {

// Visible pairs of each block of `block` queries. Takes time by runs and blocks, never by pairs.
std::vector<std::int64_t> work_of_blocks(const Runs& runs, std::int64_t block);

}  // namespace mosaic::search::context
