// Placing modules that disturb each other: depth first over devices that hold the same modules.
#pragma once

#include <vector>

#include "search/stages/interference.h"
#include "search/stages/packers/packing.h"

namespace mosaic::search {

// Every module starts at the least quota that meets the target alone and is raised as its neighbours make it slower.
// What neighbours cost at least never falls when quotas rise or modules come, so the first fixed point reached has the
// least quotas of all. Keeps its memory from one question to the next.
class BesidePacker {
  public:
    explicit BesidePacker(const Problem& problem);

    // Whether every module of a set can be placed so that it meets the target beside its neighbours; `open` where the
    // effort ran out. For `yes`, `placed` holds how.
    Answer pack(Mask set, const Target& target, Effort& effort, std::vector<Placed>& placed);

  private:
    // An option with all that is asked of it over and over.
    struct Rung {
        int module;
        int option;
        int quota;
        bool is_last;         // of its choice; the next larger one follows in memory otherwise
        std::int64_t memory;  // least of this option and those with more slots; 0 where memory is not limited
        Ns forward;
        Ns backward;
        const Extra* row;   // what it loses beside whom
        std::size_t place;  // of this one in such rows of others
    };
    // Options of one degree that meet the target alone, by rising quota.
    struct Choice {
        int degree = 0;
        int least_beside =
            0;  // quota at which it meets the target beside the mildest neighbour; more than a device: none
        std::size_t first_beside = 0;  // the rung that has it
        std::vector<Rung> rungs;
    };
    struct Item {
        int module = 0;
        std::vector<Choice> choices;
        int num_choices = 0;
        int least_area = 0;
    };
    // So many devices that hold the same items.
    struct Room {
        Mask items;
        int free;
        std::int64_t memory;
        int count;
    };
    struct State {
        std::vector<Room> rooms;         // by rising room
        std::vector<const Rung*> rungs;  // by item
    };
    using Group = std::vector<const Rung*>;

    void fill(Item& item, int module, const Target& target) const;
    void judge_neighbours();
    void sort_items();
    bool descend(std::size_t depth);
    bool has_room(std::size_t depth);
    int least_area(const State& state, const Item& item);
    int least_quota(const Choice& choice, const Room& room, const Group& residents) const;
    bool is_met_beside(const Rung& own, const Rung* const* others, std::size_t num_others, bool is_exact) const;
    bool is_met_beside_one(std::size_t item, const Rung& rung) const;
    bool spread(std::size_t depth, const Choice& choice, std::size_t from, int needed);
    bool place(std::size_t depth, const Choice& choice);
    bool settle(State& state, Mask dirty) const;
    bool raise(State& state, std::size_t item) const;
    Mask neighbours(const State& state, std::size_t item) const;
    bool meets(const State& state, std::size_t item, bool is_exact) const;
    bool finish(const State& state);
    Mask find_broken(const State& state) const;

    const Problem& problem_;
    ExtraTable extras_;
    std::vector<std::vector<int>> sorted_;  // options of each module by rising degree, then quota
    Target target_;
    std::vector<Item> items_;  // the first size_ are in use; largest area first
    std::size_t size_ = 0;
    std::vector<int> area_from_;              // least area of all from each depth on
    std::vector<State> states_;               // by depth
    std::vector<std::vector<int>> taken_;     // by depth and room: devices that the item got
    std::vector<Group> residents_;            // scratch: of each room
    std::vector<std::pair<int, int>> needs_;  // scratch: quotas and how many devices there are at each
    State final_;
    Effort* effort_ = nullptr;
    bool is_open_ = false;
};

}  // namespace mosaic::search
