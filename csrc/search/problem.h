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
    // Share of the device's memory bandwidth that it draws, by phase, in [0, 1].
    double forward_bandwidth = 0;
    double backward_bandwidth = 0;

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

// Extra time of a module beside others on one device.
enum class Form {
    none,
    pairwise,  // extras of neighbours, by table, add up
    eq8        // e1 + e2 * sum B + e3 * prod B over all modules of the device; zero for a module alone
};

struct Interference {
    Form form = Form::none;
    // pairwise: for module m, option o, neighbour n at quota q:
    // pairs[phase][m][o][n * (num_slots + 1) + q]; empty where never disturbed.
    std::vector<std::vector<std::vector<Ns>>> pairs[2];
    // eq8, in nanoseconds, by phase.
    double e1[2] = {0, 0};
    double e2[2] = {0, 0};
    double e3[2] = {0, 0};
};

struct Problem {
    std::vector<Module> modules;
    Machine machine;
    Interference interference;

    int size() const { return static_cast<int>(modules.size()); }
    Mask all() const { return (Mask{1} << size()) - 1; }
    bool is_disturbed() const { return interference.form != Form::none; }
};

// Throws std::invalid_argument for what no search can work on: too many modules, no options, cycles, or an
// interference that falls where a neighbour gets more slots in a form that is pruned by that.
void check(const Problem& problem);

// Calls `visit(index)` for each module of a set, lowest first.
template <typename Visit>
void each(Mask set, Visit visit) {
    for (Mask rest = set; rest != 0; rest &= rest - 1) visit(__builtin_ctzll(rest));
}

}  // namespace mosaic::search
