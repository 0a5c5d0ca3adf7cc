// Ways to treat the layers of a chunk between forward and backward, of which few are worth a look (PipeWeaver, 6.3).
#pragma once

#include <cstdint>
#include <vector>

#include "search/problem.h"

namespace mosaic::search {

// What one way to treat a layer costs, and what it keeps on the device from forward to backward.
struct LayerWay {
    Ns forward = 0;
    Ns backward = 0;
    std::int64_t kept = 0;

    bool operator==(const LayerWay& other) const {
        return forward == other.forward && backward == other.backward && kept == other.kept;
    }
};

// A layer's ways, the first of which keeps everything that backward needs.
struct TunedLayer {
    std::vector<LayerWay> ways;
    std::int64_t workspace = 0;  // in use while it runs, above what it keeps

    bool operator==(const TunedLayer& other) const { return ways == other.ways && workspace == other.workspace; }
};

// What one combination of ways costs and keeps.
struct Candidate {
    Ns forward = 0;
    Ns backward = 0;
    std::int64_t kept = 0;
    std::int64_t workspace = 0;  // in use while either phase runs, above what is kept
    std::vector<int> ways;       // for each layer the index of its way
};

// The fastest combination, the leanest one, and the fastest one in each of `count` - 2 equal buckets of memory between
// them: up to `count`, from fast to lean, each leaner than the one before. Exact while a chunk has few different sums,
// as with layers that are alike; beyond that sums that are nearly equal are taken for one. Throws
// std::invalid_argument.
std::vector<Candidate> tuning_candidates(const std::vector<TunedLayer>& layers, int count);

}  // namespace mosaic::search
