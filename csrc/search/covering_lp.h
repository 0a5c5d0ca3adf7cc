// The cheapest mix of sets that covers every row once: revised simplex with a dense inverse, for some sixty rows.
#pragma once

#include <cstdint>
#include <vector>

#include "problem.h"

namespace mosaic::search {

// Prices of the rows are what column generation works with. Rounding may make them a little wrong, so whoever takes a
// bound from them must check them against all columns.
class CoveringLp {
  public:
    // A row's own cost alone is its first column.
    explicit CoveringLp(const std::vector<double>& alone);

    // Adds a column by its set of rows, which are bits below the number of rows.
    void add(Mask rows, double cost) { columns_.push_back({rows, cost}); }

    // Goes on from where it was, until no column known is worth more than it costs.
    void solve();

    // What covering a row is worth: never negative after solve().
    const std::vector<double>& prices() const { return prices_; }
    double value() const;

  private:
    struct Column {
        Mask rows;
        double cost;
    };

    void find_prices();
    void enter(const std::vector<double>& column, double cost);

    std::size_t size_;
    std::vector<Column> columns_;
    std::vector<double> inverse_;  // of the basis, row by row
    std::vector<double> amount_;   // of each column in the basis
    std::vector<double> cost_;
    std::vector<double> prices_;
};

}  // namespace mosaic::search
