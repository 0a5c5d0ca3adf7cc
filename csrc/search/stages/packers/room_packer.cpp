#include "search/stages/packers/room_packer.h"

#include <algorithm>
#include <tuple>

namespace mosaic::search {
namespace {

// A failure found sooner than this is found again sooner than it is looked up.
constexpr std::int64_t kWorthRemembering = 6;
constexpr std::int64_t kOptionWork = 3;

// Those that fit: what beats one of them fits, too.
std::vector<int> worthwhile(const Options& options, const Machine& machine) {
    std::vector<int> kept;
    for (const int i : options.worthwhile()) {
        if (machine.memory == 0 || options[static_cast<std::size_t>(i)].memory <= machine.memory) kept.push_back(i);
    }
    return kept;
}

}  // namespace

RoomPacker::RoomPacker(const Problem& problem) : problem_(problem) {
    const auto size = problem.modules.size();
    for (const Module& module : problem.modules) worthwhile_.push_back(worthwhile(module.options, problem.machine));
    items_.resize(size);
    states_.resize(size + 1);
    taken_.resize(size + 1);
    chosen_.resize(size);
    area_from_.resize(size + 1);
    quota_from_.resize(size + 1);
    memory_from_.resize(size + 1);
}

Answer RoomPacker::pack(Mask set, const Target& target, Effort& effort, std::vector<Placed>& placed) {
    size_ = 0;
    bool is_possible = true;
    each(set, [&](int module) { is_possible = is_possible && fill(items_[size_++], module, target); });
    if (!is_possible) return Answer::no;
    sort_items();
    const Machine& machine = problem_.machine;
    states_[0].clear();
    if (machine.num_slots >= quota_from_[0]) {
        states_[0].push_back({machine.num_slots, std::min(machine.memory, memory_from_[0]), machine.num_devices});
    }
    failed_.clear();
    effort_ = &effort;
    is_open_ = false;
    if (descend(0)) {
        trace(placed);
        return Answer::yes;
    }
    return is_open_ ? Answer::open : Answer::no;
}

// Returns whether any option of the module meets the target.
bool RoomPacker::fill(Item& item, int module, const Target& target) const {
    const auto& options = problem_.modules[static_cast<std::size_t>(module)].options;
    const bool is_limited = problem_.machine.memory != 0;
    item.module = module;
    item.picks.clear();
    item.least_area = item.least_quota = INT32_MAX;
    item.most_memory = 0;
    Work::add(kOptionWork * static_cast<std::int64_t>(worthwhile_[static_cast<std::size_t>(module)].size()));
    for (const int index : worthwhile_[static_cast<std::size_t>(module)]) {
        const Option& option = options[static_cast<std::size_t>(index)];
        if (!target.is_met(option)) continue;
        const std::int64_t memory = is_limited ? option.memory : 0;
        // Degrees rise: what needs no more slots and memory than a later option goes wherever that one goes.
        const bool is_beaten = std::any_of(item.picks.begin(), item.picks.end(), [&](const Pick& pick) {
            return pick.quota <= option.quota && pick.memory <= memory;
        });
        if (is_beaten) continue;
        item.picks.push_back({index, option.degree, option.quota, memory});
        item.least_area = std::min(item.least_area, option.area());
        item.least_quota = std::min(item.least_quota, option.quota);
        item.most_memory = std::max(item.most_memory, memory);
    }
    return !item.picks.empty();
}

void RoomPacker::sort_items() {
    order_.resize(size_);
    for (std::size_t i = 0; i < size_; ++i) order_[i] = i;
    std::sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) {
        const Item& first = items_[a];
        const Item& second = items_[b];
        return std::tie(second.least_area, first.module) < std::tie(first.least_area, second.module);
    });
    area_from_[size_] = 0;
    quota_from_[size_] = INT32_MAX;
    memory_from_[size_] = 0;
    for (std::size_t i = size_; i-- > 0;) {
        const Item& item = items_[order_[i]];
        area_from_[i] = area_from_[i + 1] + item.least_area;
        quota_from_[i] = std::min(quota_from_[i + 1], item.least_quota);
        memory_from_[i] = memory_from_[i + 1] + item.most_memory;
    }
}

bool RoomPacker::descend(std::size_t depth) {
    if (depth == size_) return true;
    if (!effort_->spend()) {
        is_open_ = true;
        return false;
    }
    if (!has_room(depth)) return false;
    if (depth + 1 == size_) return try_picks(depth);
    if (!failed_.empty() && failed_.count(key_of(depth)) != 0) return false;
    const std::int64_t before = effort_->nodes_left;
    if (try_picks(depth)) return true;
    if (!is_open_ && before - effort_->nodes_left >= kWorthRemembering) failed_.insert(key_of(depth));
    return false;
}

// Whether what is left can fit by number, and each of it alone. Devices too full for any of it are not in the state.
bool RoomPacker::has_room(std::size_t depth) const {
    int free = 0;
    for (const Room& room : states_[depth]) free += room.free * room.count;
    if (free < area_from_[depth]) return false;
    for (std::size_t i = depth; i < size_; ++i) {
        const auto& picks = items_[order_[i]].picks;
        const bool fits = std::any_of(picks.begin(), picks.end(), [&](const Pick& pick) {
            int count = 0;
            for (const Room& room : states_[depth]) {
                if (room.free >= pick.quota && room.memory >= pick.memory) count += room.count;
            }
            return count >= pick.degree;
        });
        if (!fits) return false;
    }
    return true;
}

bool RoomPacker::try_picks(std::size_t depth) {
    for (const Pick& pick : items_[order_[depth]].picks) {
        taken_[depth].assign(states_[depth].size(), 0);
        if (spread(depth, pick, 0, pick.degree)) return true;
        if (is_open_) return false;
    }
    return false;
}

// Puts a module on as many devices as it needs; those with the least room come first.
bool RoomPacker::spread(std::size_t depth, const Pick& pick, std::size_t from, int needed) {
    if (needed == 0) return place(depth, pick);
    const auto& rooms = states_[depth];
    const auto is_fit = [&](const Room& room) { return room.free >= pick.quota && room.memory >= pick.memory; };
    int there = 0;
    for (std::size_t i = from; i < rooms.size(); ++i) there += is_fit(rooms[i]) ? rooms[i].count : 0;
    if (there < needed) return false;
    while (!is_fit(rooms[from])) ++from;
    for (int count = std::min(needed, rooms[from].count); count >= 0; --count) {
        taken_[depth][from] = count;
        if (spread(depth, pick, from + 1, needed - count)) return true;
        if (is_open_) break;
    }
    taken_[depth][from] = 0;
    return false;
}

bool RoomPacker::place(std::size_t depth, const Pick& pick) {
    chosen_[depth] = &pick;
    states_[depth + 1].clear();
    for (std::size_t i = 0; i < states_[depth].size(); ++i) {
        const Room room = states_[depth][i];
        const int taken = taken_[depth][i];
        if (room.count > taken) add_room(depth + 1, {room.free, room.memory, room.count - taken});
        if (taken > 0) add_room(depth + 1, {room.free - pick.quota, room.memory - pick.memory, taken});
    }
    return descend(depth + 1);
}

// Memory beyond what all that is left could use together is worth nothing, nor are devices too full for any of it.
void RoomPacker::add_room(std::size_t depth, Room room) {
    if (room.free < quota_from_[depth]) return;
    room.memory = std::min(room.memory, memory_from_[depth]);
    auto& rooms = states_[depth];
    const auto place = std::lower_bound(rooms.begin(), rooms.end(), room, [](const Room& a, const Room& b) {
        return std::tie(a.free, a.memory) < std::tie(b.free, b.memory);
    });
    if (place != rooms.end() && place->free == room.free && place->memory == room.memory) {
        place->count += room.count;
    } else {
        rooms.insert(place, room);
    }
}

const std::string& RoomPacker::key_of(std::size_t depth) {
    key_.assign(1, static_cast<char>(depth));
    const auto append = [&](const auto& value) { key_.append(reinterpret_cast<const char*>(&value), sizeof value); };
    for (const Room& room : states_[depth]) {
        append(static_cast<std::uint16_t>(room.free));
        append(static_cast<std::uint16_t>(room.count));
        if (problem_.machine.memory != 0) append(room.memory);
    }
    return key_;
}

// Goes through the choices again with every device by itself.
void RoomPacker::trace(std::vector<Placed>& placed) const {
    const auto num_devices = static_cast<std::size_t>(problem_.machine.num_devices);
    const int num_slots = problem_.machine.num_slots;
    std::vector<Room> devices(num_devices, {num_slots, std::min(problem_.machine.memory, memory_from_[0]), 1});
    placed.clear();
    for (std::size_t depth = 0; depth < size_; ++depth) {
        const Pick& pick = *chosen_[depth];
        std::vector<int> left = taken_[depth];
        Placed one{items_[order_[depth]].module, pick.option, {}};
        one.devices.reserve(static_cast<std::size_t>(pick.degree));
        for (std::size_t device = 0; device < num_devices; ++device) {
            Room& own = devices[device];
            bool is_taken = false;
            for (std::size_t i = 0; i < left.size(); ++i) {
                const Room& room = states_[depth][i];
                if (left[i] == 0 || own.free != room.free || own.memory != room.memory) continue;
                --left[i];
                is_taken = true;
                break;
            }
            if (is_taken) {
                one.devices.push_back(static_cast<int>(device));
                own.free -= pick.quota;
                own.memory -= pick.memory;
            }
            own.memory = std::min(own.memory, memory_from_[depth + 1]);
        }
        placed.push_back(std::move(one));
    }
}

}  // namespace mosaic::search
