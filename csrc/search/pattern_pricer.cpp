#include "search/pattern_pricer.h"

#include <algorithm>
#include <queue>

namespace mosaic::search {
namespace {

constexpr std::size_t kMostRectangles = 400000;
constexpr std::size_t kMostAreas = 24000000;
// Of one knapsack; what is not settled by then counts with its bound. A rectangle is cut in two where few do not do.
constexpr std::int64_t kMostNodes = 20000;
constexpr std::int64_t kFewNodes = 300;
// So many modules to a chain, in the mean, and what chains rule out is worth another look at each node.
constexpr double kFewChains = 4.0 / 3;
constexpr std::size_t kMostRemembered = 1000000;  // costs of sets

}  // namespace

// All ways to fill the room at one rectangle's far corner, depth first, best worth for area first.
class PatternPricer::Knapsack {
  public:
    Knapsack(const PatternPricer& pricer, const std::int32_t* areas, const std::vector<double>& prices)
        : room_(static_cast<std::int64_t>(pricer.room_)) {
        for (std::size_t c = 0; c < pricer.chains_.size(); ++c) {
            for (const int place : pricer.chains_[c]) {
                const Unit& unit = pricer.units_[static_cast<std::size_t>(place)];
                const std::int64_t area = pricer.area_of(unit, areas);
                if (area <= room_)
                    items_.push_back({unit.modules, c, area, worth_of(unit.modules, prices), unit.apart});
            }
        }
        has_chains_ =
            kFewChains * static_cast<double>(pricer.chains_.size()) <= static_cast<double>(pricer.units_.size());
        std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
            const double left = a.worth * static_cast<double>(b.area);
            const double right = b.worth * static_cast<double>(a.area);
            return left != right ? left > right : a.modules < b.modules;
        });
    }

    // The most worth above `floor`, its set; is_open() where nodes ran out.
    double best(double floor, std::int64_t nodes, Mask& set) {
        best_ = floor;
        set_ = 0;
        nodes_left_ = nodes;
        search(0, 0, 0, 0, room_);
        set = set_;
        return best_;
    }

    // Calls `visit` with every set of at least this worth that has a module of each of two sets, until it returns false
    // or nodes or time are over.
    template <typename Visit>
    bool every(double floor, Mask one_of, Mask another_of, std::int64_t nodes, const Clock& clock, Visit& visit) {
        nodes_left_ = nodes;
        clock_ = &clock;
        one_of_ = one_of;
        another_of_ = another_of;
        rest_.assign(items_.size() + 1, 0);
        for (std::size_t i = items_.size(); i-- > 0;) rest_[i] = rest_[i + 1] | items_[i].modules;
        return every(0, 0, 0, 0, room_, floor, visit);
    }

    bool is_open() const { return nodes_left_ < 0; }

  private:
    struct Item {
        Mask modules;
        std::size_t chain;
        std::int64_t area;
        double worth;
        Mask apart;
    };

    // At most so much is worth what still fits; `price` is what room is worth at the end.
    double bound(std::size_t i, Mask apart, double worth, std::int64_t room, double& price) const {
        for (; i < items_.size(); ++i) {
            const Item& item = items_[i];
            if ((apart & item.modules) != 0) continue;
            if (item.area > room) {
                price = item.worth / static_cast<double>(item.area);
                return worth + price * static_cast<double>(room);
            }
            room -= item.area;
            worth += item.worth;
        }
        price = 0;
        return worth;
    }

    // The same where of each chain one item counts at most: all gain what they are worth beyond the price of their
    // room, and there is as much room as anyone pays for.
    double bound_by_chains(std::size_t i, Mask apart, double worth, std::int64_t room, double price) const {
        worth += price * static_cast<double>(room);
        double most[kMaxModules] = {};
        for (; i < items_.size(); ++i) {
            const Item& item = items_[i];
            const double gain = item.worth - price * static_cast<double>(item.area);
            if (gain <= most[item.chain] || (apart & item.modules) != 0) continue;
            worth += gain - most[item.chain];
            most[item.chain] = gain;
        }
        return worth;
    }

    // Whether the items from `i` on may bring the worth above `floor`.
    bool may_exceed(double floor, std::size_t i, Mask apart, double worth, std::int64_t room) const {
        double price = 0;
        if (bound(i, apart, worth, room, price) <= floor) return false;
        return !has_chains_ || bound_by_chains(i, apart, worth, room, price) > floor;
    }

    void search(std::size_t i, Mask set, Mask apart, double worth, std::int64_t room) {
        if (worth > best_) {
            best_ = worth;
            set_ = set;
        }
        while (i < items_.size() && ((apart & items_[i].modules) != 0 || items_[i].area > room)) ++i;
        if (i == items_.size() || --nodes_left_ < 0 || !may_exceed(best_, i, apart, worth, room)) return;
        const Item& item = items_[i];
        search(i + 1, set | item.modules, apart | item.apart, worth + item.worth, room - item.area);
        search(i + 1, set, apart, worth, room);
    }

    template <typename Visit>
    bool every(std::size_t i, Mask set, Mask apart, double worth, std::int64_t room, double floor, Visit& visit) {
        while (i < items_.size() && ((apart & items_[i].modules) != 0 || items_[i].area > room)) ++i;
        const Mask most = set | (rest_[i] & ~apart);
        if ((most & one_of_) == 0 || (most & another_of_) == 0) return true;
        if (i == items_.size()) return worth < floor || visit(set);
        double price = 0;
        if (bound(i, apart, worth, room, price) < floor) return true;
        if (--nodes_left_ < 0 || (nodes_left_ % 1024 == 0 && clock_->is_over())) return false;
        const Item& item = items_[i];
        return every(i + 1, set | item.modules, apart | item.apart, worth + item.worth, room - item.area, floor,
                     visit) &&
               every(i + 1, set, apart, worth, room, floor, visit);
    }

    std::int64_t room_;
    std::vector<Item> items_;
    bool has_chains_ = false;
    double best_ = 0;
    Mask set_ = 0;
    std::int64_t nodes_left_ = 0;
    const Clock* clock_ = nullptr;
    Mask one_of_ = 0;
    Mask another_of_ = 0;
    std::vector<Mask> rest_;  // modules of all items from each on
};

PatternPricer::PatternPricer(const StageAreas& areas, Mask members)
    : areas_(areas), members_(members), room_(static_cast<double>(areas.room())) {
    each(members, [&](int m) { modules_.push_back(m); });
    take_order();
    append({0, static_cast<std::int32_t>(areas.firsts().size()) - 1, 0,
            static_cast<std::int32_t>(areas.seconds().size()) - 1, 0});
}

void PatternPricer::take_order(const std::vector<Mask>& together) {
    units_.clear();
    std::vector<int> place_of(kMaxModules, -1);
    Mask first_ones = 0;
    for (const int m : modules_) {
        Mask modules = Mask{1} << m;
        for (const Mask set : together) modules |= (set >> m & 1) != 0 ? set : 0;
        if (m != __builtin_ctzll(modules)) continue;
        Unit unit{modules, 0, 0};
        each(modules, [&](int one) {
            unit.places |= Mask{1} << __builtin_popcountll(members_ & ((Mask{1} << one) - 1));
            unit.apart |= areas_.apart(one);
        });
        place_of[static_cast<std::size_t>(m)] = static_cast<int>(units_.size());
        first_ones |= Mask{1} << m;
        units_.push_back(unit);
    }
    chains_ = areas_.chains(first_ones);
    for (auto& chain : chains_) {
        for (int& m : chain) m = place_of[static_cast<std::size_t>(m)];
    }
}

Mask PatternPricer::with(int module) const {
    const auto holds = [&](const Unit& unit) { return (unit.modules >> module & 1) != 0; };
    return std::find_if(units_.begin(), units_.end(), holds)->modules;
}

std::int64_t PatternPricer::area_of(const Unit& unit, const std::int32_t* areas) const {
    std::int64_t area = 0;
    each(unit.places, [&](int place) { area += areas[place]; });
    return area;
}

double PatternPricer::worth_of(Mask modules, const std::vector<double>& prices) {
    double worth = 0;
    each(modules, [&](int m) { worth += prices[static_cast<std::size_t>(m)]; });
    return worth;
}

void PatternPricer::append(Rectangle rectangle) {
    rectangles_.push_back(rectangle);
    const Ns first = areas_.firsts()[static_cast<std::size_t>(rectangle.first_high)];
    const Ns second = areas_.seconds()[static_cast<std::size_t>(rectangle.second_high)];
    for (const int m : modules_) area_.push_back(static_cast<std::int32_t>(areas_.area(m, first, second)));
}

// One nanosecond more than the truth, so that it is never zero.
double PatternPricer::near_cost(const Rectangle& at) const {
    return static_cast<double>(areas_.firsts()[static_cast<std::size_t>(at.first_low)] +
                               areas_.seconds()[static_cast<std::size_t>(at.second_low)] + 1);
}

bool PatternPricer::is_point(const Rectangle& at) const {
    return at.first_low == at.first_high && at.second_low == at.second_high;
}

bool PatternPricer::is_full() const { return rectangles_.size() + 2 > kMostRectangles || area_.size() > kMostAreas; }

bool PatternPricer::cut(std::size_t index) {
    if (rectangles_[index].child != 0) return true;
    if (is_full()) return false;
    const auto width = [](const std::vector<Ns>& times, std::int32_t low, std::int32_t high) {
        const auto from = static_cast<double>(times[static_cast<std::size_t>(low)] + 1);
        return low == high ? -1.0 : static_cast<double>(times[static_cast<std::size_t>(high)] + 1) / from;
    };
    Rectangle left = rectangles_[index];
    Rectangle right = left;
    if (width(areas_.firsts(), left.first_low, left.first_high) >=
        width(areas_.seconds(), left.second_low, left.second_high)) {
        left.first_high = (left.first_low + left.first_high) / 2;
        right.first_low = left.first_high + 1;
    } else {
        left.second_high = (left.second_low + left.second_high) / 2;
        right.second_low = left.second_high + 1;
    }
    rectangles_[index].child = static_cast<std::int32_t>(rectangles_.size());
    append(left);
    append(right);
    return true;
}

// Steps of the upper hull of a chain's modules over area: what the fractional knapsack takes of it, best first.
void PatternPricer::add_hull(std::size_t index, const std::vector<int>& chain, const std::vector<double>& prices) {
    const std::int32_t* areas = areas_of(index);
    points_.clear();
    for (const int place : chain) {
        const Unit& unit = units_[static_cast<std::size_t>(place)];
        const auto area = static_cast<double>(area_of(unit, areas));
        const double worth = worth_of(unit.modules, prices);
        if (area <= room_ && worth > 0) points_.push_back({area, worth});
    }
    std::sort(points_.begin(), points_.end(), [](const Part& a, const Part& b) { return a.area < b.area; });
    const std::size_t start = parts_.size();  // steps of this chain, falling in worth for area
    Part end{0, 0};
    for (const Part& point : points_) {
        Part step{point.area - end.area, point.worth - end.worth};
        if (step.worth <= 0) continue;
        while (parts_.size() > start && parts_.back().worth * step.area <= step.worth * parts_.back().area) {
            step.area += parts_.back().area;
            step.worth += parts_.back().worth;
            parts_.pop_back();
        }
        parts_.push_back(step);
        end = point;
    }
}

double PatternPricer::most_worth(std::size_t index, const std::vector<double>& prices) {
    parts_.clear();
    for (const auto& chain : chains_) add_hull(index, chain, prices);
    std::sort(parts_.begin(), parts_.end(),
              [](const Part& a, const Part& b) { return a.worth * b.area > b.worth * a.area; });
    double room = room_;
    double worth = 0;
    for (const Part& part : parts_) {
        if (part.area > room) return worth + part.worth * room / part.area;
        room -= part.area;
        worth += part.worth;
    }
    return worth;
}

Ns PatternPricer::cost(Mask set) {
    if (costs_.size() > kMostRemembered) costs_.clear();
    const auto [place, is_new] = costs_.try_emplace(set, 0);
    if (is_new) place->second = areas_.together(set);
    return place->second;
}

double PatternPricer::best_ratio(const std::vector<double>& prices, double stop, std::size_t enough, const Clock& clock,
                                 std::vector<Pattern>& found) {
    using Entry = std::pair<double, std::size_t>;  // bound, rectangle
    std::priority_queue<Entry> queue;
    queue.emplace(most_worth(0, prices) / near_cost(rectangles_[0]), 0);
    const std::size_t before = found.size();
    double settled = stop;  // of patterns found and of rectangles that are not cut
    while (!queue.empty()) {
        const auto [bound, index] = queue.top();
        if (bound <= settled) break;
        if (found.size() - before >= enough || clock.is_over()) return bound;
        queue.pop();
        const bool is_small = is_point(rectangles_[index]);
        const double near = near_cost(rectangles_[index]);
        Knapsack knapsack(*this, areas_of(index), prices);
        Mask set = 0;
        const double worth = knapsack.best(settled * near, is_small ? kMostNodes : kFewNodes, set);
        const double left = knapsack.is_open() ? bound : std::min(bound, worth / near);
        if (set != 0) settled = std::max(settled, take(set, prices, stop, before, found));
        if (left <= settled) continue;
        if (is_small || !cut(index)) {
            settled = left;
            continue;
        }
        const auto child = static_cast<std::size_t>(rectangles_[index].child);
        for (const std::size_t half : {child, child + 1}) {
            const double ratio = std::min(left, most_worth(half, prices) / near_cost(rectangles_[half]));
            if (ratio > settled) queue.emplace(ratio, half);
        }
    }
    return settled;
}

// Returns what a set is worth for what it costs, which may be more than at the corner where it was found.
double PatternPricer::take(Mask set, const std::vector<double>& prices, double stop, std::size_t before,
                           std::vector<Pattern>& found) {
    const Ns own = cost(set);
    const double worth = worth_of(set, prices);
    const double ratio = worth / static_cast<double>(own + 1);
    const bool is_new = ratio > stop && std::none_of(found.begin() + static_cast<std::ptrdiff_t>(before), found.end(),
                                                     [&](const Pattern& other) { return other.stage == set; });
    if (is_new) found.push_back({set, own});
    return ratio;
}

bool PatternPricer::list(const std::vector<double>& prices, double slack, std::size_t most, const Clock& clock,
                         std::unordered_map<Mask, Ns>& found) {
    std::vector<std::size_t> open{0};
    std::vector<Mask> sets;
    auto keep = [&](Mask set) {
        if (found.count(set) == 0) sets.push_back(set);
        return found.size() + sets.size() <= most;
    };
    while (!open.empty()) {
        const std::size_t index = open.back();
        open.pop_back();
        const double floor = near_cost(rectangles_[index]) - 1 - slack;
        if (most_worth(index, prices) < floor) continue;
        if (clock.is_over()) return false;
        sets.clear();
        const bool is_whole = is_point(rectangles_[index]) || is_full();
        const std::int64_t nodes = is_whole ? INT64_MAX : kFewNodes;
        // What a set takes at least are times of its own options: elsewhere it would only be found again.
        const Rectangle at = rectangles_[index];
        const auto place = [](std::int32_t of) { return static_cast<std::size_t>(of); };
        const Mask by_first = areas_.with_first(members_, place(at.first_low), place(at.first_high));
        const Mask by_second = areas_.with_second(members_, place(at.second_low), place(at.second_high));
        Knapsack knapsack(*this, areas_of(index), prices);
        if (knapsack.every(floor, by_first, by_second, nodes, clock, keep)) {
            for (const Mask set : sets) {
                const double worth = worth_of(set, prices);
                const Ns own = cost(set);
                if (static_cast<double>(own) <= worth + slack) found.emplace(set, own);
            }
        } else if (!is_whole && cut(index)) {
            const auto child = static_cast<std::size_t>(rectangles_[index].child);
            open.insert(open.end(), {child, child + 1});
        } else {
            return false;
        }
    }
    return true;
}

}  // namespace mosaic::search
