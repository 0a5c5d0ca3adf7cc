#include "stage_areas.h"

#include <algorithm>
#include <set>
#include <tuple>

namespace mosaic::search {
namespace {

// Finds a successor for `from` in a largest matching of modules with later ones (Kuhn's augmenting paths).
class ChainMatching {
  public:
    ChainMatching(const std::vector<Mask>& earlier, Mask set)
        : earlier_(earlier), set_(set), before_(earlier.size(), -1), after_(earlier.size(), -1) {
        each(set, [&](int m) {
            seen_ = 0;
            extend(m);
        });
    }
    int before(int module) const { return before_[static_cast<std::size_t>(module)]; }
    int after(int module) const { return after_[static_cast<std::size_t>(module)]; }

  private:
    bool extend(int from) {
        for (Mask rest = set_; rest != 0; rest &= rest - 1) {
            const int to = __builtin_ctzll(rest);
            if ((earlier_[static_cast<std::size_t>(to)] >> from & 1) == 0 || (seen_ >> to & 1) != 0) continue;
            seen_ |= Mask{1} << to;
            if (before(to) >= 0 && !extend(before(to))) continue;
            before_[static_cast<std::size_t>(to)] = from;
            after_[static_cast<std::size_t>(from)] = to;
            return true;
        }
        return false;
    }

    const std::vector<Mask>& earlier_;
    Mask set_;
    Mask seen_ = 0;
    std::vector<int> before_;
    std::vector<int> after_;
};

}  // namespace

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
    order(problem);
}

void StageAreas::order(const Problem& problem) {
    const auto size = static_cast<std::size_t>(problem.size());
    for (const Module& module : problem.modules) earlier_.push_back(module.before);
    for (std::size_t round = 0; round < size; ++round) {  // as many rounds as the longest chain can have
        for (Mask& earlier : earlier_) {
            each(earlier, [&](int other) { earlier |= earlier_[static_cast<std::size_t>(other)]; });
        }
    }
    apart_ = earlier_;
    for (std::size_t m = 0; m < size; ++m) {
        each(earlier_[m], [&](int other) { apart_[static_cast<std::size_t>(other)] |= Mask{1} << m; });
    }
}

std::int64_t StageAreas::area(int module, Ns first, Ns second) const {
    for (const Need& need : needs_[static_cast<std::size_t>(module)]) {
        if (need.first <= first && need.second <= second) return need.area;
    }
    return room_ + 1;
}

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

std::vector<std::vector<int>> StageAreas::chains(Mask set) const {
    const ChainMatching matching(earlier_, set);
    std::vector<std::vector<int>> found;
    each(set, [&](int m) {
        if (matching.before(m) >= 0) return;
        found.emplace_back();
        for (int at = m; at >= 0; at = matching.after(at)) found.back().push_back(at);
    });
    return found;
}

}  // namespace mosaic::search
