// The cheapest mix of sets that covers every row once: revised simplex with a dense inverse, for some sixty rows.
#pragma once

#include <cstdint>
#include <vector>

#include "search/problem.h"

namespace mosaic::search {

// Prices of the rows are what column generation works with. Rounding may make them a little wrong, so whoever takes a
// bound from them must check them against all columns.
class CoveringLp {
  public:
    // A row's own cost alone is its first column.
    explicit CoveringLp(const std::vector<double>& alone);

    // Adds a column by its set of rows, which are bits below the number of rows.
    void add(Mask rows, double cost) { columns_.push_back({rows, cost, 1}); }

    // A column costs more than was said when it was added; `column` counts from 0, the rows' own columns first.
    void raise(std::size_t column, double cost);

    // Goes on from where it was, until no column known is worth more than it costs.
    void solve();

    // What covering a row is worth: never negative after solve().
    const std::vector<double>& prices() const { return prices_; }

    // What the mix costs.
    double value() const;

    // Calls `visit(rows, amount)` for the columns of the mix.
    template <typename Visit>
    void each_used(Visit visit) const {
        for (std::size_t i = 0; i < size_; ++i) {
            if (basis_[i].sign > 0 && amount_[i] > 0) visit(basis_[i].rows, amount_[i]);
        }
    }

  private:
    struct Column {
        Mask rows;
        double cost;
        double sign;  // -1: a row covered more often than asked for
    };

    void find_prices();
    void enter(const Column& column);
    std::size_t find_leaving() const;
    void invert();
    bool eliminate(std::vector<double>& matrix, std::size_t at);

    std::size_t size_;
    std::vector<Column> columns_;
    std::vector<Column> basis_;
    std::vector<double> inverse_;  // of the basis, row by row
    std::vector<double> needed_;   // of each row
    std::vector<double> amount_;   // of each column in the basis
    std::vector<double> change_;   // of the amounts by the column that enters: scratch
    std::vector<double> prices_;
    int num_updates_ = 0;  // of the inverse since it was made anew
};

}  // namespace mosaic::search
