#include "search/pattern_prices.h"

#include <algorithm>
#include <memory>
#include <numeric>

#include "search/covering_lp.h"

namespace mosaic::search {
namespace {

// How much of the best prices so far is in those that are asked next: without it prices swing.
constexpr double kSmoothing = 0.7;
constexpr std::size_t kEnough = 20;  // patterns from one question
// Of what the mix costs; parts with more modules are further from a proof than that, and have better uses for the time.
constexpr double kCloseEnough = 1e-5;
constexpr double kCloseEnoughOfMany = 5e-4;
constexpr std::size_t kManyModules = 24;
// A pattern is worth asking for if it is worth more than this over what it costs; less is rounding.
constexpr double kWorthIt = 1 + 1e-7;
constexpr double kRoundedDown = 1 - 1e-9;  // sums of doubles may be off in their last bits
constexpr int kMostRounds = 2000;

class ColumnGeneration {
  public:
    ColumnGeneration(const StageAreas& areas, PatternPricer& pricer, Mask members, const Pricing& pricing,
                     const Clock& clock)
        : pricer_(pricer), clock_(clock) {
        each(members, [&](int m) { modules_.push_back(m); });
        std::vector<double> alone;
        for (const int m : modules_) {
            const Mask with = pricer.with(m);
            const bool is_alone = (with & (with - 1)) == 0;
            alone.push_back(static_cast<double>((is_alone ? areas.alone(m) : areas.together(with)) + 1));
        }
        lp_ = std::make_unique<CoveringLp>(alone);
        best_.assign(modules_.size(), 0);
        if (pricing.known != nullptr) {
            for (std::size_t i = 0; i < modules_.size(); ++i) {
                best_[i] = static_cast<double>(pricing.known->of[static_cast<std::size_t>(modules_[i])]);
            }
            best_sum_ = std::accumulate(best_.begin(), best_.end(), 0.0);
        }
        for (const Pattern& pattern : pricing.start) {
            const Mask stage = pattern.stage & members;
            if ((stage & (stage - 1)) != 0) patterns_.push_back({stage, pattern.cost});
        }
        std::sort(patterns_.begin(), patterns_.end(), [](const Pattern& a, const Pattern& b) {
            return a.stage != b.stage ? a.stage < b.stage : a.cost < b.cost;
        });
        const auto is_same = [](const Pattern& a, const Pattern& b) { return a.stage == b.stage; };
        patterns_.erase(std::unique(patterns_.begin(), patterns_.end(), is_same), patterns_.end());
        for (const Pattern& pattern : patterns_) add(pattern);
    }

    Prices run(std::size_t num_modules, Ns enough) {
        const double close_enough = modules_.size() > kManyModules ? kCloseEnoughOfMany : kCloseEnough;
        for (int round = 0; round < kMostRounds && !clock_.is_over(); ++round) {
            lp_->solve();
            if (best_sum_ >= lp_->value() * (1 - close_enough)) break;
            if (best_sum_ * kRoundedDown > static_cast<double>(enough) + static_cast<double>(2 * kMaxModules)) break;
            // Smoothed prices first; where they bring no pattern that the mix wants, its own.
            if (!ask(best_sum_ > 0 ? kSmoothing : 0) && !ask(0)) break;
        }
        Prices prices;
        prices.of.assign(num_modules, 0);
        for (std::size_t i = 0; i < modules_.size(); ++i) {
            // Patterns cost a nanosecond more here than in truth; they have at least one module to take it from.
            prices.of[static_cast<std::size_t>(modules_[i])] =
                std::max<Ns>(0, static_cast<Ns>(best_[i] * kRoundedDown) - 1);
        }
        prices.patterns = std::move(patterns_);
        lp_->each_used([&](Mask rows, double amount) {
            Mask stage = 0;
            each(rows, [&](int row) { stage |= Mask{1} << modules_[static_cast<std::size_t>(row)]; });
            prices.mix.push_back({stage, amount});
        });
        return prices;
    }

  private:
    // Whether there are new patterns that are worth more to the mix than they cost.
    bool ask(double smoothing) {
        std::vector<double> prices(kMaxModules, 0);
        for (std::size_t i = 0; i < modules_.size(); ++i) {
            prices[static_cast<std::size_t>(modules_[i])] = smoothing * best_[i] + (1 - smoothing) * lp_->prices()[i];
        }
        const std::size_t before = patterns_.size();
        const double ratio = pricer_.best_ratio(prices, kWorthIt, kEnough, clock_, patterns_);
        const double sum = std::accumulate(prices.begin(), prices.end(), 0.0) / ratio;
        if (sum > best_sum_) {
            best_sum_ = sum;
            for (std::size_t i = 0; i < modules_.size(); ++i) {
                best_[i] = prices[static_cast<std::size_t>(modules_[i])] / ratio;
            }
        }
        bool is_wanted = false;
        for (std::size_t at = before; at < patterns_.size(); ++at) {
            double worth = 0;
            each(add(patterns_[at]), [&](int row) { worth += lp_->prices()[static_cast<std::size_t>(row)]; });
            is_wanted = is_wanted || worth > static_cast<double>(patterns_[at].cost + 1);
        }
        return is_wanted;
    }

    // Returns its rows.
    Mask add(const Pattern& pattern) {
        Mask rows = 0;
        for (std::size_t i = 0; i < modules_.size(); ++i) rows |= (pattern.stage >> modules_[i] & 1) << i;
        lp_->add(rows, static_cast<double>(pattern.cost + 1));
        return rows;
    }

    PatternPricer& pricer_;
    const Clock& clock_;
    std::vector<int> modules_;
    std::unique_ptr<CoveringLp> lp_;
    std::vector<double> best_;  // true prices, by place in modules_
    double best_sum_ = 0;
    std::vector<Pattern> patterns_;
};

}  // namespace

Prices find_prices(const StageAreas& areas, PatternPricer& pricer, Mask members, const Pricing& pricing,
                   const Clock& clock) {
    return ColumnGeneration(areas, pricer, members, pricing, clock).run(kMaxModules, pricing.enough);
}

}  // namespace mosaic::search
