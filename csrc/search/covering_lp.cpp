#include "search/covering_lp.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace mosaic::search {
namespace {

constexpr double kTolerance = 1e-9;
constexpr double kLeastPivot = 1e-7;
constexpr int kMostPivots = 5000;  // in one go: rounding could make it turn in circles
constexpr int kMostUpdates = 100;  // of one inverse: each adds to its rounding

}  // namespace

CoveringLp::CoveringLp(const std::vector<double>& alone) : size_(alone.size()), prices_(alone) {
    for (std::size_t i = 0; i < size_; ++i) {
        basis_.push_back({Mask{1} << i, alone[i], 1});
        // Amounts a little apart from each other keep pivots from standing still; prices do not depend on them.
        needed_.push_back(1 + 1e-4 * static_cast<double>(i * 7919 % 101) / 101);
    }
    columns_ = basis_;
    invert();
}

double CoveringLp::value() const { return std::accumulate(prices_.begin(), prices_.end(), 0.0); }

void CoveringLp::raise(std::size_t column, double cost) {
    columns_[column].cost = cost;
    for (Column& used : basis_) {
        if (used.sign > 0 && used.rows == columns_[column].rows) used.cost = cost;
    }
}

void CoveringLp::find_prices() {
    std::fill(prices_.begin(), prices_.end(), 0);
    for (std::size_t i = 0; i < size_; ++i) {
        for (std::size_t j = 0; j < size_; ++j) prices_[j] += basis_[i].cost * inverse_[i * size_ + j];
    }
}

void CoveringLp::solve() {
    double scale = 0;
    for (const Column& column : basis_) scale = std::max(scale, column.cost);
    for (int pivot = 0; pivot < kMostPivots; ++pivot) {
        find_prices();
        const auto least = std::min_element(prices_.begin(), prices_.end());
        if (*least < -kTolerance * scale) {  // a row may be covered more than once
            enter({Mask{1} << (least - prices_.begin()), 0, -1});
            continue;
        }
        const Column* best = nullptr;
        double ratio = 1 + kTolerance;
        for (const Column& one : columns_) {
            double worth = 0;
            each(one.rows, [&](int row) { worth += prices_[static_cast<std::size_t>(row)]; });
            if (worth > ratio * one.cost) {
                ratio = worth / one.cost;
                best = &one;
            }
        }
        if (best == nullptr) break;
        enter(*best);
    }
    for (double& price : prices_) price = std::max(price, 0.0);
}

void CoveringLp::enter(const Column& column) {
    change_.assign(size_, 0);
    for (std::size_t i = 0; i < size_; ++i) {
        const double* row = &inverse_[i * size_];
        each(column.rows, [&](int j) { change_[i] += column.sign * row[j]; });
    }
    const std::size_t leaving = find_leaving();
    if (leaving == size_) return;
    basis_[leaving] = column;
    if (++num_updates_ >= kMostUpdates) return invert();
    const double step = amount_[leaving] / change_[leaving];
    for (std::size_t j = 0; j < size_; ++j) inverse_[leaving * size_ + j] /= change_[leaving];
    for (std::size_t i = 0; i < size_; ++i) {
        if (i == leaving || change_[i] == 0) continue;
        for (std::size_t j = 0; j < size_; ++j) inverse_[i * size_ + j] -= change_[i] * inverse_[leaving * size_ + j];
        amount_[i] = std::max(0.0, amount_[i] - step * change_[i]);
    }
    amount_[leaving] = step;
}

// What runs out first; of several that do so at nearly the same time, the one that changes most, which divides by the
// least small number.
std::size_t CoveringLp::find_leaving() const {
    double soon = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < size_; ++i) {
        if (change_[i] > kLeastPivot) soon = std::min(soon, (amount_[i] + kTolerance) / change_[i]);
    }
    std::size_t leaving = size_;
    for (std::size_t i = 0; i < size_; ++i) {
        if (change_[i] <= kLeastPivot || amount_[i] > soon * change_[i]) continue;
        if (leaving == size_ || change_[i] > change_[leaving]) leaving = i;
    }
    return leaving;
}

// Inverts the basis anew, by elimination.
void CoveringLp::invert() {
    num_updates_ = 0;
    std::vector<double> matrix(size_ * size_, 0);
    inverse_.assign(size_ * size_, 0);
    for (std::size_t i = 0; i < size_; ++i) {
        inverse_[i * size_ + i] = 1;
        each(basis_[i].rows, [&](int row) { matrix[static_cast<std::size_t>(row) * size_ + i] = basis_[i].sign; });
    }
    for (std::size_t at = 0; at < size_; ++at) {
        if (eliminate(matrix, at)) continue;
        std::copy_n(columns_.begin(), size_, basis_.begin());  // every row's own column: what it began with
        return invert();
    }
    amount_.assign(size_, 0);
    for (std::size_t i = 0; i < size_; ++i) {
        for (std::size_t j = 0; j < size_; ++j) amount_[i] += inverse_[i * size_ + j] * needed_[j];
        amount_[i] = std::max(0.0, amount_[i]);
    }
}

// Returns false where the matrix cannot be inverted.
bool CoveringLp::eliminate(std::vector<double>& matrix, std::size_t at) {
    std::size_t pivot = at;
    for (std::size_t i = at + 1; i < size_; ++i) {
        if (std::abs(matrix[i * size_ + at]) > std::abs(matrix[pivot * size_ + at])) pivot = i;
    }
    const double value = matrix[pivot * size_ + at];
    if (std::abs(value) < kTolerance) return false;
    for (std::size_t j = 0; j < size_; ++j) {
        std::swap(matrix[pivot * size_ + j], matrix[at * size_ + j]);
        std::swap(inverse_[pivot * size_ + j], inverse_[at * size_ + j]);
        matrix[at * size_ + j] /= value;
        inverse_[at * size_ + j] /= value;
    }
    for (std::size_t i = 0; i < size_; ++i) {
        const double factor = matrix[i * size_ + at];
        if (i == at || factor == 0) continue;
        for (std::size_t j = 0; j < size_; ++j) {
            matrix[i * size_ + j] -= factor * matrix[at * size_ + j];
            inverse_[i * size_ + j] -= factor * inverse_[at * size_ + j];
        }
    }
    return true;
}

}  // namespace mosaic::search
