#include <algorithm>

#include "search/plans/plan_search.h"

namespace mosaic::search {

RestBound::RestBound(const Problem& problem) : all_(problem.all()), longest_(problem) {
    const double room = static_cast<double>(problem.machine.num_devices) * problem.machine.num_slots;
    const auto size = static_cast<std::size_t>(problem.size());
    least_.assign(size, kNever);
    earlier_.assign(size, 0);
    later_.assign(size, 0);
    tail_.assign(size, 0);
    for (std::size_t m = 0; m < size; ++m) {
        double work = static_cast<double>(kNever);
        for (const Option& option : problem.modules[m].options) {
            least_[m] = std::min(least_[m], option.latency());
            work = std::min(work, static_cast<double>(option.latency()) * option.area());
        }
        work_.push_back(work / room);
        earlier_[m] = problem.modules[m].before;
    }
    for (std::size_t round = 0; round < size; ++round) {  // as many rounds as the longest chain can have
        for (std::size_t m = 0; m < size; ++m) {
            Ns longest = 0;
            each(earlier_[m], [&](int n) { earlier_[m] |= earlier_[static_cast<std::size_t>(n)]; });
            for (std::size_t n = 0; n < size; ++n) {
                if ((problem.modules[n].before >> m & 1) != 0) longest = std::max(longest, tail_[n]);
            }
            tail_[m] = least_[m] + longest;
        }
    }
    for (std::size_t m = 0; m < size; ++m) {
        each(earlier_[m], [&](int n) { later_[static_cast<std::size_t>(n)] |= Mask{1} << m; });
    }
}

double RestBound::work_of(Mask set) const {
    double work = 0;
    each(set, [&](int m) { work += work_[static_cast<std::size_t>(m)]; });
    return work;
}

Ns RestBound::operator()(Mask done) const {
    const Mask rest = all_ & ~done;
    double longest = work_of(rest);
    each(rest, [&](int m) {
        // What comes before a module, its own stage, and what comes after: three times that do not overlap.
        const double through =
            work_of(earlier(m) & rest) + static_cast<double>(least_[static_cast<std::size_t>(m)]) + work_of(later(m));
        longest = std::max({longest, through, static_cast<double>(tail_[static_cast<std::size_t>(m)])});
    });
    // A sum of doubles may be above the true value in its last bits; a bound must not be.
    return static_cast<Ns>(longest * (1 - 1e-12));
}

Ns RestBound::sharper(Mask done, Ns at_most) {
    const auto known = sharper_.find(done);
    const Ns plain = known != sharper_.end() ? known->second : (*this)(done);
    if (known != sharper_.end() || plain >= at_most) return plain;
    const Mask rest = all_ & ~done;
    Ns best = longest_(rest, plain, at_most);
    // What comes before a module, its own stage, and what comes after; where that is all there is, or nearly.
    each(rest, [&](int m) {
        const Mask before = earlier(m) & rest;
        const Mask after = later(m);
        if (2 * __builtin_popcountll(before | after) < __builtin_popcountll(rest) || best >= at_most) return;
        const Ns own = least_[static_cast<std::size_t>(m)];
        const Ns before_plain = static_cast<Ns>(work_of(before) * (1 - 1e-12));
        const Ns after_plain = (*this)(all_ & ~after);
        const Ns before_time = longest_(before, before_plain, at_most - own - after_plain);
        best = std::max(best, before_time + own + longest_(after, after_plain, at_most - own - before_time));
    });
    sharper_.emplace(done, best);
    return best;
}

}  // namespace mosaic::search
