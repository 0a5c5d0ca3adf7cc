#include "search/stages/packers/held_packer.h"

#include <algorithm>
#include <numeric>

namespace mosaic::search {

HeldPacker::HeldPacker(std::vector<HeldItem> items, const Machine& machine, int num_stages)
    : items_(std::move(items)), machine_(machine), chosen_(items_.size()) {
    const std::size_t size = items_.size();
    stages_from_.resize(size + 1);
    least_from_.assign(size + 1, 0);
    for (std::size_t i = size; i-- > 0;) {
        const HeldItem& item = items_[i];
        std::int64_t least = INT64_MAX;
        for (const HeldOption& option : item.options) least = std::min(least, option.degree * option.kept);
        const bool is_sound = std::all_of(item.options.begin(), item.options.end(),
                                          [](const HeldOption& option) { return option.degree >= 1; });
        if (item.stage < 0 || item.stage >= num_stages || item.options.empty() || !is_sound) {
            throw std::invalid_argument("an item has a stage that is not there, no option, or one of no device");
        }
        least_from_[i] = least_from_[i + 1] + least;
        stages_from_[i] = stages_from_[i + 1];
        auto& stages = stages_from_[i];
        if (std::find(stages.begin(), stages.end(), item.stage) == stages.end()) stages.push_back(item.stage);
    }
    const auto count = static_cast<std::size_t>(num_stages);
    loads_.assign(static_cast<std::size_t>(machine.num_devices),
                  {0, 0, std::vector<std::int64_t>(count, 0), std::vector<int>(count, 0)});
}

Answer HeldPacker::pack(Effort effort, std::vector<HeldChoice>& chosen) {
    effort_ = effort;
    if (place(0)) {
        chosen = chosen_;
        return Answer::yes;
    }
    return is_open_ ? Answer::open : Answer::no;
}

bool HeldPacker::place(std::size_t at) {
    if (at == items_.size()) return true;
    if (!may_fit(at)) return false;
    const auto alike = groups(at);
    const std::string key = key_of(at, alike);
    if (failed_.count(key) != 0) return false;
    for (std::size_t i = 0; i < items_[at].options.size(); ++i) {
        const HeldOption& option = items_[at].options[i];
        chosen_[at].option = static_cast<int>(i);
        std::vector<int> devices;
        if (spread(at, option, alike, 0, option.degree, devices)) return true;
        if (is_open_) return false;
    }
    failed_.insert(key);
    return false;
}

// As many devices as can be of the first group, then fewer.
bool HeldPacker::spread(std::size_t at, const HeldOption& option, const std::vector<std::vector<int>>& alike,
                        std::size_t from, int needed, std::vector<int>& devices) {
    if (needed == 0) return put(at, option, devices);
    int there = 0;
    const auto takes_group = [&](std::size_t i) {
        return takes(option, items_[at].stage, loads_[static_cast<std::size_t>(alike[i][0])]);
    };
    for (std::size_t i = from; i < alike.size(); ++i) there += takes_group(i) ? static_cast<int>(alike[i].size()) : 0;
    if (there < needed) return false;
    while (!takes_group(from)) ++from;
    const std::vector<int>& group = alike[from];
    const std::size_t before = devices.size();
    for (int count = std::min(needed, static_cast<int>(group.size())); count >= 0; --count) {
        devices.resize(before);
        devices.insert(devices.end(), group.begin(), group.begin() + count);
        if (spread(at, option, alike, from + 1, needed - count, devices)) return true;
        if (is_open_) return false;
    }
    devices.resize(before);
    return false;
}

bool HeldPacker::put(std::size_t at, const HeldOption& option, const std::vector<int>& devices) {
    if (!effort_.spend()) {
        is_open_ = true;
        return false;
    }
    const auto stage = static_cast<std::size_t>(items_[at].stage);
    std::vector<std::int64_t> before;
    for (const int device : devices) {
        Load& load = loads_[static_cast<std::size_t>(device)];
        before.push_back(load.most);
        load.kept += option.kept;
        load.slots[stage] += option.quota;
        load.working[stage] += option.working;
        load.most = std::max(load.most, load.working[stage]);
    }
    chosen_[at].devices = devices;
    std::sort(chosen_[at].devices.begin(), chosen_[at].devices.end());
    if (place(at + 1)) return true;
    for (std::size_t i = 0; i < devices.size(); ++i) {
        Load& load = loads_[static_cast<std::size_t>(devices[i])];
        load.kept -= option.kept;
        load.slots[stage] -= option.quota;
        load.working[stage] -= option.working;
        load.most = before[i];
    }
    return false;
}

bool HeldPacker::takes(const HeldOption& option, int stage, const Load& load) const {
    const auto at = static_cast<std::size_t>(stage);
    return load.slots[at] + option.quota <= machine_.num_slots &&
           load.kept + option.kept + std::max(load.most, load.working[at] + option.working) <= machine_.memory;
}

// Whether what is left can fit by its bytes, and each of it alone.
bool HeldPacker::may_fit(std::size_t at) const {
    std::int64_t room = 0;
    for (const Load& load : loads_) room += machine_.memory - load.kept - load.most;
    if (least_from_[at] > room) return false;
    for (std::size_t i = at; i < items_.size(); ++i) {
        const auto fits = [&](const HeldOption& option) {
            int count = 0;
            for (const Load& load : loads_) count += takes(option, items_[i].stage, load) ? 1 : 0;
            return count >= option.degree;
        };
        if (std::none_of(items_[i].options.begin(), items_[i].options.end(), fits)) return false;
    }
    return true;
}

// Of stages that have all of their items nothing counts but the most that any works with.
int HeldPacker::compare(const Load& first, const Load& second, std::size_t at) const {
    if (first.kept != second.kept) return first.kept < second.kept ? -1 : 1;
    if (first.most != second.most) return first.most < second.most ? -1 : 1;
    for (const int stage : stages_from_[at]) {
        const auto s = static_cast<std::size_t>(stage);
        if (first.slots[s] != second.slots[s]) return first.slots[s] < second.slots[s] ? -1 : 1;
        if (first.working[s] != second.working[s]) return first.working[s] < second.working[s] ? -1 : 1;
    }
    return 0;
}

std::vector<std::vector<int>> HeldPacker::groups(std::size_t at) const {
    std::vector<int> order(loads_.size());
    std::iota(order.begin(), order.end(), 0);
    const auto load = [&](int device) -> const Load& { return loads_[static_cast<std::size_t>(device)]; };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return compare(load(a), load(b), at) < 0; });
    std::vector<std::vector<int>> alike;
    for (const int device : order) {
        if (alike.empty() || compare(load(alike.back()[0]), load(device), at) != 0) alike.emplace_back();
        alike.back().push_back(device);
    }
    return alike;
}

std::string HeldPacker::key_of(std::size_t at, const std::vector<std::vector<int>>& alike) const {
    std::string key;
    const auto append = [&](const auto& value) { key.append(reinterpret_cast<const char*>(&value), sizeof value); };
    append(at);
    for (const std::vector<int>& group : alike) {
        const Load& load = loads_[static_cast<std::size_t>(group[0])];
        append(group.size());
        append(load.kept);
        append(load.most);
        for (const int stage : stages_from_[at]) {
            append(load.slots[static_cast<std::size_t>(stage)]);
            append(load.working[static_cast<std::size_t>(stage)]);
        }
    }
    return key;
}

}  // namespace mosaic::search
