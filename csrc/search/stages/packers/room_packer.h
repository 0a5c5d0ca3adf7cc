// Placing modules that do not disturb each other: depth first over devices that look alike.
#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "search/stages/packers/packing.h"

namespace mosaic::search {

// Only how many devices have which room matters, so that is what a state is. Keeps its memory from one question to the
// next.
class RoomPacker {
  public:
    explicit RoomPacker(const Problem& problem);

    // Whether every module of a set can be placed with an option that meets the target alone; `open` where the effort
    // ran out. For `yes`, `placed` holds how.
    Answer pack(Mask set, const Target& target, Effort& effort, std::vector<Placed>& placed);

  private:
    struct Pick {
        int option;
        int degree;
        int quota;
        std::int64_t memory;
    };
    struct Item {
        int module = 0;
        std::vector<Pick> picks;  // none needs as much of everything as another
        int least_area = 0;
        int least_quota = 0;
        std::int64_t most_memory = 0;
    };
    // So many devices with this room. Memory is 0 where it is not limited.
    struct Room {
        int free;
        std::int64_t memory;
        int count;
    };

    bool fill(Item& item, int module, const Target& target) const;
    void sort_items();
    bool descend(std::size_t depth);
    bool has_room(std::size_t depth) const;
    bool try_picks(std::size_t depth);
    bool spread(std::size_t depth, const Pick& pick, std::size_t from, int needed);
    bool place(std::size_t depth, const Pick& pick);
    void add_room(std::size_t depth, Room room);
    const std::string& key_of(std::size_t depth);
    void trace(std::vector<Placed>& placed) const;

    const Problem& problem_;
    std::vector<std::vector<int>> worthwhile_;  // options of each module by rising degree, then quota
    std::vector<Item> items_;
    std::vector<std::size_t> order_;         // of the items
    std::size_t size_ = 0;                   // how many items are in use
    std::vector<int> area_from_;             // least area of all from each depth on
    std::vector<int> quota_from_;            // least quota of any
    std::vector<std::int64_t> memory_from_;  // all that they could use together
    std::vector<std::vector<Room>> states_;  // by depth; rising
    std::vector<std::vector<int>> taken_;    // by depth and room: devices that the item got
    std::vector<const Pick*> chosen_;        // by depth
    std::unordered_set<std::string> failed_;
    std::string key_;
    Effort* effort_ = nullptr;
    bool is_open_ = false;
};

}  // namespace mosaic::search
