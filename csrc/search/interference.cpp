#include "interference.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace mosaic::search {
namespace {

const Option& option_of(const Problem& problem, const Resident& resident) {
    return problem.modules[static_cast<std::size_t>(resident.module)]
        .options[static_cast<std::size_t>(resident.option)];
}

double bandwidth(const Problem& problem, int phase, const Resident& resident) {
    const Option& option = option_of(problem, resident);
    return phase == 0 ? option.forward_bandwidth : option.backward_bandwidth;
}

Ns pairwise(const Problem& problem, int phase, const Resident& own, const Resident* others, int num_others) {
    const auto& tables = problem.interference.pairs[phase];
    if (tables.empty()) return 0;
    const auto& table = tables[static_cast<std::size_t>(own.module)][static_cast<std::size_t>(own.option)];
    if (table.empty()) return 0;
    Ns sum = 0;
    for (int i = 0; i < num_others; ++i) {
        const int quota = option_of(problem, others[i]).quota;
        const int place = others[i].module * (problem.machine.num_slots + 1) + quota;
        sum += table[static_cast<std::size_t>(place)];
    }
    return sum;
}

// Eq. 8 as it stands falls when a module is added (its product shrinks); the largest value over the subsets with the
// module itself and at least one neighbour does not. For each size the neighbours that draw most make it largest.
Ns composite(const Problem& problem, int phase, const Resident& own, const Resident* others, int num_others) {
    if (num_others == 0) return 0;
    std::array<double, kMaxModules> drawn{};
    for (int i = 0; i < num_others; ++i) drawn[static_cast<std::size_t>(i)] = bandwidth(problem, phase, others[i]);
    std::sort(drawn.begin(), drawn.begin() + num_others, std::greater<double>());
    const Interference& form = problem.interference;
    double sum = bandwidth(problem, phase, own);
    double product = sum;
    double worst = 0;
    for (int i = 0; i < num_others; ++i) {
        sum += drawn[static_cast<std::size_t>(i)];
        product *= drawn[static_cast<std::size_t>(i)];
        worst = std::max(worst, form.e1[phase] + form.e2[phase] * sum + form.e3[phase] * product);
    }
    return static_cast<Ns>(std::llround(worst));
}

}  // namespace

Ns extra(const Problem& problem, int phase, const Resident& own, const Resident* others, int num_others) {
    switch (problem.interference.form) {
        case Form::pairwise:
            return pairwise(problem, phase, own, others, num_others);
        case Form::eq8:
            return composite(problem, phase, own, others, num_others);
        case Form::none:
            break;
    }
    return 0;
}

}  // namespace mosaic::search
