#include "search/plans/chains.h"

namespace mosaic::search {
namespace {

// Numbers; of more, nothing is said but that.
constexpr std::size_t kTooMany = std::size_t{1} << 40;

// Splits modules into as few chains as there can be: of each chain, every module comes before the next. Finds a
// successor for `from` in a largest matching of modules with later ones (Kuhn's augmenting paths).
class ChainMatching {
  public:
    explicit ChainMatching(const std::vector<Mask>& earlier)
        : earlier_(earlier), before_(earlier.size(), -1), after_(earlier.size(), -1) {
        for (int m = 0; m < static_cast<int>(earlier.size()); ++m) {
            seen_ = 0;
            extend(m);
        }
    }
    int before(int module) const { return before_[static_cast<std::size_t>(module)]; }
    int after(int module) const { return after_[static_cast<std::size_t>(module)]; }

  private:
    bool extend(int from) {
        for (int to = 0; to < static_cast<int>(earlier_.size()); ++to) {
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
    Mask seen_ = 0;
    std::vector<int> before_;
    std::vector<int> after_;
};

std::vector<std::vector<int>> split_into_chains(const std::vector<Mask>& earlier) {
    const ChainMatching matching(earlier);
    std::vector<std::vector<int>> found;
    for (int m = 0; m < static_cast<int>(earlier.size()); ++m) {
        if (matching.before(m) >= 0) continue;
        found.emplace_back();
        for (int at = m; at >= 0; at = matching.after(at)) found.back().push_back(at);
    }
    return found;
}

}  // namespace

std::vector<Mask> earlier_of(const Problem& problem) {
    std::vector<Mask> before;
    for (const Module& module : problem.modules) before.push_back(module.before);
    return all_earlier(std::move(before));
}

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

ChainIndex::ChainIndex(const std::vector<Mask>& earlier) : in_ideal_(earlier.size()), in_stage_(earlier.size()) {
    for (const std::vector<int>& chain : split_into_chains(earlier)) {
        steps_.push_back(size_);
        lengths_.push_back(chain.size());
        for (std::size_t i = 0; i < chain.size(); ++i) {
            in_ideal_[static_cast<std::size_t>(chain[i])] = size_;
            in_stage_[static_cast<std::size_t>(chain[i])] = size_ * (i + 1);
        }
        if (size_ < kTooMany) size_ *= chain.size() + 1;
    }
}

}  // namespace mosaic::search
