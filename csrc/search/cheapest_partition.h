// Which of many possible stages together hold every module once and cost least above their worth.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "search/clock.h"
#include "search/stage_areas.h"

namespace mosaic::search {

// A set that may be a stage.
struct Column {
    Mask stage = 0;
    Ns excess = 0;  // what it takes at least above what its modules are worth
};

// Depth first over sets of finished modules, so that the stages have an order that keeps dependencies. What each set
// still needs at least is remembered; since an excess only ever rises, that holds for the next question, too.
class CheapestPartition {
  public:
    // `columns` are all that have an excess of `slack` at most. `most_work` counts columns looked at, of one question.
    CheapestPartition(const StageAreas& areas, Mask members, std::vector<Column> columns, Ns slack,
                      std::int64_t most_work);

    // The stages of the least excess in sum, if that is below `limit` and the slack; otherwise none. Work or time may
    // end it: see is_stopped().
    std::vector<Mask> find(Ns limit, const Clock& clock);

    // After find(): no partition has less, unless it was stopped.
    Ns least() const { return least_; }
    bool is_stopped() const { return is_stopped_; }

    // Makes a column dearer.
    void raise(Mask stage, Ns excess);
    Ns excess(Mask stage) const { return excess_[static_cast<std::size_t>(index_of(stage))]; }

  private:
    struct Rest {
        Ns bound = 0;
        int choice = -1;         // the column that comes next at that bound
        std::int64_t round = 0;  // of the question for which the bound was reached; 0: never
    };

    Ns complete(Mask done, Ns limit);
    Ns through(Mask done, int column, Ns limit);
    std::vector<int> choices(Mask done, Ns limit);
    Mask ready(Mask done) const;
    int find_first(Mask ready, Mask waiting) const;
    int index_of(Mask stage) const;
    bool spend();

    const StageAreas& areas_;
    Mask members_;
    std::vector<Column> columns_;  // by rising excess, as it was at first
    Ns slack_;
    std::int64_t most_work_;
    std::vector<Ns> excess_;              // now
    std::vector<std::vector<int>> with_;  // columns with each module
    std::vector<int> all_;
    std::unordered_map<Mask, int> index_;  // by stage
    std::vector<int> table_;               // the same where modules are few; -1: no column
    std::unordered_map<Mask, Rest> rests_;
    std::int64_t round_ = 0;
    std::int64_t work_ = 0;
    const Clock* clock_ = nullptr;
    Ns least_ = 0;
    bool is_stopped_ = false;
};

}  // namespace mosaic::search
