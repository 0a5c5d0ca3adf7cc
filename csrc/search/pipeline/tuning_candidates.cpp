#include "search/pipeline/tuning_candidates.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace mosaic::search {

namespace {

constexpr std::size_t kMaxSums = 1024;

// Some ways for the layers so far: their sums, and the last layer's way after which sum of the layers before it.
struct Sum {
    std::int64_t kept;
    Ns extra;
    int before;
    int way;
};

void check(const std::vector<TunedLayer>& layers, int count) {
    if (count < 2) {
        throw std::invalid_argument("count=" + std::to_string(count) +
                                    " candidates; the fastest and the leanest are 2");
    }
    for (std::size_t index = 0; index < layers.size(); ++index) {
        const std::string where = "layer " + std::to_string(index);
        if (layers[index].ways.empty())
            throw std::invalid_argument(where + " has no strategy; give it 'keep' at least");
        bool is_bad = layers[index].workspace < 0;
        for (const LayerWay& way : layers[index].ways) {
            is_bad = is_bad || way.kept < 0 || way.forward < 0 || way.backward < 0;
        }
        if (is_bad) throw std::invalid_argument(where + " has negative times or bytes; they are sums above 'keep'");
    }
}

// Only sums that no other is both leaner and faster than, from lean to fast.
void keep_front(std::vector<Sum>& sums) {
    std::sort(sums.begin(), sums.end(), [](const Sum& one, const Sum& other) {
        if (one.kept != other.kept) return one.kept < other.kept;
        if (one.extra != other.extra) return one.extra < other.extra;
        return one.way != other.way ? one.way < other.way : one.before < other.before;
    });
    std::size_t kept = 0;
    for (const Sum& sum : sums) {
        if (kept == 0 || sum.extra < sums[kept - 1].extra) sums[kept++] = sum;
    }
    sums.resize(kept);
}

// Of too many sums the leanest, and the fastest in each of equal buckets of memory.
void thin(std::vector<Sum>& sums, std::size_t most) {
    if (sums.size() <= most) return;
    const double low = static_cast<double>(sums.front().kept);
    const double width = (static_cast<double>(sums.back().kept) - low) / static_cast<double>(most - 2);
    std::vector<Sum> few{sums.front()};
    for (std::size_t next = 1; next < sums.size(); ++next) {
        const auto bucket = [&](std::size_t i) {
            return static_cast<std::int64_t>((static_cast<double>(sums[i].kept) - low) / width);
        };
        if (next + 1 == sums.size() || bucket(next) != bucket(next + 1)) few.push_back(sums[next]);
    }
    if (few.size() > most) few.erase(few.end() - 2);  // the last bucket begins at the fastest
    sums = std::move(few);
}

// Among layers that are alike and next to each other the leaner ways come first: what backward makes anew for its first
// layers, which are the last ones, it needs on top of all that is kept.
void lean_first(const std::vector<TunedLayer>& layers, std::vector<int>& ways) {
    for (std::size_t first = 0, end = 0; first < layers.size(); first = end) {
        for (end = first + 1; end < layers.size() && layers[end] == layers[first];) ++end;
        const std::vector<LayerWay>& same = layers[first].ways;
        std::stable_sort(ways.begin() + static_cast<std::ptrdiff_t>(first),
                         ways.begin() + static_cast<std::ptrdiff_t>(end),
                         [&](int one, int other) { return same[one].kept < same[other].kept; });
    }
}

// A layer's activations are whole while it runs, in either phase, whatever is kept of them.
Candidate candidate_of(const std::vector<TunedLayer>& layers, std::vector<int> ways) {
    Candidate made;
    std::int64_t peak = 0;
    for (std::size_t index = 0; index < layers.size(); ++index) {
        const LayerWay& way = layers[index].ways[ways[index]];
        const std::int64_t whole = std::max(layers[index].ways[0].kept, way.kept) + layers[index].workspace;
        peak = std::max(peak, made.kept + whole);
        made.kept += way.kept;
        made.forward += way.forward;
        made.backward += way.backward;
    }
    made.workspace = std::max<std::int64_t>(0, peak - made.kept);
    made.ways = std::move(ways);
    return made;
}

}  // namespace

std::vector<Candidate> tuning_candidates(const std::vector<TunedLayer>& layers, int count) {
    check(layers, count);
    std::vector<std::vector<Sum>> after{{{0, 0, 0, 0}}};  // for each layer, all sums worth going on with
    for (const TunedLayer& layer : layers) {
        std::vector<Sum> sums;
        const std::vector<Sum>& before = after.back();
        for (std::size_t index = 0; index < before.size(); ++index) {
            for (std::size_t way = 0; way < layer.ways.size(); ++way) {
                const LayerWay& taken = layer.ways[way];
                sums.push_back({before[index].kept + taken.kept, before[index].extra + taken.forward + taken.backward,
                                static_cast<int>(index), static_cast<int>(way)});
            }
        }
        keep_front(sums);
        thin(sums, kMaxSums);
        after.push_back(std::move(sums));
    }
    std::vector<Sum> ends = after.back();
    for (std::size_t index = 0; index < ends.size(); ++index) ends[index].before = static_cast<int>(index);
    thin(ends, static_cast<std::size_t>(count));
    std::vector<Candidate> found;
    for (auto end = ends.rbegin(); end != ends.rend(); ++end) {
        std::vector<int> ways(layers.size());
        int at = end->before;
        for (std::size_t layer = layers.size(); layer > 0; --layer) {
            ways[layer - 1] = after[layer][at].way;
            at = after[layer][at].before;
        }
        lean_first(layers, ways);
        found.push_back(candidate_of(layers, std::move(ways)));
    }
    return found;
}

}  // namespace mosaic::search
