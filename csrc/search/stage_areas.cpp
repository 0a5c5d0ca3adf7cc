#include "search/stage_areas.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "search/plans/chains.h"

namespace mosaic::search {
StageAreas::StageAreas(const Problem& problem)
    : room_(std::int64_t{problem.machine.num_devices} * problem.machine.num_slots) {
    std::set<Ns> firsts;
    std::set<Ns> seconds;
    for (const Module& module : problem.modules) {
        std::vector<Need> all;
        Ns alone = kNever;
        for (const Option& option : module.options) {
            if (problem.machine.memory != 0 && option.memory > problem.machine.memory) continue;
            const bool phases = problem.objective == Objective::phases;
            all.push_back({option.area(), phases ? option.forward : option.latency(), phases ? option.backward : 0});
            alone = std::min(alone, option.latency());
        }
        std::sort(all.begin(), all.end(), [](const Need& a, const Need& b) {
            return std::tie(a.area, a.first, a.second) < std::tie(b.area, b.first, b.second);
        });
        std::vector<Need> kept;
        for (const Need& need : all) {
            const bool beaten = std::any_of(kept.begin(), kept.end(), [&](const Need& other) {
                return other.first <= need.first && other.second <= need.second;
            });
            if (beaten) continue;
            kept.push_back(need);
            firsts.insert(need.first);
            seconds.insert(need.second);
        }
        needs_.push_back(std::move(kept));
        alone_.push_back(alone);
    }
    firsts_.assign(firsts.begin(), firsts.end());
    seconds_.assign(seconds.begin(), seconds.end());
    find_owners();
    find_order(problem);
}

void StageAreas::find_owners() {
    const auto mark = [](const std::vector<Ns>& times, Ns time, std::size_t m, std::vector<Mask>& owners) {
        const auto at = static_cast<std::size_t>(std::lower_bound(times.begin(), times.end(), time) - times.begin());
        owners[at] |= Mask{1} << m;
        return at;
    };
    least_first_.assign(needs_.size(), firsts_.size());
    least_second_.assign(needs_.size(), seconds_.size());
    first_owners_.assign(firsts_.size(), 0);
    second_owners_.assign(seconds_.size(), 0);
    for (std::size_t m = 0; m < needs_.size(); ++m) {
        for (const Need& need : needs_[m]) {
            least_first_[m] = std::min(least_first_[m], mark(firsts_, need.first, m, first_owners_));
            least_second_[m] = std::min(least_second_[m], mark(seconds_, need.second, m, second_owners_));
        }
    }
}

Mask StageAreas::with(const std::vector<Mask>& owners, Mask set, std::size_t low, std::size_t high) {
    Mask found = 0;
    for (std::size_t place = low; place <= high && (set & ~found) != 0; ++place) found |= owners[place];
    return found & set;
}

void StageAreas::find_order(const Problem& problem) {
    const auto size = static_cast<std::size_t>(problem.size());
    std::vector<Mask> all;
    for (const Module& module : problem.modules) all.push_back(module.before);
    for (std::size_t round = 0; round < size; ++round) {  // as many rounds as the longest chain can have
        for (Mask& earlier : all) {
            each(earlier, [&](int other) { earlier |= all[static_cast<std::size_t>(other)]; });
        }
    }
    set_order(std::move(all));
}

void StageAreas::set_order(std::vector<Mask> earlier) {
    earlier_ = std::move(earlier);
    earlier_.resize(needs_.size());
    apart_ = earlier_;
    for (std::size_t m = 0; m < apart_.size(); ++m) {
        each(earlier_[m], [&](int other) { apart_[static_cast<std::size_t>(other)] |= Mask{1} << m; });
    }
}

std::int64_t StageAreas::area(int module, Ns first, Ns second) const {
    for (const Need& need : needs_[static_cast<std::size_t>(module)]) {
        if (need.first <= first && need.second <= second) return need.area;
    }
    return room_ + 1;
}

// As the first time rises, the least second time that leaves enough room falls. The sum of areas is kept up to date: a
// step of one time changes the areas of the few modules that have an option of that time.
class StageAreas::Frontier {
  public:
    Frontier(const StageAreas& areas, Mask set) : areas_(areas), set_(set) {
        list(areas.firsts_, areas.first_owners_, areas.least_first_, firsts_);
        list(areas.seconds_, areas.second_owners_, areas.least_second_, seconds_);
    }

    Ns least() {
        if (firsts_.empty() || seconds_.empty()) return kNever;
        std::size_t second = start();
        Ns best = kNever;
        for (std::size_t first = 0; first < firsts_.size(); ++first) {
            if (time(first, 0) >= best) return best;
            if (first > 0) take(areas_.first_owners_[firsts_[first]], first, second);
            while (total_ <= areas_.room_) {
                best = std::min(best, time(first, second));
                if (second == 0) return best;
                --second;
                take(areas_.second_owners_[seconds_[second + 1]], first, second);
            }
        }
        return best;
    }

  private:
    // Places of all times that any member has, rising; without those that are too short for some member.
    void list(const std::vector<Ns>& times, const std::vector<Mask>& owners, const std::vector<std::size_t>& least,
              std::vector<std::size_t>& found) const {
        std::size_t from = 0;
        each(set_, [&](int m) { from = std::max(from, least[static_cast<std::size_t>(m)]); });
        for (std::size_t place = from; place < times.size(); ++place) {
            if ((owners[place] & set_) != 0) found.push_back(place);
        }
    }

    // The least second time that leaves enough room beside the shortest first, or the longest where none does.
    std::size_t start() {
        std::size_t high = seconds_.size() - 1;
        take(set_, 0, high);
        if (total_ > areas_.room_) return high;
        for (std::size_t low = 0; low < high;) {
            const std::size_t middle = low + (high - low) / 2;
            take(set_, 0, middle);
            if (total_ <= areas_.room_) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        take(set_, 0, high);
        return high;
    }

    Ns time(std::size_t first, std::size_t second) const {
        return areas_.firsts_[firsts_[first]] + areas_.seconds_[seconds_[second]];
    }

    // Members among these need another area at these times.
    void take(Mask modules, std::size_t first, std::size_t second) {
        each(modules & set_, [&](int m) {
            std::int64_t& own = area_[m];
            total_ -= own;
            own = areas_.area(m, areas_.firsts_[firsts_[first]], areas_.seconds_[seconds_[second]]);
            total_ += own;
        });
    }

    const StageAreas& areas_;
    Mask set_;
    std::vector<std::size_t> firsts_;  // places
    std::vector<std::size_t> seconds_;
    std::int64_t area_[kMaxModules] = {};  // by module
    std::int64_t total_ = 0;
};

Ns StageAreas::together(Mask set) const { return Frontier(*this, set).least(); }

std::vector<Mask> StageAreas::parts() const {
    std::vector<Mask> found;
    Mask left = apart_.size() == kMaxModules ? ~Mask{0} : (Mask{1} << apart_.size()) - 1;
    while (left != 0) {
        Mask part = left & -left;
        for (Mask grown = 0; grown != part;) {
            grown = part;
            each(grown, [&](int m) { part |= left & ~apart(m); });
        }
        found.push_back(part);
        left &= ~part;
    }
    return found;
}

std::vector<std::vector<int>> StageAreas::chains(Mask set) const { return split_into_chains(earlier_, set); }

}  // namespace mosaic::search
