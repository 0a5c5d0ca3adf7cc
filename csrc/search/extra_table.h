// What neighbours cost, in a form that a search can ask very often and prune by.
#pragma once

#include <vector>

#include "interference.h"

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

    // At most that, and never less for neighbours with more slots: a pair measured to be milder at a larger quota
    // counts as mild at all smaller ones.
    Extra least(const Resident& own, const Resident* others, int num_others) const;

    // Whether both are always the same.
    bool is_monotone() const { return is_monotone_; }

  private:
    void fill_row(std::size_t module, std::size_t option);

    const Problem& problem_;
    int width_;
    bool is_monotone_ = true;
    std::vector<std::vector<std::vector<Extra>>> rows_;  // pairwise only: by module, option, neighbour and quota
};

}  // namespace mosaic::search
