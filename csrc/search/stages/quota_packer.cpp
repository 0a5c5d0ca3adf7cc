#include "search/stages/quota_packer.h"

#include <algorithm>

namespace mosaic::search {
namespace {

// What an exchange in vain counts for: as much as so many nodes.
constexpr std::int64_t kExchangeNodes = 50;
constexpr int kTooMuch = INT32_MAX / 128;

constexpr Mask bit(std::size_t index) { return Mask{1} << index; }

}  // namespace

QuotaPacker::QuotaPacker(const Problem& problem)
    : problem_(problem), items_(problem.modules.size()), exchange_(problem) {}

Answer QuotaPacker::pack(Mask set, const Target& target, Effort& effort, std::vector<Placed>& placed) {
    size_ = 0;
    bool is_possible = true;
    each(set, [&](int module) { is_possible = is_possible && fill(items_[size_++], module, target); });
    if (!is_possible) return Answer::no;
    const int num_slots = problem_.machine.num_slots;
    Rooms rooms(static_cast<std::size_t>(num_slots) + 1, 0);
    rooms.back() = problem_.machine.num_devices;
    steps_.clear();
    failed_.clear();
    effort_ = &effort;
    is_open_ = false;
    is_too_large_ = false;
    if (descend(num_slots, size_ == kMaxModules ? ~Mask{0} : bit(size_) - 1, rooms)) {
        placed = std::move(placed_);
        return Answer::yes;
    }
    return is_open_ || is_too_large_ ? Answer::open : Answer::no;
}

// Returns whether any option of the module meets the target.
bool QuotaPacker::fill(Item& item, int module, const Target& target) const {
    const Module& own = problem_.modules[static_cast<std::size_t>(module)];
    const auto size = static_cast<std::size_t>(problem_.machine.num_slots) + 1;
    item.module = module;
    item.options.assign(size, -1);
    item.degrees.assign(size, 0);
    item.least.assign(size, kTooMuch);
    item.smallest = 0;
    for (std::size_t i = 0; i < own.options.size(); ++i) {
        const Option& option = own.options[i];
        if (problem_.machine.memory != 0 && option.memory > problem_.machine.memory) continue;
        const auto at = static_cast<std::size_t>(option.quota);
        if (!target.is_met(option) || (item.degrees[at] != 0 && item.degrees[at] <= option.degree)) continue;
        item.degrees[at] = option.degree;
        item.options[at] = static_cast<int>(i);
    }
    int fewest = INT32_MAX;
    for (std::size_t quota = 1; quota < size; ++quota) {
        int& degree = item.degrees[quota];
        if (degree >= fewest) degree = 0;  // as many devices with fewer slots do
        item.least[quota] = item.least[quota - 1];
        if (degree == 0) continue;
        fewest = degree;
        item.least[quota] = std::min(item.least[quota], degree * static_cast<int>(quota));
        if (item.smallest == 0) item.smallest = static_cast<int>(quota);
    }
    return item.smallest != 0;
}

bool QuotaPacker::descend(int quota, Mask left, const Rooms& rooms) {
    if (left == 0) return is_held();
    quota = next_quota(quota, left);
    if (quota == 0) return false;
    if (!effort_->spend()) {
        is_open_ = true;
        return false;
    }
    if (!has_room(quota, left, rooms)) return false;
    std::string key = key_of(quota, left, rooms);
    if (failed_.count(key) != 0) return false;
    int spare = 0;
    for (std::size_t room = 1; room < rooms.size(); ++room) spare += static_cast<int>(room) * rooms[room];
    each(left, [&](int i) { spare -= items_[static_cast<std::size_t>(i)].least[static_cast<std::size_t>(quota)]; });
    steps_.emplace_back();
    steps_.back().quota = quota;
    if (choose(0, left, rooms, spare)) return true;
    steps_.pop_back();
    if (!is_open_) failed_.insert(std::move(key));
    return false;
}

// Everything fits by slots; the answer stays open where it does not by memory.
bool QuotaPacker::is_held() {
    trace(placed_);
    const bool is_held = exchange_.settle(placed_);
    is_too_large_ = is_too_large_ || !is_held;
    if (!is_held && !effort_->spend(kExchangeNodes)) is_open_ = true;
    return is_held;
}

// The largest quota up to this one that some module could have; 0: there is none.
int QuotaPacker::next_quota(int quota, Mask left) const {
    const auto is_asked = [&](int at) {
        bool is_any = false;
        each(left, [&](int i) {
            is_any = is_any || items_[static_cast<std::size_t>(i)].degrees[static_cast<std::size_t>(at)] != 0;
        });
        return is_any;
    };
    while (quota > 0 && !is_asked(quota)) --quota;
    return quota;
}

// Whether what is left can fit by number, and each of it alone.
bool QuotaPacker::has_room(int quota, Mask left, const Rooms& rooms) const {
    // The most of each room that quotas of modules left can fill.
    std::vector<char> is_quota(rooms.size(), 0);
    int needed = 0;
    bool fits = true;
    std::vector<int> with(rooms.size() + 1, 0);  // devices with so much room or more
    for (std::size_t room = rooms.size(); room-- > 0;) with[room] = with[room + 1] + rooms[room];
    each(left, [&](int i) {
        const Item& item = items_[static_cast<std::size_t>(i)];
        bool is_any = false;
        for (std::size_t at = 1; at <= static_cast<std::size_t>(quota); ++at) {
            if (item.degrees[at] == 0) continue;
            is_quota[at] = 1;
            is_any = is_any || item.degrees[at] <= with[at];
        }
        fits = fits && is_any;
        needed += item.least[static_cast<std::size_t>(quota)];
    });
    if (!fits) return false;
    std::vector<int> filled(rooms.size(), 0);
    int free = 0;
    for (std::size_t room = 1; room < rooms.size(); ++room) {
        filled[room] = filled[room - 1];
        for (std::size_t at = 1; at <= room; ++at) {
            if (is_quota[at] != 0) filled[room] = std::max(filled[room], filled[room - at] + static_cast<int>(at));
        }
        free += filled[room] * rooms[room];
    }
    return needed <= free;
}

// Which modules get this quota. Those for which it is the smallest must.
bool QuotaPacker::choose(std::size_t from, Mask left, const Rooms& rooms, int spare) {
    if (spare < 0) return false;
    const auto quota = static_cast<std::size_t>(steps_.back().quota);
    for (std::size_t i = from; i < size_; ++i) {
        const Item& item = items_[i];
        if ((left >> i & 1) == 0 || item.degrees[quota] == 0) continue;
        const int area = item.degrees[quota] * static_cast<int>(quota);
        steps_.back().items.push_back(i);
        if (choose(i + 1, left & ~bit(i), rooms, spare - (area - item.least[quota]))) return true;
        steps_.back().items.pop_back();
        if (is_open_ || item.smallest == steps_.back().quota) return false;
        return choose(i + 1, left, rooms, spare - (item.least[quota - 1] - item.least[quota]));
    }
    return start_spread(left, rooms);
}

bool QuotaPacker::start_spread(Mask left, const Rooms& rooms) {
    Step& step = steps_.back();
    const int quota = step.quota;
    if (step.items.empty()) {
        const Step kept = std::move(step);
        steps_.pop_back();
        const bool is_found = descend(quota - 1, left, rooms);
        if (!is_found) steps_.push_back(kept);
        return is_found;
    }
    int needed = 0;
    for (const std::size_t i : step.items) needed += items_[i].degrees[static_cast<std::size_t>(quota)];
    Rooms to = rooms;
    return spread(quota, needed, left, rooms, to);
}

// How many devices of each room get how many modules of this quota; those with the least room come first.
bool QuotaPacker::spread(int room, int needed, Mask left, const Rooms& from, Rooms& to) {
    const Step& step = steps_.back();
    if (needed == 0) {
        if (!effort_->spend()) is_open_ = true;
        if (is_open_ || !are_different(step)) return false;
        const std::size_t depth = steps_.size();
        const int quota = step.quota;
        if (descend(quota - 1, left, to)) return true;
        steps_.resize(depth);
        return false;
    }
    const int most = static_cast<int>(step.items.size());
    int able = 0;
    for (auto r = static_cast<std::size_t>(room); r < from.size(); ++r) {
        able += from[r] * std::min(static_cast<int>(r) / step.quota, most);
    }
    if (able < needed) return false;
    while (from[static_cast<std::size_t>(room)] == 0) ++room;
    return deal(room, std::min(room / step.quota, most), from[static_cast<std::size_t>(room)], needed, left, from, to);
}

// The same for devices of one room: how many get so many modules, how many one less, and so on.
bool QuotaPacker::deal(int room, int num_modules, int devices, int needed, Mask left, const Rooms& from, Rooms& to) {
    if (num_modules == 0) return spread(room + 1, needed, left, from, to);
    const auto high = static_cast<std::size_t>(room);
    const auto low = static_cast<std::size_t>(room - num_modules * steps_.back().quota);
    for (int count = std::min(devices, needed / num_modules); count >= 0; --count) {
        if (count > 0) steps_.back().shares.push_back({room, num_modules, count});
        to[low] += count;
        to[high] -= count;
        if (deal(room, num_modules - 1, devices - count, needed - count * num_modules, left, from, to)) return true;
        to[low] -= count;
        to[high] += count;
        if (count > 0) steps_.back().shares.pop_back();
        if (is_open_) return false;
    }
    return false;
}

bool QuotaPacker::are_different(const Step& step) const {
    std::vector<int> degrees;
    for (const std::size_t i : step.items) degrees.push_back(items_[i].degrees[static_cast<std::size_t>(step.quota)]);
    std::sort(degrees.rbegin(), degrees.rend());
    int needed = 0;
    for (std::size_t k = 0; k < degrees.size(); ++k) {
        needed += degrees[k];
        int there = 0;
        for (const Share& share : step.shares)
            there += share.num_devices * std::min<int>(share.num_modules, static_cast<int>(k) + 1);
        if (needed > there) return false;
    }
    return true;
}

// Goes through the steps again with every device by itself.
void QuotaPacker::trace(std::vector<Placed>& placed) const {
    const Machine& machine = problem_.machine;
    std::vector<int> free(static_cast<std::size_t>(machine.num_devices), machine.num_slots);
    placed.clear();
    for (const Step& step : steps_) {
        const auto quota = static_cast<std::size_t>(step.quota);
        std::vector<std::pair<int, int>> takers;  // modules that a device is still to take, less than 0; the device
        for (const Share& share : step.shares) {
            int count = share.num_devices;
            for (std::size_t device = 0; count > 0; ++device) {
                if (free[device] != share.room) continue;
                free[device] = -free[device] - 1;  // not again
                takers.emplace_back(-share.num_modules, static_cast<int>(device));
                --count;
            }
        }
        for (const auto& [_, device] : takers) {
            int& own = free[static_cast<std::size_t>(device)];
            own = -own - 1;
        }
        for (const std::size_t i : step.items) {
            std::sort(takers.begin(), takers.end());
            Placed one{items_[i].module, items_[i].options[quota], {}, {}};
            for (int j = 0; j < items_[i].degrees[quota]; ++j) {
                auto& [open, device] = takers[static_cast<std::size_t>(j)];
                ++open;
                free[static_cast<std::size_t>(device)] -= step.quota;
                one.devices.push_back(device);
            }
            std::sort(one.devices.begin(), one.devices.end());
            placed.push_back(std::move(one));
        }
    }
}

std::string QuotaPacker::key_of(int quota, Mask left, const Rooms& rooms) const {
    std::string key(1, static_cast<char>(quota));
    key.append(reinterpret_cast<const char*>(&left), sizeof left);
    for (const int count : rooms) {
        const auto narrow = static_cast<std::uint16_t>(count);
        key.append(reinterpret_cast<const char*>(&narrow), sizeof narrow);
    }
    return key;
}

}  // namespace mosaic::search
