// When which activations of a rank are in use together: as few conditions as say that its memory holds at all times.
#pragma once

#include <cstdint>
#include <vector>

#include "search/problem.h"

namespace mosaic::search {

// The choices of one forward with its backward, in columns: the same index is the same choice.
struct PairWays {
    std::vector<Ns> forward;
    std::vector<Ns> backward;
    std::vector<std::int64_t> kept;
    std::vector<std::int64_t> workspace;
};

// A pair's activations are in use from its start to its end; it works on them until forward ends, and again from when
// backward starts. Ends are not included.
struct Span {
    Ns start = 0;
    Ns forward_end = 0;
    Ns backward_start = 0;
    Ns end = 0;
};

// Bytes taken, or given back if negative, that no choice alters.
struct Change {
    Ns at = 0;
    std::int64_t bytes = 0;
};

// One simulation of a rank: all pairs' spans, and all else.
struct Snapshot {
    std::vector<Span> spans;
    std::vector<Change> changes;
};

// At one instant: who holds, who works as well, and how much there is for them.
struct MemoryRow {
    Ns at = 0;
    std::int64_t room = 0;
    std::vector<int> holding;  // those that work are not among them
    std::vector<int> working;
};

// Memory that this row takes at least, which no choice can be below.
std::int64_t least_use(const MemoryRow& row, const std::vector<PairWays>& pairs);

// All instants of the snapshots that matter: those at which something starts, but for those at which others are in use
// that need as much whatever is chosen, and those that hold whatever is chosen.
std::vector<MemoryRow> memory_rows(const std::vector<PairWays>& pairs, const std::vector<Snapshot>& snapshots,
                                   std::int64_t limit);

}  // namespace mosaic::search
