#include "search/cheapest_partition.h"

#include <algorithm>
#include <utility>

namespace mosaic::search {
namespace {

// Columns of problems with no more modules are found in a table of all sets.
constexpr int kModulesOfTable = 22;

}  // namespace

CheapestPartition::CheapestPartition(const StageAreas& areas, Mask members, std::vector<Column> columns, Ns slack,
                                     std::int64_t most_work)
    : areas_(areas), members_(members), columns_(std::move(columns)), slack_(slack), most_work_(most_work) {
    std::sort(columns_.begin(), columns_.end(), [](const Column& a, const Column& b) {
        return a.excess != b.excess ? a.excess < b.excess : a.stage < b.stage;
    });
    with_.resize(kMaxModules);
    if (members_ >> kModulesOfTable == 0) table_.assign(std::size_t{2} << (63 - __builtin_clzll(members_ | 1)), -1);
    for (std::size_t i = 0; i < columns_.size(); ++i) {
        const int index = static_cast<int>(i);
        excess_.push_back(columns_[i].excess);
        all_.push_back(index);
        if (table_.empty()) {
            index_.emplace(columns_[i].stage, index);
        } else {
            table_[static_cast<std::size_t>(columns_[i].stage)] = index;
        }
        each(columns_[i].stage, [&](int m) { with_[static_cast<std::size_t>(m)].push_back(index); });
    }
}

void CheapestPartition::raise(Mask stage, Ns excess) {
    Ns& own = excess_[static_cast<std::size_t>(index_of(stage))];
    own = std::max(own, excess);
}

std::vector<Mask> CheapestPartition::find(Ns limit, const Clock& clock) {
    clock_ = &clock;
    ++round_;
    work_ = 0;
    is_stopped_ = false;
    limit = std::min(limit, slack_);
    least_ = complete(0, limit);
    std::vector<Mask> stages;
    if (is_stopped_ || least_ >= limit) return stages;
    for (Mask done = 0; done != members_; done |= stages.back()) {
        stages.push_back(columns_[static_cast<std::size_t>(rests_.at(done).choice)].stage);
    }
    return stages;
}

// -1: it is no column.
int CheapestPartition::index_of(Mask stage) const {
    if (!table_.empty()) return table_[static_cast<std::size_t>(stage)];
    const auto place = index_.find(stage);
    return place == index_.end() ? -1 : place->second;
}

bool CheapestPartition::spend() {
    if (++work_ > most_work_ || (work_ % 4096 == 0 && clock_->is_over())) is_stopped_ = true;
    return !is_stopped_;
}

// What is left after these modules has at least this excess; that is reached if it is below the limit.
Ns CheapestPartition::complete(Mask done, Ns limit) {
    if (done == members_) return 0;
    const Rest known = rests_[done];
    if (known.bound >= limit || known.round == round_) return known.bound;
    Ns best = slack_;  // what is no column has more than that
    int choice = -1;
    const auto look_at = [&](int column) {
        const Ns own = through(done, column, std::min(limit, best));
        if (own < best) {
            best = own;
            choice = column;
        }
        return best > known.bound;  // nothing is below that
    };
    if (known.choice < 0 || look_at(known.choice)) {
        for (const int column : choices(done, std::min(limit, best))) {
            if (!spend()) return 0;
            // From here on none is below the limit.
            const Ns least = columns_[static_cast<std::size_t>(column)].excess;
            if (least >= std::min(limit, best)) {
                best = std::min(best, least);
                break;
            }
            if (!look_at(column)) break;
        }
    }
    if (is_stopped_) return 0;
    const bool is_reached = best < limit;
    rests_[done] = {std::max(known.bound, best), choice, is_reached ? round_ : 0};
    return std::max(known.bound, best);
}

// The same where this stage comes next.
Ns CheapestPartition::through(Mask done, int column, Ns limit) {
    const Ns own = excess_[static_cast<std::size_t>(column)];
    if (own >= limit) return own;
    return own + complete(done | columns_[static_cast<std::size_t>(column)].stage, limit - own);
}

// Columns that may come next, by rising excess; at the limit the list ends with one, which may fit or not.
std::vector<int> CheapestPartition::choices(Mask done, Ns limit) {
    const Mask now = ready(done);
    const int first = find_first(now, members_ & ~done & ~now);
    const std::vector<int>& listed = first >= 0 ? with_[static_cast<std::size_t>(first)] : all_;
    const Mask fixed = first >= 0 ? Mask{1} << first : 0;
    const Mask others = now & ~fixed;
    std::vector<int> found;
    const int size = __builtin_popcountll(others);
    if (size < 60 && Mask{1} << size < listed.size()) {  // fewer sets than columns
        for (Mask part = others;; part = (part - 1) & others) {
            const int index = index_of(part | fixed);
            if (index >= 0) found.push_back(index);
            if (part == 0) break;
        }
        std::sort(found.begin(), found.end());
    } else {
        for (const int index : listed) {
            const Column& column = columns_[static_cast<std::size_t>(index)];
            if (!spend()) break;
            const bool is_last = column.excess >= limit;
            if (is_last || (column.stage & ~now) == 0) found.push_back(index);
            if (is_last) break;
        }
    }
    return found;
}

Mask CheapestPartition::ready(Mask done) const {
    Mask found = 0;
    each(members_ & ~done, [&](int m) {
        if ((areas_.earlier(m) & members_ & ~done) == 0) found |= Mask{1} << m;
    });
    return found;
}

// A module whose stage may as well come next, since everything that could share it is ready; of several the one with
// the fewest columns. -1: there is none.
int CheapestPartition::find_first(Mask ready, Mask waiting) const {
    int first = -1;
    const auto count = [&](int m) { return with_[static_cast<std::size_t>(m)].size(); };
    each(ready, [&](int m) {
        if ((waiting & ~areas_.apart(m)) == 0 && (first < 0 || count(m) < count(first))) first = m;
    });
    return first;
}

}  // namespace mosaic::search
