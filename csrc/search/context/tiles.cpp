#include "search/context/tiles.h"

#include <algorithm>

namespace mosaic::search::context {

namespace {

// Tokens of one stream of one document in a block of keys.
struct Share {
    int document = 0;
    int stream = 0;
    std::int64_t count = 0;
};

// The shares of all blocks of keys: those of block i from offsets[i] to offsets[i + 1].
struct Shares {
    std::vector<std::size_t> offsets{0};
    std::vector<Share> shares;

    Shares(const Runs& runs, std::int64_t size) {
        std::size_t at = 0;
        for (std::int64_t begin = 0; begin < runs.num_tokens; begin += size) {
            const std::int64_t end = std::min(begin + size, runs.num_tokens);
            for (; runs.runs[at].end <= begin; ++at) {
            }
            for (std::size_t i = at; i < runs.runs.size() && runs.runs[i].start < end; ++i) {
                const Run& run = runs.runs[i];
                if (run.document >= 0) add(run, std::min(end, run.end) - std::max(begin, run.start));
            }
            offsets.push_back(shares.size());
        }
    }

  private:
    void add(const Run& run, std::int64_t count) {
        for (std::size_t i = shares.size(); i > offsets.back() && shares[i - 1].document == run.document; --i) {
            if (shares[i - 1].stream != run.stream) continue;
            shares[i - 1].count += count;
            return;
        }
        shares.push_back({run.document, run.stream, count});
    }
};

// Pairs with a key at or before its query, of queries from q0 to q1 and keys from k0 to k1, ends not included.
std::int64_t pairs_behind(std::int64_t q0, std::int64_t q1, std::int64_t k0, std::int64_t k1) {
    const auto up_to = [&](std::int64_t query) {  // of queries below this one
        const std::int64_t count = k1 - k0, rising = std::clamp<std::int64_t>(query - k0, 0, count);
        return rising * (rising + 1) / 2 + std::max<std::int64_t>(query - k1, 0) * count;
    };
    return up_to(q1) - up_to(q0);
}

// One block of queries: what it asks of keys by document and stream, and the columns that it sees.
class Row {
  public:
    Row(const Runs& runs, const Shares& shares, std::int64_t block) : runs_(runs), shares_(shares), block_(block) {}

    void find(std::int64_t row, Tiles& tiles) {
        begin_ = row * block_;
        end_ = std::min(begin_ + block_, runs_.num_tokens);
        ask();
        if (!asks_.empty()) {
            const std::int64_t own = begin_ / block_, behind = (end_ - 1) / block_ + 1;
            const std::int64_t first = runs_.first_token[static_cast<std::size_t>(document_)] / block_;
            for (std::int64_t column = first; column < own; ++column) keep(column, by_shares(column, before_), tiles);
            for (std::int64_t column = own; column < behind; ++column) keep(column, by_runs(column), tiles);
            const std::int64_t last = last_ahead_ / block_;
            for (std::int64_t column = behind; column <= last; ++column) keep(column, by_shares(column, ahead_), tiles);
        }
        tiles.offsets.push_back(static_cast<std::int64_t>(tiles.columns.size()));
    }

  private:
    // Counts queries that may see each stream: of what is before them, and of what is ahead.
    void ask() {
        asks_.clear();
        last_ahead_ = -1;
        for (std::size_t i = runs_.run_of(begin_); i < runs_.runs.size() && runs_.runs[i].start < end_; ++i) {
            Run run = runs_.runs[i];
            if (run.document < 0) continue;
            run.start = std::max(run.start, begin_);
            run.end = std::min(run.end, end_);
            asks_.push_back(run);
        }
        if (asks_.empty()) return;
        document_ = asks_.front().document;
        const int count = asks_.back().document - document_ + 1;
        before_.assign(static_cast<std::size_t>(count) * kStreams, 0);
        ahead_.assign(before_.size(), 0);
        for (const Run& run : asks_) {
            const std::size_t place = static_cast<std::size_t>(run.document - document_) * kStreams;
            const std::int64_t queries = run.end - run.start;
            for (std::size_t stream = 0; stream < kStreams; ++stream) {
                if ((run.attends >> stream & 1) != 0) before_[place + stream] += queries;
            }
            if (!run.both) continue;
            ahead_[place + static_cast<std::size_t>(run.stream)] += queries;
            last_ahead_ = std::max(last_ahead_, runs_.find(run.document, run.stream)->last);
        }
    }

    std::int64_t by_shares(std::int64_t column, const std::vector<std::int64_t>& asked) const {
        std::int64_t pairs = 0;
        const std::size_t index = static_cast<std::size_t>(column);
        for (std::size_t i = shares_.offsets[index]; i < shares_.offsets[index + 1]; ++i) {
            const Share& share = shares_.shares[i];
            const std::size_t place = static_cast<std::size_t>(share.document - document_) * kStreams;
            if (share.document < document_ || place >= asked.size()) continue;
            pairs += asked[place + static_cast<std::size_t>(share.stream)] * share.count;
        }
        return pairs;
    }

    // The same for a column that has tokens of the row, run by run.
    std::int64_t by_runs(std::int64_t column) const {
        const std::int64_t begin = column * block_, end = std::min(begin + block_, runs_.num_tokens);
        std::int64_t pairs = 0;
        for (std::size_t i = runs_.run_of(begin); i < runs_.runs.size() && runs_.runs[i].start < end; ++i) {
            const Run& keys = runs_.runs[i];
            const std::int64_t k0 = std::max(keys.start, begin), k1 = std::min(keys.end, end);
            for (const Run& asked : asks_) {
                if (asked.sees_ahead(keys)) {
                    pairs += (asked.end - asked.start) * (k1 - k0);
                } else if (asked.sees(keys)) {
                    pairs += pairs_behind(asked.start, asked.end, k0, k1);
                }
            }
        }
        return pairs;
    }

    void keep(std::int64_t column, std::int64_t pairs, Tiles& tiles) const {
        if (pairs == 0) return;
        tiles.columns.push_back(static_cast<std::int32_t>(column));
        tiles.is_full.push_back(pairs == block_ * block_ ? 1 : 0);
    }

    const Runs& runs_;
    const Shares& shares_;
    const std::int64_t block_;
    std::int64_t begin_ = 0, end_ = 0, last_ahead_ = -1;
    int document_ = 0;                          // the first of the row
    std::vector<Run> asks_;                     // what the row has of runs, without padding
    std::vector<std::int64_t> before_, ahead_;  // queries that may see a stream, from the row's first document on
};

}  // namespace

Tiles find_tiles(const Runs& runs, const std::vector<std::int64_t>& rows, std::int64_t block) {
    const Shares shares(runs, block);
    Row finder(runs, shares, block);
    Tiles tiles;
    for (const std::int64_t row : rows) finder.find(row, tiles);
    return tiles;
}

}  // namespace mosaic::search::context
