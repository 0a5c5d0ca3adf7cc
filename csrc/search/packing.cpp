#include "packing.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <unordered_set>

#include "interference.h"

namespace mosaic::search {
namespace {

// Options of one module with one degree that meet the target alone, by rising quota.
struct Choice {
    int degree = 0;
    std::vector<int> options;
};

struct Item {
    int module = 0;
    std::vector<Choice> choices;
    int least_area = 0;
    int least_quota = 0;
    std::int64_t most_memory = 0;
};

struct DeviceState {
    Mask modules = 0;
    int free = 0;
    std::int64_t memory = 0;  // still free; not used where memory is not limited
};

struct State {
    std::vector<DeviceState> devices;
    std::vector<int> option;  // by module index; -1: not placed
    int total_free = 0;
};

using Kind = std::tuple<int, std::int64_t, int>;

class Packer {
  public:
    Packer(const Problem& problem, Mask set, const Target& target, const Effort& effort, bool is_disturbed)
        : problem_(problem),
          target_(target),
          is_disturbed_(is_disturbed),
          nodes_left_(effort.max_nodes),
          clock_(effort.clock) {
        each(set, [&](int module) { items_.push_back(make_item(module)); });
        std::sort(items_.begin(), items_.end(), [](const Item& first, const Item& second) {
            return std::tie(second.least_area, first.module) < std::tie(first.least_area, second.module);
        });
        area_from_.assign(items_.size() + 1, 0);
        memory_from_.assign(items_.size() + 1, 0);
        quota_from_.assign(items_.size() + 1, INT32_MAX);
        for (std::size_t i = items_.size(); i-- > 0;) {
            area_from_[i] = area_from_[i + 1] + items_[i].least_area;
            quota_from_[i] = std::min(quota_from_[i + 1], items_[i].least_quota);
            memory_from_[i] = memory_from_[i + 1] + items_[i].most_memory;
        }
        states_.resize(items_.size() + 1);
    }

    Packing run() {
        for (const Item& item : items_) {
            if (item.choices.empty()) return {Answer::no, {}};
        }
        State& state = states_[0];
        const Machine& machine = problem_.machine;
        state.devices.assign(static_cast<std::size_t>(machine.num_devices), {0, machine.num_slots, machine.memory});
        state.option.assign(static_cast<std::size_t>(problem_.size()), -1);
        state.total_free = machine.num_devices * machine.num_slots;
        if (descend(state, 0)) return {Answer::yes, std::move(found_)};
        return {is_open_ ? Answer::open : Answer::no, {}};
    }

  private:
    const std::vector<Option>& options_of(int module) const {
        return problem_.modules[static_cast<std::size_t>(module)].options;
    }
    const Option& chosen(const State& state, int module) const {
        return options_of(module)[static_cast<std::size_t>(state.option[static_cast<std::size_t>(module)])];
    }

    Item make_item(int module) const {
        std::map<int, std::vector<int>> by_degree;
        const auto& options = options_of(module);
        for (int i = 0; i < static_cast<int>(options.size()); ++i) {
            const Option& option = options[static_cast<std::size_t>(i)];
            const bool fits = problem_.machine.memory == 0 || option.memory <= problem_.machine.memory;
            if (fits && target_.is_met(option.forward, option.backward, option.latency()))
                by_degree[option.degree].push_back(i);
        }
        Item item{module, {}, INT32_MAX, INT32_MAX, 0};
        for (auto& [degree, indices] : by_degree) {
            std::stable_sort(indices.begin(), indices.end(), [&](int first, int second) {
                return options[static_cast<std::size_t>(first)].quota < options[static_cast<std::size_t>(second)].quota;
            });
            if (!is_disturbed_) keep_least(options, indices);
            item.least_area = std::min(item.least_area, options[static_cast<std::size_t>(indices.front())].area());
            item.choices.push_back({degree, std::move(indices)});
        }
        if (!is_disturbed_) drop_dominated(options, item);
        for (const Choice& choice : item.choices) {
            item.least_quota =
                std::min(item.least_quota, options[static_cast<std::size_t>(choice.options.front())].quota);
            for (const int index : choice.options) {
                item.most_memory = std::max(item.most_memory, options[static_cast<std::size_t>(index)].memory);
            }
        }
        return item;
    }

    // Without neighbours' disturbance a larger quota is worth nothing once the target is met, unless it saves memory.
    static void keep_least(const std::vector<Option>& options, std::vector<int>& indices) {
        std::vector<int> kept;
        for (const int index : indices) {
            const auto memory = options[static_cast<std::size_t>(index)].memory;
            if (kept.empty() || memory < options[static_cast<std::size_t>(kept.back())].memory) kept.push_back(index);
        }
        indices = std::move(kept);
    }

    static void drop_dominated(const std::vector<Option>& options, Item& item) {
        std::vector<Choice> kept;
        for (const Choice& choice : item.choices) {  // by rising degree
            Choice left{choice.degree, {}};
            for (const int index : choice.options) {
                const Option& option = options[static_cast<std::size_t>(index)];
                bool beaten = false;
                for (const Choice& other : kept) {
                    for (const int rival : other.options) {
                        const Option& better = options[static_cast<std::size_t>(rival)];
                        beaten = beaten || (better.quota <= option.quota && better.memory <= option.memory);
                    }
                }
                if (!beaten) left.options.push_back(index);
            }
            if (!left.options.empty()) kept.push_back(std::move(left));
        }
        item.choices = std::move(kept);
    }

    bool descend(const State& state, std::size_t depth) {
        --nodes_left_;
        const bool is_late = nodes_left_ % 1024 == 1023 && clock_ != nullptr && clock_->is_over();
        if (nodes_left_ < 0 || is_late) {
            is_open_ = true;
            return false;
        }
        if (depth == items_.size()) return finish(state);
        if (!has_room(state, depth)) return false;
        if (is_disturbed_) return try_choices(state, depth);
        std::string key = failure_key(state, depth);
        if (failed_.count(key) != 0) return false;
        if (try_choices(state, depth)) return true;
        if (!is_open_) failed_.insert(std::move(key));
        return false;
    }

    // Whether what is left can fit by number: slots on devices too full for any of it do not count.
    bool has_room(const State& state, std::size_t depth) const {
        if (state.total_free < area_from_[depth]) return false;
        int usable = 0;
        for (const DeviceState& one : state.devices) usable += one.free >= quota_from_[depth] ? one.free : 0;
        if (usable < area_from_[depth]) return false;
        for (std::size_t i = depth; i < items_.size(); ++i) {
            if (!fits_somewhere(state, items_[i])) return false;
        }
        return true;
    }

    bool fits_somewhere(const State& state, const Item& item) const {
        for (const Choice& choice : item.choices) {
            const int quota = options_of(item.module)[static_cast<std::size_t>(choice.options.front())].quota;
            const auto free = std::count_if(state.devices.begin(), state.devices.end(),
                                            [&](const DeviceState& one) { return one.free >= quota; });
            if (free >= choice.degree) return true;
        }
        return false;
    }

    bool try_choices(const State& state, std::size_t depth) {
        for (const Choice& choice : items_[depth].choices) {
            // With disturbance the least option is where the fixed point starts; it raises quotas by itself.
            const std::size_t starts = is_disturbed_ ? 1 : choice.options.size();
            for (std::size_t i = 0; i < starts; ++i) {
                if (spread(state, depth, choice.options[i])) return true;
                if (is_open_) return false;
            }
        }
        return false;
    }

    // Memory beyond what all that is left could use together is worth nothing.
    std::int64_t usable_memory(const DeviceState& device, std::size_t depth) const {
        return problem_.machine.memory == 0 ? 0 : std::min(device.memory, memory_from_[depth]);
    }

    // Puts a module on `degree` devices. Devices are alike if they have the same room, or, where neighbours matter, the
    // same modules; so only how many of each kind matters. Kinds with the least room come first.
    bool spread(const State& state, std::size_t depth, int index) {
        const Option& option = options_of(items_[depth].module)[static_cast<std::size_t>(index)];
        std::vector<Kind> kinds;  // (room, what else tells devices apart, device)
        kinds.reserve(state.devices.size());
        for (int device = 0; device < problem_.machine.num_devices; ++device) {
            const DeviceState& one = state.devices[static_cast<std::size_t>(device)];
            if (one.free < option.quota || (problem_.machine.memory != 0 && one.memory < option.memory)) continue;
            const auto apart = is_disturbed_ ? static_cast<std::int64_t>(one.modules) : usable_memory(one, depth);
            kinds.emplace_back(one.free, apart, device);
        }
        if (static_cast<int>(kinds.size()) < option.degree) return false;
        std::sort(kinds.begin(), kinds.end());
        std::vector<std::vector<int>> groups;
        for (std::size_t i = 0; i < kinds.size(); ++i) {
            const auto& [room, apart, device] = kinds[i];
            const bool is_new = i == 0 || room != std::get<0>(kinds[i - 1]) || apart != std::get<1>(kinds[i - 1]);
            if (is_new) groups.emplace_back();
            groups.back().push_back(device);
        }
        std::vector<int> taken;
        return take(state, depth, index, groups, 0, option.degree, taken);
    }

    bool take(const State& state, std::size_t depth, int index, const std::vector<std::vector<int>>& groups,
              std::size_t group, int needed, std::vector<int>& taken) {
        if (needed == 0) return place(state, depth, index, taken);
        if (group == groups.size()) return false;
        const auto& devices = groups[group];
        const int most = std::min(needed, static_cast<int>(devices.size()));
        for (int count = most; count >= 0; --count) {
            taken.insert(taken.end(), devices.begin(), devices.begin() + count);
            if (take(state, depth, index, groups, group + 1, needed - count, taken)) return true;
            taken.resize(taken.size() - static_cast<std::size_t>(count));
            if (is_open_) return false;
        }
        return false;
    }

    bool place(const State& before, std::size_t depth, int index, const std::vector<int>& devices) {
        State& state = states_[depth + 1];
        state = before;
        const int module = items_[depth].module;
        const Option& option = options_of(module)[static_cast<std::size_t>(index)];
        state.option[static_cast<std::size_t>(module)] = index;
        for (const int device : devices) {
            DeviceState& one = state.devices[static_cast<std::size_t>(device)];
            one.modules |= Mask{1} << module;
            one.free -= option.quota;
            one.memory -= option.memory;
        }
        state.total_free -= option.area();
        if (is_disturbed_ && !settle(state, depth)) return false;
        return descend(state, depth + 1);
    }

    // Raises quotas until every module meets the target beside its neighbours. What neighbours cost never falls when
    // quotas rise or modules come, so the first fixed point reached has the least quotas of all.
    bool settle(State& state, std::size_t depth) {
        for (bool changed = true; changed;) {
            changed = false;
            for (std::size_t i = 0; i <= depth; ++i) {
                while (!meets(state, items_[i].module)) {
                    if (!raise(state, items_[i])) return false;
                    changed = true;
                }
            }
        }
        return true;
    }

    bool meets(const State& state, int module) const {
        const Option& option = chosen(state, module);
        const Extras extras = worst_extras(state, module);
        return target_.is_met(option.forward + extras.forward, option.backward + extras.backward,
                              option.latency() + extras.both);
    }

    Extras worst_extras(const State& state, int module) const {
        Extras worst;
        Mask seen = 0;
        for (const DeviceState& one : state.devices) {
            if ((one.modules >> module & 1) == 0 || one.modules == seen) continue;
            seen = one.modules;
            worst.raise_to(extra_on(state, one.modules, module, 0), extra_on(state, one.modules, module, 1));
        }
        return worst;
    }

    Ns extra_on(const State& state, Mask modules, int module, int phase) const {
        Resident others[kMaxModules];
        int count = 0;
        each(modules & ~(Mask{1} << module),
             [&](int other) { others[count++] = {other, state.option[static_cast<std::size_t>(other)]}; });
        return extra(problem_, phase, {module, state.option[static_cast<std::size_t>(module)]}, others, count);
    }

    // Moves a module to its next larger option of the same degree, on the devices where it is.
    bool raise(State& state, const Item& item) const {
        const Option& now = chosen(state, item.module);
        int& index = state.option[static_cast<std::size_t>(item.module)];
        for (const Choice& choice : item.choices) {
            if (choice.degree != now.degree) continue;
            const auto place = std::find(choice.options.begin(), choice.options.end(), index);
            if (place + 1 == choice.options.end()) return false;
            index = *(place + 1);
        }
        const Option& next = chosen(state, item.module);
        for (DeviceState& one : state.devices) {
            if ((one.modules >> item.module & 1) == 0) continue;
            one.free -= next.quota - now.quota;
            one.memory -= next.memory - now.memory;
            if (one.free < 0 || (problem_.machine.memory != 0 && one.memory < 0)) return false;
        }
        state.total_free -= next.area() - now.area();
        return true;
    }

    bool finish(const State& state) {
        std::vector<int> next(state.devices.size(), 0);
        for (const Item& item : items_) {
            Placed placed{item.module, state.option[static_cast<std::size_t>(item.module)], {}, {}};
            for (std::size_t device = 0; device < state.devices.size(); ++device) {
                if ((state.devices[device].modules >> item.module & 1) == 0) continue;
                placed.devices.push_back(static_cast<int>(device));
                placed.starts.push_back(next[device]);
                next[device] += chosen(state, item.module).quota;
            }
            found_.placed.push_back(std::move(placed));
        }
        time_stage(problem_, found_);
        return true;
    }

    // Devices are alike: how many have which room is all that matters.
    std::string failure_key(const State& state, std::size_t depth) const {
        std::vector<std::pair<std::int32_t, std::int64_t>> rooms;
        rooms.reserve(state.devices.size());
        for (const DeviceState& one : state.devices) rooms.emplace_back(one.free, usable_memory(one, depth));
        std::sort(rooms.begin(), rooms.end());
        std::string key(1, static_cast<char>(depth));
        const auto append = [&key](const auto& value) {
            key.append(reinterpret_cast<const char*>(&value), sizeof value);
        };
        for (std::size_t i = 0, next = 0; i < rooms.size(); i = next) {
            while (next < rooms.size() && rooms[next] == rooms[i]) ++next;
            append(static_cast<std::uint16_t>(rooms[i].first));
            append(static_cast<std::uint16_t>(next - i));
            if (rooms[i].second != 0) append(rooms[i].second);
            key.push_back(rooms[i].second != 0);
        }
        return key;
    }

    const Problem& problem_;
    const Target target_;
    const bool is_disturbed_;
    std::int64_t nodes_left_;
    const Clock* clock_;
    std::vector<Item> items_;
    std::vector<int> area_from_;
    std::vector<int> quota_from_;
    std::vector<std::int64_t> memory_from_;
    std::vector<State> states_;  // by depth
    std::unordered_set<std::string> failed_;
    bool is_open_ = false;
    Stage found_;
};

}  // namespace

Packing pack(const Problem& problem, Mask set, const Target& target, const Effort& effort) {
    if (!problem.is_disturbed()) return Packer(problem, set, target, effort, false).run();
    // What cannot be placed without disturbance cannot be placed with it, and that is found out much sooner.
    if (Packer(problem, set, target, effort, false).run().answer == Answer::no) return {Answer::no, {}};
    return Packer(problem, set, target, effort, true).run();
}

}  // namespace mosaic::search
