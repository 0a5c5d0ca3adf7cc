#include "search/plans/plain_bound.h"

#include <algorithm>

#include "search/plans/chains.h"

namespace mosaic::search {
namespace {

// Of one module, over all of its options.
struct Least {
    double work = static_cast<double>(kNever);  // slots x time, over the machine's slots
    Ns time = kNever;
};

Least least_of(const Module& module, const Machine& machine) {
    const double room = static_cast<double>(machine.num_devices) * machine.num_slots;
    Least least;
    for (const Option& option : module.options) {
        if (machine.memory != 0 && option.memory > machine.memory) continue;
        least.time = std::min(least.time, option.latency());
        least.work = std::min(least.work, static_cast<double>(option.latency()) * option.area() / room);
    }
    return least;
}

}  // namespace

Ns plain_bound(const Problem& problem) {
    const auto size = problem.modules.size();
    const std::vector<Mask> earlier = earlier_of(problem);
    std::vector<Least> least;
    for (const Module& module : problem.modules) least.push_back(least_of(module, problem.machine));
    double longest = 0;
    for (const Least& one : least) longest += one.work;
    std::vector<double> before(size, 0);  // work that comes before each module
    std::vector<double> after(size, 0);
    std::vector<Ns> chain(size, 0);  // longest chain of modules up to each
    for (std::size_t m = 0; m < size; ++m) {
        each(earlier[m], [&](int n) {
            before[m] += least[static_cast<std::size_t>(n)].work;
            after[static_cast<std::size_t>(n)] += least[m].work;
        });
    }
    for (std::size_t round = 0; round < size; ++round) {  // as many rounds as the longest chain can have
        for (std::size_t m = 0; m < size; ++m) {
            chain[m] = least[m].time;
            each(earlier[m],
                 [&](int n) { chain[m] = std::max(chain[m], chain[static_cast<std::size_t>(n)] + least[m].time); });
        }
    }
    for (std::size_t m = 0; m < size; ++m) {
        const double through = before[m] + static_cast<double>(least[m].time) + after[m];
        longest = std::max({longest, through, static_cast<double>(chain[m])});
    }
    // A sum of doubles may be above the true value in its last bits; a bound must not be.
    return std::min(kNever, static_cast<Ns>(longest * (1 - 1e-12)));
}

}  // namespace mosaic::search
