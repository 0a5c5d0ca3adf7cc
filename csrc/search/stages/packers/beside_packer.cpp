#include "search/stages/packers/beside_packer.h"

#include <algorithm>
#include <tuple>

namespace mosaic::search {
namespace {

constexpr int kNowhere = INT32_MAX / 2;
constexpr std::int64_t kDeviceWork = 40;  // of a node, beside what any has

constexpr Mask bit(std::size_t index) { return Mask{1} << index; }

}  // namespace

BesidePacker::BesidePacker(const Problem& problem) : problem_(problem), extras_(problem) {
    const auto size = problem.modules.size();
    for (const Module& module : problem.modules) {
        std::vector<int> sorted;
        for (int i = 0; i < static_cast<int>(module.options.size()); ++i) sorted.push_back(i);
        std::stable_sort(sorted.begin(), sorted.end(), [&](int a, int b) {
            const Option& first = module.options[static_cast<std::size_t>(a)];
            const Option& second = module.options[static_cast<std::size_t>(b)];
            return std::tie(first.degree, first.quota) < std::tie(second.degree, second.quota);
        });
        sorted_.push_back(std::move(sorted));
    }
    items_.resize(size);
    area_from_.resize(size + 1);
    states_.resize(size + 1);
    taken_.resize(size);
    residents_.resize(static_cast<std::size_t>(problem.machine.num_devices));
    for (State& state : states_) state.rungs.resize(size);
}

Answer BesidePacker::pack(Mask set, const Target& target, Effort& effort, std::vector<Placed>& placed) {
    target_ = target;
    size_ = 0;
    bool is_possible = true;
    each(set, [&](int module) {
        fill(items_[size_], module, target);
        is_possible = is_possible && items_[size_++].num_choices > 0;
    });
    if (!is_possible) return Answer::no;
    judge_neighbours();
    sort_items();
    const Machine& machine = problem_.machine;
    states_[0].rooms.assign(1, {0, machine.num_slots, machine.memory, machine.num_devices});
    effort_ = &effort;
    is_open_ = false;
    if (!descend(0)) return is_open_ ? Answer::open : Answer::no;
    placed.clear();
    for (std::size_t i = 0; i < size_; ++i) placed.push_back({items_[i].module, final_.rungs[i]->option, {}});
    int device = 0;
    for (const Room& room : final_.rooms) {
        for (int count = 0; count < room.count; ++count, ++device) {
            each(room.items, [&](int i) { placed[static_cast<std::size_t>(i)].devices.push_back(device); });
        }
    }
    return Answer::yes;
}

void BesidePacker::fill(Item& item, int module, const Target& target) const {
    const auto& options = problem_.modules[static_cast<std::size_t>(module)].options;
    const std::int64_t limit = problem_.machine.memory;
    item.module = module;
    item.num_choices = 0;
    for (const int index : sorted_[static_cast<std::size_t>(module)]) {
        const Option& option = options[static_cast<std::size_t>(index)];
        if ((limit != 0 && option.memory > limit) || !target.is_met(option)) continue;
        const auto last = static_cast<std::size_t>(item.num_choices);
        if (last == 0 || item.choices[last - 1].degree != option.degree) {
            if (item.choices.size() == last) item.choices.emplace_back();
            item.choices[last].degree = option.degree;
            item.choices[last].rungs.clear();
            ++item.num_choices;
        }
        auto& rungs = item.choices[static_cast<std::size_t>(item.num_choices) - 1].rungs;
        rungs.push_back({module, index, option.quota, true, limit != 0 ? option.memory : 0, option.forward,
                         option.backward, extras_.row(module, index), extras_.place(module, option.quota)});
        for (auto i = rungs.size() - 1; i-- > 0;) {
            rungs[i].memory = std::min(rungs[i].memory, rungs[i + 1].memory);
            rungs[i].is_last = false;
        }
    }
}

// A module either has its devices for itself, all their slots with them, or is slowed down by the mildest neighbour at
// least; what that leaves is the least area it takes.
void BesidePacker::judge_neighbours() {
    const int whole = problem_.machine.num_slots;
    for (std::size_t i = 0; i < size_; ++i) {
        Item& item = items_[i];
        item.least_area = INT32_MAX;
        for (int c = 0; c < item.num_choices; ++c) {
            Choice& choice = item.choices[static_cast<std::size_t>(c)];
            const auto first = std::find_if(choice.rungs.begin(), choice.rungs.end(),
                                            [&](const Rung& rung) { return is_met_beside_one(i, rung); });
            choice.first_beside = static_cast<std::size_t>(first - choice.rungs.begin());
            choice.least_beside = first == choice.rungs.end() ? whole + 1 : first->quota;
            item.least_area = std::min(item.least_area, choice.degree * std::min(choice.least_beside, whole));
        }
    }
}

bool BesidePacker::is_met_beside_one(std::size_t item, const Rung& rung) const {
    for (std::size_t j = 0; j < size_; ++j) {
        for (int c = 0; j != item && c < items_[j].num_choices; ++c) {
            const Rung* least = items_[j].choices[static_cast<std::size_t>(c)].rungs.data();
            if (least->quota + rung.quota <= problem_.machine.num_slots && is_met_beside(rung, &least, 1, false)) {
                return true;
            }
        }
    }
    return false;
}

void BesidePacker::sort_items() {
    std::sort(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(size_), [](const Item& a, const Item& b) {
        return std::tie(b.least_area, a.module) < std::tie(a.least_area, b.module);
    });
    area_from_[size_] = 0;
    for (std::size_t i = size_; i-- > 0;) area_from_[i] = area_from_[i + 1] + items_[i].least_area;
}

bool BesidePacker::descend(std::size_t depth) {
    if (depth == size_) return finish(states_[depth]);
    if (!has_room(depth)) return false;
    const State& state = states_[depth];
    for (int c = 0; c < items_[depth].num_choices; ++c) {
        const Choice& choice = items_[depth].choices[static_cast<std::size_t>(c)];
        taken_[depth].assign(state.rooms.size(), 0);
        if (spread(depth, choice, 0, choice.degree)) return true;
        if (is_open_) return false;
    }
    return false;
}

// Whether what is left can fit by number, and each of it by itself beside what is there already.
bool BesidePacker::has_room(std::size_t depth) {
    const State& state = states_[depth];
    int free = 0;
    for (const Room& room : state.rooms) free += room.free * room.count;
    if (free < area_from_[depth]) return false;
    for (std::size_t r = 0; r < state.rooms.size(); ++r) {
        residents_[r].clear();
        each(state.rooms[r].items, [&](int i) { residents_[r].push_back(state.rungs[static_cast<std::size_t>(i)]); });
    }
    for (std::size_t i = depth; i < size_; ++i) {
        free -= least_area(state, items_[i]);
        if (free < 0) return false;
    }
    return true;
}

// Least slots that an item takes of all devices, whatever else comes; more than there are if it does not fit.
int BesidePacker::least_area(const State& state, const Item& item) {
    int least = kNowhere;
    for (int c = 0; c < item.num_choices; ++c) {
        const Choice& choice = item.choices[static_cast<std::size_t>(c)];
        needs_.clear();
        for (std::size_t r = 0; r < state.rooms.size(); ++r) {
            const int quota = least_quota(choice, state.rooms[r], residents_[r]);
            if (quota < kNowhere) needs_.emplace_back(quota, state.rooms[r].count);
        }
        std::sort(needs_.begin(), needs_.end());
        int count = 0;
        for (const auto& [quota, devices] : needs_) {
            count += devices;
            if (count < choice.degree) continue;
            least = std::min(least, choice.degree * quota);  // it has the same quota on all of its devices
            break;
        }
    }
    return least;
}

// Slots that an item takes of a device at least. Where nobody is yet, it either stays alone there, which leaves none to
// others, or is not milder off than beside its mildest neighbour.
int BesidePacker::least_quota(const Choice& choice, const Room& room, const Group& residents) const {
    if (problem_.machine.memory != 0 && room.memory < choice.rungs.front().memory) return kNowhere;
    if (residents.empty()) return std::min(choice.least_beside, problem_.machine.num_slots);
    for (auto i = choice.first_beside; i < choice.rungs.size() && choice.rungs[i].quota <= room.free; ++i) {
        if (is_met_beside(choice.rungs[i], residents.data(), residents.size(), false)) return choice.rungs[i].quota;
    }
    return kNowhere;
}

bool BesidePacker::is_met_beside(const Rung& own, const Rung* const* others, std::size_t num_others,
                                 bool is_exact) const {
    Extra more;
    if (!is_exact) {
        for (std::size_t i = 0; i < num_others; ++i) {
            more.forward += own.row[others[i]->place].forward;
            more.backward += own.row[others[i]->place].backward;
        }
    } else {
        Resident residents[kMaxModules];
        for (std::size_t i = 0; i < num_others; ++i) residents[i] = {others[i]->module, others[i]->option};
        more = extras_.exact({own.module, own.option}, residents, static_cast<int>(num_others));
    }
    const Ns forward = own.forward + more.forward;
    const Ns backward = own.backward + more.backward;
    return target_.is_met(forward, backward, forward + backward);
}

// Puts a module on as many devices as it needs; those with the least room come first.
bool BesidePacker::spread(std::size_t depth, const Choice& choice, std::size_t from, int needed) {
    if (needed == 0) return place(depth, choice);
    const State& state = states_[depth];
    const Rung& rung = choice.rungs.front();
    const auto is_fit = [&](const Room& room) {
        const int quota = room.items == 0 ? rung.quota : choice.least_beside;
        return room.free >= quota && (problem_.machine.memory == 0 || room.memory >= rung.memory);
    };
    int there = 0;
    for (std::size_t i = from; i < state.rooms.size(); ++i) there += is_fit(state.rooms[i]) ? state.rooms[i].count : 0;
    if (there < needed) return false;
    while (!is_fit(state.rooms[from])) ++from;
    for (int count = std::min(needed, state.rooms[from].count); count >= 0; --count) {
        taken_[depth][from] = count;
        if (spread(depth, choice, from + 1, needed - count)) return true;
        if (is_open_) break;
    }
    taken_[depth][from] = 0;
    return false;
}

bool BesidePacker::place(std::size_t depth, const Choice& choice) {
    Work::add(kDeviceWork * problem_.machine.num_devices);
    if (!effort_->spend()) {
        is_open_ = true;
        return false;
    }
    const State& before = states_[depth];
    State& state = states_[depth + 1];
    const Rung& rung = choice.rungs.front();  // where the fixed point starts
    state.rooms.clear();
    std::copy_n(before.rungs.begin(), depth, state.rungs.begin());
    state.rungs[depth] = &rung;
    Mask dirty = 0;
    for (std::size_t i = 0; i < before.rooms.size(); ++i) {
        const Room& room = before.rooms[i];
        const int taken = taken_[depth][i];
        if (room.count > taken) state.rooms.push_back({room.items, room.free, room.memory, room.count - taken});
        if (taken == 0) continue;
        const Room filled{room.items | bit(depth), room.free - rung.quota, room.memory - rung.memory, taken};
        state.rooms.push_back(filled);
        dirty |= filled.items;
    }
    if (!settle(state, dirty)) return false;
    std::stable_sort(state.rooms.begin(), state.rooms.end(),
                     [](const Room& a, const Room& b) { return a.free < b.free; });
    return descend(depth + 1);
}

bool BesidePacker::settle(State& state, Mask dirty) const {
    while (dirty != 0) {
        const auto item = static_cast<std::size_t>(__builtin_ctzll(dirty));
        while (!meets(state, item, false)) {
            if (!raise(state, item)) return false;
            dirty |= neighbours(state, item);
        }
        dirty &= ~bit(item);
    }
    return true;
}

// Moves a module to its next larger option of the same degree, on the devices where it is.
bool BesidePacker::raise(State& state, std::size_t item) const {
    const Rung& now = *state.rungs[item];
    if (now.is_last) return false;
    const Rung& next = *(&now + 1);
    state.rungs[item] = &next;
    for (Room& room : state.rooms) {
        if ((room.items & bit(item)) == 0) continue;
        room.free -= next.quota - now.quota;
        room.memory -= next.memory - now.memory;
        if (room.free < 0 || room.memory < 0) return false;
    }
    return true;
}

Mask BesidePacker::neighbours(const State& state, std::size_t item) const {
    Mask all = 0;
    for (const Room& room : state.rooms) all |= (room.items & bit(item)) != 0 ? room.items : 0;
    return all;
}

bool BesidePacker::meets(const State& state, std::size_t item, bool is_exact) const {
    for (const Room& room : state.rooms) {
        if ((room.items & bit(item)) == 0) continue;
        const Rung* others[kMaxModules];
        std::size_t count = 0;
        each(room.items & ~bit(item), [&](int i) { others[count++] = state.rungs[static_cast<std::size_t>(i)]; });
        if (!is_met_beside(*state.rungs[item], others, count, is_exact)) return false;
    }
    return true;
}

// Least quotas need not be a solution where the bounds that they rest on are not exact. Any solution then has more
// slots for one of the modules that take part in what is broken.
bool BesidePacker::finish(const State& state) {
    const Mask broken = find_broken(state);
    if (broken == 0) {
        final_ = state;
        return true;
    }
    for (std::size_t item = 0; item < size_; ++item) {
        if ((broken & bit(item)) == 0) continue;
        if (!effort_->spend()) {
            is_open_ = true;
            return false;
        }
        State more = state;
        if (raise(more, item) && settle(more, neighbours(more, item)) && finish(more)) return true;
        if (is_open_) return false;
    }
    return false;
}

// Modules of which one must have more slots; 0 if all is well.
Mask BesidePacker::find_broken(const State& state) const {
    const std::int64_t limit = problem_.machine.memory;
    for (const Room& room : state.rooms) {
        std::int64_t used = 0;
        each(room.items, [&](int i) {
            const Rung& own = *state.rungs[static_cast<std::size_t>(i)];
            used += problem_.modules[static_cast<std::size_t>(own.module)]
                        .options[static_cast<std::size_t>(own.option)]
                        .memory;
        });
        if (limit != 0 && used > limit) return room.items;
    }
    if (extras_.is_monotone()) return 0;
    for (std::size_t item = 0; item < size_; ++item) {
        if (!meets(state, item, true)) return neighbours(state, item);
    }
    return 0;
}

}  // namespace mosaic::search
