// Devices for the modules of all stages together, so that none holds more over a step than it has.
#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "search/stages/packers/packing.h"

namespace mosaic::search {

// A device keeps what all of its modules keep, and beyond that works for one stage at a time.
struct HeldOption {
    int degree = 1;
    int quota = 1;
    std::int64_t kept = 0;
    std::int64_t working = 0;
};

struct HeldItem {
    int stage = 0;
    std::vector<HeldOption> options;  // in the order in which they are tried
};

struct HeldChoice {
    int option = 0;
    std::vector<int> devices;  // rising
};

// Depth first, item after item, the emptiest devices first; devices that look alike are one choice.
class HeldPacker {
  public:
    // Throws std::invalid_argument for a stage that is not there, or an option of no device.
    HeldPacker(std::vector<HeldItem> items, const Machine& machine, int num_stages);

    // Whether every item can be placed; `open` where the effort ran out. For `yes`, `chosen` holds how.
    Answer pack(Effort effort, std::vector<HeldChoice>& chosen);

  private:
    struct Load {
        std::int64_t kept = 0;
        std::int64_t most = 0;  // that one stage works with
        std::vector<std::int64_t> working;
        std::vector<int> slots;
    };

    bool place(std::size_t at);
    bool spread(std::size_t at, const HeldOption& option, const std::vector<std::vector<int>>& alike, std::size_t from,
                int needed, std::vector<int>& devices);
    bool put(std::size_t at, const HeldOption& option, const std::vector<int>& devices);
    bool takes(const HeldOption& option, int stage, const Load& load) const;
    bool may_fit(std::size_t at) const;
    int compare(const Load& first, const Load& second, std::size_t at) const;
    std::vector<std::vector<int>> groups(std::size_t at) const;
    std::string key_of(std::size_t at, const std::vector<std::vector<int>>& alike) const;

    std::vector<HeldItem> items_;
    Machine machine_;
    std::vector<std::vector<int>> stages_from_;  // stages of all items from each place on
    std::vector<std::int64_t> least_from_;       // what these keep at the least, on all devices
    std::vector<Load> loads_;                    // by device
    std::vector<HeldChoice> chosen_;
    std::unordered_set<std::string> failed_;
    Effort effort_;
    bool is_open_ = false;
};

}  // namespace mosaic::search
