#include "search/stages/extra_table.h"

namespace mosaic::search {
ExtraTable::ExtraTable(const Problem& problem) : problem_(problem), width_(problem.machine.num_slots + 1) {
    if (problem.interference.form != Form::pairwise) return;
    rows_.resize(problem.modules.size());
    for (std::size_t m = 0; m < rows_.size(); ++m) {
        rows_[m].resize(problem.modules[m].options.size());
        for (std::size_t o = 0; o < rows_[m].size(); ++o) fill_row(m, o);
    }
}

// The least over the neighbour's own quotas from each quota on.
void ExtraTable::fill_row(std::size_t module, std::size_t option) {
    std::vector<Extra>& row = rows_[module][option];
    row.assign(problem_.modules.size() * static_cast<std::size_t>(width_), Extra{});
    const auto own_of = [&](int phase) -> const std::vector<Ns>* {
        const auto& table = problem_.interference.pairs[phase];
        return table.empty() || table[module][option].empty() ? nullptr : &table[module][option];
    };
    const std::vector<Ns>* forward = own_of(0);
    const std::vector<Ns>* backward = own_of(1);
    for (std::size_t n = 0; n < problem_.modules.size(); ++n) {
        if (n == module) continue;
        std::vector<char> is_there(static_cast<std::size_t>(width_), 0);
        for (const Option& other : problem_.modules[n].options) is_there[static_cast<std::size_t>(other.quota)] = 1;
        Extra least{kNever, kNever};
        for (int quota = width_ - 1; quota >= 0; --quota) {
            const auto place = n * static_cast<std::size_t>(width_) + static_cast<std::size_t>(quota);
            if (is_there[static_cast<std::size_t>(quota)] != 0) {
                const Extra exact{forward != nullptr ? (*forward)[place] : 0,
                                  backward != nullptr ? (*backward)[place] : 0};
                is_monotone_ = is_monotone_ && exact.forward <= least.forward && exact.backward <= least.backward;
                least = {std::min(least.forward, exact.forward), std::min(least.backward, exact.backward)};
            }
            row[place] = least;
        }
    }
}

Extra ExtraTable::exact(const Resident& own, const Resident* others, int num_others) const {
    return {extra(problem_, 0, own, others, num_others), extra(problem_, 1, own, others, num_others)};
}

}  // namespace mosaic::search
