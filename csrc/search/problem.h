// What is to be planned, in whole numbers: modules with their options, which must come first, and the machine.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace mosaic::search {

using Ns = std::int64_t;
using Mask = std::uint64_t;

constexpr int kMaxModules = 16;
constexpr Ns kNever = INT64_MAX / 4;

// One way to deploy a module: on `degree` devices, `quota` slots of each.
struct Option {
    int degree = 1;
    int quota = 1;
    Ns forward = 0;
    Ns backward = 0;
    std::int64_t memory = 0;  // bytes on each of its devices

    Ns latency() const { return forward + backward; }
    int area() const { return degree * quota; }
};

// The ways to deploy a module. Problems that have the module share them: they are many, and never change.
class Options {
  public:
    Options() : Options(std::vector<Option>{}) {}
    Options(std::vector<Option> options);

    auto begin() const { return table_->all.begin(); }
    auto end() const { return table_->all.end(); }
    std::size_t size() const { return table_->all.size(); }
    bool empty() const { return table_->all.empty(); }
    const Option& operator[](std::size_t index) const { return table_->all[index]; }

    // Indices of those that no other one beats in everything, by rising degree, then quota: without neighbours'
    // disturbance no other is ever needed, however much memory there is. Of thousands, some that are beaten too.
    const std::vector<int>& worthwhile() const { return table_->worthwhile; }

  private:
    struct Table {
        std::vector<Option> all;
        std::vector<int> worthwhile;
    };
    std::shared_ptr<const Table> table_;
};

struct Module {
    Options options;
    Mask before = 0;  // modules that must be in an earlier stage
};

struct Machine {
    int num_devices = 1;
    int num_slots = 1;
    std::int64_t memory = 0;  // bytes of each device; 0: not limited
};

struct Problem {
    std::vector<Module> modules;
    Machine machine;
    // What neighbours cost, by phase: extras[phase][m][o][n * (num_slots + 1) + q] is the extra time of module m at
    // option o beside module n at quota q. Extras of several neighbours add up. Empty where never disturbed.
    std::vector<std::vector<std::vector<Ns>>> extras[2];

    int size() const { return static_cast<int>(modules.size()); }
    Mask all() const { return (Mask{1} << size()) - 1; }
    bool is_disturbed() const { return !extras[0].empty(); }
};

// Throws std::invalid_argument for what no search can work on: too many modules, no options, or cycles.
void check(const Problem& problem);

// Calls `visit(index)` for each module of a set, lowest first.
template <typename Visit>
void each(Mask set, Visit visit) {
    for (Mask rest = set; rest != 0; rest &= rest - 1) visit(__builtin_ctzll(rest));
}

}  // namespace mosaic::search
