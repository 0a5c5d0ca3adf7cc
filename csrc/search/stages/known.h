// What one search found out about sets of modules, for the next one that has modules in common with it.
#pragma once

#include <optional>
#include <unordered_map>
#include <vector>

#include "search/problem.h"
#include "search/stages/stage.h"

namespace mosaic::search {

// What is known of a set of modules.
struct StageValue {
    Ns bound = 0;      // no placement costs less
    Ns cost = kNever;  // of `stage`; kNever if none is known
    Stage stage;
    bool gave_up = false;  // the number of nodes ran out: the value stays as it is
    Ns step = 0;           // how far above the bound to look next; 0: not asked yet
    bool is_exact() const { return bound >= cost; }
};

using StageValues = std::unordered_map<Mask, StageValue>;

struct Known {
    Problem problem;
    StageValues values;
};

// The values of an earlier search that hold for another problem too: of sets of modules that have the same options in
// both, on the same machine and with the same interference. They are looked up one by one: there may be very many.
class Carried {
  public:
    Carried() = default;
    // `places[m]` is the index that module m had before; -1: it is new. Throws std::invalid_argument where `places`
    // does not fit the problems. `known` may be null, and must outlive this.
    Carried(const Known* known, const Problem& problem, const std::vector<int>& places);

    // What was known of a set; nothing is known of most.
    std::optional<StageValue> find(Mask set) const;

    // Calls `visit(set, bound)` for each set of which a bound is known. Those of sets that were given up hold too.
    template <typename Visit>
    void each_bound(Visit visit) const {
        if (known_ == nullptr) return;
        for (const auto& [earlier, value] : known_->values) {
            if (const auto set = set_now(earlier)) visit(*set, value.bound);
        }
    }

    // Adds what was known of sets that `values` says nothing of.
    void add_to(StageValues& values) const;

  private:
    // A value with the modules' indices of now.
    StageValue value_now(const StageValue& earlier) const;

    // A set of the earlier problem in this one; none where a module is gone or not the same any more.
    std::optional<Mask> set_now(Mask earlier) const;

    const Known* known_ = nullptr;
    std::vector<int> before_;  // by index now; -1 where a module is new or not the same any more
    std::vector<int> now_;     // by index before
};

}  // namespace mosaic::search
