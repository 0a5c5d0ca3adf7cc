// Placing modules that do not disturb each other: quota by quota, the largest first.
#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "search/stages/memory_exchange.h"
#include "search/stages/packing.h"

namespace mosaic::search {

// Devices are alike, so what counts is how many have which room, and which modules are left. Nor does it count which
// module of a quota is on which device: by Gale and Ryser, devices that take so many of them can all have different
// ones if, for every k, the k modules with most devices need no more than there is when each device counts k at most.
// So what is searched is small however many devices there are. Memory is left out until everything is placed; what one
// device does not hold then is exchanged. Keeps its memory from one question to the next.
class QuotaPacker {
  public:
    explicit QuotaPacker(const Problem& problem);

    // Whether every module of a set can be placed with an option that meets the target alone; `open` where the effort
    // ran out, or memory is what rules out the placement that was found. For `yes`, `placed` holds how.
    Answer pack(Mask set, const Target& target, Effort& effort, std::vector<Placed>& placed);

  private:
    struct Item {
        int module = 0;
        std::vector<int> options;  // by quota: an option of that quota that needs least devices; -1: none
        std::vector<int> degrees;  // by quota; 0: none
        std::vector<int> least;    // by quota: least area with that quota or a smaller one
        int smallest = 0;          // quota
    };
    // So many devices with so much room get so many of the modules of a quota.
    struct Share {
        int room;
        int num_modules;
        int num_devices;
    };
    // What was chosen for a quota.
    struct Step {
        int quota = 0;
        std::vector<std::size_t> items;
        std::vector<Share> shares;
    };
    using Rooms = std::vector<int>;  // by room: how many devices have it

    bool fill(Item& item, int module, const Target& target) const;
    bool descend(int quota, Mask left, const Rooms& rooms);
    bool is_held();
    int next_quota(int quota, Mask left) const;
    bool has_room(int quota, Mask left, const Rooms& rooms) const;
    bool choose(std::size_t from, Mask left, const Rooms& rooms, int spare);
    bool start_spread(Mask left, const Rooms& rooms);
    bool spread(int room, int needed, Mask left, const Rooms& from, Rooms& to);
    bool deal(int room, int num_modules, int devices, int needed, Mask left, const Rooms& from, Rooms& to);
    bool are_different(const Step& step) const;
    void trace(std::vector<Placed>& placed) const;
    std::string key_of(int quota, Mask left, const Rooms& rooms) const;

    const Problem& problem_;
    std::vector<Item> items_;
    std::size_t size_ = 0;     // how many items are in use
    std::vector<Step> steps_;  // quotas done so far
    MemoryExchange exchange_;
    std::unordered_set<std::string> failed_;
    Effort* effort_ = nullptr;
    bool is_open_ = false;
    bool is_too_large_ = false;  // some placement was, by memory
    std::vector<Placed> placed_;
};

}  // namespace mosaic::search
