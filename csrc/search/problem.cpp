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
