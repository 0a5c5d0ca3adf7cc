#include "search/stages/interference.h"

#include <algorithm>
#include <cmath>

namespace mosaic::search {
namespace {

const Option& option_of(const Problem& problem, const Resident& resident) {
    return problem.modules[static_cast<std::size_t>(resident.module)]
        .options[static_cast<std::size_t>(resident.option)];
}

std::vector<int> quotas_of(const Module& module) {
    std::vector<int> quotas;
    for (const Option& option : module.options) quotas.push_back(option.quota);
    std::sort(quotas.begin(), quotas.end());
    quotas.erase(std::unique(quotas.begin(), quotas.end()), quotas.end());
    return quotas;
}

void check_shares(const PairShares& pair, std::size_t num_rows, std::size_t num_entries) {
    const std::string name = std::to_string(pair.module) + " beside " + std::to_string(pair.beside);
    if (pair.rows.size() != num_rows) {
        throw std::invalid_argument("shares of module " + name + " have " + std::to_string(pair.rows.size()) +
                                    " rows; give one for each of its " + std::to_string(num_rows) + " quotas");
    }
    for (const std::vector<double>& row : pair.rows) {
        const bool is_fit = row.size() == num_entries &&
                            std::all_of(row.begin(), row.end(), [](double share) { return share >= 0 && share < 1e6; });
        if (!is_fit) {
            throw std::invalid_argument(
                "shares of module " + name + " need " + std::to_string(num_entries) +
                " entries per row, one for each quota of the other module, finite and not negative");
        }
    }
}

void add_shares(Problem& problem, int phase, const PairShares& pair) {
    if (pair.module < 0 || pair.module >= problem.size() || pair.beside < 0 || pair.beside >= problem.size()) {
        throw std::invalid_argument("shares name module " + std::to_string(pair.module) + " beside " +
                                    std::to_string(pair.beside) + "; there are " + std::to_string(problem.size()));
    }
    const Module& own = problem.modules[static_cast<std::size_t>(pair.module)];
    const std::vector<int> quotas = quotas_of(own);
    const std::vector<int> held = quotas_of(problem.modules[static_cast<std::size_t>(pair.beside)]);
    check_shares(pair, quotas.size(), held.size());
    const auto width = static_cast<std::size_t>(problem.machine.num_slots + 1);
    auto& table = problem.extras[phase][static_cast<std::size_t>(pair.module)];
    for (std::size_t o = 0; o < own.options.size(); ++o) {
        const Option& option = own.options[o];
        const auto alone = static_cast<double>(phase == 0 ? option.forward : option.backward);
        const auto place = std::lower_bound(quotas.begin(), quotas.end(), option.quota) - quotas.begin();
        const std::vector<double>& row = pair.rows[static_cast<std::size_t>(place)];
        table[o].resize(problem.modules.size() * width, 0);
        for (std::size_t i = 0; i < held.size(); ++i) {
            table[o][static_cast<std::size_t>(pair.beside) * width + static_cast<std::size_t>(held[i])] =
                static_cast<Ns>(std::llround(alone * row[i]));
        }
    }
}

}  // namespace

void disturb_by_shares(Problem& problem, const std::vector<PairShares> (&shares)[2]) {
    for (int phase = 0; phase < 2; ++phase) {
        auto& tables = problem.extras[phase];
        tables.assign(problem.modules.size(), {});
        for (std::size_t m = 0; m < tables.size(); ++m) tables[m].resize(problem.modules[m].options.size());
        for (const PairShares& pair : shares[phase]) add_shares(problem, phase, pair);
    }
}

Ns extra(const Problem& problem, int phase, const Resident& own, const Resident* others, int num_others) {
    const auto& table =
        problem.extras[phase][static_cast<std::size_t>(own.module)][static_cast<std::size_t>(own.option)];
    if (table.empty()) return 0;
    Ns sum = 0;
    for (int i = 0; i < num_others; ++i) {
        const int place = others[i].module * (problem.machine.num_slots + 1) + option_of(problem, others[i]).quota;
        sum += table[static_cast<std::size_t>(place)];
    }
    return sum;
}

ExtraTable::ExtraTable(const Problem& problem) : problem_(problem), width_(problem.machine.num_slots + 1) {
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
        const auto& table = problem_.extras[phase];
        return table[module][option].empty() ? nullptr : &table[module][option];
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
