#include "search/plans/chains.h"

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

std::vector<Mask> all_earlier(std::vector<Mask> before) {
    for (bool grew = true; grew;) {  // as many rounds as the longest chain can have
        grew = false;
        for (Mask& own : before) {
            const Mask old = own;
            each(old, [&](int other) { own |= before[static_cast<std::size_t>(other)]; });
            grew = grew || own != old;
        }
    }
    return before;
}

std::vector<Mask> all_apart(const std::vector<Mask>& earlier) {
    std::vector<Mask> apart = earlier;
    for (std::size_t m = 0; m < earlier.size(); ++m) {
        each(earlier[m], [&](int other) { apart[static_cast<std::size_t>(other)] |= Mask{1} << m; });
    }
    return apart;
}

bool may_be_stage(Mask set, const std::vector<Mask>& apart) {
    Mask others = 0;
    each(set, [&](int m) { others |= apart[static_cast<std::size_t>(m)]; });
    return (others & set) == 0;
}

std::vector<std::vector<int>> split_into_chains(const std::vector<Mask>& earlier, Mask set) {
    const ChainMatching matching(earlier, set);
    std::vector<std::vector<int>> found;
    each(set, [&](int m) {
        if (matching.before(m) >= 0) return;
        found.emplace_back();
        for (int at = m; at >= 0; at = matching.after(at)) found.back().push_back(at);
    });
    return found;
}

ChainIndex::ChainIndex(const std::vector<Mask>& earlier) : in_ideal_(earlier.size()), in_stage_(earlier.size()) {
    Mask all = 0;
    for (std::size_t m = 0; m < earlier.size(); ++m) all |= Mask{1} << m;
    for (const std::vector<int>& chain : split_into_chains(earlier, all)) {
        steps_.push_back(size_);
        lengths_.push_back(chain.size());
        for (std::size_t i = 0; i < chain.size(); ++i) {
            in_ideal_[static_cast<std::size_t>(chain[i])] = size_;
            in_stage_[static_cast<std::size_t>(chain[i])] = size_ * (i + 1);
        }
        size_ *= chain.size() + 1;
    }
}

}  // namespace mosaic::search
