#include "beside_packer.h"

#include <algorithm>
#include <tuple>

namespace mosaic::search {
namespace {

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
    for (State& state : states_) {
        state.choice.resize(size);
        state.rung.resize(size);
    }
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
    for (std::size_t i = 0; i < size_; ++i) placed.push_back({items_[i].module, rung_of(final_, i).option, {}, {}});
    int device = 0;
    for (const Room& room : final_.rooms) {
        for (int count = 0; count < room.count; ++count, ++device) {
            int next = 0;
            each(room.items, [&](int i) {
                Placed& one = placed[static_cast<std::size_t>(i)];
                one.devices.push_back(device);
                one.starts.push_back(next);
                next += rung_of(final_, static_cast<std::size_t>(i)).quota;
            });
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
        rungs.push_back({index, option.quota, limit != 0 ? option.memory : 0});
        for (auto i = rungs.size() - 1; i-- > 0;) rungs[i].memory = std::min(rungs[i].memory, rungs[i + 1].memory);
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
            const auto is_met_beside_one = [&](const Rung& rung) {
                const Option& option = problem_.modules[static_cast<std::size_t>(item.module)]
                                           .options[static_cast<std::size_t>(rung.option)];
                for (std::size_t j = 0; j < size_; ++j) {
                    for (int k = 0; j != i && k < items_[j].num_choices; ++k) {
                        const auto& rungs = items_[j].choices[static_cast<std::size_t>(k)].rungs;
                        const Resident other{items_[j].module, rungs.front().option};
                        const Extra more = extras_.least({item.module, rung.option}, &other, 1);
                        if (rungs.front().quota + rung.quota <= whole &&
                            target_.is_met(option.forward + more.forward, option.backward + more.backward,
                                           option.latency() + more.forward + more.backward)) {
                            return true;
                        }
                    }
                }
                return false;
            };
            const auto first = std::find_if(choice.rungs.begin(), choice.rungs.end(), is_met_beside_one);
            choice.least_beside = first == choice.rungs.end() ? whole + 1 : first->quota;
            item.least_area = std::min(item.least_area, choice.degree * std::min(choice.least_beside, whole));
        }
    }
}

void BesidePacker::sort_items() {
    std::sort(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(size_), [](const Item& a, const Item& b) {
        return std::tie(b.least_area, a.module) < std::tie(a.least_area, b.module);
    });
    area_from_[size_] = 0;
    for (std::size_t i = size_; i-- > 0;) area_from_[i] = area_from_[i + 1] + items_[i].least_area;
}

const BesidePacker::Choice& BesidePacker::choice_of(const State& state, std::size_t item) const {
    return items_[item].choices[static_cast<std::size_t>(state.choice[item])];
}

const BesidePacker::Rung& BesidePacker::rung_of(const State& state, std::size_t item) const {
    return choice_of(state, item).rungs[static_cast<std::size_t>(state.rung[item])];
}

Resident BesidePacker::resident(const State& state, std::size_t item) const {
    return {items_[item].module, rung_of(state, item).option};
}

bool BesidePacker::descend(std::size_t depth) {
    if (depth == size_) return finish(states_[depth]);
    if (!effort_->spend()) {
        is_open_ = true;
        return false;
    }
    if (!has_room(depth)) return false;
    State& state = states_[depth];
    for (int c = 0; c < items_[depth].num_choices; ++c) {
        state.choice[depth] = c;
        state.rung[depth] = 0;  // where the fixed point starts; it is raised from there
        taken_[depth].assign(state.rooms.size(), 0);
        if (spread(depth, 0, items_[depth].choices[static_cast<std::size_t>(c)].degree)) return true;
        if (is_open_) return false;
    }
    return false;
}

// Whether what is left can fit by number, and each of it alone.
bool BesidePacker::has_room(std::size_t depth) const {
    int free = 0;
    for (const Room& room : states_[depth].rooms) free += room.free * room.count;
    if (free < area_from_[depth]) return false;
    for (std::size_t i = depth; i < size_; ++i) {
        if (!fits_somewhere(states_[depth], items_[i])) return false;
    }
    return true;
}

bool BesidePacker::fits_somewhere(const State& state, const Item& item) const {
    for (int c = 0; c < item.num_choices; ++c) {
        const Choice& choice = item.choices[static_cast<std::size_t>(c)];
        int count = 0;
        for (const Room& room : state.rooms) {
            const int quota = room.items == 0 ? choice.rungs.front().quota : choice.least_beside;
            if (room.free >= quota && (problem_.machine.memory == 0 || room.memory >= choice.rungs.front().memory)) {
                count += room.count;
            }
        }
        if (count >= choice.degree) return true;
    }
    return false;
}

// Puts a module on as many devices as it needs; those with the least room come first.
bool BesidePacker::spread(std::size_t depth, std::size_t from, int needed) {
    if (needed == 0) return place(depth);
    const State& state = states_[depth];
    const Choice& choice = choice_of(state, depth);
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
        if (spread(depth, from + 1, needed - count)) return true;
        if (is_open_) break;
    }
    taken_[depth][from] = 0;
    return false;
}

bool BesidePacker::place(std::size_t depth) {
    const State& before = states_[depth];
    State& state = states_[depth + 1];
    const Rung& rung = rung_of(before, depth);
    state.rooms.clear();
    for (std::size_t i = 0; i <= depth; ++i) {
        state.choice[i] = before.choice[i];
        state.rung[i] = before.rung[i];
    }
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
    const auto& rungs = choice_of(state, item).rungs;
    const auto now = static_cast<std::size_t>(state.rung[item]);
    if (now + 1 == rungs.size()) return false;
    ++state.rung[item];
    for (Room& room : state.rooms) {
        if ((room.items & bit(item)) == 0) continue;
        room.free -= rungs[now + 1].quota - rungs[now].quota;
        room.memory -= rungs[now + 1].memory - rungs[now].memory;
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
    const Resident own = resident(state, item);
    const Option& option =
        problem_.modules[static_cast<std::size_t>(own.module)].options[static_cast<std::size_t>(own.option)];
    for (const Room& room : state.rooms) {
        if ((room.items & bit(item)) == 0) continue;
        Resident others[kMaxModules];
        int count = 0;
        each(room.items & ~bit(item),
             [&](int other) { others[count++] = resident(state, static_cast<std::size_t>(other)); });
        const Extra more = is_exact ? extras_.exact(own, others, count) : extras_.least(own, others, count);
        if (!target_.is_met(option.forward + more.forward, option.backward + more.backward,
                            option.latency() + more.forward + more.backward)) {
            return false;
        }
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
            const Resident own = resident(state, static_cast<std::size_t>(i));
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
