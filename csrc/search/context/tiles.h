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
    std::vector<std::int64_t> pairs;    // visible pairs of each tile
};

struct BlockSize {
    std::int64_t query = 0;
    std::int64_t key = 0;
};

// Tiles with at least one visible pair of these blocks of queries. Counts tokens by stream in each block of keys, so
// a row takes time by blocks times their streams, never by tokens. A block that ends after the last token is never
// full.
Tiles find_tiles(const Runs& runs, const std::vector<std::int64_t>& rows, BlockSize size);

// The same the other way: for each column, of `num_columns`, the places of its rows, rising. Pairs are left out.
Tiles turned(const Tiles& tiles, std::int64_t num_columns);

}  // namespace mosaic::search::context
