#include "covering_lp.h"

#include <algorithm>
#include <numeric>

namespace mosaic::search {
namespace {

constexpr double kTolerance = 1e-9;
constexpr int kMostPivots = 5000;  // in one go: rounding could make it turn in circles

}  // namespace

CoveringLp::CoveringLp(const std::vector<double>& alone) : size_(alone.size()), cost_(alone), prices_(alone) {
    inverse_.assign(size_ * size_, 0);
    for (std::size_t i = 0; i < size_; ++i) {
        inverse_[i * size_ + i] = 1;
        // Amounts a little apart from each other keep pivots from standing still; prices do not depend on them.
        amount_.push_back(1 + 1e-4 * static_cast<double>(i * 7919 % 101) / 101);
    }
}

double CoveringLp::value() const { return std::accumulate(prices_.begin(), prices_.end(), 0.0); }

void CoveringLp::find_prices() {
    std::fill(prices_.begin(), prices_.end(), 0);
    for (std::size_t i = 0; i < size_; ++i) {
        for (std::size_t j = 0; j < size_; ++j) prices_[j] += cost_[i] * inverse_[i * size_ + j];
    }
}

void CoveringLp::solve() {
    const double scale = *std::max_element(cost_.begin(), cost_.end());
    std::vector<double> column(size_);
    for (int pivot = 0; pivot < kMostPivots; ++pivot) {
        find_prices();
        std::fill(column.begin(), column.end(), 0);
        const auto least = std::min_element(prices_.begin(), prices_.end());
        if (*least < -kTolerance * scale) {  // a row may be covered more than once
            column[static_cast<std::size_t>(least - prices_.begin())] = -1;
            enter(column, 0);
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
        each(best->rows, [&](int row) { column[static_cast<std::size_t>(row)] = 1; });
        enter(column, best->cost);
    }
    for (double& price : prices_) price = std::max(price, 0.0);
}

void CoveringLp::enter(const std::vector<double>& column, double cost) {
    std::vector<double> change(size_, 0);
    for (std::size_t i = 0; i < size_; ++i) {
        for (std::size_t j = 0; j < size_; ++j) change[i] += inverse_[i * size_ + j] * column[j];
    }
    std::size_t leaving = size_;
    for (std::size_t i = 0; i < size_; ++i) {
        if (change[i] <= kTolerance) continue;
        if (leaving == size_ || amount_[i] * change[leaving] < amount_[leaving] * change[i]) leaving = i;
    }
    if (leaving == size_) return;
    const double step = amount_[leaving] / change[leaving];
    for (std::size_t j = 0; j < size_; ++j) inverse_[leaving * size_ + j] /= change[leaving];
    for (std::size_t i = 0; i < size_; ++i) {
        if (i == leaving || change[i] == 0) continue;
        for (std::size_t j = 0; j < size_; ++j) inverse_[i * size_ + j] -= change[i] * inverse_[leaving * size_ + j];
        amount_[i] = std::max(0.0, amount_[i] - step * change[i]);
    }
    amount_[leaving] = step;
    cost_[leaving] = cost;
}

}  // namespace mosaic::search
