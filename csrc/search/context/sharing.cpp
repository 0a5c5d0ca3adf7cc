#include "search/context/sharing.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

namespace mosaic::search::context {

namespace {

constexpr int kDigitBits = 11;

// Pieces from the largest to the smallest, equal ones in their order: by digits, which is faster than by comparing.
std::vector<std::int32_t> largest_first(const std::vector<std::int64_t>& work) {
    std::vector<std::int32_t> order(work.size()), other(work.size());
    std::iota(order.begin(), order.end(), 0);
    const std::int64_t most = work.empty() ? 0 : *std::max_element(work.begin(), work.end());
    constexpr std::int64_t kDigits = 1 << kDigitBits;
    for (int shift = 0; shift < 63 && (most >> shift) > 0; shift += kDigitBits) {
        const auto digit = [&](std::int32_t piece) {  // turned, so that large ones come first
            return static_cast<std::size_t>(kDigits - 1 -
                                            (work[static_cast<std::size_t>(piece)] >> shift & (kDigits - 1)));
        };
        std::array<std::size_t, kDigits + 1> place{};
        for (const std::int32_t piece : order) ++place[digit(piece) + 1];
        for (std::size_t i = 1; i < place.size(); ++i) place[i] += place[i - 1];
        for (const std::int32_t piece : order) other[place[digit(piece)]++] = piece;
        order.swap(other);
    }
    return order;
}

// What a rank has so far.
struct Load {
    std::int64_t sum = 0;
    std::int32_t rank = 0;

    bool operator<(const Load& other) const { return sum != other.sum ? sum < other.sum : rank < other.rank; }
};

// Puts the top of a heap where it belongs after it has grown: half the work of taking it out and putting it in.
void sink(std::vector<Load>& heap) {
    for (std::size_t at = 0, next = 1; next < heap.size(); at = next, next = 2 * at + 1) {
        if (next + 1 < heap.size() && heap[next + 1] < heap[next]) ++next;
        if (heap[at] < heap[next]) return;
        std::swap(heap[at], heap[next]);
    }
}

// Ranks with their pieces, from the largest to the smallest.
struct Ranks {
    const std::vector<std::int64_t>& work;
    std::vector<std::int64_t> sums;
    std::vector<std::vector<std::int32_t>> pieces;

    Ranks(const std::vector<std::int64_t>& given, const std::vector<std::int32_t>& rank_of, std::int32_t num_ranks)
        : work(given), sums(static_cast<std::size_t>(num_ranks)), pieces(static_cast<std::size_t>(num_ranks)) {
        for (const std::int32_t piece : largest_first(work)) {
            const std::size_t rank = static_cast<std::size_t>(rank_of[static_cast<std::size_t>(piece)]);
            pieces[rank].push_back(piece);
            sums[rank] += of(piece);
        }
    }

    std::int64_t of(std::int32_t piece) const { return work[static_cast<std::size_t>(piece)]; }

    void move(std::int32_t piece, std::size_t from, std::size_t to) {
        auto& left = pieces[from];
        auto& joined = pieces[to];
        left.erase(std::find(left.begin(), left.end(), piece));
        joined.insert(std::lower_bound(joined.begin(), joined.end(), piece,
                                       [&](std::int32_t one, std::int32_t other) { return of(one) > of(other); }),
                      piece);
        sums[from] -= of(piece);
        sums[to] += of(piece);
    }
};

struct Trade {
    std::int64_t most = 0;  // what the larger of the two ranks has afterwards
    std::size_t with = 0;
    std::int32_t given = -1;
    std::int32_t taken = -1;
};

// The best trade of one rank with another: the two pieces whose difference is nearest to half of the ranks'.
void look(const Ranks& ranks, std::size_t from, std::size_t with, Trade& best) {
    const std::int64_t apart = ranks.sums[from] - ranks.sums[with];
    std::size_t next = 0;
    const auto& theirs = ranks.pieces[with];
    const auto consider = [&](std::int32_t given, std::int32_t taken) {
        const std::int64_t moved = ranks.of(given) - ranks.of(taken);
        const std::int64_t most = std::max(ranks.sums[from] - moved, ranks.sums[with] + moved);
        if (most < best.most) best = {most, with, given, taken};
    };
    for (const std::int32_t given : ranks.pieces[from]) {  // from the largest down, so the fitting one moves down too
        const std::int64_t wanted = ranks.of(given) - apart / 2;
        while (next < theirs.size() && ranks.of(theirs[next]) > wanted) ++next;
        if (next < theirs.size()) consider(given, theirs[next]);
        if (next > 0) consider(given, theirs[next - 1]);
    }
}

}  // namespace

std::vector<std::int32_t> longest_first(const std::vector<std::int64_t>& work, std::int32_t num_ranks,
                                        std::int64_t cap) {
    std::vector<Load> heap;  // the least at its top
    for (std::int32_t rank = 0; rank < num_ranks; ++rank) heap.push_back({0, rank});
    std::vector<std::int64_t> count(static_cast<std::size_t>(num_ranks));
    std::vector<std::int32_t> rank_of(work.size());
    for (const std::int32_t piece : largest_first(work)) {
        Load& least = heap.front();
        rank_of[static_cast<std::size_t>(piece)] = least.rank;
        least.sum += work[static_cast<std::size_t>(piece)];
        if (++count[static_cast<std::size_t>(least.rank)] == cap) {
            least = heap.back();
            heap.pop_back();
        }
        sink(heap);
    }
    return rank_of;
}

std::vector<std::int32_t> traded(const std::vector<std::int64_t>& work, std::vector<std::int32_t> rank_of,
                                 std::int32_t num_ranks, std::int64_t fineness) {
    Ranks ranks(work, rank_of, num_ranks);
    const std::int64_t total = std::accumulate(work.begin(), work.end(), std::int64_t{0});
    const std::int64_t mean = (total + num_ranks - 1) / num_ranks, enough = mean + mean / fineness;
    for (;;) {
        const auto heaviest = std::max_element(ranks.sums.begin(), ranks.sums.end());
        const std::size_t from = static_cast<std::size_t>(heaviest - ranks.sums.begin());
        if (*heaviest <= enough) break;
        Trade best{*heaviest, 0, -1, -1};
        for (std::size_t with = 0; with < ranks.sums.size(); ++with) {
            if (ranks.sums[with] < mean) look(ranks, from, with, best);
        }
        if (best.given < 0) break;
        ranks.move(best.given, from, best.with);
        ranks.move(best.taken, best.with, from);
        rank_of[static_cast<std::size_t>(best.given)] = static_cast<std::int32_t>(best.with);
        rank_of[static_cast<std::size_t>(best.taken)] = static_cast<std::int32_t>(from);
    }
    return rank_of;
}

}  // namespace mosaic::search::context
