// Extra time that neighbours on a device cost a module.
#pragma once

#include <algorithm>
#include <vector>

#include "search/problem.h"

namespace mosaic::search {

// A module on a device with the option it has there.
struct Resident {
    int module;
    int option;
};

// What neighbours cost one module, the worst of its devices (Eq. 7).
struct Extras {
    Ns forward = 0;
    Ns backward = 0;
    Ns both = 0;  // forward and backward on the same device

    void raise_to(Ns forward_time, Ns backward_time) {
        forward = std::max(forward, forward_time);
        backward = std::max(backward, backward_time);
        both = std::max(both, forward_time + backward_time);
    }
};

// Extra time of `own` in one phase (0 forward, 1 backward) beside `others` on one device. Never negative, zero without
// others, and never less for more others.
Ns extra(const Problem& problem, int phase, const Resident& own, const Resident* others, int num_others);

// What one neighbour costs a module, as shares of its time alone: a row for each quota that the module may have, an
// entry for each quota that the neighbour may, both rising.
struct PairShares {
    int module = 0;
    int beside = 0;
    std::vector<std::vector<double>> rows;
};

struct Extra {
    Ns forward = 0;
    Ns backward = 0;
};

class ExtraTable {
  public:
    explicit ExtraTable(const Problem& problem);

    // What neighbours on one device cost a module, exactly.
    Extra exact(const Resident& own, const Resident* others, int num_others) const;

    // At most what each neighbour costs, and never less for one with more slots. A pair measured to be milder at a
    // larger quota counts as mild at all smaller ones.
    const Extra* row(int module, int option) const {
        return rows_[static_cast<std::size_t>(module)][static_cast<std::size_t>(option)].data();
    }
    // Of a neighbour in such rows.
    std::size_t place(int module, int quota) const { return static_cast<std::size_t>(module * width_ + quota); }

    // Whether what the rows say is exact.
    bool is_monotone() const { return is_monotone_; }

  private:
    void fill_row(std::size_t module, std::size_t option);

    const Problem& problem_;
    int width_;
    bool is_monotone_ = true;
    std::vector<std::vector<std::vector<Extra>>> rows_;  // by module, option, neighbour and quota
};

// Sets what neighbours cost, by phase; pairs that are not named cost nothing. Throws
// std::invalid_argument for a pair of modules that are not there, rows that do not fit their quotas, or negative
// shares.
void disturb_by_shares(Problem& problem, const std::vector<PairShares> (&shares)[2]);

}  // namespace mosaic::search
