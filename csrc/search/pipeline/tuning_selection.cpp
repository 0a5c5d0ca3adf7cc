#include "search/pipeline/tuning_selection.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "search/clock.h"

namespace mosaic::search {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A way of a pair that no other one beats in both cost and memory; use[1] is while it works.
struct Way {
    double cost;
    std::int64_t use[2];
    int index;
};

struct Place {
    int other;  // row of a pair, or pair of a row
    int works;
};

class Selector {
  public:
    Selector(const std::vector<PairWays>& pairs, const std::vector<MemoryRow>& rows, const Weights& weights)
        : places_(pairs.size()) {
        for (std::size_t pair = 0; pair < pairs.size(); ++pair) {
            ways_.push_back(ways_of(pairs[pair], weights.forward[pair], weights.backward[pair]));
        }
        for (std::size_t row = 0; row < rows.size(); ++row) {
            room_.push_back(rows[row].room);
            members_.emplace_back();
            for (const int pair : rows[row].holding) add(pair, static_cast<int>(row), 0);
            for (const int pair : rows[row].working) add(pair, static_cast<int>(row), 1);
        }
    }

    // False if nothing was found that fits.
    bool run(const SelectionLimits& limits) {
        set(std::vector<int>(ways_.size(), 0));
        bound_ = cost();
        if (is_within()) {
            consider(0, 0);
            return true;
        }
        set(leanest());
        consider(0, 0);
        std::vector<double> prices(room_.size(), 0.0), best_prices = prices;
        double step = 1.0;
        int stale = 0;
        for (int round = 0; round < limits.rounds && !is_done(limits.gap); ++round) {
            heed();
            const double value = at_prices(prices);
            if (value > bound_ + 1e-9 * std::abs(bound_)) {
                stale = value > bound_ * (1 + 1e-4) ? 0 : stale + 1;
                bound_ = value;
                best_prices = prices;
            } else {
                ++stale;
            }
            if (round % 25 == 24 || stale == 12) consider(8, limits.gap);
            if (stale > 12) {
                step *= 0.5;
                stale = 0;
                prices = best_prices;
                at_prices(prices);
                if (step < 1e-3) break;
            }
            if (!move(prices, value, step)) break;
        }
        return best_cost_ < kInfinity;
    }

    double best_cost() const { return best_cost_; }
    double bound() const { return std::min(bound_ * (1 - 1e-12), best_cost_); }
    std::vector<int> best() const {
        std::vector<int> chosen;
        for (std::size_t pair = 0; pair < ways_.size(); ++pair) chosen.push_back(ways_[pair][best_[pair]].index);
        return chosen;
    }

  private:
    static std::vector<Way> ways_of(const PairWays& pair, double forward, double backward) {
        std::vector<Way> all, kept;
        for (std::size_t way = 0; way < pair.kept.size(); ++way) {
            const double cost =
                forward * static_cast<double>(pair.forward[way]) + backward * static_cast<double>(pair.backward[way]);
            const std::int64_t holds = pair.kept[way];
            all.push_back({cost, {holds, holds + pair.workspace[way]}, static_cast<int>(way)});
        }
        std::stable_sort(all.begin(), all.end(), [](const Way& one, const Way& other) {
            return one.cost != other.cost ? one.cost < other.cost : one.use[0] < other.use[0];
        });
        for (const Way& way : all) {
            const bool is_beaten = std::any_of(kept.begin(), kept.end(), [&](const Way& other) {
                return other.use[0] <= way.use[0] && other.use[1] <= way.use[1];
            });
            if (!is_beaten) kept.push_back(way);
        }
        return kept;
    }

    std::vector<int> leanest() const {
        std::vector<int> chosen;
        for (const std::vector<Way>& ways : ways_) {
            const auto least = std::min_element(
                ways.begin(), ways.end(), [](const Way& one, const Way& other) { return one.use[0] < other.use[0]; });
            chosen.push_back(static_cast<int>(least - ways.begin()));
        }
        return chosen;
    }

    void add(int pair, int row, int works) {
        members_[row].push_back({pair, works});
        places_[pair].push_back({row, works});
    }

    std::int64_t use(int pair, int way, int works) const { return ways_[pair][way].use[works]; }

    double cost() const {
        double sum = 0;
        for (std::size_t pair = 0; pair < ways_.size(); ++pair) sum += ways_[pair][chosen_[pair]].cost;
        return sum;
    }

    void set(std::vector<int> chosen) {
        chosen_ = std::move(chosen);
        slack_ = room_;
        for (std::size_t row = 0; row < room_.size(); ++row) {
            for (const Place& place : members_[row]) {
                slack_[row] -= use(place.other, chosen_[place.other], place.works);
            }
        }
    }

    void take(int pair, int way) {
        for (const Place& place : places_[pair]) {
            slack_[place.other] += use(pair, chosen_[pair], place.works) - use(pair, way, place.works);
        }
        chosen_[pair] = way;
    }

    // The relaxed problem's optimum at these prices, which bounds; what it chooses stays set.
    double at_prices(const std::vector<double>& prices) {
        double value = 0;
        for (std::size_t row = 0; row < room_.size(); ++row) value -= prices[row] * static_cast<double>(room_[row]);
        for (std::size_t pair = 0; pair < ways_.size(); ++pair) {
            double price[2] = {0, 0};
            for (const Place& place : places_[pair]) price[place.works] += prices[place.other];
            double least = kInfinity;
            for (std::size_t way = 0; way < ways_[pair].size(); ++way) {
                const Way& taken = ways_[pair][way];
                const double priced = taken.cost + price[0] * static_cast<double>(taken.use[0]) +
                                      price[1] * static_cast<double>(taken.use[1]);
                if (priced < least) {
                    least = priced;
                    relaxed_[pair] = static_cast<int>(way);
                }
            }
            value += least;
        }
        set(relaxed_);
        return value;
    }

    // Raises prices where memory is short, and lowers them where it is left (Polyak's step).
    bool move(std::vector<double>& prices, double value, double step) {
        double length = 0;
        for (std::size_t row = 0; row < prices.size(); ++row) {
            const double missing = -static_cast<double>(slack_[row]);
            if (prices[row] > 0 || missing > 0) length += missing * missing;
        }
        const double target = best_cost_ < kInfinity ? best_cost_ : dearest() * 1.05;
        if (length <= 0 || target <= value) return length > 0;
        const double size = step * (target - value) / length;
        for (std::size_t row = 0; row < prices.size(); ++row) {
            prices[row] = std::max(0.0, prices[row] - size * static_cast<double>(slack_[row]));
        }
        return true;
    }

    double dearest() const {
        double sum = 0;
        for (const std::vector<Way>& ways : ways_) sum += ways.back().cost;
        return sum;
    }

    bool is_done(double gap) const { return best_cost_ - bound_ <= gap * bound_ + 1e-9 * best_cost_; }

    bool is_within() const {
        return std::all_of(slack_.begin(), slack_.end(), [](std::int64_t slack) { return slack >= 0; });
    }

    // Throws Interrupted.
    static void heed() { Watch::is_stopped(std::chrono::steady_clock::now()); }

    // Makes what is set fit, betters it by some passes, and notes it if it is the best so far. Leaves it as it was.
    void consider(int passes, double gap) {
        const std::vector<int> before = chosen_;
        if (repair()) {
            quicken();
            for (int pass = 0; pass < passes && cost() > bound_ * (1 + gap) && exchange(); ++pass) quicken();
            const double found = cost();
            if (found < best_cost_) {
                best_cost_ = found;
                best_ = chosen_;
            }
        }
        set(before);
    }

    // Leaner ways for pairs of the row that misses most, by time added for what is missing, until all rows fit.
    bool repair() {
        while (true) {
            heed();
            const auto worst = std::min_element(slack_.begin(), slack_.end());
            if (worst == slack_.end() || *worst >= 0) return true;
            double least = kInfinity;
            int pair = -1, way = -1;
            for (const Place& place : members_[worst - slack_.begin()]) {
                const int now = chosen_[place.other];
                for (std::size_t next = 0; next < ways_[place.other].size(); ++next) {
                    if (use(place.other, next, place.works) >= use(place.other, now, place.works)) continue;
                    const double relief = relieved(place.other, static_cast<int>(next));
                    if (relief <= 0) continue;
                    const double added = ways_[place.other][next].cost - ways_[place.other][now].cost;
                    const double ratio = added > 0 ? added / relief : added * relief;
                    if (ratio < least) {
                        least = ratio;
                        pair = place.other;
                        way = static_cast<int>(next);
                    }
                }
            }
            if (pair < 0) return false;
            take(pair, way);
        }
    }

    // By how many bytes a way of the pair would lessen what is missing, in all rows together.
    double relieved(int pair, int way) const {
        double sum = 0;
        for (const Place& place : places_[pair]) {
            const std::int64_t less = use(pair, chosen_[pair], place.works) - use(pair, way, place.works);
            const std::int64_t slack = slack_[place.other];
            if (slack < 0) sum += static_cast<double>(std::min(less, -slack));
            if (slack >= 0 && less < 0 && slack + less < 0) return 0;  // it would break another row
        }
        return sum;
    }

    // Faster ways where there is room, those first that save most.
    bool quicken() {
        bool is_better = false;
        while (true) {
            heed();
            double most = 0;
            int pair = -1, way = -1;
            for (std::size_t one = 0; one < ways_.size(); ++one) {
                for (int next = 0; next < chosen_[one]; ++next) {
                    const double saved = ways_[one][chosen_[one]].cost - ways_[one][next].cost;
                    if (saved <= most) break;
                    if (!has_room(static_cast<int>(one), next)) continue;
                    most = saved;
                    pair = static_cast<int>(one);
                    way = next;
                    break;
                }
            }
            if (pair < 0) return is_better;
            take(pair, way);
            is_better = true;
        }
    }

    bool has_room(int pair, int way) const {
        for (const Place& place : places_[pair]) {
            if (slack_[place.other] + use(pair, chosen_[pair], place.works) < use(pair, way, place.works)) return false;
        }
        return true;
    }

    // A faster way for one pair and a leaner one for another, where that saves.
    bool exchange() {
        bool is_better = false;
        for (std::size_t pair = 0; pair < ways_.size(); ++pair) {
            for (int way = 0; way < chosen_[pair]; ++way) {
                if (pay_for(static_cast<int>(pair), way)) {
                    is_better = true;
                    break;
                }
            }
        }
        return is_better;
    }

    bool pay_for(int pair, int way) {
        const double saved = ways_[pair][chosen_[pair]].cost - ways_[pair][way].cost;
        missing_.clear();
        for (const Place& place : places_[pair]) {
            if (slack_[place.other] + use(pair, chosen_[pair], place.works) < use(pair, way, place.works)) {
                missing_.push_back(place.other);
            }
        }
        if (missing_.empty()) {
            take(pair, way);
            return true;
        }
        const int before = chosen_[pair];
        take(pair, way);
        double least = saved * (1 - 1e-9);
        int payer = -1, leaner = -1;
        for (const Place& place : members_[missing_[0]]) {
            const int other = place.other;
            if (other == pair) continue;
            for (std::size_t next = chosen_[other] + 1; next < ways_[other].size(); ++next) {
                const double added = ways_[other][next].cost - ways_[other][chosen_[other]].cost;
                if (added >= least) break;
                if (use(other, chosen_[other], place.works) - use(other, next, place.works) + slack_[missing_[0]] < 0) {
                    continue;
                }
                if (!mends(other, static_cast<int>(next))) continue;
                least = added;
                payer = other;
                leaner = static_cast<int>(next);
                break;
            }
        }
        take(payer < 0 ? pair : payer, payer < 0 ? before : leaner);
        return payer >= 0;
    }

    // Whether all rows that are missing memory fit with this way of the pair, and none of its others is broken.
    bool mends(int pair, int way) const {
        std::size_t mended = 0;
        for (const Place& place : places_[pair]) {
            const std::int64_t less = use(pair, chosen_[pair], place.works) - use(pair, way, place.works);
            if (slack_[place.other] + less < 0) return false;
            mended += slack_[place.other] < 0;
        }
        return mended == missing_.size();
    }

    std::vector<std::vector<Way>> ways_;       // of each pair, from fast to lean
    std::vector<std::vector<Place>> places_;   // of each pair, its rows
    std::vector<std::vector<Place>> members_;  // of each row, its pairs
    std::vector<std::int64_t> room_;
    std::vector<int> chosen_;
    std::vector<std::int64_t> slack_;  // of each row with what is chosen
    std::vector<int> relaxed_ = std::vector<int>(places_.size());
    std::vector<int> missing_;
    std::vector<int> best_;
    double best_cost_ = kInfinity;
    double bound_ = 0;
};

}  // namespace

Selection select_ways(const std::vector<PairWays>& pairs, const std::vector<MemoryRow>& rows, const Weights& weights,
                      const SelectionLimits& limits) {
    Selection made;
    Selector selector(pairs, rows, weights);
    made.fits = selector.run(limits);
    if (made.fits) {
        made.chosen = selector.best();
        made.cost = selector.best_cost();
        made.bound = selector.bound();
        return made;
    }
    for (const PairWays& pair : pairs) {
        const auto leanest = std::min_element(pair.kept.begin(), pair.kept.end());
        made.chosen.push_back(static_cast<int>(leanest - pair.kept.begin()));
    }
    for (const MemoryRow& row : rows) {
        std::int64_t use = 0;
        for (const int pair : row.holding) use += pairs[pair].kept[made.chosen[pair]];
        for (const int pair : row.working) {
            use += pairs[pair].kept[made.chosen[pair]] + pairs[pair].workspace[made.chosen[pair]];
        }
        if (use - row.room <= made.short_bytes) continue;
        made.short_bytes = use - row.room;
        made.at = row.at;
    }
    return made;
}

}  // namespace mosaic::search
