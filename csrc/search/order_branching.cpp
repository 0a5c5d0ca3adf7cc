#include "search/order_branching.h"

#include <algorithm>

namespace mosaic::search {
namespace {

constexpr double kLeastRuledOut = 1e-3;  // of the mix, by each of two orders; less hardly raises prices
constexpr std::size_t kMostPooled = 5000;
// Where the bound has not risen by this part for so many cases, what is missing is something else.
constexpr Ns kLeastRise = 10000;
constexpr std::size_t kMostInVain = 24;

}  // namespace

OrderBranching::OrderBranching(StageAreas& areas, PatternPricer& pricer, Mask members, const Prices& prices)
    : areas_(areas), pricer_(pricer), members_(members) {
    Order order(kMaxModules, 0);
    each(members, [&](int m) { order[static_cast<std::size_t>(m)] = areas.earlier(m) & members; });
    pool(prices);
    open_.push_back({prices.sum(members), 0, std::move(order), {}, prices});
}

// Stages that one case found may be of use to others.
void OrderBranching::pool(const Prices& prices) {
    for (const Pattern& pattern : prices.patterns) {
        if (pool_.size() < kMostPooled && pooled_.insert(pattern.stage).second) pool_.push_back(pattern);
    }
}

Ns OrderBranching::run(Ns incumbent, const Clock& clock) {
    const Order before = areas_.order();
    const auto is_later = [](const Case& a, const Case& b) {
        return a.bound != b.bound ? a.bound > b.bound : a.number > b.number;
    };
    Ns bound = incumbent;
    Ns risen = 0;
    std::size_t num_at_rise = 0;
    while (!open_.empty() && open_.front().bound < bound) {
        Pair pair{0, 0};
        if (open_.front().bound > risen + risen / kLeastRise) {
            risen = open_.front().bound;
            num_at_rise = num_cases_;
        }
        const bool is_in_vain = num_cases_ - num_at_rise >= kMostInVain;
        if (is_in_vain || clock.is_over() || !choose(open_.front(), pair)) {
            bound = open_.front().bound;
            break;
        }
        std::pop_heap(open_.begin(), open_.end(), is_later);
        const Case from = std::move(open_.back());
        open_.pop_back();
        const std::size_t before_split = open_.size();
        split(from, pair, incumbent, clock);
        for (std::size_t size = before_split + 1; size <= open_.size(); ++size) {
            std::push_heap(open_.begin(), open_.begin() + static_cast<std::ptrdiff_t>(size), is_later);
        }
    }
    areas_.set_order(before);
    pricer_.take_order();
    return bound;
}

// How much of the mix, by what it costs, has a stage with one of the first and one of the others.
double OrderBranching::ruled_out(const Case& from, Mask early, Mask late) const {
    double time = 0;
    for (const Share& share : from.prices.mix) {
        if ((share.stage & early) != 0 && (share.stage & late) != 0)
            time += share.amount * static_cast<double>(from.prices.sum(share.stage));
    }
    return time;
}

// Of modules each of whose orders rules out some of the mix, the two whose order keeps most worth apart: mixes change
// from case to case, and what is apart stays so. Returns whether there are any.
bool OrderBranching::choose(const Case& from, Pair& pair) const {
    Order later(kMaxModules, 0);
    each(members_, [&](int m) {
        each(from.order[static_cast<std::size_t>(m)],
             [&](int n) { later[static_cast<std::size_t>(n)] |= Mask{1} << m; });
    });
    const auto until = [&](int m) { return from.order[static_cast<std::size_t>(m)] | from.with(m); };
    const auto since = [&](int m) { return later[static_cast<std::size_t>(m)] | from.with(m); };
    const double least = kLeastRuledOut * static_cast<double>(from.bound);
    double most = -1;
    each(members_, [&](int b) {
        each(members_ & ~until(b) & ~since(b) & ((Mask{1} << b) - 1), [&](int a) {
            const double both =
                std::min(kept_apart(from, later, until(a), since(b)), kept_apart(from, later, until(b), since(a)));
            if (both <= most) return;
            if (std::min(ruled_out(from, until(a), since(b)), ruled_out(from, until(b), since(a))) < least) return;
            most = both;
            pair = {a, b};
        });
    });
    return most >= 0;
}

// The worth of all pairs of modules that could share a stage and are in these two sets.
double OrderBranching::kept_apart(const Case& from, const Order& later, Mask early, Mask late) const {
    double worth = 0;
    each(early, [&](int m) {
        const auto at = static_cast<std::size_t>(m);
        const Mask others = late & ~from.order[at] & ~later[at];
        worth += static_cast<double>(from.prices.of[at]) * static_cast<double>(from.prices.sum(others));
    });
    return worth;
}

void OrderBranching::split(const Case& from, Pair pair, Ns incumbent, const Clock& clock) {
    const Mask first = from.with(pair.first);
    const Mask second = from.with(pair.second);
    add(from, one_first(from.order, first, second), from.together, incumbent, clock);
    add(from, one_first(from.order, second, first), from.together, incumbent, clock);
    if (areas_.together(first | second) >= kNever) return;
    std::vector<Mask> together{first | second};
    for (const Mask set : from.together) {
        if ((set & together[0]) == 0) together.push_back(set);
    }
    add(from, both_at_once(from.order, first | second), std::move(together), incumbent, clock);
}

// Where time is over on the way, prices are lower, but never lower than before.
void OrderBranching::add(const Case& from, Order order, std::vector<Mask> together, Ns incumbent, const Clock& clock) {
    areas_.set_order(order);
    pricer_.take_order(together);
    Pricing pricing{{}, &from.prices, incumbent};
    for (const Pattern& pattern : pool_) {
        Mask apart = 0;
        each(pattern.stage, [&](int m) { apart |= areas_.apart(m); });
        const auto is_cut = [&](Mask set) { return (pattern.stage & set) != 0 && (~pattern.stage & set) != 0; };
        if ((apart & pattern.stage) == 0 && std::none_of(together.begin(), together.end(), is_cut)) {
            pricing.start.push_back(pattern);
        }
    }
    Prices prices = find_prices(areas_, pricer_, members_, pricing, clock);
    const Ns bound = std::max(from.bound, prices.sum(members_));
    pool(prices);
    ++num_cases_;
    if (bound < incumbent) {
        open_.push_back({bound, num_cases_, std::move(order), std::move(together), std::move(prices)});
    }
}

// All of the first set before all of the second.
OrderBranching::Order OrderBranching::one_first(Order order, Mask first, Mask second) const {
    Mask early = first;
    each(first, [&](int m) { early |= order[static_cast<std::size_t>(m)]; });
    each(members_, [&](int m) {
        Mask& own = order[static_cast<std::size_t>(m)];
        if (((own | Mask{1} << m) & second) != 0) own |= early;
    });
    return order;
}

OrderBranching::Order OrderBranching::both_at_once(Order order, Mask both) const {
    Mask early = 0;
    each(both, [&](int m) { early |= order[static_cast<std::size_t>(m)]; });
    each(members_, [&](int m) {
        Mask& own = order[static_cast<std::size_t>(m)];
        if ((own & both) != 0) own |= both;
        if ((own & both) != 0 || (both >> m & 1) != 0) own |= early;
    });
    return order;
}

OrderBounds bound_by_order(const Problem& problem, Ns incumbent, const Clock& clock) {
    StageAreas areas(problem);
    PatternPricer pricer(areas, problem.all());
    const Prices prices = find_prices(areas, pricer, problem.all(), {}, clock);
    OrderBranching cases(areas, pricer, problem.all(), prices);
    return {prices.sum(problem.all()), cases.run(incumbent, clock)};
}

}  // namespace mosaic::search
