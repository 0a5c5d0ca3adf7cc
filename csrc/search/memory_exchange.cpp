#include "memory_exchange.h"

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
    for (std::size_t i = 0; i < placed.size(); ++i) {
        for (const int device : placed[i].devices) {
            held_[static_cast<std::size_t>(device)] |= Mask{1} << i;
            used_[static_cast<std::size_t>(device)] += option_of(i, placed).memory;
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
    Mask given = 0;
    Mask taken = 0;
    for (std::size_t other = 0; other < held_.size(); ++other) {
        if (other == device) continue;
        const std::int64_t before = lack(used_[device]) + lack(used_[other]);
        list(other, placed, others_);
        for (const Group& own : own_) {
            if ((own.items & held_[other]) != 0) continue;
            for (const Group& its : others_) {
                if (its.slots != own.slots || (its.items & held_[device]) != 0) continue;
                const std::int64_t moved = own.memory - its.memory;
                const std::int64_t gain = before - lack(used_[device] - moved) - lack(used_[other] + moved);
                if (gain <= most) continue;
                most = gain;
                best = other;
                given = own.items;
                taken = its.items;
            }
        }
    }
    if (most == 0) return false;
    held_[device] ^= given | taken;
    held_[best] ^= given | taken;
    used_[device] = used_[best] = 0;
    for (const std::size_t at : {device, best}) {
        each(held_[at], [&](int i) { used_[at] += option_of(static_cast<std::size_t>(i), placed).memory; });
    }
    return true;
}

// All groups of few modules of a device, the empty one with them: it stands for free slots.
void MemoryExchange::list(std::size_t device, const std::vector<Placed>& placed, std::vector<Group>& groups) const {
    groups.assign(1, {});
    int free = problem_.machine.num_slots;
    int num_items = 0;
    each(held_[device], [&](int i) {
        const Option& option = option_of(static_cast<std::size_t>(i), placed);
        free -= option.quota;
        if (++num_items > kMostExchanged) return;
        for (std::size_t g = 0, size = groups.size(); g < size; ++g) {
            groups.push_back(
                {groups[g].items | Mask{1} << i, groups[g].slots + option.quota, groups[g].memory + option.memory});
        }
    });
    for (std::size_t g = 0, size = groups.size(); g < size; ++g) {
        for (int extra = 1; extra <= free; ++extra) {
            groups.push_back({groups[g].items, groups[g].slots + extra, groups[g].memory});
        }
    }
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
