#include "search/problem.h"

#include <algorithm>
#include <tuple>

namespace mosaic::search {
namespace {

// Of the options before it, with how many one is compared: as many slots as a device may have, over two degrees. A
// table of 100,000 options would take many seconds otherwise; one that stays although another beats it costs time only.
constexpr std::ptrdiff_t kMaxCompared = 2048;

bool beats(const Option& first, const Option& second) {
    return first.degree <= second.degree && first.quota <= second.quota && first.forward <= second.forward &&
           first.backward <= second.backward && first.memory <= second.memory;
}

std::vector<int> find_worthwhile(const std::vector<Option>& options) {
    std::vector<int> sorted;
    for (int i = 0; i < static_cast<int>(options.size()); ++i) sorted.push_back(i);
    const auto at = [&](int i) -> const Option& { return options[static_cast<std::size_t>(i)]; };
    std::stable_sort(sorted.begin(), sorted.end(), [&](int a, int b) {
        return std::tie(at(a).degree, at(a).quota) < std::tie(at(b).degree, at(b).quota);
    });
    std::vector<int> kept;
    for (const int i : sorted) {
        const auto first = kept.end() - std::min<std::ptrdiff_t>(kept.end() - kept.begin(), kMaxCompared);
        if (std::none_of(first, kept.end(), [&](int other) { return beats(at(other), at(i)); })) {
            kept.push_back(i);
        }
    }
    return kept;
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void check_module(const Problem& problem, int index) {
    const Module& module = problem.modules[static_cast<std::size_t>(index)];
    const std::string name = "module " + std::to_string(index);
    if (module.options.empty()) refuse(name + " has no options; give it at least one (degree, quota)");
    if ((module.before & ~problem.all()) != 0) refuse(name + " comes after a module that is not there");
    for (const Option& option : module.options) {
        const bool fits = option.degree >= 1 && option.degree <= problem.machine.num_devices && option.quota >= 1 &&
                          option.quota <= problem.machine.num_slots;
        if (!fits) {
            refuse(name + " has an option of degree " + std::to_string(option.degree) + " and quota " +
                   std::to_string(option.quota) + "; the machine has " + std::to_string(problem.machine.num_devices) +
                   " devices of " + std::to_string(problem.machine.num_slots) + " slots");
        }
        if (option.forward < 0 || option.backward < 0 || option.memory < 0) {
            refuse(name + " has an option with a negative time or memory");
        }
    }
}

}  // namespace

Options::Options(std::vector<Option> options) {
    std::vector<int> worthwhile = find_worthwhile(options);
    table_ = std::make_shared<const Table>(Table{std::move(options), std::move(worthwhile)});
}

void check(const Problem& problem) {
    if (problem.modules.empty()) refuse("there is no module to plan; give at least one");
    if (problem.size() > kMaxModules) {
        refuse(std::to_string(problem.size()) + " modules are more than the " + std::to_string(kMaxModules) +
               " that this search takes; merge small modules, or use method='gahc'");
    }
    if (problem.machine.num_devices < 1 || problem.machine.num_slots < 1) {
        refuse("a machine needs at least one device of one slot");
    }
    for (int index = 0; index < problem.size(); ++index) check_module(problem, index);
    Mask done = 0;
    for (bool grew = true; grew;) {
        grew = false;
        for (int index = 0; index < problem.size(); ++index) {
            const Mask bit = Mask{1} << index;
            if ((done & bit) == 0 && (problem.modules[static_cast<std::size_t>(index)].before & ~done) == 0) {
                done |= bit;
                grew = true;
            }
        }
    }
    if (done != problem.all()) refuse("the modules depend on each other in a cycle");
}

}  // namespace mosaic::search
