// Which blocks of keys a block of queries sees, and which of them wholly.
#pragma once

#include <cstdint>
#include <vector>

#include "search/context/runs.h"

namespace mosaic::search::context {

// For each row that was asked for its columns, rising: those from offsets[i] to offsets[i + 1].
struct Tiles {
    std::vector<std::int64_t> offsets{0};
    std::vector<std::int32_t> columns;
    std::vector<std::uint8_t> is_full;  // whether every query of the row sees every key of the column
};

// Tiles of `block` tokens with at least one visible pair of these blocks of queries. Counts tokens by stream in each
// block of keys, so a row takes time by blocks times their streams, never by tokens. A block that ends after the last
// token is never full.
Tiles find_tiles(const Runs& runs, const std::vector<std::int64_t>& rows, std::int64_t block);

}  // namespace mosaic::search::context
