#include "search/stages/memory_exchange.h"

namespace mosaic::search {
namespace {

// Of a device with more modules, only so many are exchanged.
constexpr int kMostExchanged = 5;

}  // namespace

const Option& MemoryExchange::option_of(std::size_t item, const std::vector<Placed>& placed) const {
    const Placed& one = placed[item];
    return problem_.modules[static_cast<std::size_t>(one.module)].options[static_cast<std::size_t>(one.option)];
}

bool MemoryExchange::settle(std::vector<Placed>& placed) {
    const auto num_devices = static_cast<std::size_t>(problem_.machine.num_devices);
    held_.assign(num_devices, 0);
    used_.assign(num_devices, 0);
    free_.assign(num_devices, problem_.machine.num_slots);
    for (std::size_t i = 0; i < placed.size(); ++i) {
        for (const int device : placed[i].devices) {
            const auto at = static_cast<std::size_t>(device);
            held_[at] |= Mask{1} << i;
            used_[at] += option_of(i, placed).memory;
            free_[at] -= option_of(i, placed).quota;
        }
    }
    for (std::size_t device = 0; problem_.machine.memory != 0 && device < num_devices; ++device) {
        while (lack(used_[device]) > 0) {
            if (!relieve(device, placed)) return false;
        }
    }
    write(placed);
    return true;
}

// The exchange with another device that takes most off what both lack; false if none takes anything off.
bool MemoryExchange::relieve(std::size_t device, const std::vector<Placed>& placed) {
    list(device, placed, own_);
    std::int64_t most = 0;
    std::size_t best = device;
    Group given;
    Group taken;
    for (std::size_t other = 0; other < held_.size(); ++other) {
        if (other == device) continue;
        const std::int64_t before = lack(used_[device]) + lack(used_[other]);
        list(other, placed, others_);
        for (const Group& own : own_) {
            if ((own.items & held_[other]) != 0) continue;
            for (const Group& its : others_) {
                const int more = its.slots - own.slots;
                if (more > free_[device] || -more > free_[other] || (its.items & held_[device]) != 0) continue;
                const std::int64_t moved = own.memory - its.memory;
                const std::int64_t gain = before - lack(used_[device] - moved) - lack(used_[other] + moved);
                if (gain <= most) continue;
                most = gain;
                best = other;
                given = own;
                taken = its;
            }
        }
    }
    if (most == 0) return false;
    const auto exchange = [&](std::size_t at, const Group& out, const Group& in) {
        held_[at] ^= out.items | in.items;
        used_[at] += in.memory - out.memory;
        free_[at] += out.slots - in.slots;
    };
    exchange(device, given, taken);
    exchange(best, taken, given);
    return true;
}

// All groups of few modules of a device, the empty one with them.
void MemoryExchange::list(std::size_t device, const std::vector<Placed>& placed, std::vector<Group>& groups) const {
    groups.assign(1, {});
    int num_items = 0;
    each(held_[device], [&](int i) {
        if (++num_items > kMostExchanged) return;
        const Option& option = option_of(static_cast<std::size_t>(i), placed);
        for (std::size_t g = 0, size = groups.size(); g < size; ++g) {
            groups.push_back(
                {groups[g].items | Mask{1} << i, groups[g].slots + option.quota, groups[g].memory + option.memory});
        }
    });
}

void MemoryExchange::write(std::vector<Placed>& placed) const {
    for (Placed& one : placed) {
        one.devices.clear();
        one.starts.clear();
    }
    for (std::size_t device = 0; device < held_.size(); ++device) {
        int next = 0;
        each(held_[device], [&](int i) {
            Placed& one = placed[static_cast<std::size_t>(i)];
            one.devices.push_back(static_cast<int>(device));
            one.starts.push_back(next);
            next += option_of(static_cast<std::size_t>(i), placed).quota;
        });
    }
}

}  // namespace mosaic::search
