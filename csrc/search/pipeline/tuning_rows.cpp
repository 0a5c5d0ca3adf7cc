#include "search/pipeline/tuning_rows.h"

#include <algorithm>

namespace mosaic::search {

namespace {

std::int64_t most_of(const PairWays& pair, bool works) {
    std::int64_t most = 0;
    for (std::size_t way = 0; way < pair.kept.size(); ++way) {
        most = std::max(most, pair.kept[way] + (works ? pair.workspace[way] : 0));
    }
    return most;
}

std::int64_t least_of(const PairWays& pair, bool works) {
    std::int64_t least = INT64_MAX;
    for (std::size_t way = 0; way < pair.kept.size(); ++way) {
        least = std::min(least, pair.kept[way] + (works ? pair.workspace[way] : 0));
    }
    return least;
}

// Sets of pairs as bits: those in use, and those that work.
struct Bits {
    std::vector<Mask> in_use;
    std::vector<Mask> working;

    explicit Bits(const MemoryRow& row, std::size_t count) : in_use((count + 63) / 64), working((count + 63) / 64) {
        for (const int pair : row.holding) in_use[pair / 64] |= Mask{1} << (pair % 64);
        for (const int pair : row.working) {
            in_use[pair / 64] |= Mask{1} << (pair % 64);
            working[pair / 64] |= Mask{1} << (pair % 64);
        }
    }

    bool is_within(const Bits& other) const {
        for (std::size_t word = 0; word < in_use.size(); ++word) {
            if ((in_use[word] & ~other.in_use[word]) != 0 || (working[word] & ~other.working[word]) != 0) return false;
        }
        return true;
    }
};

std::vector<MemoryRow> rows_of(const std::vector<PairWays>& pairs, const Snapshot& snapshot, std::int64_t limit) {
    // A workspace that every choice needs is not worth a row of its own: it is memory that no choice alters.
    std::vector<std::int64_t> shared(pairs.size(), -1);
    for (std::size_t pair = 0; pair < pairs.size(); ++pair) {
        const std::vector<std::int64_t>& spaces = pairs[pair].workspace;
        const auto [low, high] = std::minmax_element(spaces.begin(), spaces.end());
        if (*low == *high) shared[pair] = *low;
    }
    std::vector<Change> changes = snapshot.changes;
    std::stable_sort(changes.begin(), changes.end(),
                     [](const Change& one, const Change& other) { return one.at < other.at; });
    std::vector<Ns> instants;
    for (const Span& span : snapshot.spans) instants.insert(instants.end(), {span.start, span.backward_start});
    for (const Change& change : changes) {
        if (change.bytes > 0) instants.push_back(change.at);
    }
    std::sort(instants.begin(), instants.end());
    instants.erase(std::unique(instants.begin(), instants.end()), instants.end());
    std::vector<MemoryRow> rows;
    std::size_t done = 0;
    for (const Ns now : instants) {
        for (; done < changes.size() && changes[done].at <= now; ++done) limit -= changes[done].bytes;
        MemoryRow row{now, limit, {}, {}};
        for (std::size_t index = 0; index < pairs.size(); ++index) {
            const Span& span = snapshot.spans[index];
            if (now < span.start || now >= span.end) continue;
            const bool works = now < span.forward_end || now >= span.backward_start;
            if (works && shared[index] >= 0) row.room -= shared[index];
            (works && shared[index] < 0 ? row.working : row.holding).push_back(static_cast<int>(index));
        }
        rows.push_back(std::move(row));
    }
    return rows;
}

}  // namespace

std::int64_t least_use(const MemoryRow& row, const std::vector<PairWays>& pairs) {
    std::int64_t least = 0;
    for (const int pair : row.holding) least += least_of(pairs[pair], false);
    for (const int pair : row.working) least += least_of(pairs[pair], true);
    return least;
}

std::vector<MemoryRow> memory_rows(const std::vector<PairWays>& pairs, const std::vector<Snapshot>& snapshots,
                                   std::int64_t limit) {
    std::vector<std::int64_t> held(pairs.size()), worked(pairs.size());
    for (std::size_t pair = 0; pair < pairs.size(); ++pair) {
        held[pair] = most_of(pairs[pair], false);
        worked[pair] = most_of(pairs[pair], true);
    }
    std::vector<MemoryRow> rows;
    for (const Snapshot& snapshot : snapshots) {
        for (MemoryRow& row : rows_of(pairs, snapshot, limit)) {
            std::int64_t most = 0;
            for (const int pair : row.holding) most += held[pair];
            for (const int pair : row.working) most += worked[pair];
            if (most > row.room) rows.push_back(std::move(row));
        }
    }
    std::vector<Bits> bits;
    for (const MemoryRow& row : rows) bits.emplace_back(row, pairs.size());
    std::vector<MemoryRow> kept;
    for (std::size_t row = 0; row < rows.size(); ++row) {
        bool is_needed = true;
        for (std::size_t other = 0; is_needed && other < rows.size(); ++other) {
            const bool is_within =
                other != row && rows[row].room >= rows[other].room && bits[row].is_within(bits[other]);
            const bool is_same = is_within && rows[row].room == rows[other].room && bits[other].is_within(bits[row]);
            is_needed = !is_within || (is_same && row < other);  // of equal rows the first stays
        }
        if (is_needed) kept.push_back(rows[row]);
    }
    return kept;
}

}  // namespace mosaic::search
