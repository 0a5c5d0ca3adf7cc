#include "stage_areas.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "chains.h"

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
    find_places();
    find_order(problem);
}

void StageAreas::find_places() {
    const auto mark = [](const std::vector<Ns>& times, Ns time, Places& places, std::size_t& least) {
        const auto at = static_cast<std::size_t>(std::lower_bound(times.begin(), times.end(), time) - times.begin());
        places[at / 64] |= std::uint64_t{1} << at % 64;
        least = std::min(least, at);
    };
    least_first_.assign(needs_.size(), firsts_.size());
    least_second_.assign(needs_.size(), seconds_.size());
    first_places_.assign(needs_.size(), Places(firsts_.size() / 64 + 1, 0));
    second_places_.assign(needs_.size(), Places(seconds_.size() / 64 + 1, 0));
    for (std::size_t m = 0; m < needs_.size(); ++m) {
        for (const Need& need : needs_[m]) {
            mark(firsts_, need.first, first_places_[m], least_first_[m]);
            mark(seconds_, need.second, second_places_[m], least_second_[m]);
        }
    }
}

Mask StageAreas::with(const std::vector<Places>& places, Mask set, std::size_t low, std::size_t high) {
    Mask found = 0;
    each(set, [&](int m) {
        const Places& own = places[static_cast<std::size_t>(m)];
        for (std::size_t word = low / 64; word <= high / 64; ++word) {
            std::uint64_t bits = own[word];
            if (word == low / 64) bits &= ~std::uint64_t{0} << low % 64;
            if (word == high / 64) bits &= ~std::uint64_t{0} >> (63 - high % 64);
            if (bits != 0) found |= Mask{1} << m;
        }
    });
    return found;
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
    Frontier(const StageAreas& areas, Mask set) : areas_(areas) {
        each(set, [&](int m) { members_.push_back({m, 0}); });
        list(areas.firsts_, areas.first_places_, areas.least_first_, firsts_);
        list(areas.seconds_, areas.second_places_, areas.least_second_, seconds_);
    }

    Ns least() {
        if (firsts_.empty() || seconds_.empty()) return kNever;
        find_start();
        Ns best = kNever;
        std::size_t second = start_;
        for (std::size_t first = 0; first < firsts_.size(); ++first) {
            if (time(firsts_[first], seconds_[0]) >= best) return best;
            if (first > 0) step(areas_.first_places_, firsts_[first], firsts_[first], seconds_[second]);
            while (total_ <= areas_.room_) {
                best = std::min(best, time(firsts_[first], seconds_[second]));
                if (second == 0) return best;
                step(areas_.second_places_, seconds_[second], firsts_[first], seconds_[second - 1]);
                --second;
            }
        }
        return best;
    }

  private:
    struct Member {
        int module;
        std::int64_t area;
    };

    // Places of all times that any member has, rising; without those that are too short for some member.
    void list(const std::vector<Ns>& times, const std::vector<Places>& places, const std::vector<std::size_t>& least,
              std::vector<std::size_t>& found) const {
        std::size_t from = 0;
        for (const Member& member : members_) from = std::max(from, least[static_cast<std::size_t>(member.module)]);
        for (std::size_t word = from / 64; word <= times.size() / 64; ++word) {
            std::uint64_t bits = 0;
            for (const Member& member : members_) bits |= places[static_cast<std::size_t>(member.module)][word];
            if (word == from / 64) bits &= ~std::uint64_t{0} << from % 64;
            each(bits, [&](int bit) { found.push_back(word * 64 + static_cast<std::size_t>(bit)); });
        }
    }

    // The least second time that leaves enough room beside the shortest first, or the longest where none does.
    void find_start() {
        const auto judge = [&](std::size_t first, std::size_t second) {
            for (Member& member : members_) take(member, firsts_[first], seconds_[second]);
            return total_ <= areas_.room_;
        };
        start_ = seconds_.size() - 1;
        if (!judge(0, start_)) return;
        std::size_t low = 0;
        while (low < start_) {
            const std::size_t middle = low + (start_ - low) / 2;
            if (judge(0, middle)) {
                start_ = middle;
            } else {
                low = middle + 1;
            }
        }
        judge(0, start_);
    }

    Ns time(std::size_t first, std::size_t second) const { return areas_.firsts_[first] + areas_.seconds_[second]; }

    void take(Member& member, std::size_t first, std::size_t second) {
        total_ -= member.area;
        member.area = areas_.area(member.module, areas_.firsts_[first], areas_.seconds_[second]);
        total_ += member.area;
    }

    // Of one time the place `at` was reached or is left: members with an option there need another area.
    void step(const std::vector<Places>& places, std::size_t at, std::size_t first, std::size_t second) {
        for (Member& member : members_) {
            if ((places[static_cast<std::size_t>(member.module)][at / 64] >> at % 64 & 1) != 0)
                take(member, first, second);
        }
    }

    const StageAreas& areas_;
    std::vector<Member> members_;
    std::vector<std::size_t> firsts_;  // places
    std::vector<std::size_t> seconds_;
    std::size_t start_ = 0;  // among the second times
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
