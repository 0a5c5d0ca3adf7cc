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
    const auto mark = [](const std::vector<Ns>& times, Ns time, Places& places) {
        const auto at = static_cast<std::size_t>(std::lower_bound(times.begin(), times.end(), time) - times.begin());
        places[at / 64] |= std::uint64_t{1} << at % 64;
    };
    first_places_.assign(needs_.size(), Places(firsts_.size() / 64 + 1, 0));
    second_places_.assign(needs_.size(), Places(seconds_.size() / 64 + 1, 0));
    for (std::size_t m = 0; m < needs_.size(); ++m) {
        for (const Need& need : needs_[m]) {
            mark(firsts_, need.first, first_places_[m]);
            mark(seconds_, need.second, second_places_[m]);
        }
    }
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
        list(areas.firsts_, areas.first_places_, firsts_);
        list(areas.seconds_, areas.second_places_, seconds_);
    }

    Ns least() {
        if (firsts_.empty()) return kNever;
        Ns best = kNever;
        std::size_t second = seconds_.size() - 1;
        for (Member& member : members_) take(member, firsts_[0], seconds_[second]);
        for (std::size_t first = 0; first < firsts_.size(); ++first) {
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

    // Places of all times that any member has, rising.
    void list(const std::vector<Ns>& times, const std::vector<Places>& places, std::vector<std::size_t>& found) const {
        for (std::size_t word = 0; word <= times.size() / 64; ++word) {
            std::uint64_t bits = 0;
            for (const Member& member : members_) bits |= places[static_cast<std::size_t>(member.module)][word];
            each(bits, [&](int bit) { found.push_back(word * 64 + static_cast<std::size_t>(bit)); });
        }
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
