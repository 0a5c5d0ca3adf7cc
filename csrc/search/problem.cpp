#include "problem.h"

namespace mosaic::search {
namespace {

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

void check_levels(const Problem& problem) {
    const Interference& form = problem.interference;
    for (int phase = 0; phase < 2; ++phase) {
        const bool is_sound = form.capacity[phase] > 0 && form.fairness[phase] >= 0 && form.fairness[phase] <= 1 &&
                              form.cache[phase] >= 0;
        if (!is_sound) refuse("capacity is above 0, fairness from 0 to 1, cache not negative");
        for (const Module& module : problem.modules) {
            for (const Option& option : module.options) {
                const double used = phase == 0 ? option.forward_bandwidth : option.backward_bandwidth;
                const bool is_possible = option.idle[phase] >= 0 && option.idle[phase] < 1 &&
                                         option.cap[phase] * (1 - option.idle[phase]) >= used * (1 - 1e-9);
                if (!is_possible) refuse("an option draws more than its slots can, or nothing all the time");
            }
        }
    }
}

}  // namespace

void check(const Problem& problem) {
    if (problem.modules.empty()) refuse("there is no module to plan; give at least one");
    if (problem.size() > kMaxModules) {
        refuse(std::to_string(problem.size()) + " modules are more than the " + std::to_string(kMaxModules) +
               " that this search holds in one word; merge small modules, or use method='gahc'");
    }
    if (problem.machine.num_devices < 1 || problem.machine.num_slots < 1) {
        refuse("a machine needs at least one device of one slot");
    }
    for (int index = 0; index < problem.size(); ++index) check_module(problem, index);
    if (problem.interference.form == Form::leveled) check_levels(problem);
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
