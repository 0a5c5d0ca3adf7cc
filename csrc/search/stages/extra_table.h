// What neighbours cost, in a form that a search can ask very often and prune by.
#pragma once

#include <vector>

#include "search/stages/interference.h"

namespace mosaic::search {

struct Extra {
    Ns forward = 0;
    Ns backward = 0;
};

class ExtraTable {
  public:
    explicit ExtraTable(const Problem& problem);

    // What neighbours on one device cost a module, exactly.
    Extra exact(const Resident& own, const Resident* others, int num_others) const;

    // For pairs, without `waiting`: at most that of each neighbour, and never less for one with more slots. A pair
    // measured to be milder at a larger quota counts as mild at all smaller ones. Null where extras do not add up by
    // pairs; `exact` then never falls.
    const Extra* row(int module, int option) const {
        if (rows_.empty()) return nullptr;
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
    std::vector<std::vector<std::vector<Extra>>> rows_;  // pairwise only: by module, option, neighbour and quota
};

}  // namespace mosaic::search
